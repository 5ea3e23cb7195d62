"""Public prefixes in a file: JSON lines, each of them token ids, a text, or messages of a chat."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Protocol

from kvkeep.core.errors import InvalidValue, reason
from kvkeep.core.tokens import as_tokens, common_length

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from kvkeep.core.tokens import TokenArray, TokensLike

__all__ = ["NoTokenizer", "PrefixTokenizer", "read_prefixes"]

_MOST_BYTES = 1 << 28


class NoTokenizer(InvalidValue):
    """A text or a chat is given where only token ids can be read."""


class PrefixTokenizer(Protocol):
    """The model's tokenizer, as the engine that serves the prompts uses it.

    `encode` returns the tokens of a text in which a completion begins; `chat` those of a
    conversation, ready for the model's answer. Both raise `InvalidValue` for what they refuse.
    """

    def encode(self, text: str) -> TokensLike: ...
    def chat(self, messages: Sequence[Mapping[str, Any]]) -> TokensLike: ...


def read_prefixes(file: Path, tokenizer: PrefixTokenizer | None) -> list[TokenArray]:
    """Return the prefixes in ``file`` as tokens; None for the tokenizer: lists of ids alone.

    Of messages, these are all tokens that the chat template puts before the text of a user's
    message which follows them.

    Raises:
        InvalidValue: the file cannot be read, or a line is wrong; names the line.
    """
    try:
        with file.open("rb") as opened:
            raw = opened.read(_MOST_BYTES + 1)
        lines = raw.decode("utf-8-sig").split("\n")  # U+2028 may be in a text
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidValue(f"cannot read public prefixes from {file}: {reason(error)}") from error
    if len(raw) > _MOST_BYTES:
        raise InvalidValue(f"{file} is larger than {_MOST_BYTES >> 20} MiB")
    rows: list[TokenArray] = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                rows.append(_row(json.loads(line), tokenizer))
            except (ValueError, RecursionError) as error:
                kind = NoTokenizer if isinstance(error, NoTokenizer) else InvalidValue
                raise kind(f"{file}, line {number}: {error}") from error
    return rows


def _row(told: Any, tokenizer: PrefixTokenizer | None) -> TokenArray:
    row = _tokens_of(told, tokenizer)
    if not len(row):
        raise InvalidValue("a public prefix has at least one token, got none")
    return row


def _tokens_of(told: Any, tokenizer: PrefixTokenizer | None) -> TokenArray:
    if isinstance(told, list):
        return as_tokens(told)
    if tokenizer is None:
        raise NoTokenizer("there is no tokenizer of the model; give lists of token ids")
    if isinstance(told, str):
        return as_tokens(tokenizer.encode(told))
    messages = told.get("messages") if isinstance(told, dict) else None
    if not isinstance(messages, list) or not all(isinstance(one, dict) for one in messages):
        raise InvalidValue(
            'a prefix is a text, a list of token ids, or {"messages": [{"role": …, "content": …}]}'
        )
    others = sorted(told.keys() - {"messages"})
    if others:
        raise InvalidValue(
            f"unknown field {others[0]!r} beside messages; of a prompt with tools or other fields, "
            "give the token ids"
        )
    first, second = (
        as_tokens(tokenizer.chat([*messages, {"role": "user", "content": text}]))
        for text in ("0", "Ay")
    )
    return first[: common_length(first, second)]
