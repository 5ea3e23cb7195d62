"""`create_proxy`: a reverse proxy that sends each prompt where most of it is cached."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kvkeep.serve.http import BodyBudget, BodyGuard, BodyRefused, body_of
from kvkeep.serve.router.health import InstanceHealth, Patience
from kvkeep.serve.router.metrics import RouterMetrics
from kvkeep.serve.router.probes import Probes
from kvkeep.serve.router.prompts import Prompt, PromptParser
from kvkeep.serve.router.upstreams import UpstreamFailed, passed_on

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    import httpx
    from starlette.types import Message, Receive, Scope, Send

    from kvkeep.serve.kv_events import EventReader
    from kvkeep.serve.router.prompts import Tokenize
    from kvkeep.serve.router.router import PrefixRouter, RouteTicket, Score
    from kvkeep.serve.router.upstreams import Upstreams

__all__ = ["create_proxy"]

log = logging.getLogger("kvkeep.router")

_PLACED = ("/v1/completions", "/v1/chat/completions")
# What goes to whoever has least to do.
_OTHERS = ("/v1/models", "/v1/models/{name:path}", "/v1/embeddings", "/tokenize", "/detokenize")
# An instance that answers this is not well; and with the others, another one may do better.
_FAILED = frozenset({502, 503, 504})
_ELSEWHERE = _FAILED | {429}
_LONGEST_PATH = 32 << 10  # bytes, with its query


class _Outcome(Enum):
    """What came of asking one instance."""

    ANSWERED = "answered"
    REFUSED_AT_LAST = "refused"  # an error, which the client was told
    BROKEN_OFF = "broken off"  # after the client had the beginning
    STALLED = "stalled"  # the same: no next piece in time
    NOT_TAKEN = "not taken"  # the client stopped reading
    REFUSED = "refused, asked elsewhere"
    BROKE = "broke"  # it was reached, and did not answer
    LATE = "no first byte in time"
    SILENT = "silent, asked elsewhere"  # probes found it stopped, and another one is up
    UNREACHABLE = "unreachable"
    GIVEN_UP = "given up"  # by the client, which has gone


_DONE = frozenset(
    {
        _Outcome.ANSWERED,
        _Outcome.REFUSED_AT_LAST,
        _Outcome.BROKEN_OFF,
        _Outcome.STALLED,
        _Outcome.NOT_TAKEN,
    }
)
# The instance may have had the request in hand.
_REACHED = frozenset({_Outcome.BROKE, _Outcome.LATE, _Outcome.SILENT})


def create_proxy(
    router: PrefixRouter,
    upstreams: Upstreams,
    reader: EventReader | None = None,
    *,
    tokenize: Tokenize | None = None,
    hosts: Sequence[str] | None = ("localhost", "127.0.0.1", "[::1]"),
    patience: Patience | None = None,
    bodies: BodyBudget | None = None,
) -> Starlette:
    """An ASGI application in front of ``upstreams``, whose names are the router's instances.

    ``reader`` is only looked at, for /metrics. ``hosts`` are the names in a Host header that are
    served (None: all); see `PromptParser` for ``tokenize``, `Patience` for how long instances are
    waited for, and `BodyBudget` for the memory that requests take. Keys and bodies are passed on as
    they are; neither is logged.
    """
    bodies = bodies or BodyBudget()
    metrics = RouterMetrics(bodies, router.cost.tiers)
    proxy = _Proxy(
        router, upstreams, reader, tokenize, patience=patience or Patience(), metrics=metrics
    )

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        probing = asyncio.create_task(proxy.probes.run())
        probing.add_done_callback(_say_why)
        try:
            yield
        finally:
            probing.cancel()
            await asyncio.wait([probing])
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


def _say_why(probing: asyncio.Task[None]) -> None:
    """A fault of ours in the probes is loud; requests go on, judged by what becomes of them."""
    error = None if probing.cancelled() else probing.exception()
    if error is not None:
        log.error("the probes of the instances have ended", exc_info=error)


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
            await (body := body_of(scope)).read()
        except ClientDisconnect:
            return
        except BodyRefused as why:
            kind = "server_error" if why.status >= 500 else "invalid_request_error"
            answer = _error(why.status, str(why), kind)
            answer.headers.update(why.headers)
            await answer(scope, receive, send)
            return
        # Kept, and counted, until the answer has ended: another instance may have to be asked.
        passing = asyncio.create_task(
            self._proxy.pass_on(request, body.take(), send, placed=self._placed)
        )
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
        *,
        patience: Patience,
        metrics: RouterMetrics,
    ) -> None:
        self._router = router
        self._upstreams = upstreams
        self._health = upstreams.health
        self._reader = reader
        self._patience = patience
        self._metrics = metrics
        self._prompts = PromptParser(upstreams, patience, tokenize, told=self._metrics.tokenized)
        self._health.subscribe(self._metrics.doubted)
        self.probes = Probes(upstreams, self._health, patience, self._metrics.probed)

    async def health(self, request: Request) -> Response:
        """200 while an instance is up; how many are, and what is thought of each."""
        states = {name: self._health.state(name) for name in self._upstreams.names}
        up = sum(state is InstanceHealth.UP for state in states.values())
        body = {
            "status": "ok" if up else "unavailable",
            "instances": up,
            "each": {name: state.value for name, state in states.items()},
        }
        return JSONResponse(body, 200 if up else 503)

    async def metrics(self, request: Request) -> Response:
        """Prometheus' text format."""
        text = self._metrics.exposition(self._router, self._upstreams, self._reader)
        return Response(text, headers={"content-type": self._metrics.content_type})

    async def pass_on(self, request: Request, body: bytes, send: Send, *, placed: bool) -> None:
        """Ask the best instance; while nothing has been sent to the client, the next best."""
        headers = passed_on(request.scope["headers"])
        prompt = await self._prompts.read(body, headers) if placed else Prompt(None)
        lora = prompt.model if self._router.is_adapter(prompt.model) else ""
        question = _Question(request, headers, body)
        names = self._upstreams.names
        tried: set[str] = set()
        came: list[_Outcome] = []
        while len(tried) < len(names):
            score = self._next(prompt, lora, tried)
            name = score.place.instance
            if placed and not tried:
                self._metrics.placed_at(score, prompt.tokens)
            tried.add(name)
            # A request that breaks whoever computes it must not go round them all.
            reached = sum(one in _REACHED for one in came)
            final = len(tried) == len(names) or reached >= self._patience.tries - 1
            ticket = self._router.begin(score, prompt.tokens, lora=lora, salt=prompt.salt)
            outcome = _Outcome.GIVEN_UP
            try:
                # The last one is waited for: it may go on, and nobody else will be asked.
                others = set() if final else set(names) - tried
                outcome = await self._try(question, score, ticket, send, others)
            finally:
                self._router.end(ticket)
                self._metrics.requests.labels(name, outcome.value).inc()
            log.info("%s to %s: %s", question.shown, name, outcome.value)
            if outcome in _DONE:
                return
            came.append(outcome)
            if final:
                break
            self._metrics.retries.labels(name).inc()
        await _no_answer(came)(request.scope, request.receive, send)

    def _next(self, prompt: Prompt, lora: str, tried: set[str]) -> Score:
        """The best of the instances that were not tried, among those that are up if there are."""
        begun = time.perf_counter()
        among = self._health.best(tried)
        if prompt.tokens is None:
            scores = self._router.least_loaded(among)
        else:
            scores = self._router.score(prompt.tokens, lora=lora, salt=prompt.salt, among=among)
        self._metrics.deciding.observe(time.perf_counter() - begun)
        return scores[0]

    async def _try(
        self,
        question: _Question,
        score: Score,
        ticket: RouteTicket,
        send: Send,
        others: set[str],
    ) -> _Outcome:
        """Ask one instance; ``others`` are those that may be asked after it.

        Whenever this is left early the connection is closed, so that the instance sees that its
        answer is not wanted; a stopped one sees that when it goes on.
        """
        name = score.place.instance
        since = self._health.now()
        begun = abandoned = False
        try:
            async with AsyncExitStack() as stack:
                async with asyncio.timeout(self._patience.first_byte_s) as limit:
                    with self._health.waiting(name, others, partial(_expire, limit)) as waiting:
                        try:
                            answer = await self._begin(stack, question, score)
                            if answer.status_code in _ELSEWHERE and self._hopeful(others):
                                return _Outcome.REFUSED
                            pieces = answer.aiter_raw()
                            first = await anext(pieces, b"")
                        finally:
                            abandoned = waiting.abandoned
                self._router.first_token(ticket)
                if answer.status_code not in _FAILED:
                    self._health.worked(name)
                begun = True
                return await self._stream(name, answer, first, pieces, send)
        except TimeoutError:
            if abandoned:  # it is suspect already
                return _Outcome.SILENT
            log.warning("%s did not begin to answer in time", name)
            self._health.failed(name)
            return _Outcome.LATE
        except UpstreamFailed as failure:
            self._health.failed(name)
            log.warning("%s", failure)
            if begun:  # the client sees that the answer has no end
                return _Outcome.BROKEN_OFF
            return _Outcome.BROKE if failure.reached else _Outcome.UNREACHABLE
        except asyncio.CancelledError:
            if not begun:
                self._health.left(name, since)
            raise

    async def _begin(
        self, stack: AsyncExitStack, question: _Question, score: Score
    ) -> httpx.Response:
        """The head of an instance's answer; ``stack`` closes it."""
        name = score.place.instance
        headers = self._headers(question, score)
        answer = await stack.enter_async_context(
            self._upstreams.asking(name, question.method, question.path, headers, question.body)
        )
        if answer.status_code in _FAILED:
            self._health.failed(name)
        return answer

    async def _stream(
        self,
        name: str,
        answer: httpx.Response,
        first: bytes,
        pieces: AsyncIterator[bytes],
        send: Send,
    ) -> _Outcome:
        """Pass an answer on as it comes. Each piece has its time, to come and to be taken."""
        if not await self._taken(send, _start(answer)) or not await self._taken(send, _part(first)):
            return _Outcome.NOT_TAKEN
        while True:
            try:
                async with asyncio.timeout(self._patience.idle_s):
                    piece = await anext(pieces, None)
            except TimeoutError:
                log.warning("%s stalled in the middle of an answer", name)
                self._health.failed(name)
                return _Outcome.STALLED
            if piece is None:
                break
            self._health.heard(name)
            if not await self._taken(send, _part(piece)):
                return _Outcome.NOT_TAKEN
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return _Outcome.REFUSED_AT_LAST if answer.is_error else _Outcome.ANSWERED

    async def _taken(self, send: Send, message: Message) -> bool:
        """Whether the client took this in time; `send` waits for one that does not read."""
        try:
            async with asyncio.timeout(self._patience.idle_s):
                await send(message)
        except TimeoutError:
            return False
        return True

    def _hopeful(self, others: set[str]) -> bool:
        """Whether one of them answers, if only probes."""
        return any(self._health.state(name) is not InstanceHealth.SUSPECT for name in others)

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


def _no_answer(came: list[_Outcome]) -> Response:
    """What to tell a client whose request no instance answered."""
    if _Outcome.BROKE in came:
        return _error(502, "no instance could answer", "server_error")
    if not _REACHED.isdisjoint(came):
        return _error(504, "no instance began to answer in time", "server_error")
    return _error(503, "no instance can be reached", "server_error", retry_after_s=1)


def _error(
    status: int, message: str, kind: str = "invalid_request_error", *, retry_after_s: int = 0
) -> Response:
    return JSONResponse(
        {"error": {"message": message, "type": kind, "code": status}},
        status,
        headers={"retry-after": str(retry_after_s)} if retry_after_s else None,
    )


def _part(piece: bytes) -> Message:
    return {"type": "http.response.body", "body": piece, "more_body": True}


def _expire(limit: asyncio.Timeout) -> None:
    """End this time limit now, unless it is over already."""
    if not limit.expired():
        limit.reschedule(asyncio.get_running_loop().time())


async def _gone(receive: Receive) -> None:
    """Until the client has."""
    while (await receive())["type"] != "http.disconnect":
        pass
