"""Text in, text out: a model's tokenizer, and text that grows token by token."""

from __future__ import annotations

import re
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvkeep.errors import InvalidValue, UnsupportedModel, require

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Mapping, Sequence

    import numpy.typing as npt
    from transformers import PreTrainedTokenizerBase

__all__ = ["GrowingText", "Tokenizer"]

# What a tokenizer writes for bytes that are no character yet.
_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
# How vocabularies write a single byte, where tokens are text and a byte is the exception.
_BYTE_NAME = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE_NAME = "\N{LOWER ONE EIGHTH BLOCK}"  # and a space


class Tokenizer:
    """A model's own tokenizer: text to token ids (int32) and back, and its chat template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer: Any = tokenizer  # its type says less than its documentation

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Tokenizer:
        """Read the tokenizer in the model directory ``path``."""
        transformers = require("transformers", "transformers")
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(
                Path(path), local_files_only=True, trust_remote_code=False
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
            raise UnsupportedModel(f"no tokenizer can be loaded from {Path(path)}") from error
        return cls(tokenizer)

    @property
    def has_chat_template(self) -> bool:
        """Whether `chat` works."""
        return bool(self._tokenizer.chat_template)

    def encode(self, text: str) -> npt.NDArray[np.int32]:
        """The token ids of ``text`` as it stands, with the model's start token if it has one."""
        return self._encoded(text, special_tokens=True)

    def chat(self, messages: Sequence[Mapping[str, str]]) -> npt.NDArray[np.int32]:
        """The token ids of a conversation, ready for the model's answer.

        Each message has a ``role`` (system, user, assistant) and a ``content``. Raises
        `InvalidValue` for a conversation that the model's template refuses.
        """
        if not self.has_chat_template:
            raise InvalidValue("this model has no chat template; give it plain text")
        template_error = require("jinja2", "transformers").TemplateError
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
            )
        except (template_error, ValueError, TypeError, KeyError) as error:
            raise InvalidValue(f"the model's chat template refuses this: {error}") from error
        return self._encoded(text, special_tokens=False)

    def _encoded(self, text: str, *, special_tokens: bool) -> npt.NDArray[np.int32]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidValue(f"the text is not valid Unicode: {error}") from error
        ids = self._tokenizer.encode(text, add_special_tokens=special_tokens)
        return np.array(ids, np.int32)

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of ``tokens``, without special tokens."""
        text: str = self._tokenizer.decode(
            list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def token_bytes(self, token: int) -> bytes:
        """What one token stands for within a text, in UTF-8: it may be part of a character.

        Special tokens stand for their names, and ids that the tokenizer has no token for, for
        nothing.
        """
        name: str | None = self._tokenizer.convert_ids_to_tokens(token)
        if name is None:
            return b""
        if token in self._added:
            return name.encode()
        if self._is_byte_level and all(sign in _BYTES for sign in name):
            return bytes(_BYTES[sign] for sign in name)
        if byte := _BYTE_NAME.fullmatch(name):
            return bytes([int(byte[1], 16)])
        return name.replace(_SPACE_NAME, " ").encode()

    @cached_property
    def longest_token(self) -> int:
        """How many bytes of text one token stands for at most. Cost: a pass over the vocabulary.

        So a text has at least its bytes by this many tokens, unless the tokenizer itself shortens
        it before (strips it, folds its blanks) or takes many unknown characters for one token.
        """
        added = [name.encode() for name in self._tokenizer.get_added_vocab()]
        names: list[str] = list(self._tokenizer.get_vocab())
        if self._is_byte_level:  # a sign is a byte
            signs = map(len, names)
        else:
            signs = (len(name.replace(_SPACE_NAME, " ").encode()) for name in names)
        return max(chain(signs, map(len, added)), default=1)

    @cached_property
    def _added(self) -> frozenset[int]:
        """Tokens that were added by name: they are written as they are."""
        return frozenset(self._tokenizer.get_added_vocab().values())

    @cached_property
    def _is_byte_level(self) -> bool:
        """Whether each sign of a token's name stands for a byte."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        return backend is not None and b'"ByteLevel"' in backend.decoder.__getstate__()


def _byte_signs() -> dict[str, int]:
    """The signs for bytes of byte-level vocabularies, as GPT-2 has introduced them.

    Printable Latin-1 stands for itself; all other bytes follow, in their order, from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    signs = {chr(byte): byte for byte in printable}
    return signs | {chr(0x100 + place): byte for place, byte in enumerate(others)}


_BYTES = _byte_signs()


class GrowingText:
    """The text of a request while its tokens come, cut before the first of its stop texts.

    `add` and `finish` return what can be shown now: what is held back is half a character, or
    what may be the beginning of a stop text. Cost: a token decodes the few tokens since the last
    whole character, whatever the length of the text.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self._tokens: list[int] = []
        # Some tokenizers write a token differently at a text's beginning, so that the last whole
        # piece [_context, _done) is decoded again in front of what is new.
        self._context = 0
        self._done = 0
        self._shown = 0
        self.text = ""
        self.stopped = False

    def add(self, token: int) -> str:
        """Add one token; returns the text that has become final."""
        assert not self.stopped, "the text has ended"
        self._tokens.append(token)
        known = self._tokenizer.decode(self._tokens[self._context : self._done])
        grown = self._tokenizer.decode(self._tokens[self._context :])
        if grown.endswith(_UNFINISHED):
            return ""
        self._context, self._done = self._done, len(self._tokens)
        return self._take(grown[len(known) :])

    def finish(self) -> str:
        """No more tokens come; returns the text that was held back."""
        shown = ""
        if not self.stopped:
            known = self._tokenizer.decode(self._tokens[self._context : self._done])
            grown = self._tokenizer.decode(self._tokens[self._context :])
            self._context = self._done = len(self._tokens)
            shown = self._take(grown[len(known) :])
        return shown + self._show(len(self.text))

    def _take(self, more: str) -> str:
        before = len(self.text)
        self.text += more
        longest = max(map(len, self._stop), default=0)
        ends = [self.text.find(stop, max(0, before - longest + 1)) for stop in self._stop]
        found = [end for end in ends if end >= 0]
        if found:
            self.text = self.text[: min(found)]
            self.stopped = True
            return self._show(len(self.text))
        return self._show(len(self.text) - self._held_back())

    def _held_back(self) -> int:
        """How many characters at the end may be the beginning of a stop text."""
        return max(
            (
                size
                for stop in self._stop
                for size in range(1, len(stop))
                if self.text.endswith(stop[:size])
            ),
            default=0,
        )

    def _show(self, end: int) -> str:
        shown, self._shown = self._shown, max(self._shown, end)
        return self.text[shown : self._shown]
