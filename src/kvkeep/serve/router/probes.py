"""`Probes`: checks the health of each instance at intervals."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from kvkeep.serve.router.upstreams import UpstreamFailed

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvkeep.serve.router.health import Health, Timeouts
    from kvkeep.serve.router.upstreams import Upstreams

__all__ = ["Probes"]

# A new connection per probe: the instance may have closed a kept one meanwhile.
_HEADERS = [(b"connection", b"close")]
_LEAST_PAUSE_S = 0.05
_MOST_A_SECOND = 200
"""Probes a second to all instances together; with more instances, each is probed less often."""
_LONGEST_PAUSE = 8
"""Backoff for an instance that stays silent: at most this many probe intervals."""


class Probes:
    """Sends ``GET /health`` to each instance, one probe at a time, and reports to `Health`.

    Instances that come are probed at once, those that leave until they are forgotten.
    A stopped process still accepts connections, so a probe succeeds only with a response; any
    status below 500 counts. ``on_probe`` is called with the instance and whether it answered,
    ``on_gone`` with one that was forgotten, after its last probe.
    """

    def __init__(
        self,
        upstreams: Upstreams,
        health: Health,
        timeouts: Timeouts,
        on_probe: Callable[[str, bool], None],
        *,
        on_gone: Callable[[str], None] = lambda name: None,
    ) -> None:
        self._upstreams = upstreams
        self._health = health
        self._timeouts = timeouts
        self._on_probe = on_probe
        self._on_gone = on_gone

    async def run(self) -> None:
        """Probe until cancelled."""
        changed = self._health.changed
        following: dict[str, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as group:
            while True:
                changed.clear()
                names = self._health.names()
                for name in following.keys() - set(names):
                    following.pop(name).cancel()
                    self._on_gone(name)
                for name in names:
                    if name not in following:
                        following[name] = group.create_task(self._follow(name))
                await changed.wait()

    async def _follow(self, name: str) -> None:
        clock = asyncio.get_running_loop().time
        wake = self._health.wake(name)
        times = 1
        while True:
            wake.clear()
            begun = clock()
            answered = await self._answers(name)
            self._on_probe(name, answered)
            self._health.probed(name, answered=answered)
            times = min(times * 2, _LONGEST_PAUSE) if self._health.silent(name) else 1
            every_s = max(self._timeouts.probe_every_s, self._health.size / _MOST_A_SECOND)
            pause = every_s * times - (clock() - begun)
            # A minimum pause, so that doubts in quick succession cause no flood of probes.
            await asyncio.sleep(min(_LEAST_PAUSE_S, self._timeouts.probe_every_s))
            try:
                async with asyncio.timeout(max(0.0, pause)):
                    await wake.wait()
            except TimeoutError:
                pass

    async def _answers(self, name: str) -> bool:
        try:
            async with (
                asyncio.timeout(self._timeouts.probe_s),
                self._upstreams.request(name, "GET", "/health", _HEADERS, b"") as response,
            ):
                return response.status_code < 500
        except (UpstreamFailed, TimeoutError):
            return False
