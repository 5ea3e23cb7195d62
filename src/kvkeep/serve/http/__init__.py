"""HTTP servers bounded against slow clients, unfinished requests and floods of connections.

`GuardedServer` is uvicorn with its own accept loop and protocol: a connection limit, a deadline for
request heads, and one for clients that do not read. `BodyGuard` limits the memory that all request
bodies take together. `kvkeep serve` and `kvkeep route` are built on both.
"""

from __future__ import annotations

from kvkeep.core.errors import require

require("uvicorn", "server")  # first, so that the error names the extra to install
require("starlette", "server")

from kvkeep.serve.http.bodies import (  # noqa: E402  # noqa: E402
    BodyBudget,
    BodyGuard,
    BodyRefused,
    RequestBody,
    body_of,
    check_values,
    text_size,
    texts_in,
    unless_disconnected,
)
from kvkeep.serve.http.connections import ConnectionLimits, Connections  # noqa: E402
from kvkeep.serve.http.listening import (  # noqa: E402  # noqa: E402
    GuardedServer,
    bind,
    check_port,
    connections_for,
    raise_file_limit,
    url_of,
)

__all__ = [
    "BodyBudget",
    "BodyGuard",
    "BodyRefused",
    "ConnectionLimits",
    "Connections",
    "GuardedServer",
    "RequestBody",
    "bind",
    "body_of",
    "check_port",
    "check_values",
    "connections_for",
    "raise_file_limit",
    "text_size",
    "texts_in",
    "unless_disconnected",
    "url_of",
]
