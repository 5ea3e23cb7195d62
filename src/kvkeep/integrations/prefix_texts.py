"""`PrefixTexts`: texts and chats in a file of public prefixes, as tokens of an engine's model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvkeep.core.errors import InvalidValue, require

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["PrefixTexts"]


class PrefixTexts:
    """A `kvkeep.core.prefix_file.PrefixTokenizer` from a tokenizer of Transformers.

    ``load`` returns it, None if the engine has none, and is called when it is first needed. Chats
    are rendered by the tokenizer's own template: an engine that is given another one must be told
    the token ids.
    """

    def __init__(self, load: Callable[[], Any]) -> None:
        self._load = load
        self._loaded: Any = None

    @property
    def _tokenizer(self) -> Any:
        if self._loaded is None:
            self._loaded = self._load()
            if self._loaded is None:
                raise InvalidValue("the engine has no tokenizer; give lists of token ids")
        return self._loaded

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, with the model's start token if it has one."""
        return self._encode(text, special=True)

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the tokens of a conversation, ready for the model's answer."""
        tokenizer = self._tokenizer
        if not getattr(tokenizer, "chat_template", None):
            raise InvalidValue("the tokenizer has no chat template; give lists of token ids")
        template_error = require("jinja2", "transformers").TemplateError
        try:
            text = tokenizer.apply_chat_template(
                [dict(turn) for turn in messages], tokenize=False, add_generation_prompt=True
            )
        except (template_error, ValueError, TypeError, KeyError) as error:
            raise InvalidValue(f"the model's chat template refuses this: {error}") from error
        return self._encode(text, special=False)

    def _encode(self, text: str, *, special: bool) -> list[int]:
        try:
            found: list[int] = self._tokenizer.encode(text, add_special_tokens=special)
        except (TypeError, ValueError) as error:  # half of a character, as "\ud800"
            raise InvalidValue(f"the model's tokenizer refuses this text: {error}") from error
        return found
