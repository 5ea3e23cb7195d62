"""The open store of an engine, with what vLLM's order of calls demands of it."""

from __future__ import annotations

import atexit
import heapq
import logging
import shutil
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Final, TypeVar
from weakref import WeakValueDictionary

from kvkeep.core.errors import IllegalStep, InvalidValue
from kvkeep.core.geometry.units import format_bytes
from kvkeep.core.keys import root_key
from kvkeep.integrations.load_choice import RunCost, TimedLoads
from kvkeep.integrations.options import FLUSH_S
from kvkeep.integrations.vllm.groups import keys_of
from kvkeep.integrations.vllm.stats import TierFigures

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from concurrent.futures import Future

    from kvkeep.integrations.vllm.groups import Groups
    from kvkeep.integrations.vllm.stats import Counts
    from kvkeep.store import BlockStore
    from kvkeep.store.tiers import ReturnNotes, TierStats

__all__ = ["Loaders", "OpenStore", "SharedStore", "join_logs", "log_fault", "log_start"]


_LOG = logging.getLogger("kvkeep.vllm")
_DELETE_WAIT_S = 0.05
T = TypeVar("T")


class OpenStore:
    """A store that several parts of vLLM use, and close in any order. Thread safety: all methods.

    After `close`, `lookup`, `knows`, `unknown`, `must_ask` and `pin` find nothing and save nothing,
    where the store itself raises.

    Attributes:
        closed: whether `close` was called.
    """

    def __init__(self, store: BlockStore, *, rank: int = 0) -> None:
        self.store = store
        self._lock = threading.Lock()
        self._ends: list[tuple[float, bytes]] = []  # a heap: when a block is to be deleted
        self._due: dict[bytes, float] = {}
        self._counting = threading.Lock()
        self._figures = TierFigures(rank)
        self.closed = False
        # If vLLM runs in a script's own process, it may exit without closing its parts.
        atexit.register(self.close)

    def lookup(self, keys: Sequence[bytes], deadline: float) -> int:
        """As `BlockStore.lookup`; 0 if the store is closed."""
        return _unless_closed(lambda: self.store.lookup(keys, deadline=deadline), 0)

    def lookup_each(self, keys: Sequence[bytes], deadline: float) -> list[bool]:
        """As `BlockStore.lookup_each`; all False if the store is closed."""
        return _unless_closed(
            lambda: self.store.lookup_each(keys, deadline=deadline), [False] * len(keys)
        )

    def knows(self, keys: Sequence[bytes]) -> int:
        """As `BlockStore.knows`; 0 if the store is closed."""
        return _unless_closed(lambda: self.store.knows(keys), 0)

    @property
    def must_ask(self) -> bool:
        """As `BlockStore.must_ask`; False if the store is closed."""
        return _unless_closed(lambda: self.store.must_ask, False)

    def unknown(self, keys: Sequence[bytes]) -> list[int]:
        """As `BlockStore.unknown`; empty if the store is closed, so that nothing is saved."""
        return _unless_closed(lambda: self.store.unknown(keys), [])

    def pin(self, keys: Sequence[bytes], seconds: float) -> None:
        """As `BlockStore.pin`; does nothing if the store is closed."""
        _unless_closed(lambda: self.store.pin(keys, seconds), 0)

    def expire(self, keys: Sequence[bytes], ttl: float | None) -> None:
        """Delete new blocks ``ttl`` seconds from now; None: never. Replaces an earlier ``ttl``."""
        with self._lock:
            if ttl is None:
                for key in self._due.keys() & keys:
                    del self._due[key]
                return
            end = time.monotonic() + ttl
            for key in keys:
                self._due[key] = end
                heapq.heappush(self._ends, (end, key))

    @property
    def has_ends(self) -> bool:
        """Whether any block is to be deleted some time."""
        return bool(self._due)

    @property
    def has_expired(self) -> bool:
        """Whether blocks are to be deleted now."""
        ends = self._ends
        return bool(ends) and ends[0][0] <= time.monotonic()

    def delete_expired(self) -> None:
        """Start to delete the blocks that are due. Costs nothing if none are.

        Waits for a moment only: a tier that hangs delays no request.
        """
        if not self.has_expired:
            return
        now = time.monotonic()
        keys = []
        with self._lock:
            while self._ends and self._ends[0][0] <= now:
                end, key = heapq.heappop(self._ends)
                if self._due.get(key) == end:
                    del self._due[key]
                    keys.append(key)
        if keys:
            deleting = threading.Thread(
                target=self._remove, args=(keys,), name="kvkeep ttl", daemon=True
            )
            deleting.start()
            deleting.join(_DELETE_WAIT_S)

    def _remove(self, keys: Sequence[bytes]) -> None:
        with suppress(IllegalStep):  # the store was closed meanwhile
            removed = self.store.remove(keys)
            if not removed.complete:
                _LOG.warning(
                    "kvkeep failed to delete expired blocks from %s", ", ".join(removed.failed)
                )

    def count_tiers(self, counts: Counts, *, states: bool = False, now: bool = False) -> None:
        """Count what the tiers did since the last call; with ``states``, set these, too.

        That is done once a second, and at each call with ``now``.

        Cost: 20 µs a tier.
        """
        with self._counting:  # loads end concurrently
            if states and not (now or self._figures.due):
                return
            tiers = self.store.stats()
            self._figures.count(tiers, counts)
            if states:
                self._figures.state(tiers, counts)

    def clear(self) -> bool:
        """Delete the namespace; False: a tier failed and may still hold blocks."""
        try:
            removed = self.store.clear()
        except IllegalStep:  # closed: the slower tiers still hold their blocks
            return False
        _LOG.info("kvkeep deleted %.1f MiB", removed.bytes / 2**20)
        if not removed.complete:
            _LOG.warning(
                "kvkeep failed to delete all blocks: %s failed. Try again later",
                ", ".join(removed.failed),
            )
        return removed.complete

    def close(self) -> None:
        """Write queued blocks, for at most `FLUSH_S`; a second call does nothing."""
        with self._lock:
            if self.closed:
                return
            self.closed = True
        atexit.unregister(self.close)
        if not self.store.close(FLUSH_S):
            _LOG.warning("kvkeep did not write all queued blocks within %g s", FLUSH_S)


def _unless_closed(call: Callable[[], T], closed: T) -> T:
    try:
        return call()
    except IllegalStep:
        return closed


def log_fault(future: Future[Any]) -> None:
    """Log an unexpected exception in a thread; for the request it is a miss."""
    if not future.cancelled() and (error := future.exception()) is not None:
        _LOG.error("a bug of kvkeep; tokens that were not loaded are computed", exc_info=error)


_AT_ONCE: Final = 4  # more would share one interpreter, and all end later
_MOST: Final = 32  # threads; each that waits holds a few blocks
_STALLED_S: Final = 0.05  # a load without a block for so long waits for its tier
_LONGEST_WAIT_S: Final = 60.0


class Loaders:
    """Runs loads in order, four at a time.

    A load that waits for its tier makes room for the next one: so up to 32 loads from a slow tier
    delay no load from another. Later loads then wait for one of them, or end at their deadline.

    Thread safety: all methods. Cost: a thread for each load that has begun and not ended.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_MOST, "kvkeep load")
        self._changed = threading.Condition()
        self._waiting: deque[object] = deque()
        self._going_on: dict[object, float] = {}  # load → time of its last block

    def submit(
        self,
        load: Callable[[Callable[[], None]], None],
        *,
        until: float,
        cancelled: Callable[[], bool],
    ) -> Future[None]:
        """Begin ``load`` in its turn, at ``until`` (monotonic seconds), or if it is ``cancelled``.

        It is called with a function that it calls after each block.
        """
        turn = object()
        with self._changed:
            self._waiting.append(turn)
        return self._threads.submit(self._run, turn, load, until, cancelled)

    def wake(self) -> None:
        """Begin the loads that are cancelled by now."""
        with self._changed:
            self._changed.notify_all()

    def _run(
        self,
        turn: object,
        load: Callable[[Callable[[], None]], None],
        until: float,
        cancelled: Callable[[], bool],
    ) -> None:
        with self._changed:
            while not cancelled() and (left := until - time.monotonic()) > 0:
                first = self._waiting[0] is turn
                if first and self._has_room():
                    break
                self._changed.wait(min(left, _STALLED_S if first else _LONGEST_WAIT_S))
            self._waiting.remove(turn)
            self._going_on[turn] = time.monotonic()
            self._changed.notify_all()

        def went_on() -> None:
            self._going_on[turn] = time.monotonic()

        try:
            load(went_on)
        finally:
            with self._changed:
                del self._going_on[turn]
                self._changed.notify_all()

    def _has_room(self) -> bool:
        since = time.monotonic() - _STALLED_S
        return sum(last > since for last in self._going_on.values()) < _AT_ONCE

    def close(self, *, wait: bool) -> None:
        """Take no more loads; ``wait`` until all have ended, or drop those that have no thread."""
        self.wake()
        self._threads.shutdown(wait=wait, cancel_futures=not wait)


_DISK: Final = "file://"
_DIGITS: Final = 12  # of a namespace


def join_logs() -> None:
    """Make kvkeep's loggers children of vLLM's, so that they have its handlers and its level.

    Does nothing where ``kvkeep`` has handlers of its own, as by ``VLLM_LOGGING_CONFIG_PATH``, and
    at a second call. Thread safety: as `logging`.
    """
    ours, theirs = logging.getLogger("kvkeep"), logging.getLogger("vllm")
    if ours.handlers or not ours.propagate or ours.parent is theirs:
        return
    ours.parent = theirs
    ours.setLevel(ours.level)  # forgets which levels were found to be enabled by the former parent


def log_start(store: BlockStore, records: str, *, below: bool = False) -> None:
    """Log what `start_line` says of an open store; ``below``: without the memory in front."""
    tiers = store.stats()
    namespace = root_key(store.namespace).hex()
    shown = tiers[1:] if below else tiers
    _LOG.info("%s", start_line(shown, store.own_bytes(), records, namespace))


def start_line(
    tiers: Sequence[TierStats],
    own_bytes: Mapping[str, int],
    records: str,
    namespace: str,
) -> str:
    """Return the line: version, tiers, records, namespace.

    Arguments:
        tiers: fastest first.
        own_bytes: by tier, the bytes of this engine's namespace, where they are counted.
        records: describes what is stored.
        namespace: in hexadecimal; its first digits are shown, as by ``kvkeep store ls``.
    """
    places = "; ".join(_tier(tier, own_bytes.get(tier.name)) for tier in tiers)
    ours = f"kvkeep {version('kvkeep')}"
    return f"{ours} keeps {records} in {places}; namespace {namespace[:_DIGITS]}"


def _tier(tier: TierStats, own: int | None) -> str:
    """Return a tier's place, budget, free space, and what was found in it."""
    if tier.capacity is None or tier.used_bytes is None:
        return f"{tier.place} (no budget of kvkeep's)"
    free = max(0, tier.capacity - tier.used_bytes)
    words = [f"{format_bytes(tier.capacity)}, {format_bytes(free)} free"]
    if tier.place.startswith(_DISK):
        try:
            there = shutil.disk_usage(tier.place.removeprefix(_DISK)).free
        except OSError:
            there = free  # gone by now: the tier will say so
        if there < free:
            words.append(f"but {format_bytes(there)} on its disk")
    found = f"{tier.blocks or 0:,} blocks found"
    if tier.blocks and own is not None:
        found += f", {format_bytes(own)} of this namespace"
    return f"{tier.place} ({', '.join([*words, found])})"


# By vLLM's engine id. vLLM makes both sides and gives neither a reference to the other, so they
# meet here. Weak: it keeps no store alive.
_ENGINES: WeakValueDictionary[str, SharedStore] = WeakValueDictionary()


class SharedStore(OpenStore):
    """A worker's store, used by both sides. Thread safety: all methods.

    vLLM closes its two sides in any order, so the scheduler may still use a store that the worker
    has closed.

    Attributes:
        sizes: bytes of a record, by group.
        costs: what loads take.
        generation: how often all blocks were deleted.
        news: set when a load or a lookup has ended.

    Raises:
        InvalidValue: the engine has another open store.
    """

    def __init__(
        self,
        engine: str,
        store: BlockStore,
        groups: Groups,
        sizes: list[int],
        *,
        rank: int = 0,
    ) -> None:
        other = _ENGINES.get(engine)
        if other is not None and not other.closed:
            store.close(0)
            raise InvalidValue(
                "there are two KVKeepConnectors in one engine, which would find each other's "
                "blocks; leave one of them, with the tiers of both"
            )
        super().__init__(store, rank=rank)
        self.groups = groups
        self.sizes = sizes
        self.costs = TimedLoads(store)
        self.news = threading.Event()
        self.generation = 0
        self._resetting = threading.Lock()  # held while blocks are copied into the store
        _ENGINES[engine] = self

    def write(
        self,
        keys: Sequence[bytes],
        sizes: Sequence[int],
        fill: Callable[[int, memoryview], None],
        generation: int,
    ) -> int:
        """As `BlockStore.write`; 0 if the blocks are of an earlier ``generation``."""
        with self._resetting:
            if generation < self.generation:
                return 0
            return self.store.write(keys, sizes, fill)

    def clear(self) -> bool:
        """As `OpenStore.clear`; what is computed with earlier plans is not written any more."""
        with self._resetting:
            self.generation += 1
        return super().clear()

    def runs(self, hashes: Sequence[bytes], first: int, end: int) -> list[RunCost]:
        """Return what loading the blocks ``first`` … ``end - 1`` takes, in pieces.

        Their ends are blocks of the request. Empty if the store is closed.
        """
        size, counted = self.groups.block_tokens, self.groups.counted
        nbytes = [0] * (end - first)
        for at, group in enumerate(self.groups.groups):
            start = max(first, group.first_needed(end * size, size))
            for block in range(start - first, end - first):
                nbytes[block] += self.sizes[at]
        try:
            runs = self.costs.runs(keys_of(hashes[first:end], counted), nbytes)
        except IllegalStep:
            return []
        return [run._replace(end=first + run.end) for run in runs]

    def tell(self, notes: ReturnNotes) -> None:
        """Tell the tiers of conversations that a scheduler in another process follows.

        Calls must be in order, from one thread at a time.
        """
        if not self.closed:
            _unless_closed(lambda: self.store.replay(notes), None)

    @staticmethod
    def find(engine: str) -> SharedStore | None:
        """Return the store of a worker in this process, by vLLM's engine id."""
        return _ENGINES.get(engine)
