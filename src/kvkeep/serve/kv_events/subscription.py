"""`Subscription`: the sockets of one source and its state; used by the reader's thread alone."""

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

# Messages that wait here to be read. The others wait at the publisher, which has its own bound;
# what it drops then is seen as a gap and asked for again.
_QUEUE = 64
_WATCHED = zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED


class ReplayRequest(Enum):
    """What was asked for on the replay socket."""

    SINCE = "since"  # the last batch that was taken, and what came after
    SNAPSHOT = "snapshot"
    ALL = "all"  # every batch that is still there


class Subscription:
    """A subscription, at most one question on the replay socket, and what both have brought."""

    def __init__(self, context: Context, source: Source) -> None:
        self.source = source
        self.stream = Stream()
        self.stats = ReaderStats()
        self.ranks: set[int] = set()
        self.asked: ReplayRequest | None = None
        self.answered = False  # whether the question at hand has brought anything
        self.proved = False  # whether the last batch taken was among it
        self.progress = False
        self.missing = False  # whether it was asked because something is missing
        self.deadline = 0.0
        self.next_check = 0.0
        self.silent = 0  # questions in a row that were not answered
        self._context = context
        self.dealer: zmq.Socket[bytes] | None = None
        self.sub = context.socket(zmq.SUB)
        self.sub.set_hwm(_QUEUE)
        self.sub.setsockopt(zmq.MAXMSGSIZE, MOST_BYTES)  # whoever sends more is disconnected
        self.sub.setsockopt(zmq.RECONNECT_IVL, 100)
        self.sub.setsockopt(zmq.RECONNECT_IVL_MAX, 3000)
        self.sub.setsockopt(zmq.HEARTBEAT_IVL, 5000)
        self.sub.setsockopt(zmq.HEARTBEAT_TIMEOUT, 15_000)
        self.monitor = self.sub.get_monitor_socket(_WATCHED)
        self.sub.setsockopt(zmq.SUBSCRIBE, source.topic.encode())
        _connect(self.sub, source.endpoint)

    def reconnected(self) -> bool:
        """Whether the subscription was (re-)connected since this was asked last.

        It is told before the first message of that connection can be read.
        """
        found = False
        while self.monitor.poll(0):
            event = recv_monitor_message(self.monitor)["event"]
            self.stats.connected = event == zmq.Event.HANDSHAKE_SUCCEEDED
            found = found or self.stats.connected
        return found

    def ask(self, what: ReplayRequest, now: float, patience: float, *, missing: bool) -> None:
        """Send a question, on a socket of its own: no late answer is taken for another's."""
        self.hang_up()
        assert self.source.replay is not None
        self.dealer = self._context.socket(zmq.DEALER)
        self.dealer.set_hwm(_QUEUE)
        self.dealer.setsockopt(zmq.LINGER, 0)
        self.dealer.setsockopt(zmq.MAXMSGSIZE, MOST_BYTES)
        _connect(self.dealer, self.source.replay)
        taken = self.stream.taken or 0
        start = {
            ReplayRequest.SINCE: taken,
            ReplayRequest.SNAPSHOT: SNAPSHOT,
            ReplayRequest.ALL: 0,
        }[what]
        self.dealer.send_multipart((b"", seq_frame(start)))
        self.asked = what
        self.answered = self.proved = self.progress = False
        self.missing = missing
        self.deadline = now + patience

    def hang_up(self) -> None:
        """The question at hand is over."""
        self.asked = None
        if self.dealer is not None:
            self.dealer.close(linger=0)
            self.dealer = None

    def close(self) -> None:
        """Give the sockets back."""
        self.hang_up()
        self.sub.disable_monitor()
        self.monitor.close(linger=0)
        self.sub.close(linger=0)


def _connect(to: zmq.Socket[bytes], endpoint: str) -> None:
    try:
        to.connect(endpoint)
    except zmq.ZMQError as error:
        raise InvalidValue(
            f"cannot read KV events from {endpoint!r}: {error}; an endpoint is tcp://HOST:PORT or "
            "ipc:///PATH"
        ) from error
