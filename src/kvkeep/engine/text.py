"""Text in, text out: a model's tokenizer, and text that grows token by token."""

from __future__ import annotations

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

        Each message has a ``role`` (system, user, assistant) and a ``content``.
        """
        if not self.has_chat_template:
            raise InvalidValue("this model has no chat template; give it plain text")
        text = self._tokenizer.apply_chat_template(
            [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
        )
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
