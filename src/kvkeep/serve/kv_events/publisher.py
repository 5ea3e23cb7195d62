"""`EventPublisher`: tells over ZeroMQ what a cache stores and forgets."""

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
from kvkeep.core.events import Evicted, Stored
from kvkeep.serve.kv_events.cache_mirror import CacheMirror
from kvkeep.serve.kv_events.source import check_endpoint
from kvkeep.serve.kv_events.wire import (
    END,
    SEQ_BYTES,
    SNAPSHOT,
    AllBlocksCleared,
    Batch,
    BlockStored,
    encode,
    seq_frame,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from typing import Protocol

    from kvkeep.core.events import Event, Hook
    from kvkeep.core.keys import Namespace
    from kvkeep.serve.kv_events.cache_mirror import StoredRun
    from kvkeep.serve.kv_events.wire import KVEvent

    class Cache(Protocol):
        """What is told of: `kvkeep.core.cache.PagedCache` is one."""

        page_size: int

        def subscribe(self, hook: Hook) -> Callable[[], None]: ...
        def namespaces(self) -> Mapping[Namespace, int]: ...
        def runs(self, namespace: Namespace) -> Iterator[StoredRun]: ...


__all__ = ["EventPublisher", "PublisherStats"]

log = logging.getLogger("kvkeep.feed")

_BATCH_EVENTS = 512
_BATCH_BLOCKS = 8192
_BATCH_TOKENS = 1 << 18
# What may wait or be kept, besides the number of it.
_QUEUE_TOKENS = 64 << 20  # 256 MiB
_HISTORY_BYTES = 64 << 20
# Batches for each subscriber that does not read; beyond, it misses some, sees that and asks again.
_PUB_QUEUE = 1_000
_REPLAY_QUEUE = 20_000
_CLOSE_S = 5.0


@dataclass(slots=True)
class PublisherStats:
    """What a publisher has done: batches and events told, and what it could not take.

    ``dropped`` events found the queue full; each time, what is told was compared with the cache
    afterwards (``resyncs``), so that nobody is left with a wrong picture.
    """

    batches: int = 0
    events: int = 0
    dropped: int = 0
    resyncs: int = 0
    replays: int = 0
    snapshots: int = 0
    refused: int = 0
    """Requests on the replay socket that were none."""

    def as_dict(self) -> dict[str, int]:
        """By name."""
        return asdict(self)


class EventPublisher:
    """Publishes one cache's blocks at ``endpoint``, as vLLM does, from a thread of its own.

    ``endpoint`` and ``replay`` are bound (``tcp://127.0.0.1:5557``; port 0: a free one; the
    attributes have the real one). At ``replay`` the last ``history`` batches (of 64 MiB at
    most) can be asked for, and a snapshot. ``topic`` stands before each message, ``rank`` in it,
    ``medium`` is the tier.

    The engine never waits: the cache's hook appends to a queue of at most ``queue`` events, of 64
    million tokens at most, and returns. When that is full events are dropped and counted, and the
    thread compares its picture with the cache as soon as it comes to it.

    What is published shows the tokens of prompts to whoever can connect; salts are digests. Raises
    `InvalidValue` for an endpoint that cannot be bound.

    Thread safety: `close` may be called from anywhere, once or more often.
    """

    def __init__(
        self,
        cache: Cache,
        endpoint: str,
        replay: str | None = None,
        *,
        topic: str = "kv",
        rank: int | None = None,
        medium: str = "GPU",
        history: int = 10_000,
        queue: int = 100_000,
    ) -> None:
        self._most_history = whole("history", history, 0)
        self._most = whole("queue", queue, 1)
        self.stats = PublisherStats()
        self._cache = cache
        self._journal = CacheMirror(cache.page_size, medium)
        self._topic = topic.encode()
        self._rank = rank
        self._history: deque[tuple[int, bytes]] = deque()
        self._history_bytes = 0
        self._queue: deque[Stored | Evicted] = deque()
        # Tokens and pages of all events that came in, and that went out: each has one writer.
        self._came = 0
        self._went = 0
        self._lost = False
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
        # A byte here wakes the thread; ZeroMQ's own sockets are not for several threads.
        self._bell, self._ear = socket.socketpair()
        self._bell.setblocking(False)
        self._ear.setblocking(False)
        self._end = cache.subscribe(self._take)
        self._thread = threading.Thread(target=self._run, name="kvkeep events", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Publish what is still waiting, and end."""
        self._end()
        self._closing = True
        self._ring()
        self._thread.join(_CLOSE_S)

    def _take(self, event: Event) -> None:
        """The cache's hook: under its lock, so nothing here may wait."""
        if not isinstance(event, Stored | Evicted):
            return
        size = _size(event)
        if len(self._queue) >= self._most or self._came - self._went + size > _QUEUE_TOKENS:
            self.stats.dropped += 1
            self._lost = True
            self._ring()  # an event too large for an empty queue finds the thread asleep
            return
        first = not self._queue
        self._came += size
        self._queue.append(event)
        if first:
            self._ring()

    def _ring(self) -> None:
        # Full: it is awake already. Closed: it has ended.
        with contextlib.suppress(OSError):
            self._bell.send(b"!")

    # --- the thread --------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            # Whoever listened to the one before learns that nothing of that is left.
            self._publish([AllBlocksCleared()])
            self._resync()
            poller = zmq.Poller()
            poller.register(self._ear, zmq.POLLIN)
            if self._router is not None:
                poller.register(self._router, zmq.POLLIN)
            while not self._closing:
                for ready, _ in poller.poll():
                    if ready is self._router:
                        self._answer()
                    else:
                        self._hush()
                self._drain()
            self._drain()
        except Exception:
            log.exception("the publisher of KV events ends; serving goes on without")
        finally:
            self._end()
            self._context.destroy(linger=200)
            self._bell.close()
            self._ear.close()

    def _hush(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while len(self._ear.recv(4096)) == 4096:
                pass

    def _drain(self) -> None:
        for events in _in_batches(self._waiting()):
            self._publish(events)
        if self._lost:
            self._resync()

    def _waiting(self) -> Iterator[KVEvent]:
        """What to tell of all that waits."""
        while self._queue:
            event = self._queue.popleft()
            self._went += _size(event)
            yield from self._journal.take(event)

    def _resync(self) -> None:
        """Compare with the cache itself.

        What happens meanwhile is queued and taken after; events that the runs show already change
        nothing then.
        """
        if self._lost:
            self._lost = False
            self.stats.resyncs += 1
        runs = ((space, self._cache.runs(space)) for space in self._cache.namespaces())
        for some in _in_batches(self._journal.reconcile(runs)):
            self._publish(some)

    def _publish(self, events: list[KVEvent]) -> None:
        if not events:
            return
        self._seq += 1
        payload = self._payload(events)
        self._pub.send_multipart((self._topic, seq_frame(self._seq), payload))
        self._history.append((self._seq, payload))
        self._history_bytes += len(payload)
        while self._history and (
            len(self._history) > self._most_history or self._history_bytes > _HISTORY_BYTES
        ):
            self._history_bytes -= len(self._history.popleft()[1])
        self.stats.batches += 1
        self.stats.events += len(events)

    def _payload(self, events: list[KVEvent]) -> bytes:
        return encode(Batch(time.time(), events, self._rank))

    def _answer(self) -> None:
        """One request on the replay socket; one that is none is not answered."""
        assert self._router is not None
        frames = self._router.recv_multipart()
        if len(frames) != 3 or frames[1] or len(frames[2]) != SEQ_BYTES:
            self.stats.refused += 1
            return
        who, start = frames[0], int.from_bytes(frames[2], "big")
        if start == SNAPSHOT:
            self.stats.snapshots += 1
            self._send(who, self._seq, self._payload([AllBlocksCleared()]))
            for events in _in_batches(self._journal.snapshot()):
                self._send(who, self._seq, self._payload(events))
        else:
            self.stats.replays += 1
            first = max(0, len(self._history) - max(0, self._seq + 1 - start))
            for seq, payload in islice(self._history, first, None):
                self._send(who, seq, payload)
        self._router.send_multipart((who, b"", b"", END, b""))

    def _send(self, who: bytes, seq: int, payload: bytes) -> None:
        assert self._router is not None
        self._router.send_multipart((who, b"", self._topic, seq_frame(seq), payload))


def _in_batches(events: Iterable[KVEvent]) -> Iterator[list[KVEvent]]:
    """Events in batches that are not too large for whoever reads them."""
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


def _size(event: Stored | Evicted) -> int:
    """How much an event keeps in memory, in numbers of four bytes."""
    return len(event.pages) + (len(event.tokens) if isinstance(event, Stored) else 0)


def _bound(
    context: zmq.Context[zmq.Socket[bytes]], kind: int, endpoint: str, queue: int
) -> tuple[zmq.Socket[bytes], str]:
    check_endpoint(endpoint)
    made = context.socket(kind)
    made.set_hwm(queue)
    made.setsockopt(zmq.MAXMSGSIZE, 1 << 16)  # requests have some bytes; it bounds what comes in
    try:
        made.bind(endpoint)
    except zmq.ZMQError as error:
        raise InvalidValue(
            f"cannot publish KV events at {endpoint!r}: {error}; an endpoint is tcp://HOST:PORT "
            "or ipc:///PATH, and nobody else's"
        ) from error
    return made, made.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()  # type: ignore[union-attr]
