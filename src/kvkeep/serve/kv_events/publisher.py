"""`EventPublisher`: publishes over ZeroMQ which blocks a cache stores and removes."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections import deque
from dataclasses import asdict, dataclass
from itertools import islice
from typing import TYPE_CHECKING

import zmq

from kvkeep.core.errors import InvalidValue, whole
from kvkeep.core.events import Evicted, GroupsStored, Stored
from kvkeep.serve.kv_events.blocks import CacheBlocks
from kvkeep.serve.kv_events.wire import (
    END,
    SEQ_BYTES,
    SNAPSHOT,
    AllBlocksCleared,
    Batch,
    BlockStored,
    check_endpoint,
    encode,
    seq_frame,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from typing import Protocol

    from kvkeep.core.events import Event, GroupsLost, Hook
    from kvkeep.core.keys import Namespace
    from kvkeep.serve.kv_events.blocks import StoredRun
    from kvkeep.serve.kv_events.wire import KVEvent

    class Cache(Protocol):
        """A cache to publish, such as `kvkeep.core.cache.PagedCache`."""

        page_size: int

        @property
        def groups(self) -> object | None: ...
        def subscribe(self, hook: Hook) -> Callable[[], None]: ...
        def namespaces(self) -> Mapping[Namespace, int]: ...
        def runs(self, namespace: Namespace) -> Iterator[StoredRun]: ...


__all__ = ["EventPublisher", "PublisherStats"]

log = logging.getLogger("kvkeep.feed")

_BATCH_EVENTS = 512
_BATCH_BLOCKS = 8192
_BATCH_TOKENS = 1 << 18
# Bounds on the queue and the history besides their number of entries.
_QUEUE_TOKENS = 64 << 20  # 256 MiB
_HISTORY_BYTES = 64 << 20
# Messages queued per slow subscriber. Beyond, ZeroMQ drops some; the reader sees a gap and replays.
_PUB_QUEUE = 1_000
_REPLAY_QUEUE = 20_000
_CLOSE_S = 5.0
_SNAPSHOT_S = 1.0  # from one walk over the cache for snapshots to the next
_TOPIC = b"kv"


@dataclass(slots=True)
class PublisherStats:
    """Counters of a publisher.

    ``dropped`` events found the queue full. After each drop what was announced is compared with the
    cache (``resyncs``) and the difference published, so no reader stays wrong.
    """

    batches: int = 0
    events: int = 0
    dropped: int = 0
    resyncs: int = 0
    replays: int = 0
    snapshots: int = 0
    refused: int = 0
    """Malformed requests on the replay socket."""

    def as_dict(self) -> dict[str, int]:
        """Return the counters by name."""
        return asdict(self)


class EventPublisher:
    """Publishes one cache's blocks at ``endpoint``, in vLLM's format, from its own thread.

    ``endpoint`` and ``replay`` are addresses to bind, such as ``tcp://127.0.0.1:5557``; port 0
    picks a free port, and the attributes have the actual address. The replay socket serves the
    last ``history`` batches (at most 64 MiB), and snapshots. Messages have the
    topic "kv", and events the tier "GPU".

    The engine never waits: the cache's hook appends to a queue of at most ``queue`` events and 64
    million tokens. When the queue is full, events are dropped and counted, and the thread compares
    what it has announced with the cache as soon as it can. For that, and for snapshots, it reads
    the runs of the cache under the cache's lock, some 10 µs each: for snapshots once a second at
    most, for all that ask meanwhile.

    Events show the tokens of prompts to every client that can connect; salts are digests. Raises
    `InvalidValue` for an endpoint that cannot be bound.

    Thread safety: `close` may be called from any thread, and repeatedly.
    """

    def __init__(
        self,
        cache: Cache,
        endpoint: str,
        replay: str | None = None,
        *,
        history: int = 10_000,
        queue: int = 100_000,
    ) -> None:
        self._most_history = whole("history", history, 0)
        self._most = whole("queue", queue, 1)
        self.stats = PublisherStats()
        self._cache = cache
        self._blocks = self._new_blocks()
        self._asking: list[bytes] = []  # peers that wait for a snapshot
        self._next_snapshot = 0.0
        self._history: deque[tuple[int, bytes]] = deque()
        self._history_bytes = 0
        self._queue: deque[Stored | GroupsStored | Evicted] = deque()
        # Pages and tokens of all events queued and taken, since the start. Each has one writer.
        self._enqueued = 0
        self._dequeued = 0
        self._resync_due = False
        self._seq = -1
        self._closing = False
        self._context = zmq.Context()
        try:
            self._pub, self.endpoint = _bound(self._context, zmq.PUB, endpoint, _PUB_QUEUE)
            self._router: zmq.Socket[bytes] | None = None
            self.replay: str | None = None
            if replay is not None:
                self._router, self.replay = _bound(self._context, zmq.ROUTER, replay, _REPLAY_QUEUE)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        # A byte on this pair wakes the thread: ZeroMQ sockets belong to one thread each.
        self._wake_send, self._wake_recv = socket.socketpair()
        self._wake_send.setblocking(False)
        self._wake_recv.setblocking(False)
        self._unsubscribe = cache.subscribe(self._on_event)
        self._thread = threading.Thread(target=self._run, name="kvkeep events", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Publish the queued events, then stop."""
        self._unsubscribe()
        self._closing = True
        self._wake()
        self._thread.join(_CLOSE_S)

    def _on_event(self, event: Event) -> None:
        """Queue an event. Runs under the cache's lock, so it must not wait."""
        if not isinstance(event, Stored | GroupsStored | Evicted):
            return
        size = _size(event)
        if len(self._queue) >= self._most or self._enqueued - self._dequeued + size > _QUEUE_TOKENS:
            self.stats.dropped += 1
            self._resync_due = True
            self._wake()  # with an empty queue, no earlier event has woken the thread
            return
        first = not self._queue
        self._enqueued += size
        self._queue.append(event)
        if first:
            self._wake()

    def _wake(self) -> None:
        # An error means that the pair is full, so the thread is awake; or closed, so it has ended.
        with contextlib.suppress(OSError):
            self._wake_send.send(b"!")

    # --- the thread --------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            # Readers of an earlier process at this endpoint drop the blocks that it published.
            self._publish([AllBlocksCleared()])
            self._resync()
            poller = zmq.Poller()
            poller.register(self._wake_recv, zmq.POLLIN)
            if self._router is not None:
                poller.register(self._router, zmq.POLLIN)
            while not self._closing:
                wait_s = max(0.0, self._next_snapshot - time.monotonic())
                for ready, _ in poller.poll(int(wait_s * 1000) + 1 if self._asking else None):
                    if ready is self._router:
                        self._serve_replay()
                    else:
                        self._clear_wakeups()
                self._drain()
                if self._asking and time.monotonic() >= self._next_snapshot:
                    self._send_snapshot()
            self._drain()
        except Exception:
            log.exception("the publisher of KV events has ended; the cache goes on without it")
        finally:
            self._unsubscribe()
            self._context.destroy(linger=200)
            self._wake_send.close()
            self._wake_recv.close()

    def _clear_wakeups(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while len(self._wake_recv.recv(4096)) == 4096:
                pass

    def _drain(self) -> None:
        for events in _in_batches(self._queued()):
            self._publish(events)
        if self._resync_due:
            self._resync()

    def _queued(self) -> Iterator[KVEvent]:
        """Yield the KV events of all queued events."""
        while self._queue:
            event = self._queue.popleft()
            self._dequeued += _size(event)
            yield from self._blocks.take(event)

    def _resync(self) -> list[tuple[Namespace, list[StoredRun]]]:
        """Publish the differences between what was announced and the cache; return its runs.

        Cache events queued meanwhile are applied afterwards; those already visible in the cache's
        runs change nothing.
        """
        if self._resync_due:
            self._resync_due = False
            self.stats.resyncs += 1
        cache = self._cache
        spaces = [(space, list(cache.runs(space))) for space in cache.namespaces()]
        for some in _in_batches(self._blocks.reconcile(spaces)):
            self._publish(some)
        return spaces

    def _new_blocks(self) -> CacheBlocks:
        return CacheBlocks(self._cache.page_size, groups=self._cache.groups is not None)

    def _publish(self, events: list[KVEvent]) -> None:
        if not events:
            return
        self._seq += 1
        payload = self._payload(events)
        self._pub.send_multipart((_TOPIC, seq_frame(self._seq), payload))
        self._history.append((self._seq, payload))
        self._history_bytes += len(payload)
        while self._history and (
            len(self._history) > self._most_history or self._history_bytes > _HISTORY_BYTES
        ):
            self._history_bytes -= len(self._history.popleft()[1])
        self.stats.batches += 1
        self.stats.events += len(events)

    def _payload(self, events: list[KVEvent]) -> bytes:
        return encode(Batch(time.time(), events))

    def _serve_replay(self) -> None:
        """Reply to one request on the replay socket; a malformed one gets no reply."""
        assert self._router is not None
        frames = self._router.recv_multipart()
        if len(frames) != 3 or frames[1] or len(frames[2]) != SEQ_BYTES:
            self.stats.refused += 1
            return
        peer, start = frames[0], int.from_bytes(frames[2], "big")
        if start == SNAPSHOT:
            if peer not in self._asking:
                self._asking.append(peer)
            return
        self.stats.replays += 1
        first = max(0, len(self._history) - max(0, self._seq + 1 - start))
        self._reply(peer, islice(self._history, first, None))

    def _send_snapshot(self) -> None:
        """Send all cached blocks to every reader that asked, under the last batch's number."""
        begun = time.monotonic()
        spaces = self._resync()
        events = [AllBlocksCleared(), *self._new_blocks().reconcile(spaces)]
        batches = [(self._seq, self._payload(some)) for some in _in_batches(events)]
        for peer in self._asking:
            self.stats.snapshots += 1
            self._reply(peer, batches)
        self._asking.clear()
        self._next_snapshot = begun + _SNAPSHOT_S

    def _reply(self, peer: bytes, batches: Iterable[tuple[int, bytes]]) -> None:
        assert self._router is not None
        for seq, payload in batches:
            self._router.send_multipart((peer, b"", _TOPIC, seq_frame(seq), payload))
        self._router.send_multipart((peer, b"", b"", END, b""))


def _in_batches(events: Iterable[KVEvent]) -> Iterator[list[KVEvent]]:
    """Group events into batches of bounded size."""
    some: list[KVEvent] = []
    blocks = tokens = 0
    for event in events:
        some.append(event)
        blocks += 0 if isinstance(event, AllBlocksCleared) else len(event.block_hashes)
        tokens += len(event.token_ids) if isinstance(event, BlockStored) else 0
        if len(some) >= _BATCH_EVENTS or blocks >= _BATCH_BLOCKS or tokens >= _BATCH_TOKENS:
            yield some
            some, blocks, tokens = [], 0, 0
    if some:
        yield some


def _size(event: Stored | GroupsStored | Evicted) -> int:
    """Memory of a queued event, in int32 numbers."""
    if isinstance(event, Stored):
        return len(event.pages) + len(event.tokens)
    if isinstance(event, GroupsStored):
        return _beside(event)
    return len(event.pages) + (0 if event.groups is None else _beside(event.groups))


def _beside(groups: GroupsStored | GroupsLost) -> int:
    return sum(map(len, groups.rows)) + 16 * len(groups.checkpoints)


def _bound(
    context: zmq.Context[zmq.Socket[bytes]], kind: int, endpoint: str, queue: int
) -> tuple[zmq.Socket[bytes], str]:
    check_endpoint(endpoint)
    made = context.socket(kind)
    made.set_hwm(queue)
    made.setsockopt(zmq.MAXMSGSIZE, 1 << 16)  # bounds what peers send; requests have a few bytes
    try:
        made.bind(endpoint)
    except zmq.ZMQError as error:
        raise InvalidValue(
            f"cannot publish KV events at {endpoint!r}: {error}; an endpoint is tcp://HOST:PORT "
            "or ipc:///PATH, and not in use"
        ) from error
    return made, made.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()  # type: ignore[union-attr]
