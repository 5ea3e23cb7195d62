"""`Health`: which instances may get requests, judged by the results of requests and probes."""

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

__all__ = ["Doubt", "Health", "InstanceHealth", "Patience", "Waiting"]

log = logging.getLogger("kvkeep.router")

_FIRST_REST_S = 1.0
_LONGEST_REST_S = 30.0
_SILENT_PROBES = 3
"""Probes in a row without an answer, after which requests that wait there are given up."""
_IGNORED_S = 5.0
"""Seconds without any answer of the instance after which a client that leaves makes it rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long an instance may take, in seconds, and how often a request is tried.

    ``first_byte_s``: until the first byte of an answer's body. It includes the whole prefill and
    what waits before it, and without ``stream`` the whole answer; a stopped process is found by
    probes much sooner. ``idle_s``: between two pieces of a stream, and for a client to take one.
    ``probe_every_s``: from one probe to the next. ``probe_s``: until a probe is answered.
    ``tokenize_s``: for one question to /tokenize. ``tries``: instances that may have a request in
    hand and not answer it.

    Raises `InvalidValue` for what is not above 0.
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
                raise InvalidValue(f"{name} is a number of seconds above 0, got {seconds}")
        whole("tries", self.tries, 1)


class InstanceHealth(Enum):
    """Whether an instance may get requests."""

    UP = "up"
    SUSPECT = "suspect"
    """The instance did not answer something; the next probe decides."""
    RESTING = "resting"
    """A request failed there a moment ago, and probes are answered."""


class Doubt(Enum):
    """Why an instance became suspect."""

    PROBE = "probe"
    REQUEST = "request"
    TOKENIZE = "tokenize"
    CLIENT_LEFT = "client left"


@dataclass(slots=True, eq=False)
class Waiting:
    """A request that waits for the first byte of an instance, and may be taken elsewhere."""

    others: Collection[str]
    give_up: Callable[[], None]
    abandoned: bool = False


@dataclass(slots=True, eq=False)
class _Instance:
    failures: int = 0
    rests_until: float = 0.0
    suspect: bool = False
    silent: int = 0
    """Probes in a row that were not answered."""
    answered_at: float = -math.inf
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    waiting: set[Waiting] = field(default_factory=set)


class Health:
    """What is known of each instance, without any I/O.

    A request that fails makes its instance rest: a second, then twice as long each time, half a
    minute at most. Whatever was not answered makes it suspect until a probe or another request is
    answered. Requests that wait at an instance that `_SILENT_PROBES` probes found silent are given
    up where another instance is up, so that they can be sent there.

    Thread safety: none; it belongs to the event loop.
    """

    def __init__(
        self, names: Iterable[str], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._instances = {name: _Instance() for name in names}
        self._hooks: list[Callable[[str, Doubt], None]] = []

    def subscribe(self, hook: Callable[[str, Doubt], None]) -> None:
        """Call ``hook`` each time an instance is doubted."""
        self._hooks.append(hook)

    # --- what is thought of them -------------------------------------------------------------

    def state(self, name: str) -> InstanceHealth:
        """Of one instance."""
        one = self._instances[name]
        if one.suspect:
            return InstanceHealth.SUSPECT
        return InstanceHealth.RESTING if one.rests_until > self._clock() else InstanceHealth.UP

    def up(self) -> list[str]:
        """The instances that may be asked."""
        return [name for name in self._instances if self.state(name) is InstanceHealth.UP]

    def best(self, tried: Collection[str]) -> list[str]:
        """The instances among which to choose next: those that are up, or else any that is left."""
        left = [name for name in self._instances if name not in tried]
        for state in (InstanceHealth.UP, InstanceHealth.RESTING):
            found = [name for name in left if self.state(name) is state]
            if found:
                return found
        return left

    # --- what requests say -------------------------------------------------------------------

    def now(self) -> float:
        """The time, for `left`."""
        return self._clock()

    def failed(self, name: str) -> None:
        """Note a request that got no answer, or an error that is the instance's fault."""
        one = self._instances[name]
        if one.rests_until <= self._clock():  # requests that fail together are one failure
            rest = min(_LONGEST_REST_S, _FIRST_REST_S * 2**one.failures)
            one.failures = min(one.failures + 1, 10)
            one.rests_until = self._clock() + rest
        self.doubt(name, Doubt.REQUEST)

    def worked(self, name: str) -> None:
        """Note a request that was answered."""
        one = self._instances[name]
        one.failures = 0
        one.rests_until = 0.0
        one.answered_at = self._clock()
        self._trust(name)

    def heard(self, name: str) -> None:
        """Note a piece of a stream: the instance is not silent."""
        self._instances[name].silent = 0

    def doubt(self, name: str, why: Doubt) -> None:
        """Make the instance suspect until it answers a probe, which is sent at once."""
        one = self._instances[name]
        if not one.suspect:
            log.warning("%s is suspect (%s): no requests until it answers a probe", name, why.value)
        one.suspect = True
        one.wake.set()
        for hook in self._hooks:
            hook(name, why)

    def left(self, name: str, since: float) -> None:
        """Note that a client left that had waited for the first byte since ``since``."""
        ignored = self._instances[name].answered_at < since
        if ignored and self._clock() - since >= _IGNORED_S:
            self.failed(name)
        else:
            self.doubt(name, Doubt.CLIENT_LEFT)

    # --- what probes say ---------------------------------------------------------------------

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
        """Whether so many probes failed that the instance is taken for stopped."""
        return self._instances[name].silent >= _SILENT_PROBES

    def wake(self, name: str) -> asyncio.Event:
        """Set when a probe is to be sent at once; whoever probes clears it."""
        return self._instances[name].wake

    # --- requests that wait ------------------------------------------------------------------

    @contextmanager
    def waiting(
        self, name: str, others: Collection[str], give_up: Callable[[], None]
    ) -> Iterator[Waiting]:
        """``give_up`` is called once, if this one is silent while one of ``others`` is up."""
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

    def _abandon(self) -> None:
        up = set(self.up())
        for name, one in self._instances.items():
            if not one.waiting or not self.silent(name):
                continue
            for waiting in one.waiting:
                if not waiting.abandoned and not up.isdisjoint(waiting.others):
                    waiting.abandoned = True
                    waiting.give_up()
