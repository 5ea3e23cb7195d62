"""Records: a block as it lies in a tier, with all that is needed to know that it is right.

    offset  bytes  what
         0      8  magic: "kvkeepB\\n"
         8      2  format version, 1
        10      2  number of the codec
        12      4  flags, 0
        16     16  space: the namespace's
        32     32  block key
        64      8  raw bytes: of the KV, before the codec
        72      8  payload bytes: what follows the header
        80     16  XXH3-128 of the payload
        96     24  zeros
       120      8  XXH3-64 of the 120 bytes before
       128        payload

Integers are little-endian, checksums as the library gives them. The first 72 bytes name the block:
an encrypting codec authenticates them with the ciphertext. A checksum finds what broke; it does
not stop who can write to a tier from forging a record. Encryption does (docs/security.md).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from kvkeep.core.errors import require
from kvkeep.core.keys import BLOCK_ID_BYTES

__all__ = ["HEADER_BYTES", "BadRecord", "RecordHeader", "naming", "read_header", "seal", "verify"]

HEADER_BYTES = 128
VERSION = 1
_MAGIC = b"kvkeepB\n"
_NAME = struct.Struct("<8sHHI48sQ")
_REST = struct.Struct("<Q16s24x")
_SUM_AT = _NAME.size + _REST.size
assert _SUM_AT + 8 == HEADER_BYTES


class BadRecord(Exception):
    """What was read is not the record that was asked for; the message says why."""


class OtherVersion(BadRecord):
    """A record of a format version that this kvkeep does not read: not damaged, just not ours."""


@dataclass(frozen=True, slots=True)
class RecordHeader:
    """What a record says of itself: block id, codec number, lengths in bytes, checksum."""

    block: bytes
    codec: int
    raw_bytes: int
    payload_bytes: int
    checksum: bytes

    @property
    def record_bytes(self) -> int:
        """Header and payload."""
        return HEADER_BYTES + self.payload_bytes


def naming(block: bytes, codec: int, raw_bytes: int) -> bytes:
    """The first bytes of a header, which say what the payload is of."""
    assert len(block) == BLOCK_ID_BYTES
    return _NAME.pack(_MAGIC, VERSION, codec, 0, block, raw_bytes)


def seal(record: memoryview, block: bytes, codec: int, raw_bytes: int) -> None:
    """Write the header of a record whose payload is in place. Cost: a checksum, about 20 GB/s."""
    payload = record[HEADER_BYTES:]
    xxhash = require("xxhash", "store")
    head = naming(block, codec, raw_bytes)
    head += _REST.pack(len(payload), xxhash.xxh3_128_digest(payload))
    record[:HEADER_BYTES] = head + xxhash.xxh3_64_digest(head)


def read_header(record: memoryview | bytes) -> RecordHeader:
    """Read a header; of the payload nothing is looked at.

    Raises:
        OtherVersion: it is of another format version, or has flags.
        BadRecord: it is no header, or a damaged one.
    """
    head = bytes(record[:HEADER_BYTES])
    if len(head) < HEADER_BYTES:
        raise BadRecord(f"{len(head)} bytes are no record: a header has {HEADER_BYTES}")
    magic, version, codec, flags, block, raw_bytes = _NAME.unpack_from(head)
    if magic != _MAGIC:
        raise BadRecord("it does not begin as a record does")
    if require("xxhash", "store").xxh3_64_digest(head[:_SUM_AT]) != head[_SUM_AT:]:
        raise BadRecord("the header's checksum is wrong")
    if version != VERSION:
        raise OtherVersion(f"the record has format version {version}; this kvkeep reads {VERSION}")
    if flags:
        raise OtherVersion(f"the record has flags {flags:#x}, which this kvkeep does not know")
    payload_bytes, checksum = _REST.unpack_from(head, _NAME.size)
    return RecordHeader(block, codec, raw_bytes, payload_bytes, checksum)


def verify(record: memoryview, block: bytes) -> RecordHeader:
    """Read the header and prove that ``record`` is all of ``block``'s, unchanged.

    Raises:
        BadRecord: it is not; see `read_header`.
    """
    header = read_header(record)
    if header.block != block:
        raise BadRecord("it is the record of another block")
    if header.record_bytes != len(record):
        raise BadRecord(f"it has {len(record)} bytes and should have {header.record_bytes}")
    digest = require("xxhash", "store").xxh3_128_digest(record[HEADER_BYTES:])
    if digest != header.checksum:
        raise BadRecord("the payload's checksum is wrong")
    return header
