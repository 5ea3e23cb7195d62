"""`Tier`: blocks in one backend, with its threads, circuit breakers and statistics."""

from __future__ import annotations

import logging
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvkeep.core.cost import CostModel
from kvkeep.core.errors import MissingExtra, OutOfRoom
from kvkeep.core.eviction import LRU, EvictionPolicy
from kvkeep.core.keys import SPACE_BYTES
from kvkeep.store.backends.budget import WriteBucket
from kvkeep.store.backends.buffers import aligned
from kvkeep.store.codecs import Damaged, OtherKey
from kvkeep.store.tiers.calls import BackendCalls
from kvkeep.store.tiers.counters import TierCounters, TierStats
from kvkeep.store.tiers.index import Index
from kvkeep.store.tiers.loss_log import Loss, LossLog
from kvkeep.store.tiers.notes import SpaceNotes
from kvkeep.store.tiers.prompt_writes import TierWrites
from kvkeep.store.tiers.record import HEADER_BYTES, BadRecord, OtherVersion
from kvkeep.store.tiers.record_codec import (
    NotForUs,
    RecordCodec,
    RecordRoom,
    WrongSize,
    another_length,
)
from kvkeep.store.tiers.states import BlockStates
from kvkeep.store.tiers.tier_room import TierRoom
from kvkeep.store.tiers.workers import Workers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from kvkeep.store.backends import Backend, Listed, WriteBudget
    from kvkeep.store.codecs import Codec
    from kvkeep.store.tiers.states import Deletion, Operation
    from kvkeep.store.tiers.tier_shares import TenantWeights

__all__ = ["ORDERED", "Tier", "TierOptions", "TierSpec"]

_LOG = logging.getLogger("kvkeep.tiers")
_EXPIRE_EVERY = 60.0  # seconds
_LISTING_SHARE = 20  # pause between two `expire`, in durations of the last listing
_TOUCH_COST = 1024  # bytes that a queued touch of a block counts for, about
ORDERED = 40_960
"""Blocks that a tier's policy orders; those beyond, which are evicted first, take less memory."""

_SLOW_READ = 0.05  # seconds; a read that takes longer is slow for any backend
_MOSTLY = 0.5  # share of a request's time; a read that takes more of it delayed the request
_TRIES = 20  # attempts to make room for one record, in competition with other processes
_FIRST_LOOKUP = 1.0  # seconds after which lookups begin although the listing goes on
_RELIST_AFTER = 1.0  # seconds that a listing of a shared backend is good for
_MAYBE = ("write failed", "fault")  # reasons for which the backend may have the record nevertheless


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
        breaker_pause: seconds that it stays open at first; see `kvkeep.store.tiers.calls`.
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
    open the circuit breaker of that kind of call (`kvkeep.store.tiers.calls`). Our bugs do raise.

    A backend with a budget is *indexed*: its blocks are listed once and tracked from then on. One
    without a budget evicts by its own rules, so it is queried each time. Of a large budget a part
    is kept free, in batches and by a writer thread, so that writes need not wait for room.

    Thread safety: all methods. No lock is held while the backend is called, but two that only
    writers and listings of this tier wait for.

    Arguments:
        spec: what to open.
        losses: records which blocks it lost, and why.
        notes: descriptions of the store's namespaces, by space.
        evicting: called with blocks that have to make room, before the backend deletes them.
        shares: weights of tenants; see `Index`.
        cost: learns what its reads and writes take, as ``reads`` and ``writes``.

    Attributes:
        states: what is done with each block now (`BlockStates`).
        room: deletes blocks, by request and to make room.
        queried: whether the backend must be queried: it may hold blocks that the catalogue lacks.
        listed: whether the backend was listed once.
    """

    def __init__(
        self,
        spec: TierSpec,
        *,
        cost: CostModel | None = None,
        losses: LossLog | None = None,
        notes: Mapping[bytes, bytes] | None = None,
        evicting: Callable[[Deletion], None] = lambda _victims: None,
        shares: TenantWeights | None = None,
    ) -> None:
        self.name = spec.name
        self.backend = spec.backend
        self.codec = spec.codec
        self.options = options = spec.options
        self.losses = LossLog() if losses is None else losses
        self.counters = TierCounters()
        self.indexed = self.backend.capacity is not None
        self.queried = self.backend.shared or not self.indexed
        self.catalogue = Index(
            options.policy, ttl=options.ttl, budget=self.backend.capacity, ordered=ORDERED,
            unit=self.backend.unit, shares=shares,
        )  # fmt: skip
        self.states = BlockStates(self.catalogue)
        self.calls = BackendCalls(
            self.name, self.backend, self.counters,
            limit=options.breaker_limit, pause=options.breaker_pause,
        )  # fmt: skip
        self.reading = Workers(f"{self.name} reader", options.readers, 4096)
        self.writing = Workers(
            f"{self.name} writer", options.writers, options.queue_bytes or sys.maxsize
        )
        self.records = RecordCodec(spec.codec, spec.codec_of)
        cost = CostModel() if cost is None else cost
        self.reads, self.writes = cost.reading(self.name), cost.writing(self.name)
        self._notes = SpaceNotes(self.calls, notes)
        self._bucket = None if options.writes is None else WriteBucket(options.writes)
        self.room = TierRoom(
            self.calls, self.catalogue, self.states, self.losses, self.writing,
            evicting=evicting, relist=self._relist_if_old,
        )  # fmt: skip
        self._listing = threading.Lock()
        self.listed = False
        self._listed_at = 0.0  # monotonic seconds
        self._listing_s = 0.0
        self._expired_at = float("-inf")

    @property
    def timeout(self) -> float:
        """Seconds after which a call of the backend counts as failed."""
        return self.backend.timeout

    # --- lookups ---------------------------------------------------------------------------------

    def fits(self, block: bytes, raw_bytes: int) -> bool:
        """Whether the record that is known may have so much raw KV (`RecordCodec.may_have`)."""
        size = self.catalogue.size(block)
        return size is None or self.records.may_have(raw_bytes, size)

    @property
    def serves_all(self) -> bool:
        """Whether `serves` is true of all blocks in the catalogue."""
        failing = self.calls.any_blocks("read", "lookup")
        return self.indexed and self.states.hides_none and not failing

    def may_have(self, block: bytes) -> bool:
        """Whether this tier may hold a readable record of ``block``; no I/O."""
        states, catalogue = self.states, self.catalogue
        if not states.hides_none and states.hides(block):
            return False
        if self.queried:
            return catalogue.ttl is None or catalogue.expired_at(block) is None
        return block in catalogue

    def known(self, blocks: Sequence[bytes]) -> set[bytes]:
        """Return those of ``blocks`` that are known to be here; no I/O."""
        there = self.catalogue.among(blocks) if self.indexed else set()
        if there and not self.states.hides_none:
            return {block for block in there if not self.states.hides(block)}
        return there

    def serving(self, blocks: Sequence[bytes]) -> set[bytes]:
        """Return those of ``blocks`` that are known to be here and can be read now; no I/O."""
        there = self.known(blocks)
        if there and not self.calls.quiet:
            return {block for block in there if not self.unreadable(block)}
        return there

    def probe(self, blocks: Sequence[bytes], until: float | None = None) -> set[bytes]:
        """Return those of ``blocks`` that are here; query the backend if `queried`.

        Parts of the backend are queried in parallel. Waits for the timeout at most, and until
        ``until`` (monotonic seconds) at most; blocks without an answer count as missing.
        """
        if not self.queried:
            return self.known(blocks)
        mark = self.states.deletions
        timeout = self.timeout
        patience = timeout if until is None else min(timeout, max(0.0, until - time.monotonic()))
        end = time.monotonic() + patience
        queries = [_Query(self, *part) for part in self.calls.by_part(blocks).items()]
        there: set[bytes] = set()
        for query in queries:
            for block, size in query.result(end, whole=patience == timeout):
                if not self.states.hides(block) and self.catalogue.expired_at(block) is None:
                    there.add(block)
                    if self.indexed:
                        self.states.learn(block, size, mark)
        return there

    def recheck(self, blocks: Sequence[bytes]) -> None:
        """Queue a check for ``blocks`` that other processes deleted, to forget them.

        Otherwise they would never be written again.
        """
        known = list(self.known(blocks)) if self.backend.shared else []
        if known:
            self.reading.submit(lambda: self._recheck(known))

    def _recheck(self, blocks: Sequence[bytes]) -> None:
        for part, here in self.calls.by_part(blocks).items():
            if not self.calls.allowed("lookup", part):
                continue
            sizes: list[int | None] = []
            with self.calls.to("sizes", "lookup", part):
                sizes = self.backend.sizes(here)
            for block, size in zip(here, sizes, strict=False):  # empty if the call failed
                if size is None and self.catalogue.forget(block):
                    self.losses.note([block], self.name, "removed", "gone")

    # --- reading: in a thread of `reading` -------------------------------------------------------

    def load(
        self, block: bytes, raw_bytes: int, place: Callable[[], memoryview]
    ) -> memoryview | None:
        """Return the decoded record of ``block`` in the buffer of ``place()``; None for a miss.

        ``place`` returns memory for a header and ``raw_bytes``, and is called once the record is
        found. The header in the result may be invalid. Damaged records are quarantined.
        """
        part = self.backend.part(block)
        if not self.calls.allowed("read", part):
            return None
        moved: int | None = None
        self.reads.begin()
        try:
            record, moved = self._load(block, raw_bytes, place, part)
        finally:
            self.reads.end(moved)
        return record

    def _load(
        self, block: bytes, raw_bytes: int, place: Callable[[], memoryview], part: str
    ) -> tuple[memoryview | None, int | None]:
        """Return the record, and how many bytes of raw KV were moved; None: the backend failed."""
        known = self.indexed and self.catalogue.size(block) is not None
        mark = self.states.deletions
        room = RecordRoom(self.records, raw_bytes, place)
        record: memoryview | None = None
        started = time.monotonic()
        try:
            with self.calls.to("get", "read", part) as call:
                record = self.backend.get(block, call.callback(room))
                call.decisive = record is not None
        except WrongSize as wrong:
            self.counters.count(read_seconds=time.monotonic() - started)
            self._refuse(block, f"another length, or damaged: {wrong}")
            return None, 0
        if call.failed:
            return None, None
        took = time.monotonic() - started
        decoded = None if record is None else self._decoded(block, record, raw_bytes, room)
        if record is None:
            if known:
                self.catalogue.forget(block)
                self.losses.note([block], self.name, "removed", "gone")
            self.counters.count(misses=1, read_seconds=took)
        elif decoded is None:
            self.counters.count(read_seconds=took)
        else:
            size = len(record)
            if self.indexed and not known:
                self.states.learn(block, size, mark)
            self.counters.count(hits=1, read_bytes=size, read_seconds=took)
        return decoded, 0 if decoded is None else raw_bytes

    def fetch(self, block: bytes) -> memoryview | None:
        """Return the decoded record of ``block`` in new memory, to write it to another tier.

        The header in the result may be invalid. Counts neither a hit nor a miss.
        """
        part = self.backend.part(block)
        if not self.calls.allowed("read", part):
            return None
        record: memoryview | None = None
        moved: int | None = None
        self.reads.begin()
        try:
            with self.calls.to("get", "read", part) as call:
                record = self.backend.get(block, call.callback(aligned))
                call.decisive = record is not None
            moved = 0
            if record is not None:
                record = self._decoded(block, record)
                moved = 0 if record is None else len(record) - HEADER_BYTES
        finally:
            self.reads.end(moved)
        return record

    def _decoded(
        self, block: bytes, record: memoryview, raw_bytes: int = 0, room: RecordRoom | None = None
    ) -> memoryview | None:
        """Return ``record`` verified and decoded, in ``room`` if there is one.

        A record that is wrong is a miss. Without ``room`` it may have any length, and one that is
        not for this store is left alone.
        """
        try:
            header, codec = self.records.verify(block, record)
            if room is None:
                return self.records.decode_alone(codec, header, record)
            if header.raw_bytes != raw_bytes:
                raise NotForUs(another_length(header.raw_bytes, raw_bytes))
            return self.records.decode(codec, header, record, room)
        except NotForUs as other:
            if room is not None:
                self._refuse(block, str(other))
        except (OtherVersion, OtherKey, MissingExtra) as other:
            self._refuse(block, str(other))
        except (BadRecord, Damaged) as damage:
            self.quarantine(block, str(damage))
        return None

    def _refuse(self, block: bytes, reason: str) -> None:
        """Serve an intact record that is not for this tier no more, until it is written anew."""
        _LOG.info("tier %s: %s", self.name, reason)
        self.counters.count(refused=1)
        self.states.refuse(block)
        self.losses.note([block], self.name, "refused", reason)

    def quarantine(self, block: bytes, reason: str) -> None:
        """Forget a damaged record and move it out of the way in the backend."""
        key = block[SPACE_BYTES:][:8].hex()
        _LOG.warning("tier %s: block %s… is bad: %s", self.name, key, reason)
        self.counters.count(damaged=1)
        self.losses.note([block], self.name, "damaged", reason)
        with self.states.delete([block], idle=True) as deletion:
            if not deletion:
                return
            deletion.failed[block] = None
            with self.calls.to("quarantine", "delete", self.backend.part(block)) as call:
                self.backend.quarantine(block, reason)
            if not call.failed:
                deletion.failed.clear()

    # --- writing: in a thread of `writing` -------------------------------------------------------

    def prompt(self, blocks: Sequence[bytes]) -> TierWrites:
        """Return the writes of a prompt of ``blocks`` to this tier; for any thread."""
        return TierWrites(self.catalogue, self.backend, self.room.give_up, blocks)

    def write(
        self,
        operations: Sequence[Operation],
        records: Sequence[memoryview],
        prompt: TierWrites | None = None,
    ) -> None:
        """Run writes that were queued in `states`, in order, and end each.

        ``records`` are raw KV behind room for a header, which alone is changed. A shared backend is
        queried first: an existing record is not sent again. ``prompt`` are the writes that these
        belong to.
        """
        moved: int | None = None
        ended = total = 0
        try:
            there = self._stored(operations)
            self.writes.begin()
            try:
                for operation, record in zip(operations, records, strict=True):
                    if not self.writing.progress():
                        break
                    ended += 1
                    total += self._write(operation, record, there, prompt)
                moved = total
            finally:
                self.writes.end(moved)
        finally:
            for operation in operations[ended:]:
                self.dropped([operation.block], "fault" if moved is None else "queue full")
                self.states.end(operation, saved=False)
        if total:
            self.room.trim_ahead(len(records[0]))
            for space in {operation.block[:SPACE_BYTES] for operation in operations}:
                self._notes.written(space)

    def _stored(self, operations: Sequence[Operation]) -> dict[bytes, int | None] | None:
        """Return the sizes of records that a shared backend has; None if it fails to answer."""
        there: dict[bytes, int | None] = {}
        if self.backend.shared:
            blocks = [operation.block for operation in operations if operation.over is None]
            for part, here in self.calls.by_part(blocks).items():
                if self.calls.blocks("write", part):
                    continue
                sizes: list[int | None] = []
                with self.calls.to("sizes", "write", part) as call:
                    sizes = self.backend.sizes(here)
                    call.decisive = False  # its success does not show that writing works
                if call.failed:
                    return None
                self.calls.succeeded("lookup", part)
                there.update(zip(here, sizes, strict=True))
        return there

    def _write(
        self,
        operation: Operation,
        record: memoryview,
        there: dict[bytes, int | None] | None,
        prompt: TierWrites | None,
    ) -> int:
        """Run a write and end it; return the bytes of raw KV that were written."""
        block, raw_bytes = operation.block, len(record) - HEADER_BYTES
        why, saved, written = "fault", False, 0  # kept if something raises
        try:
            size = None if there is None else there.get(block)
            if not self.states.start(operation):
                why = ""
            elif there is None:
                why = "write failed"
            elif size is not None and self.records.may_have(raw_bytes, size):
                self.counters.count(already=1)
                if self.indexed:
                    self.catalogue.add(block, size)
                why, saved = "", True
            elif prompt is not None and not prompt.start(block):
                why = "no room"
            else:
                why = self._store(block, record, prompt)
                if not why:
                    saved, written = True, raw_bytes
        finally:
            if why:
                self.dropped([block], why)
            self.states.end(operation, saved=saved, maybe=why in _MAYBE)
            if prompt is not None:
                prompt.finish(block)
        return written

    def dropped(self, blocks: Sequence[bytes], why: str) -> None:
        """Count and record that ``blocks`` were not written."""
        over_budget = len(blocks) if why == "write budget" else 0
        self.counters.count(drops=len(blocks), over_budget=over_budget)
        self.losses.note(blocks, self.name, "dropped", why)

    def refused(self, blocks: Sequence[bytes]) -> None:
        """Count and record ``blocks`` that the tier does not take: it is full, or fails."""
        self.dropped(blocks, "breaker" if self.unwritable(blocks) else "queue full")

    def _store(self, block: bytes, record: memoryview, prompt: TierWrites | None) -> str:
        """Write ``record``; return the reason of a failure, else ""."""
        if self.calls.failing and self.calls.blocks("write", self.backend.part(block)):
            self.counters.count(skipped_calls=1)
            return "breaker"
        encoded, bucket = self.records.encode(block, record), self._bucket
        size = len(encoded)
        if size > (self.backend.capacity or size):
            return "no room"  # evicting everything would not make room for it
        if bucket is not None and bucket.left() < size:  # before others go for it
            return "write budget"
        limited = self.catalogue.quota(block[:SPACE_BYTES]) is not None
        if limited and not self.room.reserve(block, size, prompt):
            return "quota"
        try:
            if bucket is not None and not bucket.spend(size):
                return "write budget"
            why = self._put(block, encoded, prompt)
            if not why and self.indexed:
                self.catalogue.add(block, size)
        finally:
            if limited:
                self.catalogue.unreserve(block[:SPACE_BYTES], size)
        return why

    def _put(self, block: bytes, encoded: memoryview, prompt: TierWrites | None) -> str:
        """Write ``encoded``, evicting others for it; return the reason of a failure, else ""."""
        if self.room.making.locked():  # another writer evicts: what it frees is not for us
            with self.room.making:
                pass
        why, needed = self._attempt(block, encoded)
        while needed:
            if self.backend.capacity and needed > self.backend.capacity:
                return "no room"
            with self.room.making:
                for _ in range(_TRIES):
                    if not self.room.make(needed):
                        break
                    why, needed = self._attempt(block, encoded)
                    if not needed:
                        return why
            # Without the lock: it waits for other writers.
            if prompt is None or not prompt.make_room(block, needed):
                return "no room"
            why, needed = self._attempt(block, encoded)
        return why

    def _attempt(self, block: bytes, encoded: memoryview) -> tuple[str, int]:
        """Write ``encoded``; return the reason of a failure, else "", and bytes that lack room."""
        started, part = time.monotonic(), self.backend.part(block)
        if not self.calls.allowed("write", part):
            return "breaker", 0
        try:
            with self.calls.to("put", "write", part) as call:
                self.backend.put(block, encoded)
        except OutOfRoom as short:
            return "no room", max(1, short.needed)
        if call.failed:
            return "write failed", 0
        took = time.monotonic() - started
        self.counters.count(writes=1, written_bytes=len(encoded), write_seconds=took)
        return "", 0

    # --- removal ---------------------------------------------------------------------------------

    def remove(
        self, deletion: Deletion, proceed: Callable[[], bool] = lambda: True
    ) -> tuple[int, bool]:
        """Delete blocks by request, behind the writes that run; see `TierRoom.delete`.

        Those that may be left are not found until they are written anew.
        """
        deletion.wait(None)
        self.calls.report_hung("delete")
        return self.room.delete(deletion, proceed)

    def clear(
        self, space: bytes, number: int, proceed: Callable[[], bool] = lambda: True
    ) -> tuple[int, bool]:
        """Delete the blocks of a clearance (`BlockStates.clear`); see `TierRoom.delete`.

        ``proceed`` is called for each record that is listed, too. If any may be left, the namespace
        stays cleared.
        """
        here = dict.fromkeys(self.catalogue.blocks(space))
        complete = False
        self.calls.report_hung("list")
        if self.calls.allowed("list"):
            complete = True
            try:
                for item in self._records():
                    if item.block.startswith(space):
                        here[item.block] = None
                    if not proceed():
                        complete = False
                        break
            except _ListFailed:
                complete = False
        self.losses.note(here, self.name, "removed", "cleared")
        deletion = self.states.delete_cleared(here, space, number)
        complete &= deletion.wait(self.timeout)
        freed, gone = self.room.delete(deletion, proceed)
        if complete:  # those that are left are not found by themselves
            complete = self.states.reveal(space, number)
        return freed, complete and gone

    # --- listing ---------------------------------------------------------------------------------

    def open(self) -> None:
        """List the backend, for its timeout at most; then writers evict down to the budget.

        Of a backend that is queried, lookups are answered before that.
        """
        if self.indexed:
            self.reading.submit(self._list_first)
            self.reading.wait(min(self.timeout, _FIRST_LOOKUP) if self.queried else self.timeout)

    def _list_first(self) -> None:
        self.relist()
        if self.listed:
            self.room.trim(0)

    def relist(self) -> bool:
        """List the backend into the catalogue; others may have written or deleted there.

        Waits for a listing that runs instead, for the timeout at most; returns whether any ended.
        Records larger than the budget are deleted: they were written under a larger budget.
        """
        before = self._listed_at
        if not self._listing.acquire(timeout=self.timeout):
            return False  # a listing hangs; do not block the caller any longer
        try:
            if self._listed_at != before:
                return True  # its end is what we waited for
            if self.calls.allowed("list"):
                started = time.monotonic()
                try:
                    gone = self.catalogue.fill(self._fitting())
                except _ListFailed:
                    pass  # `fill` took over the blocks listed before the failure, and forgot none
                else:
                    self.losses.note(gone, self.name, "removed", "gone")
                    self.listed = True
                self._listing_s = time.monotonic() - started
            self._listed_at = time.monotonic()
        finally:
            self._listing.release()
        if self.listed:
            self.compare()
        return True

    def _relist_if_old(self) -> bool:
        """List the backend, if that may tell more than we know; return whether it was done.

        So it is before the first listing has ended, and where others write, after a while.
        """
        is_open = self.backend.shared or not self.listed
        return is_open and time.monotonic() - self._listed_at > _RELIST_AFTER and self.relist()

    def _records(self) -> Iterator[Listed]:
        # An exception of this generator's consumer never reaches the `with` statement.
        with self.calls.to("list", "list") as call:
            for item in self.backend.list():
                call.due = time.monotonic() + self.timeout  # it makes progress
                yield item
        if call.failed:
            raise _ListFailed

    def _fitting(self) -> Iterator[Listed]:
        budget = self.backend.capacity or 0
        for item in self._records():
            if item.size > budget:
                self.room.evict(self.states.delete([item.block], idle=True))
            else:
                yield item

    def expect(self, space: bytes) -> None:
        """Log once if the backend holds blocks but none of namespace ``space``.

        A reader thread checks this once the backend has been listed or has answered a query.
        """
        self._notes.expect(space)
        if self.listed:
            self.reading.submit(self.compare)

    def compare(self) -> None:
        """Log once if the backend has none of the namespace that `expect` named."""
        self._notes.compare(self.catalogue.spaces() if self.indexed else None)

    # --- upkeep ----------------------------------------------------------------------------------

    def used(self, blocks: Sequence[bytes], *, stored: bool = False) -> None:
        """Record that a prompt used ``blocks``, from any level; ``stored``: it was put.

        A writer thread passes the use on to the backend. Expired blocks are removed now and then.
        """
        late = (
            self.catalogue.used(blocks, stored=stored) if self.indexed else list(reversed(blocks))
        )
        if late and not self.writers_hang():
            now = self.catalogue.now()
            uses = [(block, now) for block in late]
            self.writing.submit(lambda: self._touch(uses), _TOUCH_COST * len(late))
        if self.options.ttl is not None:
            pause = _EXPIRE_EVERY + _LISTING_SHARE * self._listing_s
            if time.monotonic() - self._expired_at > pause:
                self._expired_at = time.monotonic()
                self.reading.submit(self.expire)  # in a writer, its listing would delay a flush

    def _touch(self, uses: Sequence[tuple[bytes, float]]) -> None:
        """Record uses, oldest first, in the backend."""
        when = dict(uses)
        for part, here in self.calls.by_part(list(when)).items():
            if self.calls.allowed("touch", part):
                with self.calls.to("touch", "touch", part):
                    self.backend.touch(here, [when[block] for block in here])

    def expire(self) -> None:
        """Remove blocks whose time to live is over, unless others used them."""
        if self.backend.shared:
            self.relist()
        while old := self.catalogue.expired():
            self.losses.note(old, self.name, "removed", "ttl")
            self.room.delete(self.states.delete(old, idle=True))

    def flush(self) -> bool:
        """Make finished writes durable, and their times of use; return whether that worked."""
        self._touch(self.catalogue.unnoted())
        if self.calls.any_blocks("write") or not self.calls.allowed("flush"):
            return False
        with self.calls.to("flush", "flush") as call:
            self.backend.flush()
        return not call.failed

    def close(self) -> None:
        """Close the backend; the owner closes the worker threads."""
        with self.calls.to("close"):
            self.backend.close()

    # --- health: no I/O --------------------------------------------------------------------------

    def unreadable(self, block: bytes) -> bool:
        """Whether reading ``block`` is pointless now, because such calls fail or hang."""
        calls = self.calls
        if calls.quiet:
            return False
        calls.report_hung("lookup", "read")
        part = self.backend.part(block)
        return calls.blocks("read", part) or calls.blocks("lookup", part)

    def note_unread(self, late: str | None = None) -> None:
        """Count a failed read: not answered in time, for the reason ``late``, or not allowed."""
        if late is None:
            self.counters.count(skipped_calls=1)
            self.calls.note_failure("unavailable", "breaker")
        else:
            self.counters.count(late=1)
            self.calls.note_failure("late", late)

    def trouble(self, since: float | None = None) -> Loss | None:
        """Return why reads fail now, or failed at some time ``since`` (Unix seconds); else None."""
        if self.calls.any_blocks("read", "lookup"):
            return Loss(self.name, "unavailable", time.time(), "breaker")
        if since is None:
            return None
        last, now = self.calls.last_failure, time.time()
        if last is not None and last.at is not None and last.at >= since:
            return last
        if self.reading.longest > max(_SLOW_READ, _MOSTLY * (now - since)):
            return Loss(self.name, "late", now, "no answer")
        return None

    def unwritable(self, blocks: Sequence[bytes]) -> Sequence[bytes]:
        """Return those of ``blocks`` whose writing is pointless now: such calls fail or hang."""
        if self.calls.quiet:
            return ()
        if self.writers_hang():
            return blocks
        if not self.calls.any_blocks("write"):
            return ()
        return [block for block in blocks if self.calls.blocks("write", self.backend.part(block))]

    def writers_hang(self) -> bool:
        """Whether all writer threads hang in calls of the backend."""
        self.calls.report_hung("write", "touch", "delete", "flush")
        return self.writing.stuck(self.timeout) and self.stuck_for() > self.timeout

    def stuck_for(self) -> float:
        """Return the seconds for which the longest write has made no progress."""
        return min(self.writing.longest, time.monotonic() - self.backend.last_progress)

    def settled(self, timeout: float | None) -> bool:
        """Wait until all writes have ended, ``timeout`` seconds at most; return whether they have.

        Returns early if a write makes no progress for longer than the backend's timeout, or a
        deletion that one waits for does not end in that time.
        """
        until = float("inf") if timeout is None else time.monotonic() + timeout
        if not self.states.begun(min(self.timeout, max(0.0, until - time.monotonic()))):
            return False
        while True:
            hangs = self.timeout - self.stuck_for()
            rest = min(hangs, until - time.monotonic())
            if self.writing.wait(max(0.0, rest)):
                return True
            if hangs <= 0 or time.monotonic() >= until:
                return False

    # --- figures ---------------------------------------------------------------------------------

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
            breaker=self.calls.state,
            breaker_opened=self.calls.opened,
            counters=self.counters.as_dict(),
            breakers=self.calls.kinds(),
            parts=self.calls.parts(),
            budget=None if self._bucket is None else self._bucket.state(),
        )

    def __repr__(self) -> str:
        return f"<Tier {self.name} {self.backend.describe()} {self.codec.name}>"


class _ListFailed(Exception):
    """The backend failed to list its records; counted and logged already."""


class _Query:
    """The sizes of blocks in one part of a tier's backend, which a reader thread asks for."""

    def __init__(self, tier: Tier, part: str, blocks: list[bytes]) -> None:
        self._tier = tier
        self._part = part
        self._blocks = blocks
        self._sizes: list[int | None] = []
        self._began = False
        self._done = threading.Event()
        if tier.unreadable(blocks[0]):  # such calls fail or hang now
            tier.note_unread()
            self._done.set()
        elif not tier.calls.allowed("lookup", part):
            self._done.set()
        elif not tier.reading.submit(self._run, given_up=self._done.set):
            tier.note_unread(late="queue full")
            self._done.set()

    def _run(self) -> None:
        self._began = True
        try:
            with self._tier.calls.to("sizes", "lookup", self._part):
                self._sizes = self._tier.backend.sizes(self._blocks)
        finally:
            self._done.set()
        if self._sizes and not self._tier.indexed:
            self._tier.compare()

    def result(self, end: float, *, whole: bool) -> list[tuple[bytes, int]]:
        """Wait for the answer until ``end`` (monotonic seconds); return what is there.

        ``whole``: the wait lasts the backend's full timeout, so a running call counts as failed. If
        the query still waits for a thread, the calls that occupy the threads count as failed.
        """
        if not self._done.wait(max(0.0, end - time.monotonic())):
            tier = self._tier
            tier.note_unread(late="no answer")
            if whole and self._began:
                why = f"no answer in {tier.timeout:g} s"
                tier.calls.failed("lookup", self._part, why)
            else:
                tier.unreadable(self._blocks[0])
            return []
        pairs = zip(self._blocks, self._sizes, strict=False)
        return [(block, size) for block, size in pairs if size is not None]
