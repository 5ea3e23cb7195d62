"""Records: the format of a block in a tier: a header with checksums, and the payload.

    offset  bytes  what
         0      8  magic: "kvkeepB\\n"
         8      2  format version, 1
        10      2  number of the codec
        12      4  flags: 1 if the KV is not exact although the codec is
        16     16  space of the namespace
        32     32  block key
        64      8  length of the raw KV, before the codec, in bytes
        72      8  length of the payload in bytes
        80     16  XXH3-128 of the payload
        96     24  zeros
       120      8  XXH3-64 of the 120 bytes before
       128        payload

Integers are little-endian; checksums are big-endian digests. The first 72 bytes name the block: an
encrypting codec authenticates them with the ciphertext. A checksum detects damage, but a process
with write access to the tier can forge a record. Encryption prevents that (docs/security.md).

In memory a record is raw KV behind room for a header. There a *mark* says of what origin the KV is,
so that lossy KV never moves to a place that promises exact KV: decoded by a lossy codec, or
computed behind such KV. Other processes on a shared memory read it, too.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from kvkeep.core.errors import require
from kvkeep.core.keys import BLOCK_ID_BYTES

__all__ = [
    "BEHIND",
    "EXACT",
    "HEADER_BYTES",
    "INEXACT",
    "BadRecord",
    "RecordHeader",
    "mark",
    "naming",
    "origin",
    "read_header",
    "seal",
    "verify",
]

HEADER_BYTES = 128
VERSION = 1
INEXACT = 1
"""Flag of a record: its KV was computed behind lossy KV, say, or was lossy before it came here."""
_MAGIC = b"kvkeepB\n"
_NAME = struct.Struct("<8sHHI48sQ")
_REST = struct.Struct("<Q16s24x")
_SUM_AT = _NAME.size + _REST.size
assert _SUM_AT + 8 == HEADER_BYTES

EXACT: Final = 0
BEHIND: Final = 0xFFFF
"""The origin of KV that was computed behind KV that is not exact; other origins are codecs."""
_MARK = struct.Struct("<8sHH")  # magic, version, origin: as a header begins
_MARKED: Final = b"kvkeepM\n"
_HEAD = struct.Struct("<8sHHI")  # magic, version, codec or origin, flags


@cache
def _xxhash() -> Any:
    return require("xxhash", "store")


def mark(record: memoryview, made: int) -> None:
    """Note in memory's ``record`` of what origin its KV is: `EXACT`, a lossy codec, or `BEHIND`."""
    _MARK.pack_into(record, 0, _MARKED, 1, made)


def origin(record: memoryview) -> int:
    """Return the origin of the KV of memory's ``record``.

    A record that was read or written as it is, raw, has its header in place of a mark.
    """
    magic, _, made, flags = _HEAD.unpack_from(record)
    if magic == _MARKED:
        return int(made)
    return BEHIND if magic == _MAGIC and flags else EXACT


class BadRecord(Exception):
    """The bytes read are not the requested record; the message says why."""


class OtherVersion(BadRecord):
    """An intact record of a format version that this kvkeep does not read."""


@dataclass(frozen=True, slots=True)
class RecordHeader:
    """The header of a record: block id, codec number, lengths in bytes, checksum of the payload.

    ``inexact``: its KV is not exact although the codec is.
    """

    block: bytes
    codec: int
    raw_bytes: int
    payload_bytes: int
    checksum: bytes
    inexact: bool = False

    @property
    def record_bytes(self) -> int:
        """Bytes of header and payload together."""
        return HEADER_BYTES + self.payload_bytes


def naming(block: bytes, codec: int, raw_bytes: int, *, inexact: bool = False) -> bytes:
    """Return the first 72 bytes of a header, which name the block, its codec and its raw length."""
    assert len(block) == BLOCK_ID_BYTES
    return _NAME.pack(_MAGIC, VERSION, codec, INEXACT * inexact, block, raw_bytes)


def seal(
    record: memoryview, block: bytes, codec: int, raw_bytes: int, *, inexact: bool = False
) -> None:
    """Write the header of a record whose payload is in place. Cost: a checksum, about 20 GB/s."""
    payload = record[HEADER_BYTES:]
    xxhash = _xxhash()
    head = naming(block, codec, raw_bytes, inexact=inexact)
    head += _REST.pack(len(payload), xxhash.xxh3_128_digest(payload))
    record[:HEADER_BYTES] = head + xxhash.xxh3_64_digest(head)


def read_header(record: memoryview | bytes) -> RecordHeader:
    """Read the header of a record; the payload is not checked.

    Raises:
        OtherVersion: the record is of another format version, or has flags.
        BadRecord: there is no header, or it is damaged.
    """
    head = bytes(record[:HEADER_BYTES])
    if len(head) < HEADER_BYTES:
        raise BadRecord(f"{len(head)} bytes are no record: a header has {HEADER_BYTES}")
    magic, version, codec, flags, block, raw_bytes = _NAME.unpack_from(head)
    if magic != _MAGIC:
        raise BadRecord("it does not begin with the magic bytes of a record")
    if _xxhash().xxh3_64_digest(head[:_SUM_AT]) != head[_SUM_AT:]:
        raise BadRecord("the header's checksum is wrong")
    if version != VERSION:
        raise OtherVersion(f"the record has format version {version}; this kvkeep reads {VERSION}")
    if flags & ~INEXACT:
        raise OtherVersion(f"the record has flags {flags:#x}, which this kvkeep does not know")
    payload_bytes, checksum = _REST.unpack_from(head, _NAME.size)
    return RecordHeader(block, codec, raw_bytes, payload_bytes, checksum, bool(flags & INEXACT))


def verify(record: memoryview, block: bytes) -> RecordHeader:
    """Read the header and check that ``record`` is the complete, undamaged record of ``block``.

    Raises:
        BadRecord: it is not; or as `read_header`.
    """
    header = read_header(record)
    if header.block != block:
        raise BadRecord("it is the record of another block")
    if header.record_bytes != len(record):
        raise BadRecord(f"it has {len(record)} bytes and should have {header.record_bytes}")
    digest = _xxhash().xxh3_128_digest(record[HEADER_BYTES:])
    if digest != header.checksum:
        raise BadRecord("the payload's checksum is wrong")
    return header
