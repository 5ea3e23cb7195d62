"""The connections of one server: their limit, the phase of each, and its deadline."""

from __future__ import annotations

import logging
import math
import time
from collections import OrderedDict
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvkeep.core.errors import InvalidValue, whole

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from uvicorn.protocols.http.h11_impl import RequestResponseCycle

__all__ = ["ConnectionLimits", "Connections", "GuardedProtocol", "Phase", "RateLimitedLog"]


class RateLimitedLog(logging.LoggerAdapter[logging.Logger]):
    """A logger that logs each warning at most once in ``seconds``, with the number left out since.

    Warnings are told apart by their message before its arguments are filled in. Other levels are
    not limited. Thread safety: none; for an event loop.
    """

    def __init__(
        self,
        log: logging.Logger,
        seconds: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(log)
        self._seconds = seconds
        self._clock = clock
        self._next: dict[object, float] = {}  # by message
        self._left_out: dict[object, int] = {}

    @property
    def level(self) -> int:
        """The level of the logger, which uvicorn reads."""
        return self.logger.level

    def log(self, level: int, msg: object, *args: object, **options: Any) -> None:
        """Log ``msg % args``; only count a warning if the same was logged recently."""
        if level == logging.WARNING:
            now = self._clock()
            if now < self._next.get(msg, now):
                self._left_out[msg] = self._left_out.get(msg, 0) + 1
                return
            self._next[msg] = now + self._seconds
            more = self._left_out.pop(msg, 0)
            if more:
                msg = f"{msg} ({more:,} more like it since the last line)"
        super().log(level, msg, *args, **options)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Limits on the clients of one server.

    At most ``most`` connections are open. A request head may take ``head_s`` seconds, counted from
    the connection, or on a reused connection from the head's first byte. A reused connection may be
    idle for ``keep_alive_s``. A client that reads nothing of a waiting response for ``stall_s`` is
    disconnected.
    """

    most: int = 1024
    head_s: float = 10.0
    keep_alive_s: float = 30.0
    stall_s: float = 600.0

    def __post_init__(self) -> None:
        whole("max_connections", self.most, 1)
        for name in ("head_s", "keep_alive_s", "stall_s"):
            seconds = getattr(self, name)
            if not 0 < seconds < math.inf:
                raise InvalidValue(f"{name} is a number of seconds above 0, got {seconds}")


class Phase(Enum):
    """The event that a connection waits for."""

    HEAD = "head"
    """The head of its first request, or the rest of a head that has begun."""
    IDLE = "idle"
    """The first byte of the next request."""
    BODY = "body"
    """The rest of a request body."""
    ANSWER = "answer"
    """The server's response."""


class Connections:
    """The connections of one server by phase, longest wait first.

    With ``limits.most`` open, a new connection displaces the one that has waited longest for a
    head, else the longest idle one, else the longest with an incomplete body. A connection with a
    complete request is never displaced: if all have one, the new connection is refused with 503.

    Thread safety: none; for the event loop. Cost: O(1) per method.
    """

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self.accepted = 0
        self.accept_errors = 0
        self.closed = dict.fromkeys(
            ("head_timeout", "displaced", "refused", "unread", "stalled"), 0
        )
        """Connections closed by the server, by reason."""
        # OrderedDict, not dict: finding a dict's first entry slows with the deletions before it.
        self._phases: dict[Phase, OrderedDict[GuardedProtocol, None]] = {
            one: OrderedDict() for one in Phase
        }
        self._log = RateLimitedLog(logging.getLogger("kvkeep.http"))
        self.protocol_log = RateLimitedLog(logging.getLogger("uvicorn.error"))
        """For uvicorn's warnings: one or two for each request that is none."""

    def __len__(self) -> int:
        return sum(map(len, self._phases.values()))

    @property
    def full(self) -> bool:
        """Whether the connection limit is reached."""
        return len(self) >= self.limits.most

    @property
    def settling(self) -> bool:
        """Whether the limit is reached, and the connection to displace next was opened so recently
        that its head cannot have been read. Lasts for a few turns of the event loop.
        """
        oldest = next(iter(self._phases[Phase.HEAD]), None)
        return oldest is not None and not oldest.was_read and self.full

    def waiting(self, phase: Phase) -> int:
        """Return the number of connections in ``phase``."""
        return len(self._phases[phase])

    def add(self, one: GuardedProtocol) -> None:
        """Add a new connection, in phase HEAD."""
        self.accepted += 1
        self._phases[Phase.HEAD][one] = None

    def move(self, one: GuardedProtocol, before: Phase, after: Phase) -> None:
        """Move a connection to another phase, unless it was removed already."""
        if one in self._phases[before]:
            del self._phases[before][one]
            self._phases[after][one] = None

    def forget(self, one: GuardedProtocol, phase: Phase) -> None:
        """Remove a connection that is closed or closing."""
        self._phases[phase].pop(one, None)

    def make_room(self) -> bool:
        """Close the connection next in line. Return False if all have complete requests."""
        for phase in (Phase.HEAD, Phase.IDLE, Phase.BODY):
            oldest = next(iter(self._phases[phase]), None)
            if oldest is not None:
                self.forget(oldest, phase)
                self.count("displaced")
                oldest.end()
                return True
        return False

    def count(self, why: str) -> None:
        """Count a connection that the server closed or refused."""
        self.closed[why] += 1
        if why in {"displaced", "refused"}:
            self._log.warning(
                "connection limit of %d reached: one connection was %s",
                self.limits.most,
                why,
            )

    def accept_failed(self, error: OSError) -> None:
        """Count and log a failed ``accept``."""
        self.accept_errors += 1
        self._log.warning("cannot accept a connection: %s", error)


class GuardedProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 protocol with a time limit for each wait on the client.

    `kvkeep.serve.http.BodyBudget` limits the wait for a body; the application limits the wait for
    a response.
    """

    def __init__(self, connections: Connections, **options: Any) -> None:
        super().__init__(**options)
        self.logger = connections.protocol_log  # type: ignore[assignment]  # an adapter of its own
        self._connections = connections
        self.was_read = False
        """Whether the event loop has tried once to read from the connection."""
        self._phase = Phase.HEAD
        self._ended = False
        self._unread = 0  # bytes of the last response that waited when the deadline was set
        self._deadline: asyncio.TimerHandle | None = None
        self._stalled: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the deadline for the first head."""
        super().connection_made(transport)
        if self._ended:
            transport.abort()
        else:
            self._wait(self._connections.limits.head_s)
        # The loop reads in its next turn: after the first of these calls, before the second.
        self.loop.call_soon(self.loop.call_soon, self._note_read)

    def _note_read(self) -> None:
        self.was_read = True

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection and cancel its timers."""
        super().connection_lost(exc)
        self._connections.forget(self, self._phase)
        self._wait(None)
        self._read_on()

    def data_received(self, data: bytes) -> None:
        """Parse received bytes and update the phase."""
        if self._phase is Phase.IDLE and self.conn.their_state is h11.IDLE:
            self._move(Phase.HEAD)
            self._wait(self._connections.limits.head_s)
        super().data_received(data)
        self._look()

    def on_response_complete(self) -> None:
        """Update the phase: the next request may have arrived already."""
        super().on_response_complete()
        self._look()

    def pause_writing(self) -> None:
        """Start the deadline for a client that does not read."""
        super().pause_writing()
        if self._stalled is None:
            self._stalled = self.loop.call_later(self._connections.limits.stall_s, self._stall)

    def resume_writing(self) -> None:
        """Cancel that deadline."""
        super().resume_writing()
        self._read_on()

    def end(self) -> None:
        """Close the connection now, even during a request or before the connection is open."""
        self._ended = True
        transport: asyncio.Transport | None = self.transport
        if transport is None:
            return
        if transport.get_write_buffer_size():
            transport.abort()
        else:  # an orderly close: the client sees it before it sends its next request
            transport.close()

    def _look(self) -> None:
        """Update the phase and its deadline."""
        cycle: RequestResponseCycle | None = self.cycle  # None before the first request
        phase = Phase.HEAD if self._phase is Phase.HEAD else Phase.IDLE
        if cycle is not None and not cycle.response_complete:
            phase = Phase.BODY if cycle.more_body else Phase.ANSWER
        if phase is self._phase:
            return
        self._move(phase)
        if phase is Phase.IDLE:
            self._unread = self.transport.get_write_buffer_size()
            self._wait(self._connections.limits.keep_alive_s)
        else:
            self._wait(None)

    def _move(self, phase: Phase) -> None:
        self._connections.move(self, self._phase, phase)
        self._phase = phase

    def _wait(self, seconds: float | None) -> None:
        """Set the deadline for a head, or for reading the last response; None cancels it."""
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None if seconds is None else self.loop.call_later(seconds, self._expire)

    def _expire(self) -> None:
        self._deadline = None
        unread = self.transport.get_write_buffer_size()
        if 0 < unread < self._unread:  # the client reads, if slowly
            self._unread = unread
            self._wait(self._connections.limits.keep_alive_s)
        elif unread or self.transport.is_closing():
            self._connections.count("unread")
            self.transport.abort()
        else:
            if self._phase is Phase.HEAD:
                self._connections.count("head_timeout")
            self.transport.close()

    def _stall(self) -> None:
        self._stalled = None
        self._connections.count("stalled")
        self.transport.abort()

    def _read_on(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None
