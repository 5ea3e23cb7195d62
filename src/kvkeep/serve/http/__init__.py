"""HTTP servers with bounds against clients that are slow, never finish, or come in thousands.

`GuardedServer` is uvicorn with an accept loop and a protocol of its own: a cap on connections,
deadlines for heads and for clients that do not read. `BodyGuard` bounds what the bodies of all
requests together take. `kvkeep serve` and `kvkeep route` both stand on it.
"""

from __future__ import annotations

from kvkeep.core.errors import require

require("uvicorn", "server")  # all of this room needs them: say which extra brings them
require("starlette", "server")

from kvkeep.serve.http.bodies import BodyBudget, BodyGuard, BodyRefused, RequestBody, body_of  # noqa: E402
from kvkeep.serve.http.connections import ConnectionLimits, Connections  # noqa: E402
from kvkeep.serve.http.files import connections_for, raise_file_limit  # noqa: E402
from kvkeep.serve.http.listening import GuardedServer, bind, url_of  # noqa: E402

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
    "connections_for",
    "raise_file_limit",
    "url_of",
]
