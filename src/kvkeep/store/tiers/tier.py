"""One tier: a backend, what it is known to hold, and the edge where its failures become misses."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from kvkeep.core.errors import MissingExtra, OutOfRoom
from kvkeep.core.eviction import LRU, EvictionPolicy
from kvkeep.core.keys import SPACE_BYTES
from kvkeep.store.backends.buffers import aligned
from kvkeep.store.codecs import WITHOUT_KEY_ID, Damaged, OtherKey
from kvkeep.store.tiers.breaker import Breakers
from kvkeep.store.tiers.catalogue import Catalogue
from kvkeep.store.tiers.counters import TierCounters, TierStats
from kvkeep.store.tiers.fates import Fates, Happened
from kvkeep.store.tiers.notes import difference
from kvkeep.store.tiers.record import (
    HEADER_BYTES,
    BadRecord,
    OtherVersion,
    naming,
    read_header,
    seal,
    verify,
)
from kvkeep.store.tiers.turns import AGAIN, Again, Turns
from kvkeep.store.tiers.workers import Workers

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator, Mapping, Sequence

    from kvkeep.store.backends import Backend, Listed
    from kvkeep.store.codecs import Codec
    from kvkeep.store.tiers.breaker import Call
    from kvkeep.store.tiers.fates import What
    from kvkeep.store.tiers.record import RecordHeader

__all__ = ["Tier", "TierOptions"]

_LOG = logging.getLogger("kvkeep.tiers")
_RAW = 0  # the number of the codec that changes nothing
_EXPIRE_EVERY = 60.0  # seconds
_LISTING_SHARE = 20  # times as long as a listing takes the next one of `expire` is put off
_ENVELOPE = 1 << 16  # bytes that any codec may need beyond those of another
_TELL_COST = 1024  # bytes that a block's name counts while it waits to be told, roughly
ORDERED = 1 << 16
"""Blocks of a tier that its policy orders; of more, those that would go first take less memory."""
_SUSPICIOUS = 16  # records as large as this part of the budget must be real
_REFUSED_KEPT = 1 << 16
_NOTED_KEPT = 4096
_READING: frozenset[Call | None] = frozenset(("lookup", "read", "list"))
_AS_LONG_AS_IT_TAKES: frozenset[Call] = frozenset(("list", "flush"))
"""Calls whose work grows with what is there."""
_LONG = 0.05  # seconds that a read takes which is slow for any place
_MOSTLY = 0.5  # of the time since a moment that one read has taken: it is what was waited for
_DELETED_AT_ONCE = 1000  # blocks; more could take longer than the place's timeout
_TRIES = 8  # rounds of making room for one record; then something else takes what is freed


@dataclass(frozen=True, slots=True)
class TierOptions:
    """What can be chosen of a tier besides its place.

    Attributes:
        policy: makes the eviction policies of its catalogue.
        ttl: seconds after its last use that a block is no longer found; None: for ever.
        queue_bytes: of records that may wait to be written; None: as much as memory holds.
        readers, writers: threads.
        breaker_limit: failures in a row of one kind of call, after which such calls are not made
            for a while; see `kvkeep.store.tiers.breaker`.
        breaker_pause: seconds of that at first.
    """

    policy: Callable[[], EvictionPolicy] = LRU
    ttl: float | None = None
    queue_bytes: int | None = None
    readers: int = 4
    writers: int = 2
    breaker_limit: int = 3
    breaker_pause: float = 1.0


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
    becomes a miss or a drop, counted and logged. Too many in a row of one kind of call open the
    breaker of that kind; see `kvkeep.store.tiers.breaker`.

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
    counters: TierCounters = field(default_factory=TierCounters)
    fates: Fates = field(default_factory=Fates)
    """Where it notes what it loses. Set by who has other tiers."""
    indexed: bool = field(init=False)
    catalogue: Catalogue = field(init=False)
    breaker: Breakers = field(init=False)
    reading: Workers = field(init=False)
    writing: Workers = field(init=False)
    _scratch: _Scratch = field(init=False, default_factory=_Scratch)
    _expired: float = field(init=False, default=float("-inf"))
    _listed: float = field(init=False, default=0.0)
    _list_seconds: float = field(init=False, default=0.0)  # that the last listing took
    _listing: threading.Lock = field(init=False, default_factory=threading.Lock)
    _turns: Turns = field(init=False)
    _quota_lock: threading.Lock = field(init=False, default_factory=threading.Lock)
    _coming: dict[bytes, int] = field(init=False, default_factory=dict)
    """Bytes that are being written, by namespace."""
    _doubts: int = field(init=False, default=0)  # of the backend, when it was listed last
    _removals: int = field(init=False, default=0)  # that began, by request
    _removing: int = field(init=False, default=0)  # of these, that did not end yet
    _excess: int = field(init=False, default=0)  # bytes above the budget when it was listed last
    _trouble: Happened | None = field(init=False, default=None)
    _heard: bool = field(init=False, default=False)  # it said once what it holds
    _under_way: dict[_Edge, None] = field(init=False, default_factory=dict)
    """Calls to the backend that did not return yet."""
    notes: Mapping[bytes, bytes] = field(init=False, default_factory=dict)
    """What to note of namespaces, by space. Set by who has other tiers."""
    _noted: set[bytes] = field(init=False, default_factory=set)
    _sought: bytes | None = field(init=False, default=None)
    """A namespace of which blocks are expected, until it was looked for."""
    _refused: OrderedDict[bytes, None] = field(init=False, default_factory=OrderedDict)
    """Blocks as if not here, to be written anew: records not for us, or not to be deleted."""

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
        self.breaker = Breakers(self.name, limit=options.breaker_limit, pause=options.breaker_pause)
        self._turns = Turns(_TRIES, options.writers)
        self.reading = Workers(f"{self.name} reader", options.readers, 4096)
        self.writing = Workers(
            f"{self.name} writer", options.writers, options.queue_bytes or sys.maxsize
        )

    @property
    def timeout(self) -> float:
        """Seconds after which a call counts as failed."""
        return self.backend.timeout

    @property
    def asked(self) -> bool:
        """Whether it may hold more than is known, so that it is asked."""
        return self.backend.shared or not self.indexed

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
        self.make_room(self._excess)

    def relist(self) -> None:
        """Ask the backend for all it holds: others may have written here."""
        if not self._listing.acquire(timeout=self.timeout):  # one at a time
            return  # it hangs; who waits here has other things to do
        try:
            if self.breaker.of("list").allows():
                doubts, started = self.backend.stale_listings, time.monotonic()
                with _Edge(self, "list", "list"):
                    gone = self.catalogue.fill(self._real())
                    self.fates.note(gone, self.name, "removed", "gone")
                    self._heard = True
                    self._excess = self.catalogue.total_bytes - (self.backend.capacity or 0)
                self._doubts = doubts
                self._list_seconds = time.monotonic() - started
            self._listed = time.monotonic()
        finally:
            self._listing.release()
        if self._heard:
            self._look()

    def look_for(self, space: bytes) -> None:
        """Have it logged, once, if others have blocks here and the namespace ``space`` has none.

        As soon as it is known what is here, in a thread of the tier: an index that was read, or a
        place that answered. Nobody waits for it.
        """
        self._sought = space
        if self._heard:
            self.reading.submit(self._look)

    def _look(self) -> None:
        with self._quota_lock:
            space, self._sought = self._sought, None
        ours = None if space is None else self.notes.get(space)
        if space is None or ours is None:
            return
        there = self.catalogue.spaces() if self.indexed else None
        if there is not None and (not there or space in there):
            return
        notes: dict[bytes, bytes] = {}
        with _Edge(self, "noted_spaces"):
            notes = self.backend.noted_spaces()
        if space in notes and there is None:
            return
        others = [note for one, note in notes.items() if there is None or one in there]
        found = difference(ours, others)
        if found is not None:
            unlike, same_model = found
            _LOG.log(
                logging.WARNING if same_model else logging.INFO,
                "tier %s: %s holds blocks, but none of this store; of those nearest to it, the %s",
                self.name, self.backend.describe(), ", ".join(unlike),
            )  # fmt: skip

    def _note(self, space: bytes) -> None:
        """A block of ``space`` was written: note once what that namespace is."""
        if len(self._noted) >= _NOTED_KEPT:
            self._noted.clear()
        self._noted.add(space)
        note = self.notes.get(space)
        if note is not None:
            with _Edge(self, "note_space"):
                self.backend.note_space(space, note)

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
        if self.indexed and self._doubts != self.backend.stale_listings:
            self._doubts = self.backend.stale_listings
            self._noted.clear()  # the notes may be gone as well
            self.counters.count(relists=1)
            self.reading.submit(self.relist)

    def knows(self, block: bytes) -> bool:
        """Whether ``block`` is known to be here, without asking."""
        return self.indexed and block in self.catalogue and block not in self._refused

    @property
    def serves_all(self) -> bool:
        """Whether `serves` is true of all that the catalogue has."""
        failing = self.breaker.any_blocks("read", "lookup")
        return self.indexed and not self._refused and not failing

    def may_have(self, block: bytes) -> bool:
        """Whether it is worth trying to read ``block`` here."""
        if self.asked:
            return block not in self._refused and not self.catalogue.outlived(block)
        return self.knows(block)

    def serves(self, block: bytes) -> bool:
        """Whether ``block`` is known to be here and can be read now, without asking."""
        return self.knows(block) and not self.unread(block)

    def unread(self, block: bytes) -> bool:
        """Whether reading ``block`` here is of no use now: such calls fail, or hang."""
        if not (self._under_way or self.breaker.ever_opened):
            return False  # the usual case
        self._tell_of_hung("lookup", "read")
        part = self.backend.part(block)
        return self.breaker.blocks("read", part) or self.breaker.blocks("lookup", part)

    def _tell_of_hung(self, *calls: Call) -> None:
        """Count the calls of these kinds as failed that do not return in time.

        However short the time is for which callers wait: else nobody would tell. Once for each
        timeout that a call takes.
        """
        if self._under_way:
            now = time.monotonic()
            for edge in list(self._under_way):
                if edge.call in calls and edge.due < now:
                    edge.due = now + self.timeout
                    if edge.call == "flush" and now - self.backend.last_progress <= self.timeout:
                        continue  # long, and it gets on
                    why = f"{edge.what} takes longer than {self.timeout:g} s"
                    self.breaker.of(edge.call, edge.part).failed(why)

    def hides(self, block: bytes) -> bool:
        """Whether ``block`` may be here for all that is known while nobody answers."""
        return self.asked or not self._heard or self.knows(block)

    def failed(self, what: What, detail: str) -> None:
        """It was of no use to who wanted to read; see `trouble`."""
        self._trouble = Happened(self.name, what, time.time(), detail)

    def trouble(self, since: float | None = None) -> Happened | None:
        """Why reading here is of no use now, or was not at some moment ``since`` (Unix seconds)."""
        if self.breaker.any_blocks("read", "lookup"):
            return Happened(self.name, "unavailable", time.time(), "breaker")
        if since is None:
            return None
        last, now = self._trouble, time.time()
        if last is not None and last.at is not None and last.at >= since:
            return last
        if self.reading.longest > max(_LONG, _MOSTLY * (now - since)):
            return Happened(self.name, "late", now, "no answer")
        return None

    def is_away(self, block: bytes) -> bool:
        """Whether writing ``block`` here is of no use now: such calls fail, or hang."""
        if not (self._under_way or self.breaker.ever_opened):
            return False  # the usual case
        return self._writers_hang() or self.breaker.blocks("write", self.backend.part(block))

    def _writers_hang(self) -> bool:
        self._tell_of_hung("write", "touch", "delete", "flush")
        return self.writing.stuck(self.timeout) and self.stuck_for() > self.timeout

    def probe(self, blocks: Sequence[bytes], until: float | None = None) -> int:
        """How many of ``blocks`` are here before the first that is not; asks the place itself.

        Parts of a place are asked beside each other. What does not answer in time, or not
        ``until`` (monotonic seconds), has nothing.
        """
        if not self.asked:
            return next((i for i, block in enumerate(blocks) if not self.knows(block)), len(blocks))
        parts = self._parted(blocks)
        patience = self.timeout
        if until is not None:
            patience = min(patience, max(0.0, until - time.monotonic()))
        end = time.monotonic() + patience
        since = self._moment()
        asked = [_Question(self, part, found) for part, found in parts.items()]
        for question in asked:
            question.ask()
        sizes: dict[bytes, int | None] = {}
        for question in asked:
            sizes |= question.answer(end, whole=patience == self.timeout)
        leading = 0
        for block in blocks:
            size = sizes.get(block)
            if size is None or block in self._refused or self.catalogue.outlived(block):
                break
            leading += 1
            self._learn(block, size, since)
        return leading

    def _moment(self) -> int | None:
        """What `_learn` is to be told of when a question was asked: None, while removals go on."""
        with self._quota_lock:
            return None if self._removing else self._removals

    def _learn(self, block: bytes, size: int, since: int | None) -> None:
        """``block`` was here ``since`` then; it is known from now on, unless it may be removed."""
        if self.indexed and block not in self.catalogue:
            with self._quota_lock:
                if since is not None and since == self._removals:
                    self.catalogue.add(block, size)

    def _parted(self, blocks: Sequence[bytes]) -> dict[str, list[bytes]]:
        """``blocks`` by the part of the place that has them."""
        parts: dict[str, list[bytes]] = {}
        for block in blocks:
            parts.setdefault(self.backend.part(block), []).append(block)
        return parts

    def recheck(self, blocks: Sequence[bytes]) -> None:
        """Have forgotten, soon, what others took away of ``blocks``: else puts would skip it."""
        known = [block for block in blocks if self.knows(block)] if self.backend.shared else []

        def ask() -> None:
            for part, found in self._parted(known).items():
                if not self.breaker.of("lookup", part).allows():
                    continue
                sizes: list[int | None] = []
                with _Edge(self, "sizes", "lookup", part):
                    sizes = self.backend.sizes(found)
                for block, size in zip(found, sizes, strict=False):  # none, if it failed
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
        part = self.backend.part(block)
        breaker = self.breaker.of("read", part)
        if not breaker.allows():
            self.counters.count(skipped_calls=1)
            self.failed("unavailable", "breaker")
            return None
        known, since = self.knows(block), self._moment()
        started = time.monotonic()
        room = _RecordRoom(self, raw_bytes, place)
        record: memoryview | None = None
        bad: str | None = None
        with _Edge(self, "get", "read", part) as edge:
            try:
                record = self.backend.get(block, room)
            except _WrongSize as wrong:
                bad = str(wrong)  # the place did its part
            edge.done = record is not None  # to say that it has none is no read
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
        return self._checked(block, raw_bytes, record, bad, room, since=since)

    def _checked(
        self,
        block: bytes,
        raw_bytes: int,
        record: memoryview | None,
        bad: str | None,
        room: _RecordRoom,
        *,
        since: int | None,
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
        self._learn(block, header.record_bytes, since)
        self.counters.count(hits=1, read_bytes=header.record_bytes)
        return record

    def _refuse(self, block: bytes, reason: str) -> None:
        """A record is whole, but not for us: it stays until it is written anew."""
        _LOG.info("tier %s: %s", self.name, reason)
        self.counters.count(refused=1)
        self.hide([block])
        self.fates.note([block], self.name, "refused", reason)

    def _codec(self, header: RecordHeader) -> Codec | None:
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
        self, codec: Codec, header: RecordHeader, record: memoryview, room: _RecordRoom
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
        with _Edge(self, "quarantine", "delete", self.backend.part(block)):
            self.backend.quarantine(block, reason)

    # --- writing: in a thread of `writing` -------------------------------------------------------

    def save(self, block: bytes, record: memoryview, *, hold: bool = False) -> bool:
        """Write ``record``, whose payload is raw KV behind room for a header; whether it is here.

        ``record`` stays as it is but for its header. Whoever else may write here is asked first:
        what is there is not sent again. With ``hold``, what is here is held in the catalogue, for
        the caller to free.
        """
        if self.knows(block) and (not hold or self.catalogue.hold(block)):
            self.counters.count(already=1)
            return True
        part = self.backend.part(block)
        if not self.breaker.of("write", part).allows():
            self.counters.count(skipped_calls=1, drops=1)
            self.fates.note([block], self.name, "dropped", "breaker")
            return False
        with _Edge(self, "put", "write", part) as edge:
            there: int | None = None
            if self.backend.shared and block not in self._refused:
                there = self.backend.sizes([block])[0]
                self.breaker.of("lookup", part).succeeded()
            if there is None:
                there = self._write(block, record, hold=hold)
                edge.done = there is not None  # what found no room was not written
            else:
                edge.done = False
                self.counters.count(already=1)
                if self.indexed:
                    self.catalogue.add(block, there, hold=hold)
        if edge.failed or there is None:
            self.counters.count(drops=1)
            why = "write failed" if edge.failed else "no room"
            self.fates.note([block], self.name, "dropped", why)
            return False
        self._refused.pop(block, None)
        if block[:SPACE_BYTES] not in self._noted:
            self._note(block[:SPACE_BYTES])
        return True

    def _write(self, block: bytes, record: memoryview, *, hold: bool) -> int | None:
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
                self.catalogue.add(block, len(encoded), hold=hold)
        finally:
            with self._quota_lock:
                left = self._coming.pop(space) - len(encoded)
                if left:
                    self._coming[space] = left
        return len(encoded)

    def _put(self, block: bytes, encoded: memoryview) -> bool:
        def attempt() -> bool | Again:
            started = time.monotonic()
            try:
                self.backend.put(block, encoded)
            except OutOfRoom as short:
                return AGAIN if self.make_room(short.needed) else False
            took = time.monotonic() - started
            self.counters.count(writes=1, written_bytes=len(encoded), write_seconds=took)
            return True

        return bool(self._turns.take(attempt))

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
        goes. Where deleting fails, nothing more goes: it would be forgotten and lie there all the
        same.
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
        while freed < needed and not self.breaker.any_blocks("delete"):
            victims = self.catalogue.victims(needed - freed)
            if not victims and self.backend.shared and time.monotonic() - self._listed > 1.0:
                self.relist()  # others fill the place: theirs go, too
                victims = self.catalogue.victims(needed - freed)
            if not victims:
                break
            got, left = self._take_away(victims)
            # Records take whole units; what the backend says it freed is without those.
            freed += got + (self.backend.unit - 1) * len(victims) if got else 0
            if left:
                break
        return freed > 0

    def _take_away(self, victims: Sequence[bytes]) -> tuple[int, list[bytes]]:
        """Delete what the catalogue gave up; see `_delete`."""
        self.fates.note(victims, self.name, "evicted", self.catalogue.policy)
        if self.demote is not None:
            for block in victims:
                self.demote(block)
        self.counters.count(evictions=len(victims))
        return self._delete(victims)

    def _delete(self, blocks: Sequence[bytes]) -> tuple[int, list[bytes]]:
        """Delete ``blocks`` in pieces; bytes freed, and those that the place may have still."""
        freed, left = 0, []
        for part, found in self._parted(blocks).items():
            for at in range(0, len(found), _DELETED_AT_ONCE):
                piece = found[at : at + _DELETED_AT_ONCE]
                if not self.breaker.of("delete", part).allows():
                    self.counters.count(skipped_calls=1)
                    left += piece
                    continue
                with _Edge(self, "delete", "delete", part) as edge:
                    freed += self.backend.delete(piece)
                if edge.failed:
                    left += piece
        return freed, left

    def remove(self, blocks: Sequence[bytes]) -> tuple[int, list[bytes]]:
        """Delete ``blocks``; bytes freed, and those that the place may have still.

        Those are not read here any more, until they are written anew.
        """
        with self._quota_lock:
            self._removals += 1
            self._removing += 1
        try:
            for block in blocks:
                self.catalogue.forget(block)
            self._tell_of_hung("delete")
            freed, left = self._delete(blocks)
        finally:
            with self._quota_lock:
                self._removing -= 1
        self.hide(left)
        return freed, left

    def clear(self, space: bytes | None) -> tuple[int, bool]:
        """Delete a namespace, or everything; bytes freed, and whether all of it is gone."""
        found: set[bytes] = set(self.catalogue.blocks(space))
        listed = False
        if self.breaker.of("list").allows():
            with _Edge(self, "list", "list") as edge:
                everything = (item.block for item in self.backend.list())
                found.update(block for block in everything if block.startswith(space or b""))
            listed = not edge.failed
        self.fates.note(found, self.name, "removed", "cleared")
        freed, left = self.remove(list(found))
        return freed, listed and not left

    def removal_patience(self, blocks: int) -> float:
        """Seconds after which deleting so many blocks counts as failed."""
        return self.timeout * (1 + blocks // _DELETED_AT_ONCE)

    def hide(self, blocks: Sequence[bytes]) -> None:
        """Have ``blocks`` count as not here until they are written anew."""
        hidden = self._refused
        for block in blocks:
            hidden[block] = None
        while len(hidden) > _REFUSED_KEPT:
            hidden.popitem(last=False)

    def is_hidden(self, block: bytes) -> bool:
        """Whether ``block`` counts as not here, whatever the place holds."""
        return block in self._refused

    def fetch(self, block: bytes) -> memoryview | None:
        """The raw record of ``block`` in memory of its own, read in this thread, to take it away.

        What its header says is not to be relied on.
        """

        def anything(size: int) -> memoryview:
            return aligned(size)

        record: memoryview | None = None
        part = self.backend.part(block)
        if self.breaker.of("read", part).allows():
            with _Edge(self, "get", "read", part) as edge:
                record = self.backend.get(block, anything)
                edge.done = record is not None
        else:
            self.counters.count(skipped_calls=1)
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
        if tell and not self._writers_hang():
            now = self.catalogue.now()
            told = [(block, now) for block in tell]
            self.writing.submit(lambda: self._tell(told), _TELL_COST * len(tell))
        every = _EXPIRE_EVERY + _LISTING_SHARE * self._list_seconds
        if self.options.ttl is not None and time.monotonic() - self._expired > every:
            self._expired = time.monotonic()
            self.reading.submit(self.expire)  # no flush waits for the listing there

    def reorder(self, blocks: Sequence[bytes]) -> None:
        """``blocks``, a prompt, were written in any order: note the right one of those here.

        The place is told of it by the next `flush`.
        """
        if self.indexed:
            self.catalogue.used(blocks, grain=float("inf"), new=set(blocks))

    def _tell(self, uses: Sequence[tuple[bytes, float]]) -> None:
        """Have the place know of these uses, oldest first."""
        when = dict(uses)
        for part, found in self._parted(list(when)).items():
            if self.breaker.of("touch", part).allows():
                with _Edge(self, "touch", "touch", part):
                    self.backend.touch(found, [when[block] for block in found])

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
            hangs = self.timeout - self.stuck_for()
            left = min(hangs, until - time.monotonic())
            if self.writing.wait(max(0.0, left)):
                return True
            if hangs <= 0 or time.monotonic() >= until:
                return False

    def stuck_for(self) -> float:
        """Seconds for which the longest call that writes has not got on."""
        return min(self.writing.longest, time.monotonic() - self.backend.last_progress)

    def flush(self) -> bool:
        """Make what was written durable, and recency known; whether the place could."""
        self._tell(self.catalogue.unnoted())
        if self.breaker.any_blocks("write") or not self.breaker.of("flush").allows():
            return False
        with _Edge(self, "flush", "flush") as edge:
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
            breakers=self.breaker.calls(),
            parts=self.breaker.parts(),
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


class _Question:
    """Asks one part of a place for the sizes of blocks, in a thread of the tier."""

    def __init__(self, tier: Tier, part: str, blocks: list[bytes]) -> None:
        self._tier = tier
        self._part = part
        self._blocks = blocks
        self._sizes: list[int | None] = []
        self._began = False
        self._done = threading.Event()

    def ask(self) -> None:
        """Start it, unless that part is left alone."""
        tier = self._tier
        if tier.unread(self._blocks[0]) or not tier.breaker.of("lookup", self._part).allows():
            tier.counters.count(skipped_calls=1)
            tier.failed("unavailable", "breaker")
            self._done.set()
            return
        if not tier.reading.submit(self._ask, given_up=self._done.set):
            tier.counters.count(late=1)
            tier.failed("late", "queue full")
            self._done.set()

    def _ask(self) -> None:
        self._began = True
        try:
            with _Edge(self._tier, "sizes", "lookup", self._part):
                self._sizes = self._tier.backend.sizes(self._blocks)
        finally:
            self._done.set()
        if self._sizes and not self._tier.indexed:
            self._tier._look()

    def answer(self, end: float, *, whole: bool) -> dict[bytes, int | None]:
        """The size of each block, None if it is not there; nothing without an answer until ``end``.

        ``whole``: that was all the time that a call may take, so it failed. One that still waits
        for a thread did not: calls that hang are counted by themselves.
        """
        if not self._done.wait(max(0.0, end - time.monotonic())):
            tier = self._tier
            tier.counters.count(late=1)
            tier.failed("late", "no answer")
            if whole and self._began:
                why = f"no answer in {tier.timeout:g} s"
                tier.breaker.of("lookup", self._part).failed(why)
            else:
                tier.unread(self._blocks[0])
            return {}
        return dict(zip(self._blocks, self._sizes, strict=False))


class _Edge:
    """Where what a backend raises ends: counted, logged, and told to the breaker of such calls.

    ``what`` is the name of the call; ``call`` is its kind, None for one without a breaker.

    Attributes:
        failed: it raised.
        due: when it counts as failed, if it did not return by then.
        done: it did the work that its kind is about. A call that did not, and did not fail either,
            shows nothing of whether such calls work: it leaves the breaker as it is.
    """

    __slots__ = ("_tier", "call", "done", "due", "failed", "part", "started", "what")

    def __init__(self, tier: Tier, what: str, call: Call | None = None, part: str = "") -> None:
        self._tier = tier
        self.what = what
        self.call = call
        self.part = part
        self.started = self.due = 0.0
        self.failed = False
        self.done = True

    def __enter__(self) -> Self:
        self.started = time.monotonic()
        self.due = self.started + self._tier.timeout
        self._tier._under_way[self] = None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> bool:
        tier = self._tier
        del tier._under_way[self]
        took = time.monotonic() - self.started
        breaker = None if self.call is None else tier.breaker.of(self.call, self.part)
        if error is None:
            tier.check_doubts()
            if breaker is None:
                return False
            if took > tier.timeout and self.call not in _AS_LONG_AS_IT_TAKES:
                breaker.failed(f"{self.what} took {took:.1f} s")
            elif self.done:
                breaker.succeeded()
            else:
                breaker.undecided()
            return False
        self.failed = True
        tier.counters.count(errors=1)
        if self.call in _READING:
            tier.failed("unavailable", f"{self.what} failed: {error}")
        if breaker is not None:
            breaker.failed(f"{self.what}: {error}")
        _LOG.info("tier %s: %s failed: %s", tier.name, self.what, error)
        if isinstance(error, AssertionError):
            _LOG.error("tier %s: a fault of kvkeep", tier.name, exc_info=error)
        return isinstance(error, Exception)
