"""`PageMover` and `SnapshotMover`: move KV of plain models, and of models with groups of layers.

The store keeps snapshots: all that computing needs to go on at a position. They are written where
the pool has a checkpoint, and of a model without states also at the ends of blocks, prompts and
answers. A snapshot is read as a whole, since no part of it is of use alone.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from kvkeep.core.errors import IllegalStep, OutOfPages
from kvkeep.serve.engine.offload.forms import Forms, SnapshotPages, SnapshotWrite
from kvkeep.serve.engine.offload.load import LoadChunk
from kvkeep.serve.engine.offload.loads import Loads, PageLoads
from kvkeep.serve.engine.offload.writes import NEVER, Known, OffloadQueue, Writes
from kvkeep.store import Snapshot

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvkeep.core.cache import Sequence
    from kvkeep.core.tokens import TokenArray
    from kvkeep.serve.engine.offload.load import Load
    from kvkeep.serve.engine.offload.writes import Trail
    from kvkeep.serve.engine.request import Answer
    from kvkeep.serve.engine.runner import Runner
    from kvkeep.serve.engine.stats import EngineStats
    from kvkeep.store import KVStore

__all__ = ["Mover", "PageMover", "SnapshotMover"]


class Mover(ABC):
    """Moves KV of answers between the pages of a runner and a store.

    Thread safety: `flush` and ``known`` any; the rest belongs to the engine's thread.
    """

    known: Known
    loads: Loads

    @abstractmethod
    def restore(self, answer: Answer, chunk: LoadChunk) -> bool:
        """Write a chunk to the pages of ``answer``; False if there is no room for it.

        What is computed of its tokens stays, in pages that others may read.
        """

    @abstractmethod
    def has_news(self, answer: Answer) -> bool:
        """Whether there may be something new to `offer`; asked after each pass."""

    @abstractmethod
    def held_back(self, answer: Answer) -> tuple[int, int]:
        """Return the first token, and the end, of what is not written if ``answer`` ends now.

        That is what ``trail.held`` holds back.
        """

    @abstractmethod
    def offer(self, answer: Answer, tenant: str, *, last: bool) -> None:
        """Queue computed KV of ``answer`` up to ``trail.held``; ``last``: nothing more follows."""

    @abstractmethod
    def drop(self, answer: Answer) -> None:
        """Free what is held back of ``answer``, which has ended or lost its pages."""

    @abstractmethod
    def later(self, call: Callable[[], None], nbytes: int) -> None:
        """Call the store in the thread that writes to it, behind all that is queued now.

        ``call`` holds ``nbytes``. It is left out if the store is too slow.
        """

    @abstractmethod
    def flush(self, timeout: float) -> bool:
        """Wait ``timeout`` seconds until nothing is queued; return whether nothing is."""

    @abstractmethod
    def close(self, timeout: float) -> bool:
        """`flush`, and end the threads."""


class PageMover(Mover):
    """Moves blocks of pages, of a model in which every layer keeps every token."""

    def __init__(self, store: KVStore, runner: Runner, stats: EngineStats) -> None:
        self._tensors = tensors = runner.tensors
        forms = Forms(tensors, store.layout)
        self._writes = Writes(store, tensors, forms, stats)
        self.known = self._writes.known
        self.loads = PageLoads(store, tensors, forms, self.known)

    def restore(self, answer: Answer, chunk: LoadChunk) -> bool:
        size = self._tensors.page_size
        first = chunk.start // size
        stop = first - (-chunk.tokens // size)
        # The first page not computed in full: others before it may be published.
        begin = max(first, answer.computed // size)
        pages = answer.running_sequence.pages[begin:stop]
        self._tensors.write(pages, chunk.block[begin - first : stop - first])
        return True

    def has_news(self, answer: Answer) -> bool:
        return answer.computed >= answer.trail.next

    def offer(self, answer: Answer, tenant: str, *, last: bool) -> None:
        sequence = answer.running_sequence
        self._writes.offer(answer.trail, sequence, answer.computed, tenant, last=last)

    def held_back(self, answer: Answer) -> tuple[int, int]:
        return max(answer.trail.held, answer.trail.offered), answer.computed

    def drop(self, answer: Answer) -> None:
        """Nothing: it is in the pages of the answer."""

    def later(self, call: Callable[[], None], nbytes: int) -> None:
        self._writes.later(call, nbytes)

    def flush(self, timeout: float) -> bool:
        return self._writes.flush(timeout)

    def close(self, timeout: float) -> bool:
        return self._writes.close(timeout)


_log = logging.getLogger(__name__)

# Host memory for snapshots that wait for the store; one may be larger alone.
_QUEUE_BYTES = 256 << 20
# Host memory for snapshots that wait for the ends of their answers.
_HELD_BYTES = 256 << 20


class SnapshotMover(Mover):
    """Moves snapshots of a model with windows or states."""

    def __init__(self, store: KVStore, runner: Runner, stats: EngineStats) -> None:
        assert runner.groups is not None
        assert runner.layout is not None
        self._pages = SnapshotPages(runner.groups, hnd=store.layout == "HND")
        self._layout = runner.layout
        self._runner = runner
        self._store = store
        self._stats = stats
        self._block = store.block_tokens
        self._held_bytes = 0
        self._writes = _SnapshotWrites(store)
        self.known = self._writes.known
        self.loads = _SnapshotLoads(store, self.known, page_size=runner.page_size)

    # --- from the store --------------------------------------------------------------------------

    def restore(self, answer: Answer, chunk: LoadChunk) -> bool:
        """Write a snapshot, and leave a checkpoint there; False without room for its rows."""
        snapshot = chunk.block
        assert isinstance(snapshot, Snapshot)
        sequence, position = answer.running_sequence, snapshot.tokens
        groups = sequence.groups
        assert groups is not None
        if position <= groups.position:
            return False
        first = groups.position  # pages up to there are others', too
        try:
            groups.load(position)
        except OutOfPages:
            return False
        self._pages.write(sequence, snapshot, first)
        layout = self._layout
        if layout.state is not None and position % (layout.grid * layout.page_size) == 0:
            copy = groups.checkpoint(position)
            if copy is not None:
                self._runner.copy([copy])
        return True

    # --- to the store ----------------------------------------------------------------------------

    def has_news(self, answer: Answer) -> bool:
        trail = answer.trail
        if self._layout.state is not None:
            return trail.checkpoint > 0
        ends = trail.end is not None and answer.computed >= trail.end
        return ends or answer.computed >= max(trail.offered + self._block, trail.next)

    def offer(self, answer: Answer, tenant: str, *, last: bool) -> None:
        """Queue a snapshot of ``answer`` if it is at a position that is worth storing.

        A state is gone when the model goes on: so a snapshot that is held back is read as well, and
        waits in host memory. If there is no room for it, all are written.
        """
        trail = answer.trail
        position = self._position(answer, last=last)
        if answer.computed > trail.held:
            trail.next = (answer.computed // self._block + 1) * self._block
        self._release(trail, trail.held)
        if trail.offered < position <= min(trail.limit, trail.held):
            self._take(answer, position, tenant)
        elif trail.held < position <= trail.limit:
            self._hold(answer, position, tenant)

    def held_back(self, answer: Answer) -> tuple[int, int]:
        trail, prompt = answer.trail, len(answer.request.prompt)
        if self._layout.state is None:
            kept, stop = self._covered(answer, trail.held), answer.computed
        else:
            ends = [0, *(len(write.tokens) for write in trail.snapshots)]
            kept, stop = max(end for end in ends if end <= trail.held), ends[-1]
        return max(kept, trail.resumed, prompt), stop

    def drop(self, answer: Answer) -> None:
        self._held_bytes -= sum(write.size for write in answer.trail.snapshots)
        answer.trail.snapshots = []

    def _position(self, answer: Answer, *, last: bool) -> int:
        """Return the position of a snapshot to store or to hold back now; 0: none."""
        trail, computed = answer.trail, answer.computed
        if self._layout.state is not None:
            position, trail.checkpoint = trail.checkpoint, 0
            return position if position == computed else 0
        position = computed if last else computed // self._block * self._block
        if trail.end is not None and computed >= trail.end:
            if not last:
                position = trail.end - 1  # its last token is computed again in any case
            trail.end = None
        if position > trail.held:  # where what is not held back ends, unless that is the prompt
            position = trail.held if trail.held > len(answer.request.prompt) else 0
        return self._covered(answer, position)

    def _covered(self, answer: Answer, position: int) -> int:
        """Return ``position``, or the end of a page before it, if a snapshot can be read there; 0.

        The pool resumes at whole pages, too. What lies before the last pass, or before what was
        cached or loaded, may have left a window.
        """
        size = self._layout.page_size
        floored = position // size * size
        for one in (floored, position):
            if one - answer.trail.offered >= size and self._is_covered(
                answer.running_sequence, one
            ):
                return one
        return 0

    def _is_covered(self, sequence: Sequence, position: int) -> bool:
        """Whether the windows of ``sequence`` hold all that is needed to go on at ``position``."""
        assert sequence.groups is not None
        return all(
            begin <= window.first_token(position)
            for window, begin in zip(self._layout.windows, sequence.groups.begins, strict=True)
        )

    def _take(self, answer: Answer, position: int, tenant: str) -> None:
        """Queue the snapshot of ``answer`` at ``position``."""
        trail, sequence = answer.trail, answer.running_sequence
        keys, start = self._named(answer, position)
        trail.resumed, trail.offered = position, position // self._block * self._block
        if b"at" + keys[-1] in self.known:
            return
        if not self._writes.has_room(self._pages.size_of(position, start)):
            self._note_no_room(sequence.tokens[:position], start, tenant)
            return
        self._queue(self._read(answer, start, position, tenant, keys))

    def _hold(self, answer: Answer, position: int, tenant: str) -> None:
        """Read the snapshot of ``answer`` at ``position``, which may prove worth writing."""
        trail = answer.trail
        keys, start = self._named(answer, position)
        if b"at" + keys[-1] in self.known:
            return
        write = self._read(answer, start, position, tenant, keys)
        trail.snapshots.append(write)
        self._held_bytes += write.size
        if self._held_bytes > _HELD_BYTES:
            self._release(trail, NEVER)

    def _named(self, answer: Answer, position: int) -> tuple[list[bytes], int]:
        """Return the keys of all blocks up to ``position``, and where its own KV begins."""
        trail, sequence = answer.trail, answer.running_sequence
        full = position // self._block * self._block
        trail.extend_keys(sequence, full, self._block)
        keys = trail.keys[: full // self._block]
        if full < position:
            keys.append(trail.tail_key(sequence, full, position, self._block))
        start = trail.offered
        if trail.snapshots:
            start = len(trail.snapshots[-1].tokens) // self._block * self._block
        while start + self._block <= position and keys[start // self._block] in self.known:
            start += self._block
        return keys, start

    def _read(
        self, answer: Answer, start: int, position: int, tenant: str, keys: list[bytes]
    ) -> SnapshotWrite:
        sequence = answer.running_sequence
        snapshot = replace(self._pages.read(sequence, start, position), exact=answer.trail.exact)
        new = [*keys[start // self._block : position // self._block], b"at" + keys[-1]]
        tokens = sequence.tokens[:position].copy()
        return SnapshotWrite(
            tokens, snapshot, tenant, keys, new, self._pages.size_of(position, start)
        )

    def _queue(self, write: SnapshotWrite) -> None:
        self._writes.queue(write)
        self._stats.kept_tokens += write.snapshot.tokens - write.snapshot.start

    def _release(self, trail: Trail, stop: int) -> None:
        """Queue the snapshots that were held back, at positions up to ``stop``."""
        while trail.snapshots and len(trail.snapshots[0].tokens) <= stop:
            write = trail.snapshots.pop(0)
            self._held_bytes -= write.size
            trail.resumed = write.snapshot.tokens
            trail.offered = trail.resumed // self._block * self._block
            if write.keys[-1] in self.known:
                continue
            if self._writes.has_room(write.size):
                self._queue(write)
            else:
                self._note_no_room(write.tokens, write.snapshot.start, write.tenant)

    def _note_no_room(self, tokens: TokenArray, start: int, tenant: str) -> None:
        self._stats.unkept_tokens += len(tokens) - start
        with suppress(IllegalStep):  # its owner has closed the store
            self._store.unkept(tokens, start, tenant=tenant)

    def later(self, call: Callable[[], None], nbytes: int) -> None:
        self._writes.later(call, nbytes)

    def flush(self, timeout: float) -> bool:
        return self._writes.flush(timeout)

    def close(self, timeout: float) -> bool:
        return self._writes.close(timeout)


class _SnapshotLoads(Loads):
    """Loads whole snapshots."""

    whole = True

    def _read_from(self, load: Load, start: int) -> int:
        """Read the snapshot at the longest position that is worth reading."""
        sources: list[tuple[str, int]] = []
        snapshot = self._store.get_snapshot(
            load.tokens, start, limit=load.stop, deadline=load.patience_s, tenant=load.tenant,
            sources=sources,
        )  # fmt: skip
        if snapshot is None:
            return start
        stop = snapshot.tokens
        chunk = LoadChunk(start, stop - start, snapshot, tuple(sources), snapshot.exact)
        self._deliver(load, chunk)
        return stop

    def _relearn(self, load: Load, start: int) -> None:
        self._store.get_snapshot(load.tokens, start, tenant=load.tenant, pays=True)

    def give_back(self, chunk: LoadChunk) -> None:
        """Nothing is kept: the snapshot's memory is its own."""


class _SnapshotWrites:
    """Puts snapshots in a thread. Thread safety: all methods."""

    def __init__(self, store: KVStore) -> None:
        self.known = Known()
        self._store = store
        self._queue = OffloadQueue(_log)

    def has_room(self, size: int) -> bool:
        """Whether a snapshot of ``size`` bytes may be queued."""
        queued = self._queue.nbytes
        return not queued or queued + size <= _QUEUE_BYTES

    def queue(self, write: SnapshotWrite) -> None:
        """Queue a snapshot."""
        for key in write.keys:
            self.known.offered(key)
        self._queue.submit(lambda: self._run(write), write.size)

    def _run(self, write: SnapshotWrite) -> None:
        stored = False
        try:
            put = self._store.put_snapshot(write.tokens, write.snapshot, tenant=write.tenant)
            stored = not put.dropped
        except Exception:  # noqa: BLE001 - a store that fails costs a write; the next may succeed
            _log.exception("a snapshot of %d tokens was not stored", len(write.tokens))
        for key in write.keys:
            self.known.arrived(key, stored=stored)
        if not stored:  # blocks in front of it may be lost: they are offered again
            self.known.found([], missing=write.prefix, since=time.monotonic())

    def later(self, call: Callable[[], None], nbytes: int) -> None:
        """Call the store in the thread, behind all snapshots that are queued now."""
        self._queue.submit_some(call, nbytes)

    def flush(self, timeout: float) -> bool:
        """Wait ``timeout`` seconds until nothing is queued; return whether nothing is."""
        return self._queue.flush(timeout)

    def close(self, timeout: float) -> bool:
        """`flush`, and end the thread; one that hangs in the store is left running."""
        return self._queue.close(timeout)
