"""A listening server of its own, and its orderly end."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from kvkeep.serve.http import GuardedServer, url_of

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable
    from types import FrameType

    from starlette.applications import Starlette

    from kvkeep.serve.http import ConnectionLimits

__all__ = ["Server", "serve"]

_DRAIN_S = 30


class Server(GuardedServer):
    """A guarded server, whose end is no error: running requests have half a minute to finish.

    ``limits`` are about its connections; each of them may need a second one, to an instance.
    """

    def __init__(
        self,
        app: Starlette,
        url: str,
        ready: Callable[[str], None] | None,
        limits: ConnectionLimits | None = None,
    ) -> None:
        super().__init__(
            app,
            limits,
            date_header=False,  # the instance's own is passed on
            timeout_graceful_shutdown=_DRAIN_S,
        )
        app.state.metrics.connections = self.connections
        self._url = url
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say so."""
        await super().startup(sockets)
        if self.started and self._ready is not None:
            self._ready(self._url)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal: the first begins the end, the second hurries it."""
        self.force_exit = self.should_exit
        self.should_exit = True


def serve(
    app: Starlette,
    bound: socket.socket,
    *,
    limits: ConnectionLimits | None = None,
    ready: Callable[[str], None] | None = None,
) -> None:
    """Serve until a signal; ``ready`` is called with the address."""
    asyncio.run(Server(app, url_of(bound), ready, limits).serve([bound]))
