"""`Health`: decides from outcomes of requests and probes which instances may get requests."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from kvkeep.core.errors import InvalidValue, whole

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

__all__ = ["Doubt", "Health", "InstanceHealth", "Timeouts", "Waiting"]

log = logging.getLogger("kvkeep.router")

_FIRST_REST_S = 1.0
_LONGEST_REST_S = 30.0
_SILENT_PROBES = 3
"""Failed probes in a row after which the requests waiting at an instance are abandoned."""
_IGNORED_S = 5.0
"""Seconds without any answer of the instance after which a leaving client counts as a failure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Timeouts towards an instance, in seconds, and the number of tries per request.

    ``first_byte_s``: until the first byte of a response body. This covers queueing and the whole
    prefill, and without ``stream`` the whole response; probes find a stopped process much sooner.
    ``idle_s``: between two pieces of a stream, and for the client to take one. ``probe_every_s``:
    from one probe to the next. ``probe_s``: for a response to a probe. ``tries``: how many
    instances may accept a request and not answer it.

    Raises `InvalidValue` for values that are not above 0.
    """

    first_byte_s: float = 600.0
    idle_s: float = 300.0
    probe_every_s: float = 1.0
    probe_s: float = 2.0
    tries: int = 2

    def __post_init__(self) -> None:
        for name in ("first_byte_s", "idle_s", "probe_every_s", "probe_s"):
            seconds = getattr(self, name)
            if not 0 < seconds < math.inf:
                raise InvalidValue(f"{name} must be a number of seconds above 0, got {seconds}")
        whole("tries", self.tries, 1)


class InstanceHealth(Enum):
    """Whether an instance may get requests."""

    UP = "up"
    SUSPECT = "suspect"
    """It failed to answer; the next probe decides."""
    RESTING = "resting"
    """A request failed there recently, but it answers probes."""
    LEAVING = "leaving"
    """It was removed: it gets no new requests, and those that run there end."""


class Doubt(Enum):
    """The reason why an instance became suspect."""

    PROBE = "probe"
    REQUEST = "request"
    CLIENT_LEFT = "client left"


@dataclass(slots=True, eq=False)
class Waiting:
    """A request that waits for an instance's first byte and may be sent to another one."""

    others: Collection[str]
    give_up: Callable[[], None]
    abandoned: bool = False


@dataclass(slots=True, eq=False)
class _Instance:
    failures: int = 0
    rests_until: float = 0.0
    suspect: bool = False
    answered: bool = False
    """Whether it ever answered a probe or a request."""
    silent: int = 0
    """Failed probes in a row."""
    answered_at: float = -math.inf
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    waiting: set[Waiting] = field(default_factory=set)


class Health:
    """The state of each instance. No I/O happens here.

    A failed request makes its instance rest: for a second, doubling with each failure up to 30
    seconds. Anything unanswered makes it suspect until it answers a probe or another request. When
    `_SILENT_PROBES` probes in a row have failed, requests waiting at the instance are abandoned if
    another instance is up, so that they can be sent there.

    Instances come (`add`), leave (`drain`: no new requests), and are forgotten (`remove`). Outcomes
    of instances that are not known change nothing.

    Thread safety: none; for the event loop. Cost: what a request asks takes no step per instance
    that is up, except for lists of them.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._instances: dict[str, _Instance] = {}
        self._joined: dict[str, None] = {}  # those that get new requests, in order
        self._unwell: set[str] = set()  # at least those that are suspect or resting
        self.on_doubt: Callable[[str, Doubt], None] = lambda name, why: None
        """Called with the name and the reason each time an instance is doubted."""
        self.changed = asyncio.Event()
        """Set when instances were added or removed."""

    # --- instances ---------------------------------------------------------------------------

    def add(self, name: str, *, proven: bool = True) -> None:
        """Add an instance. One that is leaving stays, in the state that it is in.

        ``proven``: it counts as up at once, else as suspect until it answers a probe.
        """
        if name not in self._instances:
            self._instances[name] = _Instance(suspect=not proven)
            if not proven:
                self._unwell.add(name)
        self._joined[name] = None
        self.changed.set()

    def drain(self, name: str) -> None:
        """Let an instance leave: it gets no new requests, and is still probed."""
        self._joined.pop(name, None)

    def remove(self, name: str) -> None:
        """Forget an instance."""
        self.drain(name)
        self._instances.pop(name, None)
        self._unwell.discard(name)
        self.changed.set()

    @property
    def size(self) -> int:
        """The number of instances, those that are leaving included."""
        return len(self._instances)

    def names(self) -> list[str]:
        """Return all instances, those that are leaving included."""
        return list(self._instances)

    def joined(self) -> list[str]:
        """Return the instances that have not left."""
        return list(self._joined)

    # --- states ------------------------------------------------------------------------------

    def state(self, name: str) -> InstanceHealth:
        """Return the state of one instance."""
        record = self._instances.get(name)
        if record is None or name not in self._joined:
            return InstanceHealth.LEAVING
        if record.suspect:
            return InstanceHealth.SUSPECT
        return InstanceHealth.RESTING if record.rests_until > self._clock() else InstanceHealth.UP

    def states(self) -> dict[str, InstanceHealth]:
        """Return the state of each instance, those that are leaving included."""
        return {name: self.state(name) for name in self._instances}

    def up(self) -> list[str]:
        """Return the instances that are up."""
        unwell = self._not_up()
        return [name for name in self._joined if name not in unwell]

    def any_up(self) -> bool:
        """Whether an instance has answered a probe or a request, and is up."""
        return any(self._instances[name].answered for name in self.up())

    def barred(self, tried: Collection[str] = ()) -> set[str]:
        """Return the instances that a request must not go to next.

        Those that it has tried, those that are leaving, and those that are not up; if none is left,
        those that are not resting; if none is left then, suspects are not barred.
        """
        tried = set(tried)
        unwell = self._not_up()
        out = tried | (self._instances.keys() - self._joined.keys() if self._leaving else set())
        if len(self._joined) > len(unwell.keys() | tried & self._joined.keys()):
            return out | unwell.keys()
        resting = {name for name, state in unwell.items() if state is InstanceHealth.RESTING}
        return out | (unwell.keys() - resting) if resting - tried else out

    @property
    def _leaving(self) -> bool:
        return len(self._instances) > len(self._joined)

    def _not_up(self) -> dict[str, InstanceHealth]:
        """Return the states of the instances that are not up, without those that leave."""
        states = {name: self.state(name) for name in self._unwell}
        for name, state in states.items():
            if state is InstanceHealth.UP:
                self._unwell.discard(name)
        out = {InstanceHealth.UP, InstanceHealth.LEAVING}
        return {name: state for name, state in states.items() if state not in out}

    def _record(self, name: str) -> _Instance:
        """Return the record of an instance; of one that is not known, a record to throw away."""
        return self._instances.get(name) or _Instance()

    # --- outcomes of requests ----------------------------------------------------------------

    def now(self) -> float:
        """Return the current time on the clock of `left`."""
        return self._clock()

    def failed(self, name: str) -> None:
        """Note a request without a response, or with an error that is the instance's fault."""
        record = self._record(name)
        if record.rests_until <= self._clock():  # requests failing together count as one failure
            rest = min(_LONGEST_REST_S, _FIRST_REST_S * 2**record.failures)
            record.failures = min(record.failures + 1, 10)
            record.rests_until = self._clock() + rest
        self.doubt(name, Doubt.REQUEST)

    def worked(self, name: str) -> None:
        """Note a request that got a response."""
        record = self._record(name)
        record.failures = 0
        record.rests_until = 0.0
        record.answered_at = self._clock()
        self._trust(name)

    def heard(self, name: str) -> None:
        """Note a piece of a stream: the instance is alive."""
        self._record(name).silent = 0

    def doubt(self, name: str, why: Doubt) -> None:
        """Make the instance suspect and request a probe at once."""
        record = self._instances.get(name)
        if record is None:
            return
        if not record.suspect:
            log.warning("%s is suspect (%s): no requests until it answers a probe", name, why.value)
        record.suspect = True
        self._unwell.add(name)
        record.wake.set()
        self.on_doubt(name, why)

    def left(self, name: str, since: float) -> None:
        """Note that a client left while it waited, since ``since``, for a first byte."""
        ignored = self._record(name).answered_at < since
        if ignored and self._clock() - since >= _IGNORED_S:
            self.failed(name)
        else:
            self.doubt(name, Doubt.CLIENT_LEFT)

    # --- outcomes of probes ------------------------------------------------------------------

    def probed(self, name: str, *, answered: bool) -> None:
        """Note the result of a probe."""
        record = self._record(name)
        if answered:
            self._trust(name)
        else:
            record.silent += 1
            if not record.suspect:
                self.doubt(name, Doubt.PROBE)
        self._abandon()

    def silent(self, name: str) -> bool:
        """Whether enough probes failed for the instance to count as stopped."""
        return self._record(name).silent >= _SILENT_PROBES

    def wake(self, name: str) -> asyncio.Event:
        """Return the event that requests a probe at once; the prober clears it."""
        return self._record(name).wake

    # --- waiting requests --------------------------------------------------------------------

    @contextmanager
    def waiting(
        self, name: str, others: Collection[str], give_up: Callable[[], None]
    ) -> Iterator[Waiting]:
        """In this context, call ``give_up`` once if the instance is silent and another is up.

        The other instance must be one of ``others``.
        """
        waiting = Waiting(others, give_up)
        among = self._record(name).waiting
        among.add(waiting)
        try:
            yield waiting
        finally:
            among.discard(waiting)

    def _trust(self, name: str) -> None:
        record = self._record(name)
        if record.suspect:
            log.info("%s answers probes again", name)
        record.suspect = False
        record.silent = 0
        record.answered = True

    def _abandon(self) -> None:
        """Give up requests that wait at silent instances while another one is up."""
        silent = [self._instances[name] for name in self._unwell if self.silent(name)]
        up = set(self.up()) if any(record.waiting for record in silent) else set()
        for record in silent:
            for waiting in record.waiting:
                if not waiting.abandoned and not up.isdisjoint(waiting.others):
                    waiting.abandoned = True
                    waiting.give_up()
