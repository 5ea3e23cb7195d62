"""`Reader`: reads prompts from the tiers, a few blocks ahead, each block once for all."""

from __future__ import annotations

import threading
import time
from collections import deque
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from kvkeep.core.errors import BackendFailed
from kvkeep.store.backends.memory import Lease
from kvkeep.store.codecs import codec_name
from kvkeep.store.tiers.buffer import SpareBuffers
from kvkeep.store.tiers.moves import PromptWrites
from kvkeep.store.tiers.record import BEHIND, EXACT, HEADER_BYTES, origin
from kvkeep.store.tiers.record_codec import another_length
from kvkeep.store.tiers.workers import Workers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvkeep.core.cost import LearnedTransfer
    from kvkeep.store.tiers.moves import Moves
    from kvkeep.store.tiers.shared_memory import FrontMemory
    from kvkeep.store.tiers.tier import Tier

__all__ = ["ReadRequest", "Reader", "SharedRead"]

_READ_AHEAD = 16  # blocks, at most
_LEASED = 64  # blocks in memory that are leased at once, at most …
_LEASED_SHARE = 4  # … and this part of memory: what is leased cannot make room for others
_SPARE_BYTES = 64 << 20  # buffers that are kept for the next reads
_REPLACED_KEPT = 64  # replacements remembered for reads that began before them


class Reader:
    """Reads prompts from tiers, in their reader threads.

    Thread safety: all methods.

    Attributes:
        copies: learns what copies of blocks out of memory take.
        replacements: number of replacements so far; see `replaced_since`.
        prefetching: threads of `BlockPrefetch`.
    """

    def __init__(self, moves: Moves, copies: LearnedTransfer) -> None:
        self.levels = levels = moves.levels
        self.copies = copies
        self.moves = moves
        self._memory = levels.memory
        self._buffers = SpareBuffers(_SPARE_BYTES)
        self._lock = threading.Lock()
        self._reads: dict[bytes, SharedRead] = {}
        self._replaced: deque[tuple[int, frozenset[bytes]]] = deque(maxlen=_REPLACED_KEPT)
        self.replacements = 0
        self.prefetching = Workers("prefetch", 4, 256)

    def prepare(self, raw_bytes: int) -> None:
        """Touch the memory for one prompt's reads of blocks that do not stay in memory."""
        self._buffers.prepare(HEADER_BYTES + raw_bytes, _READ_AHEAD)

    # --- one block -------------------------------------------------------------------------------

    def start(
        self,
        blocks: Sequence[bytes],
        raw_bytes: Sequence[int],
        levels: Sequence[int],
        started: deque[SharedRead | Lease],
    ) -> None:
        """Begin to read ``blocks``, located at ``levels``: append to ``started``.

        A lease if memory has the block; else a read from its tier, then from the others.
        """
        begun: list[SharedRead] = []
        tiers, stays = self.levels.tiers, self.levels.planner.policy.keeps_reads
        try:
            with self._lock:
                absent = self._memory.absent(blocks)
                for at, block in enumerate(blocks):
                    read = self._reads.get(block)
                    if read is not None and read.join():
                        started.append(read)
                        continue
                    if at >= absent or read is not None:  # its read may just have ended
                        lease = self._memory.lease(block)
                        if lease is not None:
                            started.append(lease)
                            continue
                    first = max(0, levels[at] - 1)  # level 0: fastest first
                    order = [*tiers[first : first + 1], *tiers[:first], *tiers[first + 1 :]]
                    read = SharedRead(
                        self._memory, block, raw_bytes[at], order, self._ended,
                        buffers=self._buffers, stays=stays, joined=1,
                    )  # fmt: skip
                    self._reads[block] = read
                    begun.append(read)
                    started.append(read)
        finally:
            for read in begun:
                read.start()

    def _ended(self, read: SharedRead) -> None:
        """Forget an ended ``read``; delete the tier's copy, and demote, if the policy says so."""
        tier, block = read.source, read.block
        with self._lock:
            if self._reads.get(block) is not read:
                return
            del self._reads[block]
        if tier is None or not (self.levels.planner.policy.exclusive and read.stays):
            return
        with suppress(BackendFailed):  # the memory was closed meanwhile
            if block in self._memory:
                # A lossy tier keeps its copy: an exact one would not take it back from memory, and
                # to encode it again would add to its error.
                if tier.codec.exact:
                    tier.writing.submit(partial(self.moves.move_up, tier, block))
                self.moves.demote_ahead()

    def under_way(self, within: bytes) -> list[bytes]:
        """Return the blocks being read whose ids begin with ``within``."""
        with self._lock:
            return [block for block in self._reads if block.startswith(within)]

    def cancel(self, blocks: Sequence[bytes]) -> None:
        """Discard the results of running reads of ``blocks``, which are being deleted."""
        with self._lock:
            for block in blocks:
                read = self._reads.pop(block, None)
                if read is not None:
                    read.cancel()

    # --- replacements ----------------------------------------------------------------------------

    def note_replaced(self, blocks: Sequence[bytes]) -> None:
        """Record that ``blocks`` were removed to be written anew with other bytes."""
        with self._lock:
            self.replacements += 1
            self._replaced.append((self.replacements, frozenset(blocks)))

    def replaced_since(self, mark: int, blocks: Sequence[bytes]) -> bool:
        """Whether any of ``blocks`` was replaced since `replacements` was ``mark``."""
        with self._lock:
            newer = [replaced for number, replaced in self._replaced if number > mark]
            forgotten = self.replacements - mark > len(newer)
        return forgotten or any(not replaced.isdisjoint(blocks) for replaced in newer)

    def close(self) -> None:
        """Discard prefetches that have not begun."""
        self.prefetching.close()

    def join(self, timeout: float) -> bool:
        """Wait for running prefetches, ``timeout`` seconds at most; return whether they ended."""
        return self.prefetching.join(timeout)


class SharedRead:
    """Reads a block from the first of ``tiers`` that has it.

    Requests `join` it; the record stays available until all of them have left. If a tier takes
    longer than its timeout, the next tier is tried; a late result of the first, whose thread may
    hang for ever, is discarded.

    ``ended`` is called without a lock held when the read is over, perhaps more than once.

    Thread safety: all methods.

    Arguments:
        buffers: for records that memory does not take.
        stays: whether memory keeps the block.
        joined: how many take part from the beginning.

    Attributes:
        source: the tier that had the block.
    """

    def __init__(
        self,
        memory: FrontMemory,
        block: bytes,
        raw_bytes: int,
        tiers: Sequence[Tier],
        ended: Callable[[SharedRead], None],
        *,
        buffers: SpareBuffers,
        stays: bool = True,
        joined: int = 0,
    ) -> None:
        self.block = block
        self.raw_bytes = raw_bytes
        self.stays = stays
        self.source: Tier | None = None
        self._memory = memory
        self._buffers = buffers
        self._tiers = list(tiers)
        self._ended = ended
        self._changed = threading.Condition()
        self._cancelled = False
        self._attempt = 0  # number of the current attempt; results of older ones are discarded
        self._since = time.monotonic()  # requests may wait before `start`
        self._began = False  # whether the attempt runs, not waits for a thread
        self._joined = joined
        self._lease: Lease | None = None
        self._done = False
        self._queued: Tier | None = None  # whose queue of reads counts this one

    # --- called by requests ----------------------------------------------------------------------

    def join(self) -> bool:
        """Take part in the read; return False if it has ended and its record was released."""
        with self._changed:
            if self._done and self._lease is None:
                return False
            self._joined += 1
            return True

    def release(self) -> None:
        """Undo one `join`. A read that has not begun is skipped when no request is left."""
        with self._changed:
            self._joined -= 1
            lease = self._lease if self._joined == 0 else None
            if lease is not None:
                self._lease = None
            elif not self._joined and not self._began:
                self._unqueue()  # a reader thread will skip it
        if lease is not None:
            lease.release()

    def cancel(self) -> None:
        """Discard the result of the read from now on, because the block is being deleted.

        The block may be in memory already: delete it there afterwards.
        """
        with self._changed:
            self._cancelled = True

    def wait(self, until: float | None) -> Lease | None:
        """Return the record; None if no tier had it, or none by ``until`` (monotonic seconds)."""
        given_up = False
        with self._changed:
            while not self._done:
                now = time.monotonic()
                if until is not None and now >= until:
                    return None
                late = self._since + self._tiers[0].timeout if self._tiers else 0.0
                if now >= late:
                    self._give_up()  # also without tiers: `start` may not have run yet
                    given_up = True
                    continue
                self._changed.wait(min(late, until if until is not None else late) - now)
            lease = self._lease
        if given_up:
            self._ended(self)
        return lease

    def _unqueue(self) -> None:
        """Wait for no tier any more, under the lock."""
        if self._queued is not None:
            self._queued.reads.queue(-self.raw_bytes)
            self._queued = None

    def _finish(self) -> None:
        """End the read, under the lock, and wake all that wait for it."""
        self._done = True
        self._unqueue()
        self._changed.notify_all()

    # --- called by readers -----------------------------------------------------------------------

    def start(self) -> None:
        """Queue the first attempt, in a reader thread of its tier."""
        with self._changed:
            self._read_next()
            done = self._done
        if done:
            self._ended(self)

    def _read_next(self) -> None:
        """Queue a read in the first tier that accepts it, under the lock; end if none does."""
        if self._queued is not None:
            self._unqueue()
        while self._tiers:
            tier, self._attempt = self._tiers[0], self._attempt + 1
            self._began = False
            self._since = time.monotonic()
            if not tier.may_have(self.block):  # it is being deleted, say
                pass
            elif tier.unreadable(self.block):  # calls that hang may block the queue
                tier.note_unread()
            elif tier.reading.submit(
                partial(self._read, tier, self._attempt),
                given_up=partial(self._over, tier, self._attempt),
            ):
                self._queued = tier
                tier.reads.queue(self.raw_bytes)
                return
            else:
                tier.note_unread(late="queue full")
            self._tiers.pop(0)
        self._finish()

    def _give_up(self) -> None:
        """Skip the first tier, which took too long, and try the next, under the lock."""
        if self._tiers:
            tier = self._tiers.pop(0)
            tier.note_unread(late="no answer")
            if self._began:
                part = tier.backend.part(self.block)
                tier.calls.failed("read", part, f"no answer in {tier.timeout:g} s")
            else:  # still waiting for a thread: report the hanging calls that occupy all threads
                tier.unreadable(self.block)
        self._read_next()

    def _read(self, tier: Tier, attempt: int) -> None:
        with self._changed:
            if attempt != self._attempt or self._done:
                return
            self._began = True
            self._since = time.monotonic()  # the timeout excludes the wait for a thread
            unwanted = not self._joined
            if unwanted:
                self._finish()
        if unwanted:
            self._ended(self)
            return
        draft: Lease | None = None

        def place() -> memoryview:
            nonlocal draft
            if self.stays:
                with suppress(BackendFailed):  # the memory was closed meanwhile
                    draft = self._memory.reserve(self.block, self.raw_bytes)
            if draft is not None:
                return draft.record
            return self._buffers.take(HEADER_BYTES + self.raw_bytes)

        record: memoryview | None = None
        try:
            record = tier.load(self.block, self.raw_bytes, place)
        finally:  # also after an exception: wake waiting requests and free the draft
            self._over(tier, attempt, record, draft)

    def _over(
        self,
        tier: Tier,
        attempt: int,
        record: memoryview | None = None,
        draft: Lease | None = None,
    ) -> None:
        """End an attempt, which has finished or was discarded from the queue."""
        with self._changed:
            current = attempt == self._attempt and not self._done
            if current and record is not None and not self._cancelled:
                self._finish()
                self._keep(tier, record, draft)
            else:  # a late, or an unwanted one; or a miss
                if draft is not None:
                    self._memory.discard(draft)
                if current and self._cancelled:
                    self._finish()
                elif current:
                    self._tiers.pop(0)
                    self._read_next()
            over = self._done
        if over:
            self._ended(self)

    def _keep(self, tier: Tier, record: memoryview, draft: Lease | None) -> None:
        """Keep the record in memory, or for the requests that joined; under the lock."""
        lease = Lease(self._buffers, self.block, record, record) if draft is None else draft
        try:
            if draft is not None and not self._memory.commit_all([draft]):
                return  # memory of the node failed
        except BackendFailed:
            return  # the memory was closed meanwhile
        self.source = tier
        if self._joined:
            self._lease = lease
        else:
            lease.release()


class ReadRequest:
    """One request that reads a prompt, or a prefetch.

    ``sink(i, raw)`` is called for each block in order, in the calling thread; later blocks are read
    meanwhile. Reading ends early at ``until`` (monotonic seconds), or when ``cancelled()`` is true.
    The name of the tier that each block was read from is appended to ``sources``, with its codec if
    it is lossy.

    Attributes:
        exact: how many leading blocks, of those delivered so far, are exact.
    """

    def __init__(
        self,
        reader: Reader,
        raw_bytes: Sequence[int],
        sink: Callable[[int, memoryview], None],
        *,
        until: float | None = None,
        cancelled: Callable[[], bool] | None = None,
        sources: list[str] | None = None,
    ) -> None:
        self.planner = reader.levels.planner
        self._reader = reader
        self._levels = reader.levels
        self._raw_bytes = raw_bytes
        self._sink = sink
        self._until = until
        self._cancelled = cancelled or bool  # never
        self._sources = [] if sources is None else sources
        self.exact = 0
        self._mark = 0  # the reader's `replacements` at the begin

    def read(self, blocks: Sequence[bytes], levels: Sequence[int]) -> int:
        """Read ``blocks``, which are at ``levels``; return how many leading ones were read.

        Tiers that admit a block from this request on get a copy.
        """
        count = self.bring(blocks, levels)
        admitted = self.planner.read(blocks[:count])
        if admitted:
            self._copy(blocks, admitted)
        return count

    def _copy(self, blocks: Sequence[bytes], admitted: Sequence[bytes]) -> None:
        """Queue the writes of admitted ``blocks`` to tiers that lack them, if memory has them."""
        with PromptWrites(self._reader.moves, blocks) as prompt:
            for tier in self._levels.tiers:
                known = tier.known(admitted)
                missing = [block for block in admitted if block not in known]
                missing = [block for block in missing if block in self._levels.memory]
                if missing:
                    prompt.write(tier, missing, 0.0)

    def bring(self, blocks: Sequence[bytes], levels: Sequence[int]) -> int:
        """Read ``blocks``, without copies to other tiers; return how many leading ones were read.

        Blocks read into memory do not evict others of the same prompt.
        """
        held: list[bytes] = []
        index = self._levels.memory.catalogue
        try:
            if any(levels) and not all(levels):
                index.hold([blocks[at] for at, level in enumerate(levels) if not level], held)
            count = self._fetch(blocks, levels)
        finally:
            if held:
                index.free(held)
        self._levels.used(blocks[:count])
        return count

    def _fetch(self, blocks: Sequence[bytes], levels: Sequence[int]) -> int:
        """Deliver ``blocks`` in order, promoting those from lower tiers; return how many."""
        ahead: deque[SharedRead | Lease] = deque()
        run: Sequence[Lease] = ()
        sizes, end = self._raw_bytes, len(levels)
        # Blocks that are read ahead; half of memory is left to other requests.
        fit = self._levels.memory.capacity // 2 // (max(sizes[:end], default=0) + HEADER_BYTES)
        limit = max(2, min(_READ_AHEAD, fit))
        count = begun = 0  # blocks that were delivered; and whose read was begun, at least these
        self._mark = self._reader.replacements
        try:
            while count < end and not self._ends(blocks):
                if not ahead:
                    run = self._lease_run(blocks, levels, count)
                    begun = count + len(run)
                more = min(count + limit, end)
                if begun < more:
                    self._reader.start(
                        blocks[begun:more], sizes[begun:more], levels[begun:more], ahead
                    )
                    begun = more
                if run:
                    at = self._deliver_run(blocks, run, count)
                    whole, run, count = at == count + len(run), (), at
                    if not whole:
                        break
                    continue
                name, lease = self._await(ahead[0])
                if lease is None or self._replaced(blocks):
                    break
                payload = lease.record[HEADER_BYTES:]
                if len(payload) != sizes[count]:
                    self._refuse(blocks[count], len(payload), sizes[count])
                    break
                self._sources.append(self._given(count, lease, name))
                self._sink(count, payload)
                ahead.popleft().release()
                count += 1
        finally:
            for left in (*ahead, *run):
                left.release()
        if count < end:  # a located block is missing: others may be, too
            for tier in self._levels.tiers:
                tier.recheck(blocks[count:end])
        return count

    def _ends(self, blocks: Sequence[bytes]) -> bool:
        """Whether to deliver no more: it was cancelled, or blocks were replaced."""
        return self._replaced(blocks) or self._cancelled()

    def _replaced(self, blocks: Sequence[bytes]) -> bool:
        """Whether blocks were replaced: the new ones do not match those delivered.

        Ask behind the lease of a block. Before it, a replacement in between would be missed.
        """
        reader = self._reader
        return self._mark != reader.replacements and reader.replaced_since(self._mark, blocks)

    def _lease_run(
        self, blocks: Sequence[bytes], levels: Sequence[int], at: int
    ) -> Sequence[Lease]:
        """Lease the blocks from ``at`` on that are in memory, several at once."""
        if levels[at]:
            return ()
        room, end = self._levels.memory.capacity // _LEASED_SHARE, at
        for level, size in zip(levels[at : at + _LEASED], self._raw_bytes[at:], strict=False):
            room -= size + HEADER_BYTES
            if level or (room < 0 and end > at):
                break
            end += 1
        return self._levels.memory.lease_all(blocks[at:end])

    def _deliver_run(self, blocks: Sequence[bytes], run: Sequence[Lease], at: int) -> int:
        """Deliver blocks from ``at`` on out of memory, and release them.

        Return the position of the first that was not delivered. Little is done between two copies:
        these take the caches, so anything else is slow there.
        """
        memory, sink, ends = self._levels.memory, self._sink, self._replaced
        payloads = [lease.record[HEADER_BYTES:] for lease in run]
        first, sources, name = at, self._sources, memory.name
        copied: int | None = None
        self._reader.copies.begin()
        try:
            for payload, size in zip(payloads, self._raw_bytes[at:], strict=False):
                if len(payload) != size:
                    self._refuse(blocks[at], len(payload), size)
                    break
                if ends(blocks):
                    break
                sources.append(self._given(at, run[at - first], name))
                sink(at, payload)
                at += 1
                ends = self._ends  # of the first block, `_fetch` has asked
            copied = sum(map(len, payloads[: at - first]))
        finally:
            self._reader.copies.end(copied)
            memory.release_all(run)
            payloads = payloads[: at - first]
            read = sum(map(len, payloads)) + HEADER_BYTES * len(payloads)
            memory.counters.count(hits=len(payloads), read_bytes=read)
        return at

    def _refuse(self, block: bytes, length: int, raw_bytes: int) -> None:
        """Delete a record in memory that has another length: it is not this block."""
        memory = self._levels.memory
        with suppress(BackendFailed):  # memory that processes share hides it
            memory.remove([block])
        memory.counters.count(refused=1)
        self._levels.losses.note([block], memory.name, "refused", another_length(length, raw_bytes))

    def _await(self, started: SharedRead | Lease) -> tuple[str, Lease | None]:
        """Wait for a block; return the name of its source, and a lease on it."""
        memory = self._levels.memory
        if isinstance(started, SharedRead):
            lease, tier = started.wait(self._until), started.source
            return memory.name if tier is None else tier.name, lease
        memory.counters.count(hits=1, read_bytes=len(started.record))
        return memory.name, started

    def _given(self, at: int, lease: Lease, name: str) -> str:
        """Return the name of the source of block ``at``, and count it if it is exact."""
        made = origin(lease.record)
        if made == EXACT:
            self.exact += self.exact == at
            return name
        return f"{name}, {'inexact' if made == BEHIND else codec_name(made)}"
