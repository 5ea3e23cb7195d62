"""An OpenAI-compatible HTTP server for the engine; see `docs/serving.md`."""

from __future__ import annotations

from kvkeep.core.errors import require

require("fastapi", "server")  # first, so that the error names the extra to install
require("uvicorn", "server")
require("prometheus_client", "server")

from kvkeep.serve.http import bind, url_of  # noqa: E402 - after require
from kvkeep.serve.server.app import Listener, create_app  # noqa: E402
from kvkeep.serve.server.settings import LOOPBACK_HOSTS, ServerSettings  # noqa: E402

__all__ = ["LOOPBACK_HOSTS", "Listener", "ServerSettings", "bind", "create_app", "url_of"]
