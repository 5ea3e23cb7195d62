"""`RecordReader`: reads records from one backend, verifies and decodes them."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from kvkeep.core.errors import MissingExtra
from kvkeep.core.keys import SPACE_BYTES
from kvkeep.store.backends.buffers import aligned
from kvkeep.store.codecs import Damaged, OtherKey
from kvkeep.store.tiers.known import REFUSED
from kvkeep.store.tiers.record import HEADER_BYTES, BadRecord, OtherVersion
from kvkeep.store.tiers.record_codec import NotForUs, RecordRoom, WrongSize, another_length

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvkeep.core.cost import LearnedTransfer
    from kvkeep.store.tiers.calls import BackendCalls
    from kvkeep.store.tiers.known import KnownBlocks
    from kvkeep.store.tiers.loss_log import LossLog
    from kvkeep.store.tiers.record_codec import RecordCodec

__all__ = ["RecordReader"]

_LOG = logging.getLogger("kvkeep.tiers")


class RecordReader:
    """Reads the records of one tier. A failure of the backend is a miss, counted and logged.

    Damaged records are quarantined. Intact records that the tier must not serve, such as those of
    another key, are hidden until they are written anew.

    ``cost`` learns what reads take, decoding included, by the bytes of raw KV.

    Thread safety: all methods. They run in the calling thread.
    """

    def __init__(
        self,
        calls: BackendCalls,
        known: KnownBlocks,
        records: RecordCodec,
        losses: LossLog,
        cost: LearnedTransfer,
    ) -> None:
        self._calls = calls
        self._backend = calls.backend
        self._known = known
        self._records = records
        self._losses = losses
        self._cost = cost

    def load(
        self, block: bytes, raw_bytes: int, place: Callable[[], memoryview]
    ) -> memoryview | None:
        """Return the decoded record of ``block`` in the buffer of ``place()``; None for a miss.

        ``place`` returns memory for a header and ``raw_bytes``, and is called once the record is
        found. The header in the result may be invalid. Damaged records are quarantined.
        """
        part = self._backend.part(block)
        if not self._calls.allowed("read", part):
            self._calls.note_failure("unavailable", "breaker")
            return None
        moved: int | None = None
        self._cost.begin()
        try:
            record, failed = self._load(block, raw_bytes, place, part)
            moved = raw_bytes if record is not None else None if failed else 0
        finally:
            self._cost.end(moved)
        return record

    def _load(
        self, block: bytes, raw_bytes: int, place: Callable[[], memoryview], part: str
    ) -> tuple[memoryview | None, bool]:
        """Return the record, and whether the backend failed."""
        known, mark = block in self._known, self._known.before_query()
        started = time.monotonic()
        room = RecordRoom(self._records, raw_bytes, place)
        record: memoryview | None = None
        try:
            with self._calls.to("get", "read", part) as call:
                record = self._backend.get(block, call.callback(room))
                call.decisive = record is not None
        except WrongSize as wrong:
            self._calls.counters.count(read_seconds=time.monotonic() - started)
            self._refuse(block, f"another length, or damaged: {wrong}")
            return None, False
        if call.failed:
            return None, True
        self._calls.counters.count(read_seconds=time.monotonic() - started)
        if record is None:
            if known:
                self._known.catalogue.forget(block)
                self._losses.note([block], self._calls.name, "removed", "gone")
            self._calls.counters.count(misses=1)
            return None, False
        return self._decoded(block, raw_bytes, record, room, mark), False

    def _decoded(
        self, block: bytes, raw_bytes: int, record: memoryview, room: RecordRoom, mark: int
    ) -> memoryview | None:
        """Verify and decode; a record that is damaged or not for this tier is a miss."""
        try:
            header, codec = self._records.verify(block, record)
            if header.raw_bytes != raw_bytes:
                raise NotForUs(another_length(header.raw_bytes, raw_bytes))
            record = self._records.decode(codec, header, record, room)
        except (NotForUs, OtherVersion, OtherKey, MissingExtra) as other:
            self._refuse(block, str(other))
            return None
        except (BadRecord, Damaged) as damage:
            self.quarantine(block, str(damage))
            return None
        self._known.learn(block, header.record_bytes, mark)
        self._calls.counters.count(hits=1, read_bytes=header.record_bytes)
        return record

    def fetch(self, block: bytes) -> memoryview | None:
        """Return the decoded record of ``block`` in new memory, to write it to another tier.

        The header in the result may be invalid. Counts neither a hit nor a miss.
        """
        part = self._backend.part(block)
        if not self._calls.allowed("read", part):
            return None
        with self._cost.transfer(0) as transfer:
            record = self._fetch(block, part)
            if record is not None:
                transfer.moved = len(record) - HEADER_BYTES
        return record

    def _fetch(self, block: bytes, part: str) -> memoryview | None:
        record: memoryview | None = None
        with self._calls.to("get", "read", part) as call:
            record = self._backend.get(block, call.callback(aligned))
            call.decisive = record is not None
        if record is None:
            return None
        try:
            header, codec = self._records.verify(block, record)
            return self._records.decode_alone(codec, header, record)
        except NotForUs:
            return None
        except (OtherVersion, OtherKey, MissingExtra) as other:
            self._refuse(block, str(other))
        except (BadRecord, Damaged) as damage:
            self.quarantine(block, str(damage))
        return None

    def _refuse(self, block: bytes, reason: str) -> None:
        """Hide an intact record that this tier must not serve, until it is written anew."""
        _LOG.info("tier %s: %s", self._calls.name, reason)
        self._calls.counters.count(refused=1)
        self._known.hide([block], REFUSED)
        self._losses.note([block], self._calls.name, "refused", reason)

    def quarantine(self, block: bytes, reason: str) -> None:
        """Forget a damaged record and move it out of the way in the backend."""
        _LOG.warning(
            "tier %s: block %s… is bad: %s", self._calls.name, block[SPACE_BYTES:][:8].hex(), reason
        )
        self._calls.counters.count(damaged=1)
        self._known.catalogue.forget(block)
        self._losses.note([block], self._calls.name, "damaged", reason)
        with self._calls.to("quarantine", "delete", self._backend.part(block)) as call:
            self._backend.quarantine(block, reason)
        if call.failed:
            self._known.keep_undeleted([block])
