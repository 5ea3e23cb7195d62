"""`SnapshotMover`: moves KV, windows and states of models with groups of layers.

The store keeps snapshots: all that computing needs to go on at a position. They are written where
the pool has a checkpoint, and of a model without states also at the ends of blocks, prompts and
answers. A snapshot is read as a whole, since no part of it is of use alone.
"""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvkeep.core.errors import IllegalStep, OutOfPages
from kvkeep.serve.engine.offload.load import LoadChunk
from kvkeep.serve.engine.offload.loads import GRACE_S, Loads
from kvkeep.serve.engine.offload.mover import Mover
from kvkeep.serve.engine.offload.queue import OffloadQueue
from kvkeep.serve.engine.offload.snapshot_pages import SnapshotPages
from kvkeep.serve.engine.offload.writes import Known
from kvkeep.store import Snapshot

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvkeep.core.cache import Sequence
    from kvkeep.core.tokens import TokenArray
    from kvkeep.serve.engine.answer import Answer
    from kvkeep.serve.engine.offload.load import Load
    from kvkeep.serve.engine.runner import Runner
    from kvkeep.serve.engine.stats import EngineStats
    from kvkeep.store import KVStore

__all__ = ["SnapshotMover"]

_log = logging.getLogger(__name__)

# Host memory for snapshots that wait for the store; one may be larger alone.
_QUEUE_BYTES = 256 << 20


class SnapshotMover(Mover):
    """Moves snapshots of a model with windows or states."""

    def __init__(
        self, store: KVStore, runner: Runner, stats: EngineStats, *, timeout: float
    ) -> None:
        assert runner.groups is not None
        assert runner.layout is not None
        self._pages = SnapshotPages(runner.groups, hnd=store.layout == "HND")
        self._layout = runner.layout
        self.holds_back = runner.layout.state is None  # states are gone when the next one is there
        self._runner = runner
        self._store = store
        self._stats = stats
        self._block = store.block_tokens
        self._writes = _SnapshotWrites(store)
        self.known = self._writes.known
        self.loads = _SnapshotLoads(store, self.known, page_size=runner.page_size, timeout=timeout)

    # --- from the store --------------------------------------------------------------------------

    def restore(self, answer: Answer, chunk: LoadChunk) -> int:
        """Write a snapshot, and leave a checkpoint there; 0 if there is no room for its rows."""
        snapshot = chunk.block
        assert isinstance(snapshot, Snapshot)
        sequence, position = answer.running_sequence, snapshot.tokens
        groups = sequence.groups
        assert groups is not None
        if position <= groups.position:
            return groups.position
        self._runner.copy(sequence.copies())
        first = groups.position  # pages up to there are others', too
        try:
            groups.load(position)
        except OutOfPages:
            return 0
        self._pages.write(sequence, snapshot, first)
        layout = self._layout
        if layout.state is not None and position % (layout.grid * layout.page_size) == 0:
            copy = groups.checkpoint(position)
            if copy is not None:
                self._runner.copy([copy])
        return position

    # --- to the store ----------------------------------------------------------------------------

    def has_news(self, answer: Answer) -> bool:
        trail = answer.trail
        if self._layout.state is not None:
            return trail.checkpoint > 0
        ends = trail.end is not None and answer.computed >= trail.end
        return ends or answer.computed >= max(trail.offered + self._block, trail.next)

    def offer(self, answer: Answer, tenant: str, *, last: bool) -> None:
        """Queue a snapshot of ``answer`` if it is at a position that is worth storing."""
        trail, sequence = answer.trail, answer.running_sequence
        position = self._position(answer, last=last)
        if position > trail.held:
            trail.next = (answer.computed // self._block + 1) * self._block
        if position <= trail.offered or position > min(trail.limit, trail.held):
            return
        full = position // self._block * self._block
        trail.extend_keys(sequence, full, self._block)
        keys = trail.keys[: full // self._block]
        if full < position:
            keys.append(trail.tail_key(sequence, full, position, self._block))
        key = b"at" + keys[-1]
        if key not in self.known:
            start = trail.offered
            while start + self._block <= position and keys[start // self._block] in self.known:
                start += self._block
            self._queue(sequence, start, position, tenant, keys)
        trail.offered = full

    def _position(self, answer: Answer, *, last: bool) -> int:
        """Return the position of a snapshot to store now; 0: none."""
        trail, computed = answer.trail, answer.computed
        if self._layout.state is not None:
            position, trail.checkpoint = trail.checkpoint, 0
            return position if position == computed else 0
        position = computed if last else computed // self._block * self._block
        if trail.end is not None and computed >= trail.end:
            if not last:
                position = trail.end - 1  # its last token is computed again in any case
            trail.end = None
        size = self._layout.page_size
        # The pool resumes at whole pages, too. What lies before the last pass, or before what was
        # cached or loaded, may have left a window.
        floored = position // size * size
        for one in (floored, position):
            if one - trail.offered >= size and self._is_covered(answer.running_sequence, one):
                return one
        return 0

    def _is_covered(self, sequence: Sequence, position: int) -> bool:
        """Whether the windows of ``sequence`` hold all that is needed to go on at ``position``."""
        assert sequence.groups is not None
        return all(
            begin <= window.first_token(position)
            for window, begin in zip(self._layout.windows, sequence.groups.begins, strict=True)
        )

    def _queue(
        self, sequence: Sequence, start: int, position: int, tenant: str, keys: list[bytes]
    ) -> None:
        size = self._pages.size_of(position, start)
        if not self._writes.has_room(size):
            self._stats.unkept_tokens += position - start
            with suppress(IllegalStep):  # its owner has closed the store
                self._store.unkept(sequence.tokens[:position], start, tenant=tenant)
            return
        snapshot = self._pages.read(sequence, start, position)
        tokens = sequence.tokens[:position].copy()
        new = [*keys[start // self._block : position // self._block], b"at" + keys[-1]]
        self._writes.queue(_Write(tokens, snapshot, tenant, keys, new, size))
        self._stats.kept_tokens += position - start

    def later(self, call: Callable[[], None], nbytes: int) -> None:
        self._writes.later(call, nbytes)

    def flush(self, timeout: float) -> bool:
        return self._writes.flush(timeout)

    def close(self, timeout: float) -> bool:
        return self._writes.close(timeout)


class _SnapshotLoads(Loads):
    """Loads whole snapshots."""

    def _read_all(self, load: Load, start: int, seconds: float) -> None:
        """Read the snapshot at the longest position that is worth reading."""
        evidence = load.evidence
        try:
            if load.cancelled:
                return
            began = time.monotonic()
            snapshot, sources = None, None if evidence is None else list[tuple[str, int]]()
            try:
                load.due = began + seconds + GRACE_S
                snapshot = self._store.get_snapshot(
                    load.tokens, start, limit=load.stop, deadline=seconds, tenant=load.tenant,
                    sources=sources,
                )  # fmt: skip
            finally:
                load.due = None
            in_time = time.monotonic() - began <= seconds
            if snapshot is not None:
                tokens = snapshot.tokens - start
                self._deliver(load, LoadChunk(start, tokens, snapshot, sources or ()))
            if snapshot is None or snapshot.tokens < load.stop:
                stop = start if snapshot is None else snapshot.tokens
                self._forget_stored(load, stop)
                if evidence is not None and in_time:
                    evidence.stopped(self._why(load, stop, evidence.since))
            if evidence is not None and not in_time:
                evidence.late()
        finally:
            load.end_read()
            self.arrival.set()

    def give_back(self, chunk: LoadChunk) -> None:
        """Nothing is kept: the snapshot's memory is its own."""


@dataclass(frozen=True, slots=True, eq=False)
class _Write:
    """A snapshot of ``tokens`` and its bytes.

    ``prefix`` are the keys of all blocks up to it, ``keys`` those that are stored with it.
    """

    tokens: TokenArray
    snapshot: Snapshot
    tenant: str
    prefix: list[bytes]
    keys: list[bytes]
    size: int


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

    def queue(self, write: _Write) -> None:
        """Queue a snapshot."""
        for key in write.keys:
            self.known.offered(key)
        self._queue.submit(lambda: self._run(write), write.size)

    def _run(self, write: _Write) -> None:
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
