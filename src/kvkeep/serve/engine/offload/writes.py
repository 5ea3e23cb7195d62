"""`Writes`: writes KV of computed tokens from pages to a store, in the background."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import TYPE_CHECKING, Final

from kvkeep.core.errors import IllegalStep
from kvkeep.core.keys import chain_keys, root_key
from kvkeep.core.tokens import TOKEN_BYTES
from kvkeep.serve.engine.offload.forms import Buffers

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from kvkeep.core.cache import Sequence
    from kvkeep.core.keys import Namespace
    from kvkeep.core.pages.tensors import PagedTensors
    from kvkeep.core.tokens import TokenArray
    from kvkeep.serve.engine.offload.forms import Forms, SnapshotWrite
    from kvkeep.serve.engine.stats import EngineStats
    from kvkeep.store import KVStore

__all__ = ["NEVER", "DaemonThreads", "Known", "OffloadQueue", "Trail", "Writes", "block_keys"]


class DaemonThreads:
    """Up to ``count`` daemon threads that run tasks in the order of `submit`.

    Not a `ThreadPoolExecutor`: its threads are joined at exit, so one that hangs in a tier would
    keep the process alive. What a task raises goes to ``log``. Thread safety: `submit` and
    `close` belong to one thread.
    """

    def __init__(self, name: str, count: int, log: logging.Logger) -> None:
        self._name = name
        self._count = count
        self._log = log
        self._threads: list[threading.Thread] = []
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()

    def submit(self, task: Callable[[], None]) -> None:
        """Run ``task`` soon, in a thread that is started if fewer than ``count`` are."""
        self._queue.put(task)
        if len(self._threads) < self._count:
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def close(self, timeout: float) -> None:
        """End the threads after all submitted tasks; wait ``timeout`` seconds for each."""
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join(timeout)

    def _run(self) -> None:
        while (task := self._queue.get()) is not None:
            try:
                task()
            except Exception:  # noqa: BLE001 - a store that fails costs a miss, never the thread
                self._log.exception("a call into the store failed")


_MOST: Final = 1024
_MOST_BYTES: Final = 320 << 20  # a few more than those of writes


class OffloadQueue:
    """Runs writes one after another in a thread, which a store may hang.

    Thread safety: `submit` and `close` belong to one thread, the others to any.
    """

    def __init__(self, log: logging.Logger) -> None:
        self._thread = DaemonThreads("kvkeep writes", 1, log)
        self._unwritten = 0  # writes queued or under way
        self._bytes = 0  # of these
        self._changed = threading.Condition()

    @property
    def nbytes(self) -> int:
        """Bytes of the writes that are queued or under way."""
        return self._bytes

    def submit(self, write: Callable[[], None], nbytes: int = 0) -> None:
        """Queue a write of ``nbytes``."""
        with self._changed:
            self._unwritten += 1
            self._bytes += nbytes
        self._thread.submit(lambda: self._run(write, nbytes))

    def submit_some(self, call: Callable[[], None], nbytes: int) -> None:
        """Queue a call of ``nbytes`` that may be left out: not while 1,024 of anything wait."""
        if self._unwritten < _MOST and self._bytes + nbytes <= _MOST_BYTES:
            self.submit(call, nbytes)

    def _run(self, write: Callable[[], None], nbytes: int) -> None:
        try:
            write()
        finally:
            with self._changed:
                self._unwritten -= 1
                self._bytes -= nbytes
                self._changed.notify_all()

    def flush(self, timeout: float) -> bool:
        """Wait ``timeout`` seconds until no write is queued; return whether none is."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._unwritten, timeout)

    def close(self, timeout: float) -> bool:
        """`flush`, and end the thread; a thread that hangs in the store is left running."""
        end = time.monotonic() + timeout
        flushed = self.flush(timeout)
        self._thread.close(max(0.0, end - time.monotonic()))
        return flushed


_log = logging.getLogger(__name__)

# Host memory for blocks that wait for the store.
_QUEUE_BYTES = 256 << 20
_QUEUE_BLOCKS = 64
# Block keys that `Known` remembers: about 16 MB.
_REMEMBERED = 65_536
# Seconds for which a block is offered to a store that has no room, and between two attempts.
_ROOM_S = 1.0
_AGAIN_S = 0.01
# More tokens than any sequence has.
NEVER = 1 << 62


@dataclass(slots=True)
class Trail:
    """The progress of writing one answer's tokens to the store; positions are in tokens."""

    end: int | None
    """The end of the prompt, where its tail is written; None once the tail is queued."""
    limit: int = NEVER
    """Tokens from here on are not written."""
    held: int = NEVER
    """Tokens from here on are not written now: the answer may turn out to be never read again."""
    withheld: bool = False
    """Whether ``limit`` hides the answer; the store notes it for `KVStore.why`."""
    offered: int = 0
    """End of the full blocks that were handed over or are stored already."""
    resumed: int = 0
    """Position of the last snapshot that was handed over or is stored already."""
    next: int = 0
    """The number of computed tokens from which on there is a block or tail to write."""
    checkpoint: int = 0
    """The position of a checkpoint that was just left, to be written with its state; else 0."""
    exact: int | None = None
    """From this token on the KV is not exact, as it was loaded so, or is behind such; else None."""
    keys: list[bytes] = field(default_factory=list)
    """Block keys of the sequence's full blocks, as far as they were needed."""
    snapshots: list[SnapshotWrite] = field(default_factory=list)
    """Snapshots behind ``held``, in order, of a model whose states are gone when it goes on."""

    def fork(self) -> Trail:
        """Return a copy for a forked answer; the other one writes the snapshots held back."""
        return replace(self, keys=self.keys.copy(), snapshots=[])

    def extend_keys(self, sequence: Sequence, stop: int, block: int) -> None:
        """Add the keys of the blocks of ``block`` tokens up to token ``stop``, where one ends."""
        have = len(self.keys)
        if have * block < stop:
            tokens = sequence.tokens[have * block : stop].tobytes()
            self.keys += chain_keys(self._parent(sequence, have), tokens, block * TOKEN_BYTES)

    def tail_key(self, sequence: Sequence, start: int, end: int, block: int) -> bytes:
        """Return the key of the tail ``start`` … ``end - 1`` of ``sequence``."""
        tokens = sequence.tokens[start:end].tobytes()
        (key,) = chain_keys(self._parent(sequence, start // block), tokens, len(tokens))
        return key

    def _parent(self, sequence: Sequence, blocks: int) -> bytes:
        return self.keys[blocks - 1] if blocks else root_key(sequence.namespace)


class Known:
    """Keys of blocks that are stored or queued, which need not be copied from pages again.

    May be wrong either way: the store skips blocks it has, and the next lookup finds out about
    blocks it has lost. Thread safety: all methods.
    """

    def __init__(self) -> None:
        # When each block was last seen in the store, in monotonic seconds.
        self._keys: OrderedDict[bytes, float] = OrderedDict()
        self._under_way: set[bytes] = set()
        self._lock = threading.Lock()

    def __contains__(self, key: bytes) -> bool:
        with self._lock:
            return key in self._keys or key in self._under_way

    def offered(self, key: bytes) -> None:
        """Note a block that is queued for the store."""
        with self._lock:
            self._under_way.add(key)

    def arrived(self, key: bytes, *, stored: bool) -> None:
        """Note that the store has taken a queued block, or dropped it."""
        with self._lock:
            self._under_way.discard(key)
            self._keys.pop(key, None)
            if stored:
                self._note(key)

    def found(self, stored: list[bytes], *, missing: list[bytes], since: float) -> None:
        """Note the result of a lookup that began at ``since``, in monotonic seconds."""
        with self._lock:
            for key in missing:
                if self._keys.get(key, since) <= since:  # else it was stored after the lookup
                    self._keys.pop(key, None)
            for key in stored:  # after the missing: a tail may be in both lists
                self._note(key)

    def clear(self) -> None:
        """Forget stored blocks; queued ones stay known."""
        with self._lock:
            self._keys.clear()

    def _note(self, key: bytes) -> None:
        self._keys[key] = time.monotonic()
        self._keys.move_to_end(key)
        if len(self._keys) > _REMEMBERED:
            self._keys.popitem(last=False)


@dataclass(frozen=True, slots=True)
class _Write:
    """KV of ``tokens[start:]`` in page order, in ``block``; ``tokens`` is the whole prefix."""

    tokens: TokenArray
    start: int
    tenant: str
    key: bytes
    block: Tensor
    tail: bool
    exact: int | None


class Writes:
    """Hands full blocks of computed pages to a store, and tails at the ends of prompts and answers.

    The engine's thread copies pages to host memory, at most 256 MiB of it; a background thread
    brings them into the store's order and puts them. When the store is slower than the engine,
    blocks stay in their pages while their answer runs; those left at its end are not stored, and
    are counted in ``unkept_tokens``.

    Thread safety: `offer` and ``stats`` belong to the engine's thread; other methods to any.
    """

    def __init__(
        self, store: KVStore, tensors: PagedTensors, forms: Forms, stats: EngineStats
    ) -> None:
        self.known = Known()
        self._store = store
        self._tensors = tensors
        self._forms = forms
        self._stats = stats
        self._block = store.block_tokens
        pages = self._block // tensors.page_size
        count = max(2, min(_QUEUE_BLOCKS, _QUEUE_BYTES // (pages * tensors.page_bytes)))
        pinned = tensors.device.type == "cuda"
        self._buffers = Buffers(count, pages, tensors.page_bytes, pinned=pinned)
        self._queue = OffloadQueue(_log)
        self._patient = True  # whether to wait for room: not again until a put has succeeded

    def offer(
        self, trail: Trail, sequence: Sequence, computed: int, tenant: str, *, last: bool = False
    ) -> None:
        """Queue full blocks among the first ``computed`` tokens that were not queued before.

        Tails are queued, too: where the prompt ends, and at ``computed`` in the ``last`` call.
        Blocks for which no buffer is free are offered again by the next call.
        """
        grown = computed
        computed = min(computed, trail.limit, trail.held)
        stop = computed // self._block * self._block
        trail.extend_keys(sequence, stop, self._block)
        while trail.offered < stop:
            start = trail.offered
            if not self._hand_over(trail, sequence, start, start + self._block, tenant):
                break
            trail.offered += self._block
        trail.next = trail.offered + self._block
        if computed < grown:  # until there is more to decide about
            trail.next = max(trail.next, (grown // self._block + 1) * self._block)
        if trail.end is not None:
            if computed >= trail.end and self._offer_tail(trail, sequence, trail.end, tenant):
                trail.end = None
            else:
                trail.next = min(trail.next, trail.end)
        if last:
            if trail.offered < stop:
                self._stats.unkept_tokens += stop - trail.offered
                with suppress(IllegalStep):  # its owner has closed the store
                    self._store.unkept(sequence.tokens[:stop], trail.offered, tenant=tenant)
            self._offer_tail(trail, sequence, computed, tenant)

    def _offer_tail(self, trail: Trail, sequence: Sequence, end: int, tenant: str) -> bool:
        """Queue the tail: the tokens behind the last full block before ``end``.

        Returns False if it must be tried again.
        """
        start = end // self._block * self._block
        if end - start < self._tensors.page_size:
            return True  # less than a page is computed faster than it is read
        if start > trail.offered:
            return False  # a tail is found only behind the blocks before it
        return self._hand_over(trail, sequence, start, end, tenant)

    def _hand_over(
        self, trail: Trail, sequence: Sequence, start: int, stop: int, tenant: str
    ) -> bool:
        """Copy the pages and queue them for the store; False when no buffer is free."""
        if stop - start == self._block:
            key = trail.keys[start // self._block]
        else:
            key = trail.tail_key(sequence, start, stop, self._block)
        if key in self.known:
            return True
        buffer = self._buffers.take()
        if buffer is None:
            return False
        size = self._tensors.page_size
        pages = sequence.pages[start // size : -(-stop // size)]
        self._tensors.read(pages, out=buffer[: len(pages)])
        self.known.offered(key)
        tail = stop - start < self._block
        tokens = sequence.tokens[:stop].copy()
        write = _Write(tokens, start, tenant, key, buffer, tail, trail.exact)
        self._queue.submit(lambda: self._run(write))
        self._stats.kept_tokens += stop - start
        return True

    # --- the thread --------------------------------------------------------------------------

    def _run(self, write: _Write) -> None:
        stored = False
        try:
            stored = self._put(write)
        except Exception:  # noqa: BLE001 - a store that fails costs a write; the next may succeed
            _log.exception("%d tokens were not stored", len(write.tokens) - write.start)
        self.known.arrived(write.key, stored=stored)
        self._buffers.give(write.block)

    def _put(self, write: _Write) -> bool:
        """Put a block, waiting up to `_ROOM_S` seconds for slower tiers to make room.

        No step waits for this thread; later blocks stay in their pages meanwhile.
        """
        count = len(write.tokens) - write.start
        pages = -(-count // self._tensors.page_size)
        kv = self._forms.by_token(write.block[:pages], count)
        end = time.monotonic() + (_ROOM_S if self._patient else 0.0)
        while True:
            put = self._store.put(
                write.tokens, kv, start=write.start, tail=write.tail, exact=write.exact,
                tenant=write.tenant,
            )  # fmt: skip
            self._patient = not put.dropped
            if not put.dropped or time.monotonic() > end:
                return not put.dropped
            time.sleep(_AGAIN_S)

    # --- the end -----------------------------------------------------------------------------

    def later(self, call: Callable[[], None], nbytes: int) -> None:
        """Call the store in the thread, behind all blocks that are queued now."""
        self._queue.submit_some(call, nbytes)

    def flush(self, timeout: float) -> bool:
        """Wait ``timeout`` seconds until no block is queued; return whether none is."""
        return self._queue.flush(timeout)

    def close(self, timeout: float) -> bool:
        """`flush`, and end the thread; a thread that hangs in the store is left running."""
        return self._queue.close(timeout)


def block_keys(namespace: Namespace, tokens: TokenArray, block: int) -> list[bytes]:
    """Return the keys of all blocks of ``tokens``; the last block may be shorter than ``block``."""
    root = root_key(namespace)
    keys = chain_keys(root, tokens.tobytes(), block * TOKEN_BYTES)
    rest = len(tokens) % block
    if rest:
        parent = keys[-1] if keys else root
        keys += chain_keys(parent, tokens[-rest:].tobytes(), rest * TOKEN_BYTES)
    return keys
