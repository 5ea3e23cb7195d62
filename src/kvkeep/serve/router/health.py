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
    from collections.abc import Callable, Collection, Iterable, Iterator

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
    from one probe to the next. ``probe_s``: for a response to a probe. ``tokenize_s``: for one
    request to /tokenize. ``tries``: how many instances may accept a request and not answer it.

    Raises `InvalidValue` for values that are not above 0.
    """

    first_byte_s: float = 600.0
    idle_s: float = 300.0
    probe_every_s: float = 1.0
    probe_s: float = 2.0
    tokenize_s: float = 2.0
    tries: int = 2

    def __post_init__(self) -> None:
        for name in ("first_byte_s", "idle_s", "probe_every_s", "probe_s", "tokenize_s"):
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


class Doubt(Enum):
    """The reason why an instance became suspect."""

    PROBE = "probe"
    REQUEST = "request"
    TOKENIZE = "tokenize"
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

    Thread safety: none; for the event loop.
    """

    def __init__(
        self, names: Iterable[str], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._instances = {name: _Instance() for name in names}
        self._hooks: list[Callable[[str, Doubt], None]] = []

    def subscribe(self, hook: Callable[[str, Doubt], None]) -> None:
        """Call ``hook`` with the name and the reason each time an instance is doubted."""
        self._hooks.append(hook)

    # --- states ------------------------------------------------------------------------------

    def state(self, name: str) -> InstanceHealth:
        """Return the state of one instance."""
        one = self._instances[name]
        if one.suspect:
            return InstanceHealth.SUSPECT
        return InstanceHealth.RESTING if one.rests_until > self._clock() else InstanceHealth.UP

    def up(self) -> list[str]:
        """Return the instances that are up."""
        return [name for name in self._instances if self.state(name) is InstanceHealth.UP]

    def any_up(self) -> bool:
        """Whether an instance has answered a probe or a request, and is up."""
        return any(
            one.answered and self.state(name) is InstanceHealth.UP
            for name, one in self._instances.items()
        )

    def best(self, tried: Collection[str]) -> list[str]:
        """Return the instances to try next: those up, else those resting, else all others."""
        left = [name for name in self._instances if name not in tried]
        for state in (InstanceHealth.UP, InstanceHealth.RESTING):
            found = [name for name in left if self.state(name) is state]
            if found:
                return found
        return left

    # --- outcomes of requests ----------------------------------------------------------------

    def now(self) -> float:
        """Return the current time on the clock of `left`."""
        return self._clock()

    def failed(self, name: str) -> None:
        """Note a request without a response, or with an error that is the instance's fault."""
        one = self._instances[name]
        if one.rests_until <= self._clock():  # requests failing together count as one failure
            rest = min(_LONGEST_REST_S, _FIRST_REST_S * 2**one.failures)
            one.failures = min(one.failures + 1, 10)
            one.rests_until = self._clock() + rest
        self.doubt(name, Doubt.REQUEST)

    def worked(self, name: str) -> None:
        """Note a request that got a response."""
        one = self._instances[name]
        one.failures = 0
        one.rests_until = 0.0
        one.answered_at = self._clock()
        self._trust(name)

    def heard(self, name: str) -> None:
        """Note a piece of a stream: the instance is alive."""
        self._instances[name].silent = 0

    def doubt(self, name: str, why: Doubt) -> None:
        """Make the instance suspect and request a probe at once."""
        one = self._instances[name]
        if not one.suspect:
            log.warning("%s is suspect (%s): no requests until it answers a probe", name, why.value)
        one.suspect = True
        one.wake.set()
        for hook in self._hooks:
            hook(name, why)

    def left(self, name: str, since: float) -> None:
        """Note that a client left while it waited, since ``since``, for a first byte."""
        ignored = self._instances[name].answered_at < since
        if ignored and self._clock() - since >= _IGNORED_S:
            self.failed(name)
        else:
            self.doubt(name, Doubt.CLIENT_LEFT)

    # --- outcomes of probes ------------------------------------------------------------------

    def probed(self, name: str, *, answered: bool) -> None:
        """Note the result of a probe."""
        one = self._instances[name]
        if answered:
            self._trust(name)
        else:
            one.silent += 1
            if not one.suspect:
                self.doubt(name, Doubt.PROBE)
        self._abandon()

    def silent(self, name: str) -> bool:
        """Whether enough probes failed for the instance to count as stopped."""
        return self._instances[name].silent >= _SILENT_PROBES

    def wake(self, name: str) -> asyncio.Event:
        """Return the event that requests a probe at once; the prober clears it."""
        return self._instances[name].wake

    # --- waiting requests --------------------------------------------------------------------

    @contextmanager
    def waiting(
        self, name: str, others: Collection[str], give_up: Callable[[], None]
    ) -> Iterator[Waiting]:
        """In this context, call ``give_up`` once if the instance is silent and another is up.

        The other instance must be one of ``others``.
        """
        waiting = Waiting(others, give_up)
        among = self._instances[name].waiting
        among.add(waiting)
        try:
            yield waiting
        finally:
            among.discard(waiting)

    def _trust(self, name: str) -> None:
        one = self._instances[name]
        if one.suspect:
            log.info("%s answers probes again", name)
        one.suspect = False
        one.silent = 0
        one.answered = True

    def _abandon(self) -> None:
        up = set(self.up())
        for name, one in self._instances.items():
            if not one.waiting or not self.silent(name):
                continue
            for waiting in one.waiting:
                if not waiting.abandoned and not up.isdisjoint(waiting.others):
                    waiting.abandoned = True
                    waiting.give_up()
