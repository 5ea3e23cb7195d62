"""One tier: a backend, what it is known to hold, and the edge where its failures become misses."""

from __future__ import annotations

import logging
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from kvkeep.backends.buffers import aligned
from kvkeep.codecs import WITHOUT_KEY_ID, Damaged, OtherKey
from kvkeep.errors import MissingExtra, OutOfRoom
from kvkeep.eviction import LRU, EvictionPolicy
from kvkeep.keys import SPACE_BYTES
from kvkeep.tiers.breaker import Breaker
from kvkeep.tiers.catalogue import Catalogue
from kvkeep.tiers.counters import Counters, TierStats
from kvkeep.tiers.fates import Fates, Happened
from kvkeep.tiers.record import (
    HEADER_BYTES,
    BadRecord,
    OtherVersion,
    naming,
    read_header,
    seal,
    verify,
)
from kvkeep.tiers.workers import Workers

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator, Sequence

    from kvkeep.backends import Backend, Listed
    from kvkeep.codecs import Codec
    from kvkeep.tiers.fates import What
    from kvkeep.tiers.record import Header

__all__ = ["Tier", "TierOptions"]

_LOG = logging.getLogger("kvkeep.tiers")
_RAW = 0  # the number of the codec that changes nothing
_EXPIRE_EVERY = 60.0  # seconds
_ENVELOPE = 1 << 16  # bytes that any codec may need beyond those of another
_TELL_COST = 1024  # bytes that a block's name counts while it waits to be told, roughly
ORDERED = 1 << 16
"""Blocks of a tier that its policy orders; of more, those that would go first take less memory."""
_SUSPICIOUS = 16  # records as large as this part of the budget must be real
_REFUSED_KEPT = 1 << 16
_READING = frozenset(("get", "sizes", "list"))
_AS_LONG_AS_IT_TAKES = frozenset(("list", "flush"))  # their work grows with what is there
_LONG = 0.05  # seconds that a read takes which is slow for any place
_MOSTLY = 0.5  # of the time since a moment that one read has taken: it is what was waited for
_TRIES = 8  # rounds of making room for one record; then something else takes what is freed


@dataclass(frozen=True, slots=True)
class TierOptions:
    """What can be chosen of a tier besides its place.

    Attributes:
        policy: makes the eviction policies of its catalogue.
        ttl: seconds after its last use that a block is no longer found; None: for ever.
        queue_bytes: of records that may wait to be written; None: as much as memory holds.
        readers, writers: threads.
        breaker_limit: failures in a row after which it is left alone for a while.
    """

    policy: Callable[[], EvictionPolicy] = LRU
    ttl: float | None = None
    queue_bytes: int | None = None
    readers: int = 4
    writers: int = 2
    breaker_limit: int = 3


class _Scratch(threading.local):
    """A buffer for each thread, to hold what is not in its final form; grows, and is kept."""

    def __init__(self) -> None:
        self._buffer = memoryview(b"")

    def take(self, size: int) -> memoryview:
        if len(self._buffer) < size:
            self._buffer = aligned(size)
        return self._buffer[:size]


@dataclass(slots=True)
class Tier:
    """A place below memory, with its threads.

    `load` and `save` do their work in the thread that calls them, one of ``reading`` and
    ``writing``. Neither raises, whatever the backend does: here is the one place where its failure
    becomes a miss or a drop, counted and logged, and too many in a row open the breaker.

    ``indexed``: the backend has a budget, so what it holds is listed once and known from then on.
    Without one the place has rules of its own and is asked each time.

    Thread safety: all methods.
    """

    name: str
    backend: Backend
    codec: Codec
    codec_of: Callable[[int], Codec | None]
    options: TierOptions = field(default_factory=TierOptions)
    demote: Callable[[bytes], None] | None = None
    """Takes a block that must go to where it goes, if anywhere. Set by who has other tiers."""
    counters: Counters = field(default_factory=Counters)
    fates: Fates = field(default_factory=Fates)
    """Where it notes what it loses. Set by who has other tiers."""
    indexed: bool = field(init=False)
    catalogue: Catalogue = field(init=False)
    breaker: Breaker = field(init=False)
    reading: Workers = field(init=False)
    writing: Workers = field(init=False)
    _scratch: _Scratch = field(init=False, default_factory=_Scratch)
    _expired: float = field(init=False, default=float("-inf"))
    _listed: float = field(init=False, default=0.0)
    _listing: threading.Lock = field(init=False, default_factory=threading.Lock)
    _quota_lock: threading.Lock = field(init=False, default_factory=threading.Lock)
    _coming: dict[bytes, int] = field(init=False, default_factory=dict)
    """Bytes that are being written, by namespace."""
    _doubts: int = field(init=False, default=0)  # of the backend, when it was listed last
    _excess: int = field(init=False, default=0)  # bytes above the budget when it was listed last
    _trouble: Happened | None = field(init=False, default=None)
    _heard: bool = field(init=False, default=False)  # it said once what it holds
    _refused: dict[bytes, None] = field(init=False, default_factory=dict)
    """Blocks whose record is not for us: as if not here, to be written anew."""

    def __post_init__(self) -> None:
        options = self.options
        self.indexed = self.backend.capacity is not None
        self.catalogue = Catalogue(
            options.policy,
            ttl=options.ttl,
            budget=self.backend.capacity,
            ordered=ORDERED,
            unit=self.backend.unit,
        )
        self.breaker = Breaker(self.name, limit=options.breaker_limit)
        self.reading = Workers(f"{self.name} reader", options.readers, 4096)
        self.writing = Workers(
            f"{self.name} writer", options.writers, options.queue_bytes or sys.maxsize
        )

    @property
    def timeout(self) -> float:
        """Seconds after which a call counts as failed."""
        return self.backend.timeout

    # --- what is there ---------------------------------------------------------------------------

    def open(self) -> None:
        """Learn what is there; waits for it as long as for any call, then goes on without."""
        if self.indexed:
            self.reading.submit(self.relist)
            self.reading.wait(self.timeout)

    def trim(self) -> None:
        """Have go what its budget does not hold any more, if that was larger before.

        It waits for that as long as for any call; no more than once, before anything is written:
        of what two writers lack at once, each would make room for all. What is larger than the
        budget alone was never a record of ours; nothing else goes for that.
        """
        if self.indexed and self._excess > 0:
            self.reading.submit(self._trim)
            self.reading.wait(self.timeout)

    def _trim(self) -> None:
        if self.breaker.allows():
            with _Edge(self, "delete"):
                self.make_room(self._excess)

    def relist(self) -> None:
        """Ask the backend for all it holds: others may have written here."""
        if not self._listing.acquire(timeout=self.timeout):  # one at a time
            return  # it hangs; who waits here has other things to do
        try:
            if self.breaker.allows():
                doubts = self.backend.doubts
                with _Edge(self, "list"):
                    gone = self.catalogue.fill(self._real())
                    self.fates.note(gone, self.name, "removed", "gone")
                    self._heard = True
                    self._excess = self.catalogue.total_bytes - (self.backend.capacity or 0)
                self._doubts = doubts
            self._listed = time.monotonic()
        finally:
            self._listing.release()

    def _real(self) -> Iterator[Listed]:
        """What the backend lists, but for what is no record: that is put aside.

        Only what is so large that much would have to go for it is looked at.
        """
        budget = self.backend.capacity or 0
        for one in self.backend.list():
            if one.size * _SUSPICIOUS > budget and (reason := self._unreal(one)):
                self._quarantine(one.block, reason)
            elif one.size > budget:  # of a larger budget: all others could not make room for it
                self._take_away([one.block])
            else:
                yield one

    def _unreal(self, listed: Listed) -> str | None:
        """Why what was listed is no record of that block and length, if the backend can tell."""
        head = self.backend.peek(listed.block, HEADER_BYTES)
        if head is None:
            return None
        try:
            header = read_header(head)
        except OtherVersion:
            return None
        except BadRecord as bad:
            return str(bad)
        if (header.block, header.record_bytes) != (listed.block, listed.size):
            return f"it has {listed.size} bytes and should have {header.record_bytes}"
        return None

    def check_doubts(self) -> None:
        """List the place again, soon, if it noticed that it does not hold what it listed."""
        if self.indexed and self._doubts != self.backend.doubts:
            self._doubts = self.backend.doubts
            self.counters.count(relists=1)
            self.reading.submit(self.relist)

    def knows(self, block: bytes) -> bool:
        """Whether ``block`` is known to be here, without asking."""
        return self.indexed and block in self.catalogue and block not in self._refused

    def may_have(self, block: bytes) -> bool:
        """Whether it is worth trying to read ``block`` here."""
        if self.backend.shared or not self.indexed:
            return not self.catalogue.outlived(block)
        return self.knows(block)

    def hides(self, block: bytes) -> bool:
        """Whether ``block`` may be here for all that is known while nobody answers."""
        asked = self.backend.shared or not self.indexed or not self._heard
        return asked or self.knows(block)

    def failed(self, what: What, detail: str) -> None:
        """It was of no use to who wanted to read; see `trouble`."""
        self._trouble = Happened(self.name, what, time.time(), detail)

    def trouble(self, since: float | None = None) -> Happened | None:
        """Why reading here is of no use now, or was not at some moment ``since`` (Unix seconds)."""
        if self.breaker.blocks:
            return Happened(self.name, "unavailable", time.time(), "breaker")
        if since is None:
            return None
        last, now = self._trouble, time.time()
        if last is not None and last.at is not None and last.at >= since:
            return last
        if self.reading.longest > max(_LONG, _MOSTLY * (now - since)):
            return Happened(self.name, "late", now, "no answer")
        return None

    def is_away(self) -> bool:
        """Whether writing here is of no use now: it hangs, or is left alone."""
        if self._stuck() > self.timeout:
            self.breaker.failed(f"a write takes longer than {self.timeout:g} s")
        return self.breaker.blocks

    def probe(self, blocks: Sequence[bytes], until: float | None = None) -> int:
        """How many of ``blocks`` are here before the first that is not; asks the place itself.

        0 when it does not answer in time, or not ``until`` (monotonic seconds).
        """
        if not self.backend.shared and self.indexed:
            return next((i for i, block in enumerate(blocks) if not self.knows(block)), len(blocks))
        if not self.breaker.allows():
            self.counters.count(skipped_calls=1)
            self.failed("unavailable", "breaker")
            return 0
        answer: list[list[int | None]] = []
        done = threading.Event()

        def ask() -> None:
            with _Edge(self, "sizes"):
                answer.append(self.backend.sizes(blocks))
            done.set()

        patience = self.timeout
        if until is not None:
            patience = min(patience, max(0.0, until - time.monotonic()))
        asked = self.reading.submit(ask)
        if not asked or not done.wait(patience):
            self.counters.count(late=1)
            self.failed("late", "no answer" if asked else "queue full")
            if not asked or patience == self.timeout:  # else `ask` will tell how it went
                self.breaker.failed(f"no answer in {self.timeout:g} s")
            return 0
        sizes = answer[0] if answer else []
        leading = 0
        for block, size in zip(blocks, sizes, strict=False):
            if size is None or block in self._refused or self.catalogue.outlived(block):
                break
            leading += 1
        if self.indexed:
            for block, size in zip(blocks[:leading], sizes, strict=False):
                if block not in self.catalogue:
                    self.catalogue.add(block, size or 0)
        return leading

    def recheck(self, blocks: Sequence[bytes]) -> None:
        """Have forgotten, soon, what others took away of ``blocks``: else puts would skip it."""
        known = [block for block in blocks if self.knows(block)] if self.backend.shared else []

        def ask() -> None:
            if self.breaker.allows():
                sizes: list[int | None] = []
                with _Edge(self, "sizes"):
                    sizes = self.backend.sizes(known)
                for block, size in zip(known, sizes, strict=False):  # none, if it failed
                    if size is None and self.catalogue.forget(block):
                        self.fates.note([block], self.name, "removed", "gone")

        if known:
            self.reading.submit(ask)

    # --- reading: in a thread of `reading` -------------------------------------------------------

    def load(
        self, block: bytes, raw_bytes: int, place: Callable[[], memoryview]
    ) -> memoryview | None:
        """Read ``block``; the record with its payload decoded, in ``place()``, or None.

        ``place`` gives room for header and ``raw_bytes``; it is called once the record is there.
        What its header says is not to be relied on. A record that does not verify is quarantined.
        """
        if not self.breaker.allows():
            self.counters.count(skipped_calls=1)
            self.failed("unavailable", "breaker")
            return None
        known = self.knows(block)
        started = time.monotonic()
        room = _RecordRoom(self, raw_bytes, place)
        record: memoryview | None = None
        bad: str | None = None
        with _Edge(self, "get") as edge:
            try:
                record = self.backend.get(block, room)
            except _WrongSize as wrong:
                bad = str(wrong)  # the place did its part
        took = time.monotonic() - started
        if edge.failed:
            return None
        self.counters.count(read_seconds=took)
        if record is None and bad is None:
            if known:
                self.catalogue.forget(block)
                self.fates.note([block], self.name, "removed", "gone")
            self.counters.count(misses=1)
            return None
        return self._checked(block, raw_bytes, record, bad, room)

    def _checked(
        self,
        block: bytes,
        raw_bytes: int,
        record: memoryview | None,
        bad: str | None,
        room: _RecordRoom,
    ) -> memoryview | None:
        try:
            if record is None:
                raise BadRecord(bad)
            header = verify(record, block)
            if header.raw_bytes != raw_bytes:  # it is right, and who asks is wrong
                self.counters.count(refused=1)
                return None
            codec = self._codec(header)
            if codec is None:
                self._refuse(block, f"codec {header.codec} is not for this tier")
                return None
            if codec.number != _RAW or not room.placed:  # the next read takes a scratch buffer
                record = self._decoded(codec, header, record, room)
        except (OtherVersion, OtherKey, MissingExtra) as other:
            self._refuse(block, str(other))
            return None
        except (BadRecord, Damaged) as damage:
            self._quarantine(block, str(damage))
            return None
        if self.indexed and block not in self.catalogue:
            self.catalogue.add(block, header.record_bytes)
        self.counters.count(hits=1, read_bytes=header.record_bytes)
        return record

    def _refuse(self, block: bytes, reason: str) -> None:
        """A record is whole, but not for us: it stays until it is written anew."""
        _LOG.info("tier %s: %s", self.name, reason)
        self.counters.count(refused=1)
        if len(self._refused) >= _REFUSED_KEPT:
            self._refused.clear()
        self._refused[block] = None
        self.fates.note([block], self.name, "refused", reason)

    def _codec(self, header: Header) -> Codec | None:
        """What decodes it; None where this tier promises more than the record does.

        Exact KV, that is, or encryption: who could forge a plain record would get round the key.

        Raises:
            BadRecord: it is raw, and of another length than it says.
        """
        if header.codec == _RAW and header.payload_bytes != header.raw_bytes:
            raise BadRecord(f"{header.payload_bytes} raw bytes, and it says {header.raw_bytes}")
        if header.codec == self.codec.number:
            return self.codec
        if header.codec < WITHOUT_KEY_ID <= self.codec.number:
            return None
        codec = self.codec_of(header.codec)
        return None if codec is None or (self.codec.exact and not codec.exact) else codec

    def _decoded(
        self, codec: Codec, header: Header, record: memoryview, room: _RecordRoom
    ) -> memoryview:
        if room.placed:  # a raw tier met a codec: what is in its place is not in its final form
            scratch = self._scratch.take(len(record))
            scratch[:] = record
            record = scratch
        final = room.final()
        named = naming(header.block, header.codec, header.raw_bytes)
        codec.decode(record[HEADER_BYTES:], final[HEADER_BYTES:], named)
        return final

    def _quarantine(self, block: bytes, reason: str) -> None:
        _LOG.warning(
            "tier %s: block %s… is bad: %s", self.name, block[SPACE_BYTES:][:8].hex(), reason
        )
        self.counters.count(damaged=1)
        self.catalogue.forget(block)
        self.fates.note([block], self.name, "damaged", reason)
        with _Edge(self, "quarantine"):
            self.backend.quarantine(block, reason)

    # --- writing: in a thread of `writing` -------------------------------------------------------

    def save(self, block: bytes, record: memoryview) -> bool:
        """Write ``record``, whose payload is raw KV behind room for a header; whether it is here.

        ``record`` stays as it is but for its header. Whoever else may write here is asked first:
        what is there is not sent again.
        """
        if self.knows(block):
            self.counters.count(already=1)
            return True
        if not self.breaker.allows():
            self.counters.count(skipped_calls=1, drops=1)
            self.fates.note([block], self.name, "dropped", "breaker")
            return False
        with _Edge(self, "put") as edge:
            there: int | None = None
            if self.backend.shared and block not in self._refused:
                there = self.backend.sizes([block])[0]
            if there is None:
                there = self._write(block, record)
            else:
                self.counters.count(already=1)
                if self.indexed:
                    self.catalogue.add(block, there)
        if edge.failed or there is None:
            self.counters.count(drops=1)
            why = "write failed" if edge.failed else "no room"
            self.fates.note([block], self.name, "dropped", why)
            return False
        self._refused.pop(block, None)
        return True

    def _write(self, block: bytes, record: memoryview) -> int | None:
        """Encode and put; bytes of the record, None without room."""
        encoded = self._encoded(block, record)
        if len(encoded) > (self.backend.capacity or len(encoded)):
            return None  # nothing that could go would make room for it
        space = block[:SPACE_BYTES]
        if not self._within_quota(space, len(encoded)):
            return None
        try:
            if not self._put(block, encoded):
                return None
            if self.indexed:
                self.catalogue.add(block, len(encoded))
        finally:
            with self._quota_lock:
                left = self._coming.pop(space) - len(encoded)
                if left:
                    self._coming[space] = left
        return len(encoded)

    def _put(self, block: bytes, encoded: memoryview) -> bool:
        for _ in range(_TRIES):
            started = time.monotonic()
            try:
                self.backend.put(block, encoded)
            except OutOfRoom as short:
                if not self.make_room(short.needed):
                    return False
                continue
            took = time.monotonic() - started
            self.counters.count(writes=1, written_bytes=len(encoded), write_seconds=took)
            return True
        return False

    def _encoded(self, block: bytes, record: memoryview) -> memoryview:
        raw = record[HEADER_BYTES:]
        if self.codec.number != _RAW:
            encoded = self._scratch.take(HEADER_BYTES + self.codec.bound(len(raw)))
            named = naming(block, self.codec.number, len(raw))
            size = self.codec.encode(raw, encoded[HEADER_BYTES:], named)
            record = encoded[: HEADER_BYTES + size]
        seal(record, block, self.codec.number, len(raw))
        return record

    def _within_quota(self, space: bytes, size: int) -> bool:
        """Have ``size`` bytes more fit the quota, beside those that others write just now.

        They count as coming from here on, if so.
        """
        for _ in range(_TRIES):
            with self._quota_lock:
                coming = self._coming.get(space, 0) + size
                over = self.catalogue.over_quota(space, coming)
                if not over:
                    self._coming[space] = coming
                    return True
            if over < 0 or not (victims := self.catalogue.victims(over, space)):
                break
            self._take_away(victims)
        return False

    def make_room(self, needed: int) -> bool:
        """Evict ``needed`` bytes; whether anything could go.

        What others took away before frees nothing. Where all that may go would not suffice, nothing
        goes.
        """
        if not self.indexed:
            return False
        if not self.catalogue.may_free(needed):
            if not self.backend.shared or time.monotonic() - self._listed <= 1.0:
                return False
            self.relist()
            if not self.catalogue.may_free(needed):
                return False
        freed = 0
        while freed < needed:
            victims = self.catalogue.victims(needed - freed)
            if not victims and self.backend.shared and time.monotonic() - self._listed > 1.0:
                self.relist()  # others fill the place: theirs go, too
                victims = self.catalogue.victims(needed - freed)
            if not victims:
                break
            # Records take whole units; what the backend says it freed is without those.
            if deleted := self._take_away(victims):
                freed += deleted + (self.backend.unit - 1) * len(victims)
        return freed > 0

    def _take_away(self, victims: Sequence[bytes]) -> int:
        """Delete what the catalogue gave up; bytes freed."""
        if not victims:
            return 0
        self.fates.note(victims, self.name, "evicted", self.catalogue.policy)
        if self.demote is not None:
            for block in victims:
                self.demote(block)
        self.counters.count(evictions=len(victims))
        return self.backend.delete(victims)

    def remove(self, blocks: Sequence[bytes]) -> int:
        """Delete ``blocks``; bytes freed, 0 when the place fails."""
        for block in blocks:
            self.catalogue.forget(block)
        freed = 0
        if blocks and self.breaker.allows():
            with _Edge(self, "delete"):
                freed = self.backend.delete(blocks)
        return freed

    def clear(self, space: bytes | None) -> int:
        """Delete a namespace, or everything; bytes freed."""
        found: set[bytes] = set(self.catalogue.blocks(space))
        if self.breaker.allows():
            with _Edge(self, "list"):
                listed = (item.block for item in self.backend.list())
                found.update(block for block in listed if block.startswith(space or b""))
        self.fates.note(found, self.name, "removed", "cleared")
        return self.remove(list(found))

    def fetch(self, block: bytes) -> memoryview | None:
        """The raw record of ``block`` in memory of its own, read in this thread, to take it away.

        What its header says is not to be relied on.
        """

        def anything(size: int) -> memoryview:
            return aligned(size)

        record: memoryview | None = None
        with _Edge(self, "get"):
            record = self.backend.get(block, anything)
        if record is None:
            return None
        try:
            header = verify(record, block)
            codec = self._codec(header)
            if codec is None:
                return None
            if codec.number != _RAW:
                raw = aligned(HEADER_BYTES + header.raw_bytes)
                named = naming(block, header.codec, header.raw_bytes)
                codec.decode(record[HEADER_BYTES:], raw[HEADER_BYTES:], named)
                record = raw
        except (OtherVersion, OtherKey, MissingExtra) as other:
            self._refuse(block, str(other))
            return None
        except (BadRecord, Damaged) as damage:
            self._quarantine(block, str(damage))
            return None
        return record

    # --- upkeep ----------------------------------------------------------------------------------

    def used(self, blocks: Sequence[bytes], new: Container[bytes] = ()) -> None:
        """A prompt used ``blocks``: whether they were read here or above, they stay longer.

        Those in ``new`` it brought itself.
        """
        tell = self.catalogue.used(blocks, new=new) if self.indexed else list(reversed(blocks))
        if tell and not self.is_away():
            self.writing.submit(lambda: self._tell(tell), _TELL_COST * len(tell))
        if self.options.ttl is not None and time.monotonic() - self._expired > _EXPIRE_EVERY:
            self._expired = time.monotonic()
            self.writing.submit(self.expire, 0)

    def reorder(self, blocks: Sequence[bytes]) -> None:
        """``blocks``, a prompt, were written in any order: note the right one of those here.

        The place is told of it by the next `flush`.
        """
        if self.indexed:
            self.catalogue.used(blocks, grain=float("inf"), new=set(blocks))

    def _tell(self, blocks: Sequence[bytes]) -> None:
        if blocks and self.breaker.allows():
            with _Edge(self, "touch"):
                self.backend.touch(blocks)

    def expire(self) -> None:
        """Take away what outlived its time, unless others used it."""
        if self.backend.shared:
            self.relist()
        while old := self.catalogue.expired():
            self.fates.note(old, self.name, "removed", "ttl")
            self.remove(old)

    def settled(self, timeout: float | None) -> bool:
        """Wait until nothing is left to write, ``timeout`` seconds at most; whether that is so.

        A place that takes longer than its own timeout for something is not waited for.
        """
        until = float("inf") if timeout is None else time.monotonic() + timeout
        while True:
            hangs = self.timeout - self._stuck()
            left = min(hangs, until - time.monotonic())
            if self.writing.wait(max(0.0, left)):
                return True
            if hangs <= 0 or time.monotonic() >= until:
                return False

    def _stuck(self) -> float:
        """Seconds for which the longest call that writes has not got on."""
        return min(self.writing.longest, time.monotonic() - self.backend.moved)

    def flush(self) -> bool:
        """Make what was written durable, and recency known; whether the place could."""
        self._tell(self.catalogue.unnoted())
        if not self.breaker.allows():
            return False
        with _Edge(self, "flush") as edge:
            self.backend.flush()
        return not edge.failed

    def close(self) -> None:
        """Close the backend; its threads end by themselves."""
        with _Edge(self, "close"):
            self.backend.close()

    def stats(self) -> TierStats:
        """The tier at this moment; asks nobody who could be slow."""
        return TierStats(
            name=self.name,
            place=self.backend.describe(),
            codec=self.codec.name,
            blocks=len(self.catalogue) if self.indexed else None,
            used_bytes=self.catalogue.total_bytes if self.indexed else None,
            capacity=self.backend.capacity,
            pinned_bytes=self.catalogue.pinned_bytes,
            queued_bytes=self.writing.cost,
            breaker=self.breaker.state,
            breaker_opened=self.breaker.opened,
            counters=self.counters.as_dict(),
        )

    def __repr__(self) -> str:
        return f"<Tier {self.name} {self.backend.describe()} {self.codec.name}>"


class _WrongSize(OutOfRoom):
    """A record is larger than any of this block could be."""


class _RecordRoom:
    """The room for one record: its final place where it is raw already, a scratch buffer if not.

    Sizes are checked here, before any memory is taken.
    """

    def __init__(self, tier: Tier, raw_bytes: int, place: Callable[[], memoryview]) -> None:
        self._tier = tier
        self._raw_bytes = raw_bytes
        self._place = place
        self._final: memoryview | None = None

    @property
    def placed(self) -> bool:
        """Whether the record was read into its final place."""
        return self._final is not None

    def final(self) -> memoryview:
        """Where the decoded record goes."""
        if self._final is None:
            self._final = self._place()
        return self._final

    def __call__(self, size: int) -> memoryview:
        raw = HEADER_BYTES + self._raw_bytes
        # Whichever codec wrote it: one that this tier does not take is refused later, not damaged.
        most = HEADER_BYTES + self._tier.codec.bound(self._raw_bytes) + _ENVELOPE
        if size > most:
            raise _WrongSize(size, f"it has {size} bytes and can have {most} at most: the reader")
        if size == raw and self._tier.codec.number == _RAW:
            return self.final()
        return self._tier._scratch.take(size)


class _Edge:
    """Where what a backend raises ends: counted, logged, and told to the breaker."""

    __slots__ = ("_started", "_tier", "_what", "failed")

    def __init__(self, tier: Tier, what: str) -> None:
        self._tier = tier
        self._what = what
        self._started = 0.0
        self.failed = False

    def __enter__(self) -> Self:
        self._started = time.monotonic()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> bool:
        tier = self._tier
        took = time.monotonic() - self._started
        if error is None:
            if took > tier.timeout and self._what not in _AS_LONG_AS_IT_TAKES:
                tier.breaker.failed(f"{self._what} took {took:.1f} s")
            elif self._what != "close":  # which works without anybody there
                tier.breaker.succeeded()
            tier.check_doubts()
            return False
        self.failed = True
        tier.counters.count(errors=1)
        if self._what in _READING:
            tier.failed("unavailable", f"{self._what} failed: {error}")
        tier.breaker.failed(f"{self._what}: {error}")
        _LOG.info("tier %s: %s failed: %s", tier.name, self._what, error)
        if isinstance(error, AssertionError):
            _LOG.error("tier %s: a fault of kvkeep", tier.name, exc_info=error)
        return isinstance(error, Exception)
