"""`TenantRoutes`: what tenants used, from the answers that the proxy passes on."""

from __future__ import annotations

import hashlib
import json
import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from starlette.responses import JSONResponse, Response

from kvkeep.observe.usage import TenantLedger

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["SALT", "AnswerUsage", "TenantRoutes", "UsageReader", "tenant_name"]

SALT: Final = "kvkeep.salt"
"""Where the proxy notes a request's ``cache_salt``, in its scope."""

_TAIL: Final = 16 << 10
"""Bytes of the end of an answer, where its usage is."""
_TRIES: Final = 8
_DECODER: Final = json.JSONDecoder()


class AnswerUsage(NamedTuple):
    """Tokens of one answer: of its prompt, those of these that were cached, and generated ones."""

    prompt: int
    cached: int
    generated: int


class UsageReader:
    """Reads the usage of an answer as it passes, whole or in events, of either API.

    It keeps the last 16 KiB. Answers of any content are harmless: a usage that is no usage counts
    as none. Thread safety: none.
    """

    def __init__(self) -> None:
        self.status = 0
        self._tail = bytearray()

    def see(self, message: Message) -> None:
        """Note one ASGI message of the answer."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
        elif message["type"] == "http.response.body":
            self._tail += message.get("body", b"")[-_TAIL:]
            if len(self._tail) > 2 * _TAIL:
                del self._tail[:-_TAIL]

    @property
    def usage(self) -> AnswerUsage | None:
        """The last usage in the answer; None without one. Cost: below a millisecond."""
        text = bytes(self._tail[-_TAIL:]).decode(errors="replace")
        end = len(text)
        for _ in range(_TRIES):
            # In a text of the answer the quotes would be escaped.
            end = text.rfind('"usage"', 0, end)
            if end < 0:
                break
            begin = text.find("{", end, end + 16)
            found = None if begin < 0 else _read(text, begin)
            if found is not None:
                return found
        return None


def _read(text: str, begin: int) -> AnswerUsage | None:
    try:
        usage, _ = _DECODER.raw_decode(text, begin)
    except (ValueError, RecursionError):
        return None
    generated = _count(usage, "completion_tokens") or _count(usage, "output_tokens")
    if "input_tokens" in usage:  # Anthropic's parts add up to the prompt
        cached = _count(usage, "cache_read_input_tokens")
        rest = _count(usage, "input_tokens") + _count(usage, "cache_creation_input_tokens")
        return AnswerUsage(cached + rest, cached, generated)
    if "prompt_tokens" not in usage:
        return None
    prompt = _count(usage, "prompt_tokens")
    details = usage.get("prompt_tokens_details")
    cached = _count(details, "cached_tokens") if isinstance(details, dict) else 0
    return AnswerUsage(prompt, min(cached, prompt), generated)


def _count(of: dict[str, Any], name: str) -> int:
    value = of.get(name)
    return value if type(value) is int and 0 <= value < 1 << 40 else 0


class _Counted:
    """An application whose answers are counted; no byte of them changes or waits."""

    def __init__(self, app: ASGIApp, routes: TenantRoutes) -> None:
        self._app = app
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reader = UsageReader()

        async def passed(message: Message) -> None:
            reader.see(message)
            await send(message)

        try:
            await self._app(scope, receive, passed)
        finally:
            if SALT in scope and 200 <= reader.status < 300:
                self._routes.note(scope[SALT], reader.usage)


class TenantRoutes:
    """Counts requests by ``cache_salt``, and answers ``/kv/usage``.

    Tenants are named by a digest of their salt, since the router has no key of its own. Answers
    without a usage, such as streams that were not asked for one, count as ``unread``.

    Thread safety: none; for the event loop.
    """

    def __init__(self) -> None:
        self._ledger = TenantLedger(1)
        self._since = time.time()
        self._unread = 0

    def counted(self, app: ASGIApp) -> ASGIApp:
        """Return ``app``, whose answers are counted."""
        return _Counted(app, self)

    def note(self, salt: str, usage: AnswerUsage | None) -> None:
        """Count an answer."""
        if usage is None:
            self._unread += 1
        else:
            self._ledger.answered(tenant_name(salt), *usage)

    async def usage(self, request: Request) -> Response:
        """Return the counts."""
        del request
        head = {"since": self._since, "until": time.time(), "unread": self._unread}
        rows = [
            {
                "cache_salt": line.tenant,
                "requests": line.counts.requests,
                "prompt_tokens": line.counts.prompt_tokens,
                "read_tokens": line.counts.read_tokens,
                "computed_tokens": line.counts.computed_tokens,
                "generated_tokens": line.counts.generated_tokens,
            }
            for line in self._ledger.report()
        ]
        return JSONResponse({**head, "tenants": rows})


def tenant_name(salt: str) -> str:
    """Return the name of a tenant for all who can reach the router; empty for no salt."""
    if not salt:
        return ""
    return hashlib.sha256(salt.encode("utf-8", "surrogatepass")).hexdigest()[:16]
