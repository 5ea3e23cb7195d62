"""`MessagesEndpoint`: Anthropic's API on the proxy."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Protocol

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from kvkeep.core.errors import InvalidValue
from kvkeep.serve.http import BodyRefused, body_of, unless_disconnected
from kvkeep.serve.router.messages import COUNT_PATH, MESSAGES_PATH, read_exchange, refusal

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from kvkeep.serve.router.messages import MessageExchange

__all__ = ["MessagesEndpoint"]


class Forward(Protocol):
    """Sends a request to the best instance, and its answer to ``send``."""

    async def __call__(
        self,
        request: Request,
        body: bytes,
        send: Send,
        *,
        placed: bool,
        exchange: MessageExchange | None = None,
    ) -> None:
        """Return when the answer was sent."""


class MessagesEndpoint:
    """``/v1/messages``, or the count of its tokens; ``forward`` is the proxy's."""

    def __init__(self, forward: Forward) -> None:
        self._to_instance = forward

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the request, and forward it or refuse it."""
        request, path = Request(scope, receive), scope["path"]
        try:
            await (body := body_of(scope)).read()
            given = body.take()
            read = partial(read_exchange, given, send, count=path == COUNT_PATH)
            exchange = await asyncio.to_thread(read)
        except ClientDisconnect:
            return
        except BodyRefused as why:
            answer = Response(refusal(why.status, str(why)), why.status, dict(why.headers))
            answer.headers["content-type"] = "application/json"
            await answer(scope, receive, send)
            return
        except InvalidValue as why:
            answer = Response(refusal(400, str(why)), 400, media_type="application/json")
            await answer(scope, receive, send)
            return
        with suppress(ClientDisconnect):
            await unless_disconnected(receive, self._forward(request, given, exchange, path))

    async def _forward(
        self, request: Request, given: bytes, exchange: MessageExchange, path: str
    ) -> None:
        placed = path == MESSAGES_PATH
        await self._to_instance(request, given, exchange.send, placed=placed, exchange=exchange)
        await exchange.broken_off()
