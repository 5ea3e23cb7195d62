"""`Probes`: asks each instance for its health, again and again."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from kvkeep.serve.router.upstreams import UpstreamFailed

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvkeep.serve.router.health import Health, Patience
    from kvkeep.serve.router.upstreams import Upstreams

__all__ = ["Probes"]

# Each on a connection of its own: one that is kept may be closed by the other end meanwhile.
_HEADERS = [(b"connection", b"close")]
_LEAST_PAUSE_S = 0.05
_LONGEST_PAUSE = 8
"""Probes of an instance that stays silent become rarer, up to one in so many intervals."""


class Probes:
    """Sends ``GET /health`` to each instance, one at a time, and tells `Health` what came of it.

    A stopped process still accepts connections, so only the head of an answer counts; any status
    below 500 does. ``told`` is called with the instance and whether it answered.
    """

    def __init__(
        self,
        upstreams: Upstreams,
        health: Health,
        patience: Patience,
        told: Callable[[str, bool], None],
    ) -> None:
        self._upstreams = upstreams
        self._health = health
        self._patience = patience
        self._told = told

    async def run(self) -> None:
        """Until it is cancelled."""
        async with asyncio.TaskGroup() as group:
            for name in self._upstreams.names:
                group.create_task(self._follow(name))

    async def _follow(self, name: str) -> None:
        clock = asyncio.get_running_loop().time
        wake = self._health.wake(name)
        times = 1
        while True:
            wake.clear()
            begun = clock()
            answered = await self._answers(name)
            self._told(name, answered)
            self._health.probed(name, answered=answered)
            times = min(times * 2, _LONGEST_PAUSE) if self._health.silent(name) else 1
            pause = self._patience.probe_every_s * times - (clock() - begun)
            # Doubts that come one after the other are no flood of probes.
            await asyncio.sleep(min(_LEAST_PAUSE_S, self._patience.probe_every_s))
            try:
                async with asyncio.timeout(max(0.0, pause)):
                    await wake.wait()
            except TimeoutError:
                pass

    async def _answers(self, name: str) -> bool:
        try:
            async with (
                asyncio.timeout(self._patience.probe_s),
                self._upstreams.asking(name, "GET", "/health", _HEADERS, b"") as answer,
            ):
                return answer.status_code < 500
        except (UpstreamFailed, TimeoutError):
            return False
