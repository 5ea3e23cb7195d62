"""An OpenAI-compatible HTTP server on the engine; `docs/serving.md` says what it offers."""

from __future__ import annotations

from kvkeep.core.errors import require

require("fastapi", "server")  # all of this room needs them: say which extra brings them
require("uvicorn", "server")
require("prometheus_client", "server")

from kvkeep.serve.http import bind, url_of  # noqa: E402 - what is missing was named first
from kvkeep.serve.server.app import create_app  # noqa: E402
from kvkeep.serve.server.listening import Listener  # noqa: E402
from kvkeep.serve.server.settings import LOOPBACK_HOSTS, ServerSettings  # noqa: E402

__all__ = [
    "LOOPBACK_HOSTS",
    "Listener",
    "ServerSettings",
    "bind",
    "create_app",
    "url_of",
]
