"""Middleware in front of the application: Host names, the API key, the access log.

Plain ASGI: nothing is read of a refused request, and disconnects reach the handlers.
"""

from __future__ import annotations

import hmac
import logging
import time
from typing import TYPE_CHECKING
from urllib.parse import quote

from starlette.datastructures import Headers

from kvkeep.serve.server.errors import ApiError

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["OPEN_PATHS", "PAGE_HEADERS", "AccessLog", "HostGuard", "KeyGuard"]

access = logging.getLogger("kvkeep.access")

# Probes of an orchestrator, which names the server by its address. Their answers tell nothing that
# a web page could use, so they need no known Host name either.
_PROBES = frozenset({"/livez", "/ready"})
# Answered without an API key: health checks have none, and the dashboard's page is where a user
# types it in. So is everything below _OPEN_BELOW.
OPEN_PATHS = frozenset({"/health", "/"}) | _PROBES
_OPEN_BELOW = "/ui/"
# The dashboard's page may run its own scripts and request this server only. No prompt's text can
# become markup or be sent elsewhere, and no other page can frame it to hijack clicks.
PAGE_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}
# Routers, orchestrators and the dashboard request these every few seconds: a log line for each
# success would bury the others.
_QUIET_PATHS = _PROBES | {"/health", "/kv/live", "/kv/map", "/kv/requests", "/kv/summary"}


class HostGuard:
    """Refuses requests whose Host header names none of ``hosts``, ignoring ports (None: any).

    Probes are answered under any name. ``remedy`` is what to do, for the message.
    """

    def __init__(
        self,
        app: ASGIApp,
        hosts: frozenset[str] | None,
        remedy: str = "allow it with kvkeep serve --allow-host NAME",
    ) -> None:
        self._app = app
        self._hosts = hosts
        self._remedy = remedy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on or refuse."""
        if self._hosts is not None and scope["type"] == "http" and scope["path"] not in _PROBES:
            given = Headers(scope=scope).get("host", "")
            if _without_port(given).lower() not in self._hosts:
                error = ApiError(
                    400,
                    f"this server does not accept the host name {given[:100]!r}; {self._remedy}",
                    param="Host",
                    code="unknown_host",
                )
                await error.response(scope["path"])(scope, receive, send)
                return
        await self._app(scope, receive, send)


class KeyGuard:
    """Refuses requests without ``Authorization: Bearer KEY``. Compares in constant time.

    Anthropic's clients send ``x-api-key: KEY`` instead.
    """

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._expected = key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on or refuse."""
        is_guarded = scope["type"] == "http" and not _is_open(scope["path"])
        if is_guarded and not self._is_right(Headers(scope=scope)):
            error = ApiError(
                401,
                "this server needs an API key: send it as Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
            await error.response(scope["path"])(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _is_right(self, headers: Headers) -> bool:
        scheme, _, given = headers.get("authorization", "").encode("latin-1").partition(b" ")
        bearer = hmac.compare_digest(given, self._expected) and scheme.lower() == b"bearer"
        plain = headers.get("x-api-key", "").encode("latin-1")
        return hmac.compare_digest(plain, self._expected) or bearer


class AccessLog:
    """Logs a line per request: method, path, status, seconds. No query, body or header.

    At INFO; successful requests to frequently polled paths at DEBUG.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on and log."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun = time.perf_counter()
        status = 500  # if the request ends in an exception

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noted)
        finally:
            seconds = time.perf_counter() - begun
            # Quoted, so that no path can forge a log line.
            path = quote(scope["path"][:200])
            quiet = status < 400 and scope["path"] in _QUIET_PATHS
            access.log(
                logging.DEBUG if quiet else logging.INFO,
                "%s %s %d %.3f s",
                scope["method"],
                path,
                status,
                seconds,
            )


def _is_open(path: str) -> bool:
    """Whether this path needs no API key."""
    return path in OPEN_PATHS or path.startswith(_OPEN_BELOW)


def _without_port(host: str) -> str:
    """Return the name in a Host header; IPv6 addresses stand in brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]
