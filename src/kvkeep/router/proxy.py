"""`create_proxy`: a reverse proxy that sends each prompt where most of it is cached."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import asynccontextmanager, suppress
from enum import Enum
from typing import TYPE_CHECKING
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kvkeep.http import Bodies, BodyGuard, BodyRefused, body_of
from kvkeep.router.metrics import Metrics
from kvkeep.router.prompts import Prompt, Prompts
from kvkeep.router.upstreams import UpstreamFailed, passed_on

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    import httpx
    from starlette.types import Message, Receive, Scope, Send

    from kvkeep.feed import EventReader
    from kvkeep.router.prompts import Tokenize
    from kvkeep.router.router import PrefixRouter, Score, Ticket
    from kvkeep.router.upstreams import Upstreams

__all__ = ["create_proxy"]

log = logging.getLogger("kvkeep.router")

_PLACED = ("/v1/completions", "/v1/chat/completions")
# What goes to whoever has least to do.
_OTHERS = ("/v1/models", "/v1/models/{name:path}", "/v1/embeddings", "/tokenize", "/detokenize")
# An instance that answers this is not well; and with the others, another one may do better.
_FAILED = frozenset({502, 503, 504})
_ELSEWHERE = _FAILED | {429}
_MOST_REACHED = 2
_BODY_S = 60.0
_LONGEST_PATH = 32 << 10  # bytes, with its query


class _Outcome(Enum):
    """What came of asking one instance."""

    ANSWERED = "answered"
    REFUSED_AT_LAST = "refused"  # an error, which the client was told
    BROKEN_OFF = "broken off"  # after the client had the beginning
    REFUSED = "refused, asked elsewhere"
    BROKE = "broke"  # it was reached, and did not answer
    UNREACHABLE = "unreachable"
    GIVEN_UP = "given up"  # by the client, which has gone


_DONE = frozenset({_Outcome.ANSWERED, _Outcome.REFUSED_AT_LAST, _Outcome.BROKEN_OFF})


def create_proxy(
    router: PrefixRouter,
    upstreams: Upstreams,
    reader: EventReader | None = None,
    *,
    tokenize: Tokenize | None = None,
    hosts: Sequence[str] | None = ("localhost", "127.0.0.1", "[::1]"),
    max_body_bytes: int = 8 << 20,
    body_budget_bytes: int = 256 << 20,
) -> Starlette:
    """An ASGI application in front of ``upstreams``, whose names are the router's instances.

    ``reader`` is only looked at, for /metrics. ``hosts`` are the names in a Host header that are
    served (None: all); see `Prompts` for ``tokenize``. A body has ``max_body_bytes`` at most, and
    those of all requests have ``body_budget_bytes`` together, the first 64 KiB of each not counted.
    Keys and bodies are passed on as they are; neither is logged.
    """
    bodies = Bodies(largest=max_body_bytes, budget=body_budget_bytes, seconds=_BODY_S)
    metrics = Metrics(bodies)
    proxy = _Proxy(router, upstreams, reader, tokenize, metrics)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await upstreams.close()

    for name in upstreams.names:
        router.add(name)
    guards = [] if hosts is None else [Middleware(TrustedHostMiddleware, list(hosts))]
    guards.append(Middleware(BodyGuard, bodies))
    app = Starlette(
        routes=[
            Route("/health", proxy.health, methods=["GET"]),
            Route("/metrics", proxy.metrics, methods=["GET"]),
            *(Route(path, _Passing(proxy, placed=True), methods=["POST"]) for path in _PLACED),
            *(Route(path, _Passing(proxy, placed=False)) for path in _OTHERS),
        ],
        middleware=guards,
        lifespan=lifespan,
    )
    app.state.metrics = metrics
    return app


class _Passing:
    """One endpoint that is passed on, as plain ASGI: nothing between the two streams."""

    def __init__(self, proxy: _Proxy, *, placed: bool) -> None:
        self._proxy = proxy
        self._placed = placed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        refused = _refused(scope)
        if refused is not None:
            await refused(scope, receive, send)
            return
        try:
            body = await self._proxy.body(request)
        except ClientDisconnect:
            return
        if isinstance(body, Response):
            await body(scope, receive, send)
            return
        passing = asyncio.create_task(self._proxy.pass_on(request, body, send, placed=self._placed))
        gone = asyncio.create_task(_gone(receive))
        try:
            await asyncio.wait({passing, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (gone, passing):
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task  # raises what it failed with


class _Proxy:
    """What the endpoints share."""

    def __init__(
        self,
        router: PrefixRouter,
        upstreams: Upstreams,
        reader: EventReader | None,
        tokenize: Tokenize | None,
        metrics: Metrics,
    ) -> None:
        self._router = router
        self._upstreams = upstreams
        self._reader = reader
        self._prompts = Prompts(upstreams, tokenize)
        self._metrics = metrics

    async def health(self, request: Request) -> Response:
        """200 unless all instances failed a moment ago; and how many are thought to be well."""
        names = self._upstreams.names
        up = not all(self._upstreams.resting(name) for name in names)
        well = sum(map(self._upstreams.well, names))
        body = {"status": "ok" if up else "unavailable", "instances": well}
        return JSONResponse(body, 200 if up else 503)

    async def metrics(self, request: Request) -> Response:
        """Prometheus' text format."""
        text = self._metrics.exposition(self._router, self._upstreams, self._reader)
        return Response(text, headers={"content-type": self._metrics.content_type})

    async def body(self, request: Request) -> bytes | Response:
        """All of it, or what to answer where there is too much, or it takes too long."""
        body = body_of(request.scope)
        try:
            await body.read()
        except BodyRefused as refused:
            kind = "server_error" if refused.status >= 500 else "invalid_request_error"
            answer = _error(refused.status, str(refused), kind)
            answer.headers.update(refused.headers)
            return answer
        return body.take()

    async def pass_on(self, request: Request, body: bytes, send: Send, *, placed: bool) -> None:
        """Ask the best instance; while nothing has been sent to the client, the next best."""
        headers = passed_on(request.scope["headers"])
        prompt = await self._prompts.read(body, headers) if placed else Prompt(None)
        lora = prompt.model if self._router.is_adapter(prompt.model) else ""
        scores = self._scores(prompt, lora)
        if placed:
            self._metrics.placed_at(scores[0], prompt.tokens)
        question = _Question(request, headers, body)
        reached = 0
        for number, score in enumerate(scores):
            # A request that breaks whoever computes it must not go round them all.
            final = number == len(scores) - 1 or reached >= _MOST_REACHED - 1
            ticket = self._router.begin(score, prompt.tokens, lora=lora, salt=prompt.salt)
            outcome = _Outcome.GIVEN_UP
            try:
                outcome = await self._try(question, score, ticket, send, final=final)
            finally:
                self._router.end(ticket)
                self._metrics.requests.labels(score.place.instance, outcome.value).inc()
            log.info("%s to %s: %s", question.shown, score.place.instance, outcome.value)
            if outcome in _DONE:
                return
            reached += outcome is _Outcome.BROKE
            if final:
                break
            self._metrics.retries.labels(score.place.instance).inc()
        nobody = _error(502, "no instance could answer", "server_error")
        await nobody(request.scope, request.receive, send)

    def _scores(self, prompt: Prompt, lora: str) -> list[Score]:
        """Everybody, the best first; those that rest at the end."""
        begun = time.perf_counter()
        awake = self._upstreams.awake()
        resting = [name for name in self._upstreams.names if name not in awake]
        if prompt.tokens is None:
            scores = self._router.least_loaded(awake)
        else:
            scores = self._router.score(prompt.tokens, lora=lora, salt=prompt.salt, among=awake)
        self._metrics.deciding.observe(time.perf_counter() - begun)
        one_each = {score.place.instance: score for score in reversed(scores)}
        best = [score for score in scores if one_each[score.place.instance] is score]
        return best + (self._router.least_loaded(resting) if resting else [])

    async def _try(
        self, question: _Question, score: Score, ticket: Ticket, send: Send, *, final: bool
    ) -> _Outcome:
        name = score.place.instance
        begun = False
        try:
            async with self._upstreams.asking(
                name, question.method, question.path, self._headers(question, score), question.body
            ) as answer:
                if answer.status_code in _FAILED:
                    self._upstreams.failed(name)
                if answer.status_code in _ELSEWHERE and not final:
                    return _Outcome.REFUSED
                pieces = answer.aiter_raw()
                first = await anext(pieces, b"")
                self._router.first_token(ticket)
                if answer.status_code not in _FAILED:
                    self._upstreams.worked(name)
                begun = True
                await send(_start(answer))
                await send({"type": "http.response.body", "body": first, "more_body": True})
                async for piece in pieces:
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
                return _Outcome.REFUSED_AT_LAST if answer.is_error else _Outcome.ANSWERED
        except UpstreamFailed as failure:
            self._upstreams.failed(name)
            log.warning("%s", failure)
            if begun:  # the client sees that the answer has no end
                return _Outcome.BROKEN_OFF
            return _Outcome.BROKE if failure.reached else _Outcome.UNREACHABLE

    def _headers(self, question: _Question, score: Score) -> list[tuple[bytes, bytes]]:
        if self._router.num_ranks(score.place.instance) < 2:
            return question.headers
        return [*question.headers, (b"x-data-parallel-rank", b"%d" % score.place.rank)]


class _Question:
    """A client's request as it is passed on."""

    def __init__(self, request: Request, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        self.method = request.method
        path: bytes = request.scope.get("raw_path") or quote(request.scope["path"]).encode()
        query: bytes = request.scope["query_string"]
        self.path = (path + b"?" * bool(query) + query).decode("latin-1")
        self.shown = quote(request.scope["path"][:100])  # no path writes a line of its own
        self.headers = headers
        self.body = body


def _refused(scope: Scope) -> Response | None:
    """What to answer a path that is not passed on: whoever tidies it up would serve another one."""
    if not {".", ".."}.isdisjoint(scope["path"].split("/")):
        return _error(404, "there is nothing at this path")
    if len(scope.get("raw_path") or b"") + len(scope["query_string"]) > _LONGEST_PATH:
        return _error(414, "the request's path is too long")
    return None


def _start(answer: httpx.Response) -> Message:
    headers = passed_on(answer.headers.raw)
    length = answer.headers.get("content-length")
    if length is not None:
        headers.append((b"content-length", length.encode()))
    return {"type": "http.response.start", "status": answer.status_code, "headers": headers}


def _error(status: int, message: str, kind: str = "invalid_request_error") -> Response:
    return JSONResponse({"error": {"message": message, "type": kind, "code": status}}, status)


async def _gone(receive: Receive) -> None:
    """Until the client has."""
    while (await receive())["type"] != "http.disconnect":
        pass
