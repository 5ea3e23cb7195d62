"""`Tier`: blocks in one backend, with its threads, circuit breakers and statistics."""

from __future__ import annotations

import logging
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvkeep.core.cost import CostModel
from kvkeep.core.errors import MissingExtra
from kvkeep.core.eviction import LRU, EvictionPolicy
from kvkeep.core.keys import SPACE_BYTES
from kvkeep.store.backends.budget import WriteBucket
from kvkeep.store.backends.buffers import aligned
from kvkeep.store.codecs import Damaged, OtherKey
from kvkeep.store.tiers.breaker import Breakers
from kvkeep.store.tiers.calls import BackendCalls
from kvkeep.store.tiers.counters import TierCounters, TierStats
from kvkeep.store.tiers.index import Index
from kvkeep.store.tiers.known import REFUSED, KnownBlocks
from kvkeep.store.tiers.listing import Listing, PutFailed, TierSpace
from kvkeep.store.tiers.loss_log import Loss, LossLog
from kvkeep.store.tiers.record import HEADER_BYTES, BadRecord, OtherVersion
from kvkeep.store.tiers.record_codec import (
    NotForUs,
    RecordCodec,
    RecordRoom,
    WrongSize,
    another_length,
)
from kvkeep.store.tiers.workers import Workers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from kvkeep.core.cost import LearnedTransfer
    from kvkeep.store.backends import Backend, WriteBudget
    from kvkeep.store.codecs import Codec
    from kvkeep.store.tiers.prompt_holds import PromptHolds
    from kvkeep.store.tiers.tier_shares import TenantWeights

__all__ = ["ORDERED", "Tier", "TierOptions", "TierSpec"]

_LOG = logging.getLogger("kvkeep.tiers")
_EXPIRE_EVERY = 60.0  # seconds
_LISTING_SHARE = 20  # pause between two `expire`, in durations of the last listing
_TOUCH_COST = 1024  # bytes that a queued touch of a block counts for, about
ORDERED = 1 << 16
"""Blocks that a tier's policy orders; those beyond, which are evicted first, take less memory."""

_SLOW_READ = 0.05  # seconds; a read that takes longer is slow for any backend
_MOSTLY = 0.5  # share of a request's time; a read that takes more of it delayed the request


@dataclass(frozen=True, slots=True)
class TierOptions:
    """Options that every tier has, whatever its backend.

    Attributes:
        policy: makes the eviction policies of its catalogue.
        ttl: seconds after its last use that a block expires; None: never.
        writes: how much may be written in a time; None: any amount.
        queue_bytes: of records that may wait to be written; None: most of memory.
        readers, writers: threads.
        breaker_limit: failures in a row of one kind of call that open its circuit breaker.
        breaker_pause: seconds that it stays open at first; see `kvkeep.store.tiers.breaker`.
    """

    policy: Callable[[], EvictionPolicy] = LRU
    ttl: float | None = None
    writes: WriteBudget | None = None
    queue_bytes: int | None = None
    readers: int = 4
    writers: int = 2
    breaker_limit: int = 3
    breaker_pause: float = 1.0


@dataclass(slots=True)
class TierSpec:
    """A tier to be opened: its name, backend, codecs and options.

    ``codec`` encodes its writes; ``codec_of`` returns the codec of a number in a record's header.
    """

    name: str
    backend: Backend
    codec: Codec
    codec_of: Callable[[int], Codec | None]
    options: TierOptions = field(default_factory=TierOptions)


class Tier:
    """Blocks in one backend below memory.

    `load` and `save` run in the thread that calls them, one of ``reading`` and ``writing``. No
    failure of the backend raises: it is a miss or a drop, counted and logged, and several in a row
    open the circuit breaker of that kind of call (`kvkeep.store.tiers.breaker`). Our bugs do raise.

    A backend with a budget is *indexed*: its blocks are listed once and tracked from then on. One
    without a budget evicts by its own rules, so it is queried each time.

    Thread safety: all methods.

    Arguments:
        spec: what to open.
        losses: records which blocks it lost, and why.
        notes: descriptions of the store's namespaces, by space.
        evicting: called with each block that has to make room, before it is deleted.
        shares: weights of tenants; see `Index`.
        cost: learns what its reads and writes take, as ``reads`` and ``writes``.
    """

    def __init__(
        self,
        spec: TierSpec,
        *,
        cost: CostModel | None = None,
        losses: LossLog | None = None,
        notes: Mapping[bytes, bytes] | None = None,
        evicting: Callable[[bytes], None] = lambda _block: None,
        shares: TenantWeights | None = None,
    ) -> None:
        self.name = spec.name
        self.backend = spec.backend
        self.codec = spec.codec
        self.options = options = spec.options
        self.losses = LossLog() if losses is None else losses
        self.counters = TierCounters()
        self.indexed = self.backend.capacity is not None
        self.catalogue = Index(
            options.policy, ttl=options.ttl, budget=self.backend.capacity, ordered=ORDERED,
            unit=self.backend.unit, shares=shares,
        )  # fmt: skip
        self.breaker = Breakers(self.name, limit=options.breaker_limit, pause=options.breaker_pause)
        self.reading = Workers(f"{self.name} reader", options.readers, 4096)
        self.writing = Workers(
            f"{self.name} writer", options.writers, options.queue_bytes or sys.maxsize
        )
        self._known = KnownBlocks(self.catalogue, indexed=self.indexed)
        self._calls = BackendCalls(self.name, self.backend, self.breaker, self.counters)
        self.health = TierHealth(self._calls, self.reading, self.writing)
        cost = CostModel() if cost is None else cost
        self.reads, self.writes = cost.reading(self.name), cost.writing(self.name)
        self.records = RecordCodec(spec.codec, spec.codec_of)
        self._reader = RecordReader(self._calls, self._known, self.records, self.losses, self.reads)
        self._listing = Listing(self._calls, self._known, self.losses, notes)
        self.order = WriteOrder(self.name, self._known, lambda: self.timeout)
        self._bucket = None if options.writes is None else WriteBucket(options.writes)
        self._space = TierSpace(
            self._calls, self._known, self.losses, options.writers, evicting=evicting,
            take_room=self.order.take_room, relist=self.relist, listed_at=lambda: self._listing.at,
            bucket=self._bucket,
        )  # fmt: skip
        self._expired_at = float("-inf")

    @property
    def timeout(self) -> float:
        """Seconds after which a call of the backend counts as failed."""
        return self.backend.timeout

    @property
    def queried(self) -> bool:
        """Whether the backend must be queried: it may hold blocks that the catalogue lacks."""
        return self.backend.shared or not self.indexed

    # --- lookups ---------------------------------------------------------------------------------

    def open(self) -> None:
        """List the backend, for its timeout at most; then writers evict down to the budget."""
        if self.indexed:
            self.reading.submit(self._list)
            self.reading.wait(self.timeout)

    def _list(self) -> None:
        self.relist()
        self._listing.trim(self._space, self.writing)

    def relist(self) -> None:
        """List the backend again: others may have written or deleted there."""
        self._listing.relist(self._space)

    def expect(self, space: bytes) -> None:
        """Log once if the backend holds blocks but none of namespace ``space``.

        A reader thread checks this once the backend has been listed or has answered a query.
        """
        self._listing.expect(space)
        if self._listing.complete:
            self.reading.submit(self._listing.compare)

    def knows(self, block: bytes) -> bool:
        """Whether ``block`` is known to be here; no I/O."""
        return block in self._known

    def fits(self, block: bytes, raw_bytes: int) -> bool:
        """Whether the record that is known may have so much raw KV (`RecordCodec.may_have`)."""
        size = self.catalogue.size(block)
        return size is None or self.records.may_have(raw_bytes, size)

    @property
    def serves_all(self) -> bool:
        """Whether `serves` is true of all blocks in the catalogue."""
        failing = self.breaker.any_blocks("read", "lookup")
        return self.indexed and not self._known.any_hidden and not failing

    def may_have(self, block: bytes) -> bool:
        """Whether this tier may hold a readable record of ``block``; no I/O."""
        if self.queried:
            return not self.is_hidden(block) and not self.catalogue.expired_at(block) is not None
        return self.knows(block)

    def serves(self, block: bytes) -> bool:
        """Whether ``block`` is known to be here and can be read now; no I/O."""
        return self.knows(block) and not self.health.unread(block)

    def may_hold(self, block: bytes) -> bool:
        """Whether this tier may hold ``block`` although it cannot be queried now."""
        return self.queried or not self._listing.complete or self.knows(block)

    def is_hidden(self, block: bytes) -> bool:
        """Whether ``block`` counts as missing, whatever the backend holds."""
        return self._known.is_hidden(block)

    def hide(self, blocks: Sequence[bytes]) -> None:
        """Treat ``blocks`` as missing until they are written anew."""
        self._known.hide(blocks)

    def probe(self, blocks: Sequence[bytes], until: float | None = None) -> set[bytes]:
        """Return those of ``blocks`` that are here; query the backend if `queried`.

        Waits for the timeout at most, and until ``until`` (monotonic seconds) at most; blocks
        without an answer count as missing.
        """
        if not self.queried:
            return {block for block in blocks if self.knows(block)}
        mark = self._known.before_query()
        sizes = query_sizes(
            self._calls, self.reading, blocks,
            until=until, unread=self.health.unread, answered=self._answered,
        )  # fmt: skip
        found: set[bytes] = set()
        for block, size in sizes.items():
            if (
                size is None
                or self.is_hidden(block)
                or self.catalogue.expired_at(block) is not None
            ):
                continue
            found.add(block)
            self._known.learn(block, size, mark)
        return found

    def _answered(self) -> None:
        if not self.indexed:
            self._listing.compare()

    def recheck(self, blocks: Sequence[bytes]) -> None:
        """Queue a check for ``blocks`` that other processes deleted, to forget them."""
        known = [block for block in blocks if self.knows(block)] if self.backend.shared else []
        if known:
            self.reading.submit(lambda: self._listing.recheck(known))

    # --- reading: in a thread of `reading` -------------------------------------------------------

    def load(
        self, block: bytes, raw_bytes: int, place: Callable[[], memoryview]
    ) -> memoryview | None:
        """Return the decoded record of ``block`` in the buffer of ``place()``; None for a miss.

        See `RecordReader.load`.
        """
        return self._reader.load(block, raw_bytes, place)

    def fetch(self, block: bytes) -> memoryview | None:
        """Return the decoded record of ``block`` in new memory; see `RecordReader.fetch`."""
        return self._reader.fetch(block)

    # --- writing: in a thread of `writing` -------------------------------------------------------

    def save(self, block: bytes, record: memoryview) -> bool:
        """Write ``record``, raw KV behind room for a header; return whether the tier has the block.

        Only the header of ``record`` is changed. A shared backend is queried first: an existing
        record is not sent again.
        """
        if self.knows(block) and self.fits(block, len(record) - HEADER_BYTES):
            self.counters.count(already=1)
            return True
        if not self._known.wait_deleted(block, self.timeout):
            self._dropped(block, "no time")
            return False
        part = self.backend.part(block)
        if not self._calls.allowed("write", part):
            self._known.not_written(block, maybe=False)
            self._dropped(block, "breaker")
            return False
        why = "fault"  # kept if `_store` raises
        try:
            with self.order.writing(block) as allowed:
                why = self._store(block, record, part) if allowed else "no room"
        finally:
            # `_store` may have made no call; then another trial call must be allowed.
            self._calls.breaker("write", part).undecided()
            if why:
                self._known.not_written(block, maybe=why == "fault")
                self._dropped(block, why)
        if why:
            return False
        self._known.written(block)
        self._listing.note(block[:SPACE_BYTES])
        return True

    def _store(self, block: bytes, record: memoryview, part: str) -> str:
        """Write ``record`` unless the backend has it; return the reason of a failure, else ""."""
        if self.records.refuses(record):  # callers ask before; nothing gets past this
            return "lossy"
        if self.backend.shared and not self.is_hidden(block):
            there: list[int | None] = [None]
            with self._calls.to("sizes", "write", part) as call:
                there = self.backend.sizes([block])
                call.decisive = False  # its success does not show that writing works
            if call.failed:
                return "write failed"
            self._calls.breaker("lookup", part).succeeded()
            if there[0] is not None and self.records.may_have(len(record) - HEADER_BYTES, there[0]):
                self.counters.count(already=1)
                if self.indexed:
                    self.catalogue.add(block, there[0])
                return ""
        moved: int | None = None
        self.writes.begin()
        try:
            why = self._put(block, record)
            moved = 0 if why else len(record) - HEADER_BYTES
        finally:
            self.writes.end(moved)
        return why

    def _put(self, block: bytes, record: memoryview) -> str:
        """Encode and write ``record``; return the reason of a failure, else ""."""
        encoded = self.records.encode(block, record)
        if len(encoded) > (self.backend.capacity or len(encoded)):
            return "no room"  # evicting everything would not make room for it
        try:
            with self._space.within_quota(block, len(encoded)) as fits:
                if not (fits and self._space.put(block, encoded)):
                    return "no room"
                if self.indexed:
                    self.catalogue.add(block, len(encoded))
        except PutFailed as failed:
            self._known.not_written(block, maybe=failed.why == "write failed")
            return failed.why
        return ""

    def _dropped(self, block: bytes, why: str) -> None:
        self.counters.count(drops=1, over_budget=int(why == "write budget"))
        self.losses.note([block], self.name, "dropped", why)

    def remove(
        self, blocks: Sequence[bytes], proceed: Callable[[], bool] = lambda: True
    ) -> tuple[int, list[bytes]]:
        """Delete ``blocks``; return the bytes freed, and blocks that may be left: hidden now.

        ``proceed`` is called before each 1,000 blocks; False ends the deletion.
        """
        return self._space.remove(blocks, proceed)

    def hide_space(self, space: bytes) -> int:
        """Treat a namespace's blocks as missing, but those whose writes begin from now on.

        Returns the number of this clearance, for `clear`.
        """
        return self._known.hide_space(space)

    def clear(
        self, space: bytes, number: int, proceed: Callable[[], bool] = lambda: True
    ) -> tuple[int, bool]:
        """Delete what `hide_space` hid; return the bytes freed, and whether none is left.

        ``proceed`` is called for each record that is listed, and before each 1,000 deletions; False
        ends the clearance. If any may be left, the namespace stays hidden.
        """
        found, complete = self._listing.blocks(space, proceed)
        found.update(self.catalogue.blocks(space))
        self.losses.note(found, self.name, "removed", "cleared")
        freed, left = self._space.remove(list(found), proceed, cleared=number)
        if complete:  # those that are left are hidden by themselves
            complete = self._known.reveal(space, number)
        return freed, complete and not left

    # --- upkeep ----------------------------------------------------------------------------------

    def used(self, blocks: Sequence[bytes], *, stored: bool = False) -> None:
        """Record that a prompt used ``blocks``, from any level; ``stored``: it was put.

        A writer thread passes the use on to the backend. Expired blocks are removed now and then.
        """
        late = (
            self.catalogue.used(blocks, stored=stored) if self.indexed else list(reversed(blocks))
        )
        if late and not self.health.writers_hang():
            now = self.catalogue.now()
            uses = [(block, now) for block in late]
            self.writing.submit(lambda: self._touch(uses), _TOUCH_COST * len(late))
        pause = _EXPIRE_EVERY + _LISTING_SHARE * self._listing.seconds
        if self.options.ttl is not None and time.monotonic() - self._expired_at > pause:
            self._expired_at = time.monotonic()
            self.reading.submit(self.expire)  # not in a writer: its listing would delay a flush

    def reorder(self, blocks: Sequence[bytes]) -> None:
        """Record the order of a prompt's ``blocks``, which were written in another order.

        The next `flush` passes it on to the backend as times of use.
        """
        if self.indexed:
            self.catalogue.used(blocks, grain=float("inf"), stored=True)

    def _touch(self, uses: Sequence[tuple[bytes, float]]) -> None:
        """Record uses, oldest first, in the backend."""
        when = dict(uses)
        for part, found in self._calls.by_part(list(when)).items():
            if self.breaker.of("touch", part).allows():
                with self._calls.to("touch", "touch", part):
                    self.backend.touch(found, [when[block] for block in found])

    def expire(self) -> None:
        """Remove blocks whose time to live is over, unless others used them."""
        if self.backend.shared:
            self.relist()
        while old := self.catalogue.expired():
            self.losses.note(old, self.name, "removed", "ttl")
            self.remove(old)

    def flush(self) -> bool:
        """Make finished writes durable, and their times of use; return whether that worked."""
        self._touch(self.catalogue.unnoted())
        if self.breaker.any_blocks("write") or not self.breaker.of("flush").allows():
            return False
        with self._calls.to("flush", "flush") as call:
            self.backend.flush()
        return not call.failed

    def close(self) -> None:
        """Close the backend; the owner closes the worker threads."""
        with self._calls.to("close"):
            self.backend.close()

    def stats(self) -> TierStats:
        """Return the tier's figures at this moment; does no I/O."""
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
            budget=None if self._bucket is None else self._bucket.state(),
        )

    def __repr__(self) -> str:
        return f"<Tier {self.name} {self.backend.describe()} {self.codec.name}>"


class WriteOrder:
    """The writes that run in one tier, and the prompts that they belong to.

    Writers work in parallel, so a later block of a prompt may take the room that an earlier one
    needs, and without the earlier one the later is never found. A block without room therefore
    waits for the running writes of later blocks and takes their room (`take_room`). ``timeout``
    returns the tier's timeout in seconds.

    Thread safety: all methods.

    Attributes:
        prompts: prompts of which blocks are being written to the tier, or wait for it.
    """

    def __init__(self, tier: str, known: KnownBlocks, timeout: Callable[[], float]) -> None:
        self._tier = tier
        self._known = known
        self._timeout = timeout
        self.prompts: dict[PromptHolds, None] = {}
        self._changed = threading.Condition()
        self._running: dict[bytes, None] = {}

    @contextmanager
    def writing(self, block: bytes) -> Iterator[bool]:
        """Run the write of ``block`` in the ``with`` block, unless the yielded value is False.

        It is False if an earlier block of its prompt found no room.
        """
        with self._changed:
            allowed = not any(prompt.excludes(self._tier, block) for prompt in list(self.prompts))
            if allowed:
                self._running[block] = None
        try:
            yield allowed
        finally:
            with self._changed:
                self._running.pop(block, None)
                self._changed.notify_all()

    def take_room(self, block: bytes, needed: int) -> list[bytes]:
        """Forget blocks of ``needed`` bytes behind ``block`` in its prompt, and return them.

        The caller deletes them. Waits for running writes of later blocks, for the tier's timeout at
        most. If the later blocks together are smaller, none is forgotten, and those
        not written yet are not written.
        """
        until = time.monotonic() + self._timeout()
        with self._changed:
            prompts = list(self.prompts)
            while any(prompt.precedes_any(block, self._running) for prompt in prompts):
                left = until - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    break
            for prompt in prompts:
                gone = prompt.give_up(self._tier, self._known, block, needed)
                if gone:
                    return gone
            return []


class TierHealth:
    """Judges a tier by its circuit breakers, its running calls, and its threads.

    Thread safety: all methods. No I/O: the backend is not called.
    """

    def __init__(self, calls: BackendCalls, reading: Workers, writing: Workers) -> None:
        self._calls = calls
        self._backend = calls.backend
        self._breakers = calls.breakers
        self._counters = calls.counters
        self._reading = reading
        self._writing = writing

    def unread(self, block: bytes) -> bool:
        """Whether reading ``block`` is pointless now, because such calls fail or hang."""
        if self._calls.quiet:
            return False
        self._calls.report_hung("lookup", "read")
        part = self._backend.part(block)
        return self._breakers.blocks("read", part) or self._breakers.blocks("lookup", part)

    def note_failure(self, late: str | None = None) -> None:
        """Count a failed read: not answered in time, for the reason ``late``, or not allowed."""
        if late is None:
            self._counters.count(skipped_calls=1)
            self._calls.note_failure("unavailable", "breaker")
        else:
            self._counters.count(late=1)
            self._calls.note_failure("late", late)

    def trouble(self, since: float | None = None) -> Loss | None:
        """Return why reads fail now, or failed at some time ``since`` (Unix seconds); else None."""
        if self._breakers.any_blocks("read", "lookup"):
            return Loss(self._calls.name, "unavailable", time.time(), "breaker")
        if since is None:
            return None
        last, now = self._calls.last_failure, time.time()
        if last is not None and last.at is not None and last.at >= since:
            return last
        if self._reading.longest > max(_SLOW_READ, _MOSTLY * (now - since)):
            return Loss(self._calls.name, "late", now, "no answer")
        return None

    def unwritable(self, block: bytes) -> bool:
        """Whether writing ``block`` is pointless now, because such calls fail or hang."""
        if self._calls.quiet:
            return False
        return self.writers_hang() or self._breakers.blocks("write", self._backend.part(block))

    def writers_hang(self) -> bool:
        """Whether all writer threads hang in calls of the backend."""
        self._calls.report_hung("write", "touch", "delete", "flush")
        return (
            self._writing.stuck(self._backend.timeout) and self.stuck_for() > self._backend.timeout
        )

    def settled(self, timeout: float | None) -> bool:
        """Wait until the write queue is empty, ``timeout`` seconds at most; return whether it is.

        Returns early if a write makes no progress for longer than the backend's timeout.
        """
        until = float("inf") if timeout is None else time.monotonic() + timeout
        while True:
            hangs = self._backend.timeout - self.stuck_for()
            left = min(hangs, until - time.monotonic())
            if self._writing.wait(max(0.0, left)):
                return True
            if hangs <= 0 or time.monotonic() >= until:
                return False

    def stuck_for(self) -> float:
        """Return the seconds for which the longest write has made no progress."""
        return min(self._writing.longest, time.monotonic() - self._backend.last_progress)


def query_sizes(
    calls: BackendCalls,
    reading: Workers,
    blocks: Sequence[bytes],
    *,
    until: float | None,
    unread: Callable[[bytes], bool],
    answered: Callable[[], object],
) -> dict[bytes, int | None]:
    """Return the size of each of ``blocks``, None if missing; unanswered blocks are left out.

    Parts of the backend are queried in parallel. Waits for the backend's timeout at most, and until
    ``until`` (monotonic seconds) at most. ``unread`` returns whether querying a block is pointless,
    and reports hanging calls to their breakers; ``answered`` is called in a reader thread after
    each answer.
    """
    timeout = calls.backend.timeout
    patience = timeout if until is None else min(timeout, max(0.0, until - time.monotonic()))
    end = time.monotonic() + patience
    parts = calls.by_part(blocks)
    queries = [_Query(calls, part, found, unread, answered) for part, found in parts.items()]
    for query in queries:
        query.submit(reading)
    sizes: dict[bytes, int | None] = {}
    for query in queries:
        sizes |= query.result(end, whole=patience == timeout)
    return sizes


class _Query:
    """The sizes of blocks in one part of a backend."""

    def __init__(
        self,
        calls: BackendCalls,
        part: str,
        blocks: list[bytes],
        unread: Callable[[bytes], bool],
        answered: Callable[[], object],
    ) -> None:
        self._calls = calls
        self._part = part
        self._blocks = blocks
        self._unread = unread
        self._answered = answered
        self._sizes: list[int | None] = []
        self._began = False
        self._done = threading.Event()

    def submit(self, reading: Workers) -> None:
        """Queue the query, unless such calls fail or hang now."""
        calls = self._calls
        if self._unread(self._blocks[0]) or not calls.breaker("lookup", self._part).allows():
            calls.counters.count(skipped_calls=1)
            calls.note_failure("unavailable", "breaker")
            self._done.set()
        elif not reading.submit(self._run, given_up=self._done.set):
            calls.counters.count(late=1)
            calls.note_failure("late", "queue full")
            self._done.set()

    def _run(self) -> None:
        self._began = True
        try:
            with self._calls.to("sizes", "lookup", self._part):
                self._sizes = self._calls.backend.sizes(self._blocks)
        finally:
            self._done.set()
        if self._sizes:
            self._answered()

    def result(self, end: float, *, whole: bool) -> dict[bytes, int | None]:
        """Wait for the answer until ``end`` (monotonic seconds); return {} if there is none.

        ``whole``: the wait lasts the backend's full timeout, so a running call counts as failed. If
        the query still waits for a thread, the calls that occupy the threads count as failed.
        """
        if not self._done.wait(max(0.0, end - time.monotonic())):
            calls = self._calls
            calls.counters.count(late=1)
            calls.note_failure("late", "no answer")
            if whole and self._began:
                why = f"no answer in {calls.backend.timeout:g} s"
                calls.breaker("lookup", self._part).failed(why)
            else:
                self._unread(self._blocks[0])
            return {}
        return dict(zip(self._blocks, self._sizes, strict=False))


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
        moved: int | None = None
        self._cost.begin()
        try:
            record = self._fetch(block, part)
            moved = 0 if record is None else len(record) - HEADER_BYTES
        finally:
            self._cost.end(moved)
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
