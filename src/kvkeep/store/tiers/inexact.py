"""Which KV is not exact: decoded from a lossy record, or computed behind such KV.

Exact places, tiers with an exact codec, must never store it. So it is known everywhere:

- A record in memory has a mark in the room for its header (`mark`, `origin`). Every writer of
  memory sets it, other processes on a shared memory read it.
- A record in a tier has a lossy codec's number, or the flag of its header (`record.INEXACT`).
- What a caller was given does not come back marked, so `InexactBlocks` remembers the ids.
"""

from __future__ import annotations

import struct
import threading
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["BEHIND", "EXACT", "InexactBlocks", "mark", "origin"]

EXACT: Final = 0
BEHIND: Final = 0xFFFF
"""The origin of KV that was computed behind KV that is not exact; other origins are codecs."""

_MARK = struct.Struct("<8sHH")  # magic, version, origin: as a record's header begins
_MAGIC: Final = b"kvkeepM\n"
_HEADER = struct.Struct("<8sHHI")  # magic, version, codec, flags of a header
_SEALED: Final = b"kvkeepB\n"

_BITS: Final = 1 << 23
_PROBES: Final = 4


def mark(record: memoryview, made: int) -> None:
    """Note in memory's ``record`` of what origin its KV is: `EXACT`, a lossy codec, or `BEHIND`."""
    _MARK.pack_into(record, 0, _MAGIC, 1, made)


def origin(record: memoryview) -> int:
    """Return the origin of the KV of memory's ``record``.

    A record that was read or written as it is, raw, has its header in place of a mark.
    """
    magic, _, made, flags = _HEADER.unpack_from(record)
    if magic == _MAGIC:
        return int(made)
    return BEHIND if magic == _SEALED and flags else EXACT


class InexactBlocks:
    """Remembers ids of blocks for ever, in a mebibyte: a Bloom filter.

    It never forgets a block. It may take another for one of them: one in ten thousand after
    200,000 blocks, one in fifty after a million. Such a block is treated as not exact, so exact
    tiers do not store it.

    Thread safety: all methods.

    Attributes:
        tails: whether one of the blocks was a tail, whose tokens other ids contain, too.
    """

    def __init__(self) -> None:
        self._bits = bytearray()  # allocated with the first block
        self._lock = threading.Lock()
        self.tails = False

    def __bool__(self) -> bool:
        return bool(self._bits)

    def __contains__(self, block: object) -> bool:
        assert isinstance(block, bytes)
        bits = self._bits
        return bool(bits) and all(bits[at >> 3] >> (at & 7) & 1 for at in _places(block))

    def add(self, blocks: Iterable[bytes], *, tails: bool = False) -> None:
        """Remember ``blocks``; ``tails``: the last one is a tail."""
        with self._lock:
            bits = self._bits or bytearray(_BITS // 8)
            for block in blocks:
                for at in _places(block):
                    bits[at >> 3] |= 1 << (at & 7)
            self._bits = bits
            self.tails |= tails

    def exact(self, before: Sequence[bytes], blocks: Sequence[bytes]) -> int:
        """Return how many leading ``blocks`` of a prompt are exact, behind its blocks ``before``.

        What is computed behind KV that is not exact is not exact either.
        """
        if not self._bits:
            return len(blocks)
        if any(block in self for block in before):
            return 0
        return next((at for at, block in enumerate(blocks) if block in self), len(blocks))


def _places(block: bytes) -> list[int]:
    """Return bits of a block id, whose last 16 bytes are those of a hash."""
    number = int.from_bytes(block[-4 * _PROBES :], "little")
    return [number >> shift & (_BITS - 1) for shift in range(0, 32 * _PROBES, 32)]
