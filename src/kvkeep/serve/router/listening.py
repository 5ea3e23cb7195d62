"""Runs the router's HTTP server until a signal."""

from __future__ import annotations

import asyncio
from functools import partial
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
    """The router's HTTP server. On a signal, running requests have 30 seconds to finish.

    ``limits`` apply to client connections; each may need a second one, to an instance.
    """

    def __init__(
        self,
        app: Starlette,
        limits: ConnectionLimits | None = None,
        *,
        ready: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(
            app,
            limits,
            ready=ready,
            date_header=False,  # the instance's own is forwarded
            timeout_graceful_shutdown=_DRAIN_S,
        )
        app.state.metrics.connections = self.connections

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin a graceful shutdown; on the second signal, exit at once."""
        self.force_exit = self.should_exit
        self.should_exit = True


def serve(
    app: Starlette,
    bound: socket.socket,
    *,
    limits: ConnectionLimits | None = None,
    ready: Callable[[str], None] | None = None,
) -> None:
    """Serve until a signal; call ``ready`` with the URL once the server listens."""
    url = url_of(bound)
    server = Server(app, limits, ready=None if ready is None else partial(ready, url))
    asyncio.run(server.serve([bound]))
