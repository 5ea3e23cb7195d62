"""`Writes`: computed pages on their way to a store, behind the engine's back."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import TYPE_CHECKING

from kvkeep.core.keys import chain_keys, root_key
from kvkeep.serve.engine.offload.forms import Buffers

if TYPE_CHECKING:
    from torch import Tensor

    from kvkeep.core.cache import Sequence
    from kvkeep.core.keys import Namespace
    from kvkeep.core.pages.tensors import PagedTensors
    from kvkeep.core.tokens import TokenArray
    from kvkeep.serve.engine.offload.forms import Forms
    from kvkeep.serve.engine.stats import EngineStats
    from kvkeep.store import KVStore

__all__ = ["Known", "Trail", "Writes", "block_keys"]

_log = logging.getLogger(__name__)

# What may wait for the store, in host memory.
_QUEUE_BYTES = 256 << 20
_QUEUE_BLOCKS = 64
# Of so many blocks it is remembered that they were offered: about 16 MB.
_REMEMBERED = 65_536
_TOKEN_BYTES = 4
# How long a block waits for room in the store, and how often it asks.
_ROOM_S = 1.0
_AGAIN_S = 0.01
# Further than any sequence is long.
_NEVER = 1 << 62


@dataclass(slots=True)
class Trail:
    """How far one answer's tokens were offered to the store."""

    end: int | None
    """Where its prompt ends: there a tail is offered, so that the same prompt is found whole."""
    limit: int = _NEVER
    """Tokens beyond this are not offered."""
    withheld: bool = False
    """These are an answer that is not to be stored: the store is told, for those who ask why."""
    offered: int = 0
    """Full blocks up to here were offered, or are stored anyway; in tokens."""
    next: int = 0
    """Nothing is to be done before so many tokens are computed."""
    keys: list[bytes] = field(default_factory=list)

    def fork(self) -> Trail:
        """That of an answer that goes on from here."""
        return replace(self, keys=self.keys.copy())


class Known:
    """Block keys that are stored, or on their way there: their pages need not be read again.

    It may err on either side: the store skips what it has, and what it has lost is noticed by the
    next lookup. Thread safety: all.
    """

    def __init__(self) -> None:
        # When each was last seen to be there.
        self._keys: OrderedDict[bytes, float] = OrderedDict()
        self._on_their_way: set[bytes] = set()
        self._lock = threading.Lock()

    def __contains__(self, key: bytes) -> bool:
        with self._lock:
            return key in self._keys or key in self._on_their_way

    def offered(self, key: bytes) -> None:
        """It is on its way."""
        with self._lock:
            self._on_their_way.add(key)

    def arrived(self, key: bytes, *, stored: bool) -> None:
        """The store has taken it, or has dropped it."""
        with self._lock:
            self._on_their_way.discard(key)
            self._keys.pop(key, None)
            if stored:
                self._note(key)

    def found(self, stored: list[bytes], *, missing: list[bytes], asked: float) -> None:
        """What a lookup that began ``asked`` (monotonic seconds) says is there, and what is not."""
        with self._lock:
            for key in missing:
                if self._keys.get(key, asked) <= asked:  # else it has arrived since
                    self._keys.pop(key, None)
            for key in stored:  # the last may be a tail that stands among both
                self._note(key)

    def clear(self) -> None:
        """Nothing is stored any more but what is on its way."""
        with self._lock:
            self._keys.clear()

    def _note(self, key: bytes) -> None:
        self._keys[key] = time.monotonic()
        self._keys.move_to_end(key)
        if len(self._keys) > _REMEMBERED:
            self._keys.popitem(last=False)


@dataclass(frozen=True, slots=True)
class _Write:
    """Tokens ``start`` … ``len(tokens) - 1``, whose pages lie in ``block``."""

    tokens: TokenArray
    start: int
    tenant: str
    key: bytes
    block: Tensor
    tail: bool


class Writes:
    """Hands full blocks of computed pages to a store, and shorter tails at the ends.

    The engine's thread reads the pages, one copy, into memory of which there are at most 256 MiB;
    a thread of its own puts them in the store's order and gives them to it. When the store is
    slower than the engine, blocks wait in their pages for as long as their answer runs; what is
    left then is not stored, and counted.

    Thread safety: `offer` is the engine's thread's, and so is ``stats``; the rest is anybody's.
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
        self._queue: SimpleQueue[_Write | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._patient = True
        self._unwritten = 0
        self._changed = threading.Condition()

    def offer(
        self, trail: Trail, sequence: Sequence, computed: int, tenant: str, *, last: bool = False
    ) -> None:
        """Hand over the full blocks among the first ``computed`` tokens that were not yet.

        With the ``last`` call the tail goes too; so it does where the prompt ends. Blocks for
        which there is no room now are tried again with the next call.
        """
        if last and trail.withheld and computed > trail.limit:
            begin = trail.limit // self._block * self._block
            self._store.unkept(sequence.tokens[:computed], begin, tenant=tenant, answer=True)
        computed = min(computed, trail.limit)
        stop = computed // self._block * self._block
        self._extend(trail, sequence, stop)
        while trail.offered < stop:
            start = trail.offered
            key = trail.keys[start // self._block]
            if not self._hand_over(sequence, start, start + self._block, tenant, key):
                break
            trail.offered += self._block
        trail.next = trail.offered + self._block
        if trail.end is not None:
            if computed >= trail.end and self._tail(trail, sequence, trail.end, tenant):
                trail.end = None
            else:
                trail.next = min(trail.next, trail.end)
        if last:
            if trail.offered < stop:
                self._stats.unkept_tokens += stop - trail.offered
                self._store.unkept(sequence.tokens[:stop], trail.offered, tenant=tenant)
            self._tail(trail, sequence, computed, tenant)

    def _tail(self, trail: Trail, sequence: Sequence, end: int, tenant: str) -> bool:
        """Hand over what lies behind the last full block before ``end``; whether that is done."""
        start = end // self._block * self._block
        if end - start < self._tensors.page_size:
            return True  # computed sooner than it is read
        if start > trail.offered:
            return False  # found only behind the blocks before it
        parent = _parent(trail, sequence.namespace, start // self._block)
        tokens = sequence.tokens[start:end].tobytes()
        (key,) = chain_keys(parent, tokens, len(tokens))
        return self._hand_over(sequence, start, end, tenant, key)

    def _extend(self, trail: Trail, sequence: Sequence, stop: int) -> None:
        have = len(trail.keys)
        if have * self._block < stop:
            tokens = sequence.tokens[have * self._block : stop].tobytes()
            parent = _parent(trail, sequence.namespace, have)
            trail.keys += chain_keys(parent, tokens, self._block * _TOKEN_BYTES)

    def _hand_over(
        self, sequence: Sequence, start: int, stop: int, tenant: str, key: bytes
    ) -> bool:
        """Read the pages, and let the thread do the rest; False when there is no room."""
        if key in self.known:
            return True
        buffer = self._buffers.take()
        if buffer is None:
            return False
        size = self._tensors.page_size
        pages = sequence.pages[start // size : -(-stop // size)]
        self._tensors.read(pages, out=buffer[: len(pages)])
        self.known.offered(key)
        with self._changed:
            self._unwritten += 1
        tail = stop - start < self._block
        self._queue.put(_Write(sequence.tokens[:stop].copy(), start, tenant, key, buffer, tail))
        self._stats.kept_tokens += stop - start
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kvkeep writes", daemon=True)
            self._thread.start()
        return True

    # --- the thread --------------------------------------------------------------------------

    def _run(self) -> None:
        while (write := self._queue.get()) is not None:
            stored = False
            try:
                stored = self._put(write)
            except Exception:  # noqa: BLE001 - whatever it is, a later request offers it again
                _log.exception("%d tokens were not stored", len(write.tokens) - write.start)
            self.known.arrived(write.key, stored=stored)
            self._buffers.give(write.block)
            with self._changed:
                self._unwritten -= 1
                self._changed.notify_all()

    def _put(self, write: _Write) -> bool:
        """Whether the store has taken it, maybe not at once: slower tiers have to make room.

        Who waits here waits for no step, and later blocks stay in their pages meanwhile.
        """
        count = len(write.tokens) - write.start
        pages = -(-count // self._tensors.page_size)
        kv = self._forms.by_token(write.block[:pages], count)
        end = time.monotonic() + (_ROOM_S if self._patient else 0.0)
        while True:
            put = self._store.put(
                write.tokens, kv, start=write.start, tail=write.tail, tenant=write.tenant
            )
            # Once in vain is enough, until there is room again.
            self._patient = not put.dropped
            if not put.dropped or time.monotonic() > end:
                return not put.dropped
            time.sleep(_AGAIN_S)

    # --- the end -----------------------------------------------------------------------------

    def flush(self, timeout: float) -> bool:
        """Wait until the store has taken all that was handed over; False when it has not."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._unwritten, timeout)

    def close(self, timeout: float) -> bool:
        """`flush`, and end the thread, which is left to itself where it hangs."""
        end = time.monotonic() + timeout
        flushed = self.flush(timeout)
        self._queue.put(None)
        if self._thread is not None:
            self._thread.join(max(0.0, end - time.monotonic()))
        return flushed


def _parent(trail: Trail, namespace: Namespace, blocks: int) -> bytes:
    return trail.keys[blocks - 1] if blocks else root_key(namespace)


def block_keys(namespace: Namespace, tokens: TokenArray, block: int) -> list[bytes]:
    """Keys of the blocks of ``tokens``, the last of which may be shorter."""
    root = root_key(namespace)
    keys = chain_keys(root, tokens.tobytes(), block * _TOKEN_BYTES)
    rest = len(tokens) % block
    if rest:
        parent = keys[-1] if keys else root
        keys += chain_keys(parent, tokens[-rest:].tobytes(), rest * _TOKEN_BYTES)
    return keys
