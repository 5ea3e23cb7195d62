"""Public prefixes: the beginnings of prompts that all tenants share, and where each prompt's end.

The operator declares rows of tokens, such as a system prompt. The KV of such a row is kept once, in
a namespace that no tenant can name, and every tenant's prompt that begins with it reuses it. From
the first private token on, a *salt* made from the tenant's namespace belongs to the prompt, as the
bytes of an image belong to a token (`kvkeep.core.extras`):

    public namespace ── system prompt ─┬─ salt of A + A's question ── A's follow-up
                                       └─ salt of B + B's question

So the first private page, or block, is compared and named with the tenant and with all public
tokens before it. Two tenants share no page behind the salt, and none in part.

A prompt has a public part only if it begins with all whole pages (blocks) of a declared row. So the
public part holds KV of declared tokens alone, whatever tenants send, and what is stored there tells
nothing of a prompt but that it began with a declared row.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from kvkeep.core.errors import InvalidValue, listed, reason
from kvkeep.core.extras import Extra
from kvkeep.core.keys import Namespace, root_key
from kvkeep.core.tokens import TOKEN_BYTES, as_tokens, common_length

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from kvkeep.core.extras import Extras
    from kvkeep.core.tokens import TokenArray, TokensLike

__all__ = [
    "FOLDED",
    "SALT_MARK",
    "SCOPE",
    "NoTokenizer",
    "Placed",
    "PrefixTokenizer",
    "PublicPrefixes",
    "public_namespace",
    "read_prefixes",
    "salt_of",
]

FOLDED = "namespace "
"""A tenant that begins so stands for further fields, such as another model: it shares nothing."""
SALT_MARK = "kvkeep-salt-"
"""What stands for a salt, where salts are not told, begins so: see `kvkeep.serve.kv_events`."""
SCOPE = "public"
"""`Namespace.scope` of the KV that all tenants share."""
_MOST_ROWS = 4096
_MOST_TOKENS = 1 << 24
_MOST_BYTES = 1 << 28  # of a file
_PERSON = b"kvkeep tenant 1\n"


class Placed(NamedTuple):
    """Where a prompt lies: ``space`` is the namespace of its first page.

    The first ``tokens`` tokens are public, whole pages or blocks; 0 if none are. ``extras`` are the
    prompt's, with the salt at the first private token.
    """

    space: Namespace
    tokens: int
    extras: Extras


class PublicPrefixes:
    """The declared rows. One object serves a cache and a store, and more of both.

    Declared rows count for every namespace, each with a copy of its own: "all tenants" are those of
    one model, revision, dtype, layout, adapter and rank. A later declaration counts for prompts
    opened from then on; private copies made before are not shared, and age.

    Thread safety: all methods. Memory: the tokens, and once more for each unit that `place` is
    called with. Cost: nothing until a row is declared; then 0.5 µs a prompt, and one memcmp for
    each declared row that begins with the same unit.
    """

    def __init__(self, rows: Iterable[TokensLike] = ()) -> None:
        self.rows: tuple[bytes, ...] = ()
        """The declared rows, as int32; the same tuple until another row is declared."""
        # By tokens of a unit: first unit → the rows that begin with it, cut to whole units, longest
        # first. Replaced as a whole, so that readers need no lock.
        self._tables: dict[int, dict[bytes, list[bytes]]] = {}
        self.declare(*listed("rows", rows, "rows of tokens"))

    def declare(self, *rows: TokensLike) -> None:
        """Declare rows of tokens public; a row that was declared before changes nothing.

        The tokens behind a row's last whole page (or block) stay private. Raises `InvalidValue`
        for an empty row, and beyond 4,096 rows or 16 million tokens in all; nothing is changed.
        """
        declared = dict.fromkeys([*self.rows, *(_row(as_tokens(row)).tobytes() for row in rows)])
        tokens = sum(map(len, declared)) // TOKEN_BYTES
        if len(declared) > _MOST_ROWS or tokens > _MOST_TOKENS:
            raise InvalidValue(
                f"public prefixes are at most {_MOST_ROWS} rows with {_MOST_TOKENS} tokens in all, "
                f"got {len(declared)} rows with {tokens}"
            )
        if len(declared) > len(self.rows):
            self.rows, self._tables = tuple(declared), {}

    def __len__(self) -> int:
        """Return the number of declared rows."""
        return len(self.rows)

    def length(self, tokens: TokenArray, unit: int, extras: Extras = ()) -> int:
        """Return how many leading tokens of a prompt are public: whole units of ``unit`` tokens.

        They are all whole units of a declared row, the longest that the prompt begins with. Tokens
        from the first of ``extras`` on are private, as no declared row has any.
        """
        if not self.rows:
            return 0
        rows = self._table(unit).get(tokens[:unit].tobytes())
        if rows is None:
            return 0
        stop = len(rows[0]) // TOKEN_BYTES
        if extras:
            stop = min(stop, extras[0].position)
        raw = tokens[:stop].tobytes()
        return next((len(row) // TOKEN_BYTES for row in rows if raw.startswith(row)), 0)

    def begins(self, unit: TokenArray) -> bool:
        """Whether a declared row begins with ``unit``: a whole page, or block."""
        return bool(self.rows and len(unit)) and unit.tobytes() in self._table(len(unit))

    def _table(self, unit: int) -> dict[bytes, list[bytes]]:
        tables = self._tables  # `declare` replaces it behind the rows that it is of
        table = tables.get(unit)
        if table is None:
            size, table = unit * TOKEN_BYTES, {}
            rows = {row[: len(row) // size * size] for row in self.rows}
            for row in sorted(rows - {b""}, key=len, reverse=True):
                table.setdefault(row[:size], []).append(row)
            tables[unit] = table
        return table

    def place(
        self, tokens: TokenArray, namespace: Namespace, unit: int, extras: Extras = ()
    ) -> Placed:
        """Return where a prompt of ``namespace`` lies, in units of ``unit`` tokens."""
        public = self.length(tokens, unit, extras)
        if not public or namespace.tenant.startswith(FOLDED):
            return Placed(namespace, 0, extras)
        if public < len(tokens):
            salt = Extra(public, salt_of(namespace))  # no extra is before it
            extras = (salt, *extras)
        return Placed(public_namespace(namespace), public, extras)


def _row(tokens: TokenArray) -> TokenArray:
    if not len(tokens):
        raise InvalidValue("a public prefix has at least one token, got none")
    return tokens


@lru_cache(maxsize=1024)
def public_namespace(namespace: Namespace) -> Namespace:
    """Return the namespace of the KV that ``namespace`` shares with other tenants.

    No tenant can name it: it differs from all of theirs in `Namespace.scope`.
    """
    return replace(namespace, tenant="", scope=SCOPE)


@lru_cache(maxsize=1024)
def salt_of(namespace: Namespace) -> bytes:
    """Return the salt of the private tokens of ``namespace``: 32 bytes.

    BLAKE2b and not SHA-256, which hashes the bytes of extras: so no bytes that a tenant sends have
    the digest that is another tenant's salt.
    """
    return hashlib.blake2b(root_key(namespace), digest_size=32, person=_PERSON).digest()


class NoTokenizer(InvalidValue):
    """A text or a chat is given where only token ids can be read."""


class PrefixTokenizer(Protocol):
    """The model's tokenizer, as the engine that serves the prompts uses it.

    Both methods raise `InvalidValue` for what they refuse.
    """

    def encode(self, text: str) -> TokensLike:
        """Return the tokens of a text in which a completion begins."""

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> TokensLike:
        """Return the tokens of a conversation, ready for the model's answer."""


def read_prefixes(file: Path, tokenizer: PrefixTokenizer | None) -> list[TokenArray]:
    """Return the prefixes in a file as tokens; None for the tokenizer: lists of ids alone.

    The file has JSON lines, each of them token ids, a text, or the messages of a chat. Of messages,
    these are all tokens that the chat template puts before the text of a user's message which
    follows them.

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
                rows.append(_row(_tokens_of(json.loads(line), tokenizer)))
            except (ValueError, RecursionError) as error:
                kind = NoTokenizer if isinstance(error, NoTokenizer) else InvalidValue
                raise kind(f"{file}, line {number}: {error}") from error
    return rows


def _tokens_of(row: Any, tokenizer: PrefixTokenizer | None) -> TokenArray:
    if isinstance(row, list):
        return as_tokens(row)
    if tokenizer is None:
        raise NoTokenizer("there is no tokenizer of the model; give lists of token ids")
    if isinstance(row, str):
        return as_tokens(tokenizer.encode(row))
    messages = row.get("messages") if isinstance(row, dict) else None
    if not isinstance(messages, list) or not all(isinstance(one, dict) for one in messages):
        raise InvalidValue(
            'a prefix is a text, a list of token ids, or {"messages": [{"role": …, "content": …}]}'
        )
    others = sorted(row.keys() - {"messages"})
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
