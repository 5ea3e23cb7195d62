"""A model's tokenizer, and text that grows token by token."""

from __future__ import annotations

import codecs
import json
import re
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from kvkeep.core.errors import InvalidValue, UnsupportedModel, require
from kvkeep.core.geometry import download_hint
from kvkeep.core.tokens import common_length

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Mapping, Sequence

    import numpy.typing as npt
    from transformers import PreTrainedTokenizerBase

__all__ = ["GrowingText", "Tokenizer"]

# The replacement character, to which a tokenizer decodes incomplete or invalid bytes.
_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
# The name of a single byte in vocabularies whose tokens are text.
_BYTE_NAME = re.compile(r"<0x([0-9A-F]{2})>")
# Bytes of the longest character: behind more unfinished tokens than these, some byte is invalid.
_MOST_UNFINISHED = 4
_CONTEXT = 8
_SPACE_NAME = "\N{LOWER ONE EIGHTH BLOCK}"  # a space in names of SentencePiece tokens


class Tokenizer:
    """A model's own tokenizer: text to token ids (int32) and back, and its chat template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer: Any = tokenizer  # its type hints are less exact than its documentation

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Tokenizer:
        """Read the tokenizer in directory ``path``; raises `UnsupportedModel`."""
        transformers = require("transformers", "transformers")
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(
                Path(path), local_files_only=True, trust_remote_code=False
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
            raise UnsupportedModel(
                f"no tokenizer can be loaded from {Path(path)}{download_hint(path)}"
            ) from error
        return cls(tokenizer)

    @property
    def has_chat_template(self) -> bool:
        """Whether the model has a chat template, which `chat` needs."""
        return bool(self._tokenizer.chat_template)

    def encode(self, text: str) -> npt.NDArray[np.int32]:
        """Return the token ids of ``text``, with the model's start token if it has one."""
        return self._encoded(text, special_tokens=True)

    @property
    def knows_tools(self) -> bool:
        """Whether the chat template has a place for tools."""
        return self.has_chat_template and "tools" in str(self._tokenizer.chat_template)

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> npt.NDArray[np.int32]:
        """Return the token ids of a conversation, ready for the model's answer.

        Each message has a ``role`` (system, user, assistant) and a ``content``. Raises
        `InvalidValue` for a conversation that the model's template refuses.
        """
        return self._encoded(self.rendered(messages), special_tokens=False)

    def rendered(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        continued: bool = False,
    ) -> str:
        """Return the text of a conversation for `encode_rendered`; see `chat`.

        ``tools`` are definitions in OpenAI's form. With ``continued`` the last message is left
        open, and the answer continues it.
        """
        if not self.has_chat_template:
            raise InvalidValue("this model has no chat template; give it plain text")
        template_error = require("jinja2", "transformers").TemplateError
        try:
            text: str = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=list(tools) or None,
                tokenize=False,
                add_generation_prompt=not continued,
                continue_final_message=continued,
            )
        except (template_error, ValueError, TypeError, KeyError) as error:
            raise InvalidValue(f"the model's chat template refuses this: {error}") from error
        return text

    def encode_rendered(
        self, text: str, ends: Sequence[int] = ()
    ) -> tuple[npt.NDArray[np.int32], list[int]]:
        """Return the token ids of a rendered conversation, and a position for each of ``ends``.

        ``ends`` are numbers of characters; the position of one is the number of tokens that lie
        before it entirely.
        """
        tokens = self._encoded(text, special_tokens=False)
        parts = (self._encoded(text[:end], special_tokens=False) for end in ends)
        return tokens, [common_length(tokens, part) for part in parts]

    def _encoded(self, text: str, *, special_tokens: bool) -> npt.NDArray[np.int32]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidValue(f"the text is not valid Unicode: {error}") from error
        ids = self._tokenizer.encode(text, add_special_tokens=special_tokens)
        return np.array(ids, np.int32)

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of ``tokens``, without special tokens."""
        text: str = self._tokenizer.decode(
            list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def decoding(self) -> Decoding:
        """Return a new incremental decoder."""
        return _ByBytes(self) if self._decodes_bytes else _ByWindow(self)

    def decoded_bytes(self, token: int) -> bytes:
        """Return the bytes that a byte-level tokenizer decodes ``token`` to; none if it is special.

        A token whose name is not made of byte signs alone decodes to its name.
        """
        if self.is_silent(token):
            return b""
        name: str = self._tokenizer.convert_ids_to_tokens(token)
        signs = [_BYTES.get(sign) for sign in name]
        known = [sign for sign in signs if sign is not None]
        return bytes(known) if len(known) == len(signs) else name.encode()

    def is_silent(self, token: int) -> bool:
        """Whether `decode` leaves ``token`` out: special tokens, and ids without a token."""
        return token in self._special or self._tokenizer.convert_ids_to_tokens(token) is None

    def token_bytes(self, token: int) -> bytes:
        """Return the text that one token stands for, in UTF-8; may be part of a character.

        Special tokens stand for their names, ids without a token for nothing.
        """
        name: str | None = self._tokenizer.convert_ids_to_tokens(token)
        if name is None:
            return b""
        if token in self.named:
            return name.encode()
        if self._is_byte_level and all(sign in _BYTES for sign in name):
            return bytes(_BYTES[sign] for sign in name)
        if byte := _BYTE_NAME.fullmatch(name):
            return bytes([int(byte[1], 16)])
        return name.replace(_SPACE_NAME, " ").encode()

    @cached_property
    def longest_token(self) -> int:
        """The most bytes of text that one token stands for. Cost: one pass over the vocabulary.

        So a text has at least its bytes divided by this many tokens, unless the tokenizer shortens
        it first (strips it, folds blanks) or takes many unknown characters for one token.
        """
        added = [name.encode() for name in self._tokenizer.get_added_vocab()]
        names: list[str] = list(self._tokenizer.get_vocab())
        if self._is_byte_level:  # one character of a name is one byte
            sizes = [len(name) for name in names]
        else:
            sizes = [len(name.replace(_SPACE_NAME, " ").encode()) for name in names]
        return max(chain(sizes, map(len, added)), default=1)

    @cached_property
    def named(self) -> frozenset[int]:
        """Tokens that were added by name, which stand for their names: special ones and others."""
        return frozenset(self._tokenizer.get_added_vocab().values())

    @cached_property
    def _special(self) -> frozenset[int]:
        """Tokens that are no text."""
        named = self._tokenizer.added_tokens_decoder.items()
        special = {token for token, added in named if added.special}
        return frozenset(special | set(self._tokenizer.all_special_ids))

    @cached_property
    def _decodes_bytes(self) -> bool:
        """Whether `decode` only joins bytes and reads them as UTF-8."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None or backend.decoder is None:
            return False
        kind: object = json.loads(backend.decoder.__getstate__())["type"]
        return kind == "ByteLevel"

    @cached_property
    def _is_byte_level(self) -> bool:
        """Whether each character of a token's name stands for a byte."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        return backend is not None and b'"ByteLevel"' in backend.decoder.__getstate__()


def _byte_signs() -> dict[str, int]:
    """Return the characters that stand for bytes in byte-level vocabularies, as in GPT-2.

    Printable Latin-1 stands for itself; all other bytes follow, in their order, from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    signs = {chr(byte): byte for byte in printable}
    return signs | {chr(0x100 + place): byte for place, byte in enumerate(others)}


_BYTES = _byte_signs()


class Decoding(Protocol):
    """An incremental decoder: returns each piece of text once, when it is final."""

    def add(self, token: int) -> str:
        """Add one token; return the characters that are complete now."""

    def end(self) -> str:
        """End the text; return the incomplete character that was held back, if any."""


class _ByBytes:
    """Decodes tokens that are bytes: incremental UTF-8, so that nothing is decoded twice.

    Gives the same text as decoding all tokens at once: both follow Unicode's practice for invalid
    bytes (one replacement character for each maximal subpart).
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token: int) -> str:
        """Cost: that of one token."""
        return self._decoder.decode(self._tokenizer.decoded_bytes(token))

    def end(self) -> str:
        """Return at most one replacement character."""
        return self._decoder.decode(b"", final=True)


class _ByWindow:
    """Decodes tokens that are text, or single bytes: decodes the last few tokens again each time.

    Some tokenizers write a token differently at the beginning of a text, so the last tokens that
    are final stay in front of the new ones as context. If bytes never become a character, the
    window is cut where both sides decode to the same text as the whole, so that it stays a few
    tokens long.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._context: list[int] = []
        self._new: list[int] = []

    def add(self, token: int) -> str:
        """Cost: two decodes of a few tokens."""
        if self._tokenizer.is_silent(token):
            return ""
        self._new.append(token)
        grown = self._decode(self._context + self._new)
        if not grown.endswith(_UNFINISHED):
            return self._settle(len(self._new), grown)
        if len(self._new) > _MOST_UNFINISHED:
            for at in range(len(self._new) - 1, len(self._new) - _MOST_UNFINISHED - 1, -1):
                left = self._decode(self._context + self._new[:at])
                if left + self._decode(self._new[at:]) == grown:
                    return self._settle(at, left)
        return ""

    def end(self) -> str:
        """Return the text of the tokens that are left."""
        return self._settle(len(self._new), self._decode(self._context + self._new))

    def _settle(self, count: int, grown: str) -> str:
        """Make the first ``count`` new tokens final, and return their text.

        ``grown`` is the text of the context and these tokens.
        """
        more = grown[len(self._decode(self._context)) :]
        if count:
            self._context, self._new = self._new[:count][-_CONTEXT:], self._new[count:]
        return more

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens) if tokens else ""


class GrowingText:
    """The text of an answer while its tokens come, cut before the first of its stop texts.

    `add` and `finish` return text that is final. An incomplete character, and characters that may
    begin a stop text, are held back. Cost: constant for each token; with stop texts, a search in
    the held text.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        self._decoding = tokenizer.decoding()
        self._stop = stop
        self._shown: list[str] = []
        self._held = ""  # may begin a stop text
        self.stopped_by: str | None = None

    @property
    def stopped(self) -> bool:
        """Whether a stop text has ended the text."""
        return self.stopped_by is not None

    @property
    def text(self) -> str:
        """The whole text so far, including held text. Cost: a copy of the text."""
        return "".join(self._shown) + self._held

    def add(self, token: int) -> str:
        """Add one token; return the text that became final."""
        assert not self.stopped, "the text has ended"
        return self._take(self._decoding.add(token))

    def finish(self) -> str:
        """End the text; return the text that was held back."""
        shown = "" if self.stopped else self._take(self._decoding.end())
        return shown + self._show(len(self._held))

    def _take(self, more: str) -> str:
        if not more:
            return ""
        self._held += more  # no stop text begins before the held text
        ends = [(end, stop) for stop in self._stop if (end := self._held.find(stop)) >= 0]
        if ends:
            end, self.stopped_by = min(ends)
            self._held = self._held[:end]
            return self._show(len(self._held))
        return self._show(len(self._held) - max(map(self._beginning, self._stop), default=0))

    def _beginning(self, stop: str) -> int:
        """Return how many characters at the end of the held text may begin ``stop``."""
        held = self._held
        at = held.find(stop[0], max(0, len(held) - len(stop) + 1))
        while at >= 0 and not stop.startswith(held[at:]):
            at = held.find(stop[0], at + 1)
        return len(held) - at if at >= 0 else 0

    def _show(self, size: int) -> str:
        shown, self._held = self._held[:size], self._held[size:]
        if shown:
            self._shown.append(shown)
        return shown
