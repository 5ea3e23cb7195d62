"""The file of a shared arena, byte by byte.

    offset  bytes  what
         0   4096  header: magic, version, the five sizes below, CRC-32; written last, at creation
      4096  32768  words, int64 each: see the names below
     36864   176 n one entry an extent of memory, n of them, by column (see `COLUMNS`), int64 each
                   except for the block ids (48 bytes) and the holders (256 bits)
                   chain heads, int64, a power of two of them
                   data, at a multiple of 2 MiB

Integers are in the order of the machine: the file never leaves it. Offsets are bytes in the data.
Everything but the columns `state`, `generation`, `offset`, `length`, `size`, `used`, `pinned`,
`holders`, `proof` and the ids is derived from these and is rebuilt after a crash.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from typing import Final

from kvkeep.core.errors import InvalidValue
from kvkeep.core.keys import BLOCK_ID_BYTES
from kvkeep.store.backends.base import ALIGNMENT

__all__ = ["COLUMNS", "HEADER_BYTES", "HOLDER_BYTES", "HOLDER_WORDS", "SLOTS", "Layout"]

HEADER_BYTES: Final = 4096
WORDS: Final = 4096
SLOTS: Final = 256
"""Processes that may have the arena open at a time."""
HOLDER_WORDS: Final = SLOTS // 64
HOLDER_BYTES: Final = SLOTS // 8
QUOTAS: Final = 256
BINS: Final = 2048

# Words.
CHANGES: Final = 0  # odd while the index changes; readers without the lock compare it
GENERATION: Final = 1  # the last number given to a record
FREE_BYTES: Final = 2
RECORDS: Final = 3
SPARE: Final = 4  # the first entry of the list of unused entries, -1: none
SPARES: Final = 5
HIGH: Final = 6  # no entry at or above this was ever used
LEAVING: Final = 7  # bytes of records that are being demoted
REPAIRS: Final = 8
LOST: Final = 9  # published records that a repair had to drop
QUOTA_COUNT: Final = 10
KIND: Final = 11  # what the records are: one of the following
SLOT_AT: Final = 64  # the process id in each slot, 0 if it is free
QUOTA_AT: Final = SLOT_AT + SLOTS  # two words of the space, limit, bytes
BIN_AT: Final = QUOTA_AT + 4 * QUOTAS  # the first free extent of each bin, -1: none
BITMAP_AT: Final = BIN_AT + BINS  # one bit a bin
assert BITMAP_AT + BINS // 64 <= WORDS

UNDECIDED: Final = 0
RAW: Final = 1  # raw KV behind room for a header, of stores that have the arena in front
SEALED: Final = 2  # records with headers and checksums, of a lower tier

# States of an entry.
UNUSED: Final = 0
FREE: Final = 1  # a free extent
DRAFT: Final = 2  # being filled by its holder
PUBLISHED: Final = 3
UNNAMED: Final = 4  # deleted or replaced while processes hold it

COLUMNS: Final = (
    "state",
    "generation",  # unique to each record that was ever published or drafted
    "named",  # the generation while the record can be found, else 0
    "offset",
    "length",  # bytes of the extent
    "size",  # bytes of the record
    "before",  # neighbours by address
    "after",
    "link",  # the next entry of a chain, a bin or the list of unused ones
    "back",  # the previous entry of a bin
    "used",  # last use, a time of `clock`
    "pinned",  # end of the pin, a time of `clock`
    "leaving",  # 1 + the slot of the process that demotes it, 0: none
    "proof",  # see `proof_of`
)

_HEADER: Final = struct.Struct("<8sIIQQQQ")
_MAGIC: Final = b"kvkeepS\n"
_VERSION: Final = 1
_HUGE: Final = 2 << 20
_BYTES_PER_ENTRY: Final = 64 << 10
_SMALL: Final = 8192  # entries of an arena of small records, such as tests have
_MOST_ENTRIES: Final = 1 << 28
_MASK: Final = (1 << 63) - 1


def proof_of(check: int, offset: int, length: int, size: int, generation: int) -> int:
    """Return the number that an entry holds while its other columns are valid.

    ``check`` is the CRC-32 of the block id. `Repair` computes the same over arrays.
    """
    mixed = check * 0x9E3779B97F4A7C15 + offset * 0xC2B2AE3D27D4EB4F + length * 0x165667B19E3779F9
    return (mixed + size * 0x27D4EB2F165667C5 + generation * 0x85EBCA77C2B2AE63 + 1) & _MASK


class NotAnArena(Exception):
    """The bytes are no header of an arena that this kvkeep reads; the message says why."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Where everything is in the file.

    Attributes:
        data_bytes: bytes for records, a multiple of 4096.
        entries: extents of memory, taken and free, at most.
        buckets: chain heads, a power of two.
    """

    data_bytes: int
    entries: int
    buckets: int

    @classmethod
    def of(cls, size: int, records: int | None = None) -> Layout:
        """Return the layout of an arena with ``size`` bytes for ``records`` records at most."""
        data = size - size % ALIGNMENT
        if data < ALIGNMENT:
            raise InvalidValue(f"an arena of {size} bytes is too small; give it 4096 or more")
        entries = records or max(data // _BYTES_PER_ENTRY, min(data // ALIGNMENT, _SMALL))
        entries += 16  # there may be a free extent on either side of a record
        return cls(data, entries, 1 << (entries - 1).bit_length())

    @property
    def columns_at(self) -> int:
        """Offset of the first column in the file."""
        return HEADER_BYTES + 8 * WORDS

    @property
    def holders_at(self) -> int:
        """Offset of the column of holders."""
        return self.columns_at + 8 * len(COLUMNS) * self.entries

    @property
    def ids_at(self) -> int:
        """Offset of the column of block ids."""
        return self.holders_at + HOLDER_BYTES * self.entries

    @property
    def heads_at(self) -> int:
        """Offset of the chain heads."""
        return self.ids_at + BLOCK_ID_BYTES * self.entries

    @property
    def data_at(self) -> int:
        """Offset of the data, a multiple of 2 MiB."""
        end = self.heads_at + 8 * self.buckets
        return -(-end // _HUGE) * _HUGE

    @property
    def total(self) -> int:
        """Bytes of the file."""
        return self.data_at + self.data_bytes

    def header(self) -> bytes:
        """Return the header, without the zeros behind it."""
        head = _HEADER.pack(
            _MAGIC, _VERSION, SLOTS, self.data_bytes, self.entries, self.buckets, self.total
        )
        return head + zlib.crc32(head).to_bytes(4, "little")

    @classmethod
    def parse(cls, head: bytes) -> Layout:
        """Read a header; compute nothing from its numbers before they are checked.

        Raises:
            NotAnArena: it is none, is damaged, or is of another version.
        """
        if len(head) < _HEADER.size + 4 or not head.startswith(_MAGIC):
            raise NotAnArena("it does not begin as an arena of kvkeep does")
        magic, version, slots, data, entries, buckets, total = _HEADER.unpack_from(head)
        del magic
        check = int.from_bytes(head[_HEADER.size : _HEADER.size + 4], "little")
        if zlib.crc32(head[: _HEADER.size]) != check:
            raise NotAnArena("the checksum of its header is wrong")
        if (version, slots) != (_VERSION, SLOTS):
            raise NotAnArena(f"its format has version {version}; this kvkeep reads {_VERSION}")
        fine = ALIGNMENT <= data < 1 << 50 and not data % ALIGNMENT
        fine &= 16 < entries <= _MOST_ENTRIES and buckets == 1 << (entries - 1).bit_length()
        layout = cls(data, entries, buckets)
        if not fine or layout.total != total:
            raise NotAnArena("the sizes in its header contradict each other")
        return layout
