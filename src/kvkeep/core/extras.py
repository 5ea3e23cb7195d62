"""Bytes that belong to tokens of a prompt: an image or a sound behind its placeholder token.

Such a prompt is its tokens and ``extra``, pairs of ``(position, bytes)``. The KV from that position
on depends on the bytes, so they are part of every key and every comparison. Only their SHA-256 is
stored.
"""

from __future__ import annotations

import hashlib
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from kvkeep.core.errors import InvalidValue, listed, told, whole
from kvkeep.core.tokens import TOKEN_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvkeep.core.tokens import TokenArray

    ExtraLike = Iterable[tuple[int, bytes | bytearray | memoryview]]
    Extras = tuple["Extra", ...]

__all__ = ["Extra", "as_extras", "extra_bytes", "extras_between", "numbered", "signed"]

_SEPARATOR = (-1).to_bytes(TOKEN_BYTES, "little", signed=True)  # never a token
_MOST = 65_536
_MOST_BYTES = 1 << 30


class Extra(NamedTuple):
    """The position of a token, and the SHA-256 of bytes that belong to it."""

    position: int
    digest: bytes


def as_extras(extra: ExtraLike | None, length: int) -> Extras:
    """Return the extras of a row of ``length`` tokens, ordered by position; hashes the bytes.

    Positions count from the first token of the row. Several extras at one position keep their
    order, which is part of their meaning. Raises `InvalidValue` for a position outside the row, an
    item that is no pair of position and bytes, more than 1 GiB at one position, and more than
    65,536 extras. Cost: one SHA-256 over the bytes, about 1 ms a megabyte; nothing without extras.
    """
    if extra is None:
        return ()
    pairs = listed("extra", extra, "rows of (position, bytes), as extra=[(position, data)],")
    if len(pairs) > _MOST:
        raise InvalidValue(f"a row of tokens has at most {_MOST} extras, got {len(pairs)}")
    extras = [_extra(pair, length) for pair in pairs]
    extras.sort(key=lambda each: each.position)  # stable
    return tuple(extras)


def _extra(pair: object, length: int) -> Extra:
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise InvalidValue(f"an extra is a pair (position, bytes), got {told(pair)}")
    position, data = pair
    if not length:
        raise InvalidValue("the row has no tokens, so no position for an extra")
    position = whole("the position of an extra", position, 0, length - 1)
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise InvalidValue(
            f"the extra at position {position} is {type(data).__name__}; bytes, a bytearray or a "
            "memoryview are needed, such as the bytes of an image"
        )
    size = data.nbytes if isinstance(data, memoryview) else len(data)
    if size > _MOST_BYTES:
        raise InvalidValue(
            f"the extra at position {position} has {size} bytes; at most {_MOST_BYTES} are hashed: "
            "pass a digest of your own"
        )
    if isinstance(data, memoryview) and not data.c_contiguous:
        data = data.tobytes()
    return Extra(position, hashlib.sha256(data).digest())


def extras_between(extras: Extras, start: int, stop: int) -> Extras:
    """Return the extras of tokens ``start`` … ``stop``; positions then count from ``start``."""
    return tuple(
        Extra(one.position - start, one.digest) for one in extras if start <= one.position < stop
    )


def extra_bytes(extras: Extras, start: int = 0) -> bytes:
    """Return the bytes to hash after the tokens of a block with these extras; b"" without any.

    ``start`` is the position of the block in the row.
    """
    if not extras:
        return b""
    return _SEPARATOR + b"".join(
        (position - start).to_bytes(TOKEN_BYTES, "little") + digest for position, digest in extras
    )


def numbered(
    tokens: TokenArray, extras: Extras, number: Callable[[int, tuple[bytes, ...]], int | None]
) -> TokenArray:
    """Return the tokens, with ``number(token, digests)`` for each token that has extras.

    The row ends before the first of these whose number is None. It is ``tokens``, or a copy.
    """
    if not extras:
        return tokens
    row = tokens.copy()
    for position, digests in groupby(extras, key=lambda each: each.position):
        if position >= len(row):
            break
        value = number(int(row[position]), tuple(each.digest for each in digests))
        if value is None:
            return row[:position]
        row[position] = value
    return row


def signed(tokens: TokenArray, extras: Extras) -> TokenArray:
    """Return the tokens, with each token that has extras replaced by a negative hash of both.

    The hashes are the same in every process. Two contents share one with a probability of 2⁻³¹:
    good enough for statistics and explanations, not for finding KV.
    """
    return numbered(tokens, extras, _hash)


def _hash(token: int, digests: tuple[bytes, ...]) -> int:
    digest = hashlib.sha256(token.to_bytes(TOKEN_BYTES, "little") + b"".join(digests)).digest()
    return -1 - (int.from_bytes(digest[:4], "little") >> 1)
