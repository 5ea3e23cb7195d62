"""`RecordCodec`: between raw records in memory and the records that one tier stores."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from kvkeep.core.errors import OutOfRoom
from kvkeep.store.backends.buffers import aligned
from kvkeep.store.codecs import WITHOUT_KEY_ID, codec_name
from kvkeep.store.tiers.record import (
    BEHIND,
    EXACT,
    HEADER_BYTES,
    BadRecord,
    mark,
    naming,
    origin,
    seal,
    verify,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvkeep.store.codecs import Codec
    from kvkeep.store.tiers.record import RecordHeader

__all__ = ["NotForUs", "RecordCodec", "RecordRoom", "WrongSize", "another_length"]

_RAW = 0  # number of the raw codec
_ENVELOPE = 1 << 16  # bytes by which another codec's bound may exceed this one's


class NotForUs(Exception):
    """A record that verifies, but that this tier must not serve; the message says why."""


def another_length(raw_bytes: int, needed: int) -> str:
    """Return why a record is not the block that is asked for, in bytes of raw KV."""
    return f"another length: it has {raw_bytes} bytes, and the block {needed}"


class WrongSize(OutOfRoom):
    """A record is larger than any record of this block can be."""


class _Scratch(threading.local):
    """A buffer per thread for encoded records; it grows as needed and is reused."""

    def __init__(self) -> None:
        self._buffer = memoryview(b"")

    def take(self, size: int) -> memoryview:
        if len(self._buffer) < size:
            self._buffer = aligned(size)
        return self._buffer[:size]


class RecordCodec:
    """Encodes, verifies and decodes the records of one tier.

    ``codec`` encodes what the tier writes; ``codec_of`` returns the codec of a number in a record's
    header, None if it is unknown: other processes may write with another codec.

    Thread safety: all methods. Memory: a buffer of the largest record for each thread.
    """

    def __init__(self, codec: Codec, codec_of: Callable[[int], Codec | None]) -> None:
        self.codec = codec
        self._codec_of = codec_of
        self.scratch = _Scratch()

    def encode(self, block: bytes, record: memoryview) -> memoryview:
        """Return ``record``, raw KV behind room for a header, as the tier stores it.

        The result is ``record`` itself, with its header written, or this thread's buffer.
        """
        raw = record[HEADER_BYTES:]
        codec = self.codec
        inexact = codec.exact and origin(record) != EXACT
        if codec.number != _RAW:
            encoded = self.scratch.take(HEADER_BYTES + codec.bound(len(raw)))
            named = naming(block, codec.number, len(raw), inexact=inexact)
            size = codec.encode(raw, encoded[HEADER_BYTES:], named)
            record = encoded[: HEADER_BYTES + size]
        seal(record, block, codec.number, len(raw), inexact=inexact)
        return record

    def may_have(self, raw_bytes: int, record_bytes: int) -> bool:
        """Whether a record of this size may be one of so much raw KV, as this tier writes it.

        A record of another length is not that block: it is a miss, and the next put replaces it.
        """
        payload = record_bytes - HEADER_BYTES
        if self.codec.number == _RAW:
            return payload == raw_bytes
        return payload <= self.codec.bound(raw_bytes)

    def verify(self, block: bytes, record: memoryview) -> tuple[RecordHeader, Codec]:
        """Return the header of a record that was read, and the codec that decodes it.

        Raises:
            BadRecord: it is damaged, or the record of another block.
            NotForUs: the record's codec is unknown, or provides less than the tier promises: exact
                KV, or encryption. Serving plain records would let a forger bypass the key.
        """
        header = verify(record, block)
        if header.codec == _RAW and header.payload_bytes != header.raw_bytes:
            raise BadRecord(
                f"its header says {header.raw_bytes} raw bytes, the payload has "
                f"{header.payload_bytes}"
            )
        if self.codec.exact and header.inexact:
            raise NotForUs("its KV is not exact, and the tier's is")
        if header.codec == self.codec.number:
            return header, self.codec
        if header.codec < WITHOUT_KEY_ID <= self.codec.number:
            raise NotForUs("the record is not encrypted, and those of this tier are")
        codec = self._codec_of(header.codec)
        if codec is None and self.codec.number < WITHOUT_KEY_ID <= header.codec:
            raise NotForUs("the record is encrypted, and this tier has no key (encrypt=, decrypt=)")
        if codec is None:
            raise NotForUs(f"the record's codec, {codec_name(header.codec)}, is unknown here")
        if self.codec.exact and not codec.exact:
            raise NotForUs(f"the record's codec, {codec.name}, is lossy, and the tier's is exact")
        return header, codec

    def decode(
        self, codec: Codec, header: RecordHeader, record: memoryview, room: RecordRoom
    ) -> memoryview:
        """Return ``record`` with its payload decoded, in the final place of ``room``.

        Raises:
            Damaged, OtherKey, MissingExtra: see `Codec.decode`.
        """
        if codec.number == _RAW and room.placed is not None:
            return record
        if (
            room.placed is not None
        ):  # it has the size of a raw record, so it was read into the final place
            scratch = self.scratch.take(len(record))
            scratch[:] = record
            record = scratch
        final = room.final()
        _decode(codec, header, record, final)
        return final

    def decode_alone(self, codec: Codec, header: RecordHeader, record: memoryview) -> memoryview:
        """Return ``record`` decoded, in new memory; a raw record is returned as it is.

        Raises:
            Damaged, OtherKey, MissingExtra: see `Codec.decode`.
        """
        if codec.number == _RAW:
            return record
        raw = aligned(HEADER_BYTES + header.raw_bytes)
        _decode(codec, header, record, raw)
        return raw


class RecordRoom:
    """The buffer that a backend reads one record into (`kvkeep.store.backends.Room`).

    A record that needs no decoding is read into its final place, others into a buffer of the
    thread. Sizes are checked here, before any memory is taken.
    """

    def __init__(
        self, records: RecordCodec, raw_bytes: int, place: Callable[[], memoryview]
    ) -> None:
        self._records = records
        self._raw_bytes = raw_bytes
        self._place = place
        self.placed: memoryview | None = None
        """The final place, if the record was read there."""

    def final(self) -> memoryview:
        """Return the final place, allocated at the first call."""
        if self.placed is None:
            self.placed = self._place()
        return self.placed

    def __call__(self, size: int) -> memoryview:
        """Return the buffer for a record of ``size`` bytes. Raises `WrongSize`."""
        raw = HEADER_BYTES + self._raw_bytes
        codec = self._records.codec
        # With a margin, because another codec may have written it: `verify` refuses that record
        # later, but it is not damaged.
        most = HEADER_BYTES + codec.bound(self._raw_bytes) + _ENVELOPE
        if size > most:
            raise WrongSize(size, f"it has {size} bytes and can have {most} at most: the reader")
        if size == raw and codec.number == _RAW:
            return self.final()
        return self._records.scratch.take(size)


def _decode(codec: Codec, header: RecordHeader, record: memoryview, final: memoryview) -> None:
    """Decode into ``final``, and mark there of what origin the KV is."""
    named = naming(header.block, header.codec, header.raw_bytes, inexact=header.inexact)
    codec.decode(record[HEADER_BYTES:], final[HEADER_BYTES:], named)
    exact = BEHIND if header.inexact else EXACT
    mark(final, exact if codec.exact else header.codec)
