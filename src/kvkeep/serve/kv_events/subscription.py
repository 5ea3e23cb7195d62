"""`Subscription`: sockets and state of one followed publisher, for the reader's thread alone."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

import zmq
from zmq.utils.monitor import recv_monitor_message

from kvkeep.core.errors import InvalidValue
from kvkeep.serve.kv_events.source import ReaderStats, Stream
from kvkeep.serve.kv_events.wire import MOST_BYTES, SNAPSHOT, seq_frame

if TYPE_CHECKING:
    from kvkeep.serve.kv_events.source import Source

    Context = zmq.Context[zmq.Socket[bytes]]

__all__ = ["ReplayRequest", "Subscription"]

# Messages queued in this process per socket. More wait at the publisher, which has its own
# bound; messages that it drops show up as a gap and are replayed.
_QUEUE = 64
_MONITORED = zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED


class ReplayRequest(Enum):
    """The batches that a replay request covers."""

    SINCE = "since"  # the last batch taken, and all after it
    SNAPSHOT = "snapshot"
    ALL = "all"  # every batch that the publisher still has


class Subscription:
    """A subscription to one source, and at most one replay request in flight."""

    def __init__(self, context: Context, source: Source) -> None:
        self.source = source
        self.stream = Stream()
        self.stats = ReaderStats()
        self.ranks: set[int] = set()  # ranks whose events were delivered
        self.next_check = 0.0
        self.ended = False  # set by any thread: nothing more is delivered
        # The replay request in flight:
        self.requested: ReplayRequest | None = None
        self.deadline = 0.0
        self.after_gap = False  # whether it was sent because batches are missing
        self.answered = False  # whether any batch has arrived
        self.verified = False  # whether the last batch taken was among them, unchanged
        self.progress = False  # whether any of them was new
        self.timeouts = 0  # of replay requests in a row
        self._context = context
        self.dealer: zmq.Socket[bytes] | None = None
        self.socket = context.socket(zmq.SUB)
        self.socket.set_hwm(_QUEUE)
        self.socket.setsockopt(zmq.MAXMSGSIZE, MOST_BYTES)  # disconnects a sender of larger ones
        self.socket.setsockopt(zmq.RECONNECT_IVL, 100)
        self.socket.setsockopt(zmq.RECONNECT_IVL_MAX, 3000)
        self.socket.setsockopt(zmq.HEARTBEAT_IVL, 5000)
        self.socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 15_000)
        self.monitor = self.socket.get_monitor_socket(_MONITORED)
        self.socket.setsockopt(zmq.SUBSCRIBE, b"")
        try:
            _connect(self.socket, source.endpoint)
        except InvalidValue:
            self.close()
            raise

    def reconnected(self) -> bool:
        """Whether the socket has (re)connected since the last call.

        ZeroMQ reports a connection before its first message can be read.
        """
        found = False
        while self.monitor.poll(0):
            event = recv_monitor_message(self.monitor)["event"]
            self.stats.connected = event == zmq.Event.HANDSHAKE_SUCCEEDED
            found = found or self.stats.connected
        return found

    def request_replay(
        self, what: ReplayRequest, now: float, timeout: float, *, after_gap: bool
    ) -> None:
        """Send a replay request, on a new socket: late replies to earlier ones are dropped."""
        self.end_replay()
        assert self.source.replay is not None
        self.dealer = self._context.socket(zmq.DEALER)
        self.dealer.set_hwm(_QUEUE)
        self.dealer.setsockopt(zmq.LINGER, 0)
        self.dealer.setsockopt(zmq.MAXMSGSIZE, MOST_BYTES)
        _connect(self.dealer, self.source.replay)
        start = {
            ReplayRequest.SINCE: self.stream.taken or 0,
            ReplayRequest.SNAPSHOT: SNAPSHOT,
            ReplayRequest.ALL: 0,
        }[what]
        self.dealer.send_multipart((b"", seq_frame(start)))
        self.requested = what
        self.answered = self.verified = self.progress = False
        self.after_gap = after_gap
        self.deadline = now + timeout

    def end_replay(self) -> None:
        """Drop the replay request in flight, if any."""
        self.requested = None
        if self.dealer is not None:
            self.dealer.close(linger=0)
            self.dealer = None

    def close(self) -> None:
        """Close all sockets."""
        self.end_replay()
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger=0)


def _connect(to: zmq.Socket[bytes], endpoint: str) -> None:
    try:
        to.connect(endpoint)
    except zmq.ZMQError as error:
        raise InvalidValue(
            f"cannot read KV events from {endpoint!r}: {error}; an endpoint is tcp://HOST:PORT or "
            "ipc:///PATH"
        ) from error
