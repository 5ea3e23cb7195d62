"""`create_proxy`: a reverse proxy that sends each prompt to the instance with the lowest cost."""

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

from kvkeep.serve.http import BodyBudget, BodyGuard, BodyRefused, body_of, unless_disconnected
from kvkeep.serve.router.answers import UNFINISHED, AnswerReader
from kvkeep.serve.router.conversations import ConversationTable
from kvkeep.serve.router.costs import InstanceCosts
from kvkeep.serve.router.expected import ExpectedReturns
from kvkeep.serve.router.health import InstanceHealth, Timeouts
from kvkeep.serve.router.instances import InstanceRoutes
from kvkeep.serve.router.membership import Membership
from kvkeep.serve.router.message_endpoint import MessagesEndpoint
from kvkeep.serve.router.messages import COUNT_PATH, MESSAGES_PATH
from kvkeep.serve.router.metrics import RouterMetrics
from kvkeep.serve.router.probes import Probes
from kvkeep.serve.router.prompts import Prompt, PromptParser, credentials_of
from kvkeep.serve.router.readiness import Readiness, ReadinessGuard
from kvkeep.serve.router.upstreams import UpstreamFailed, end_to_end_headers
from kvkeep.serve.router.usage import SALT, TenantRoutes
from kvkeep.serve.router.via import Via

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    import httpx
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from kvkeep.core.returns import Ended
    from kvkeep.serve.kv_events import EventReader
    from kvkeep.serve.router.conversations import RoutedTurn
    from kvkeep.serve.router.messages import MessageExchange
    from kvkeep.serve.router.prompts import Tokenize
    from kvkeep.serve.router.router import PrefixRouter, RouteTicket, Score
    from kvkeep.serve.router.upstreams import Upstreams

__all__ = ["create_proxy"]

log = logging.getLogger("kvkeep.router")

_PLACED = ("/v1/completions", "/v1/chat/completions")
# Forwarded to the least loaded instance.
_OTHERS = ("/v1/models", "/v1/models/{name:path}", "/v1/embeddings", "/tokenize", "/detokenize")
# Statuses that count as a failure of the instance, and those worth a try at another one.
_FAILED = frozenset({502, 503, 504, 508})
_ELSEWHERE = _FAILED | {429}
_LONGEST_PATH = 32 << 10  # bytes, with its query


class _Outcome(Enum):
    """The outcome of sending a request to one instance."""

    ANSWERED = "answered"
    REFUSED_AT_LAST = "refused"  # an error status, forwarded to the client
    BROKEN_OFF = "broken off"  # after the first byte was forwarded
    STALLED = "stalled"  # likewise: the next piece did not come in time
    NOT_TAKEN = "not taken"  # the client stopped reading
    REFUSED = "refused, asked elsewhere"
    BROKE = "broke"  # connected, but no response
    LATE = "no first byte in time"
    SILENT = "silent, asked elsewhere"  # probes found it stopped, and another instance is up
    UNREACHABLE = "unreachable"
    GIVEN_UP = "given up"  # the client disconnected


_DONE = frozenset(
    {
        _Outcome.ANSWERED,
        _Outcome.REFUSED_AT_LAST,
        _Outcome.BROKEN_OFF,
        _Outcome.STALLED,
        _Outcome.NOT_TAKEN,
    }
)
# The instance may have begun to process the request.
_REACHED = frozenset({_Outcome.BROKE, _Outcome.LATE, _Outcome.SILENT})


def create_proxy(
    router: PrefixRouter,
    upstreams: Upstreams,
    reader: EventReader | None = None,
    *,
    tokenize: Tokenize | None = None,
    hosts: Sequence[str] | None = ("localhost", "127.0.0.1", "[::1]"),
    timeouts: Timeouts | None = None,
    bodies: BodyBudget | None = None,
    conversations: ConversationTable | None = None,
    usage: bool = False,
    learn_costs: bool = True,
    membership: Membership | None = None,
    admin_key: str | None = None,
    exposed: bool = False,
) -> Starlette:
    """Return an ASGI application in front of ``upstreams``, whose names are the router's instances.

    ``membership`` adds and removes instances; without one, it begins with those of ``upstreams``.
    ``reader`` is used for it and for /metrics. ``hosts`` are the accepted names in the Host header
    (None: all). See `PromptParser` for ``tokenize``, `Timeouts` for time limits and tries,
    `BodyBudget` for the memory of request bodies, `ConversationTable` for what is learned of
    answers, `TenantRoutes` for ``usage``, `InstanceCosts` for ``learn_costs``, and `InstanceRoutes`
    for ``admin_key`` and ``exposed``.

    API keys and bodies are forwarded unchanged and never logged.
    """
    bodies = bodies or BodyBudget()
    expected = ExpectedReturns(ConversationTable() if conversations is None else conversations)
    metrics = RouterMetrics(bodies, router.cost.tiers, expected)
    timeouts = timeouts or Timeouts()
    membership = membership or Membership(router, upstreams, reader)
    membership.subscribe(metrics.resolved)
    costs = None
    if learn_costs:
        costs = InstanceCosts(upstreams, router, timeouts.probe_s, metrics.cost_read)
    proxy = _Proxy(
        router,
        upstreams,
        reader,
        tokenize,
        timeouts=timeouts,
        metrics=metrics,
        expected=expected,
        costs=costs,
    )

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        tasks = [
            asyncio.create_task(proxy.probes.run(), name="the health probes"),
            asyncio.create_task(membership.run(), name="the watch over instances"),
        ]
        for task in tasks:
            task.add_done_callback(_log_failure)
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            await upstreams.close()

    placed: dict[str, ASGIApp] = {path: _Forward(proxy, placed=True) for path in _PLACED}
    placed[MESSAGES_PATH] = MessagesEndpoint(proxy.forward)
    told = []
    if usage:
        tenants = TenantRoutes()
        placed = {path: tenants.counted(endpoint) for path, endpoint in placed.items()}
        told.append(Route("/kv/usage", tenants.usage, methods=["GET"]))
    readiness = Readiness(upstreams.health)
    guards = [Middleware(ReadinessGuard, readiness)]
    if hosts is not None:
        guards.append(Middleware(TrustedHostMiddleware, list(hosts)))
    guards.append(Middleware(BodyGuard, bodies))
    app = Starlette(
        routes=[
            Route("/health", proxy.health, methods=["GET"]),
            Route("/metrics", proxy.metrics, methods=["GET"]),
            Route("/kv/conversations", proxy.conversations, methods=["GET"]),
            *told,
            *InstanceRoutes(membership, admin_key, exposed=exposed).routes(),
            *(Route(path, endpoint, methods=["POST"]) for path, endpoint in placed.items()),
            Route(COUNT_PATH, MessagesEndpoint(proxy.forward), methods=["POST"]),
            *(Route(path, _Forward(proxy, placed=False)) for path in _OTHERS),
        ],
        middleware=guards,
        lifespan=lifespan,
    )
    app.state.metrics = metrics
    app.state.readiness = readiness
    return app


def _log_failure(task: asyncio.Task[None]) -> None:
    """Log a bug in a task. Requests go on, and their outcomes still update `Health`."""
    error = None if task.cancelled() else task.exception()
    if error is not None:
        log.error("%s has ended", task.get_name(), exc_info=error)


class _Forward:
    """One forwarded endpoint, in plain ASGI, so that responses stream without buffering."""

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
        # The body stays in memory, and counted, until the end: a retry may need it.
        forwarding = self._proxy.forward(request, body.take(), send, placed=self._placed)
        with suppress(ClientDisconnect):
            await unless_disconnected(receive, forwarding)


class _Proxy:
    """The state and handlers shared by all endpoints."""

    def __init__(
        self,
        router: PrefixRouter,
        upstreams: Upstreams,
        reader: EventReader | None,
        tokenize: Tokenize | None,
        *,
        timeouts: Timeouts,
        metrics: RouterMetrics,
        expected: ExpectedReturns,
        costs: InstanceCosts | None,
    ) -> None:
        self._router = router
        self._expected = expected
        self._conversations = expected.table
        self._via = Via()
        self._upstreams = upstreams
        self._health = upstreams.health
        self._reader = reader
        self._timeouts = timeouts
        self._metrics = metrics
        self._prompts = PromptParser(
            upstreams, timeouts, tokenize, on_outcome=self._metrics.tokenized
        )
        self._health.subscribe(self._metrics.doubted)
        self.probes = Probes(
            upstreams,
            self._health,
            timeouts,
            self._metrics.probed,
            costs,
            on_gone=self._metrics.forget,
        )

    async def health(self, request: Request) -> Response:
        """Report the state of each instance; 200 while one is up, else 503."""
        states = {name: self._health.state(name) for name in self._health.names()}
        up = sum(state is InstanceHealth.UP for state in states.values())
        body = {
            "status": "ok" if up else "unavailable",
            "instances": up,
            "each": {name: state.value for name, state in states.items()},
        }
        return JSONResponse(body, 200 if up else 503)

    async def metrics(self, request: Request) -> Response:
        """Return the metrics in Prometheus' text format, which a thread writes."""
        seen = self._metrics.seen(self._upstreams)
        text = await asyncio.to_thread(self._metrics.exposition, seen, self._router, self._reader)
        return Response(text, headers={"content-type": self._metrics.content_type})

    async def conversations(self, request: Request) -> Response:
        """Return how many conversations are followed, and how their answers end."""
        return JSONResponse(self._expected.figures(self._upstreams.names))

    async def forward(
        self,
        request: Request,
        body: bytes,
        send: Send,
        *,
        placed: bool,
        exchange: MessageExchange | None = None,
    ) -> None:
        """Send the request to the best instance, or after a failure to the next best.

        No other instance is tried once a response to the client has begun. ``exchange`` translates
        a request for instances that do not know its API.
        """
        headers = end_to_end_headers(request.scope["headers"])
        if self._via.passed(headers):
            log.error("a request came back: this router is among its own instances")
            message = "this router is among its own instances"
            await _error(508, message, "server_error")(request.scope, request.receive, send)
            return
        headers = self._via.mark(headers)
        shown = body if exchange is None else exchange.body
        known = headers if exchange is None else exchange.headers(headers)
        prompt = await self._prompts.read(shown, known) if placed else Prompt(None)
        request.scope[SALT] = prompt.salt
        lora = prompt.model if self._router.is_adapter(prompt.model) else ""
        forwarded = _ForwardedRequest(request, headers, body, exchange)
        if placed:
            forwarded.turn = self._conversations.find(prompt, credentials_of(headers))
        tried: set[str] = set()
        outcomes: list[_Outcome] = []
        while (score := self._next(prompt, lora, tried, forwarded.turn)) is not None:
            name = score.place.instance
            if placed and not tried:
                self._metrics.placed_at(score, prompt.tokens)
            tried.add(name)
            others = set(self._upstreams.names) - tried
            # A request that crashes instances must not be sent to all of them.
            reached = sum(one in _REACHED for one in outcomes)
            final = not others or reached >= self._timeouts.tries - 1
            ticket = self._router.begin(score, prompt.tokens, lora=lora, salt=prompt.salt)
            outcome = _Outcome.GIVEN_UP
            try:
                # The last try is not abandoned for a silent instance: no other one follows.
                if final:
                    others = set()
                outcome = await self._try(forwarded, score, ticket, send, others)
            finally:
                self._router.end(ticket)
                if forwarded.turn is not None:
                    ended = forwarded.ended(complete=outcome is _Outcome.ANSWERED)
                    self._conversations.ended(forwarded.turn, name, ended)
                self._metrics.requests.labels(name, outcome.value).inc()
            log.info("%s to %s: %s", forwarded.log_path, name, outcome.value)
            if outcome in _DONE:
                return
            outcomes.append(outcome)
            if final:
                break
            self._metrics.retries.labels(name).inc()
        if exchange is not None:
            exchange.translates = True
        await _no_response(outcomes)(request.scope, request.receive, send)

    def _next(
        self, prompt: Prompt, lora: str, tried: set[str], turn: RoutedTurn | None
    ) -> Score | None:
        """Return the best instance not tried yet, preferring those that are up."""
        begun = time.perf_counter()
        home = "" if turn is None else turn.home
        if home and self._router.blocks(home)[0]:
            home = ""  # it announces its blocks, so the scores tell what it holds
        chosen = self._router.choose(
            prompt.tokens,
            lora=lora,
            salt=prompt.salt,
            without=self._health.barred(tried),
            key=prompt.key,
            home=home,
        )
        self._metrics.deciding.observe(time.perf_counter() - begun)
        return chosen

    async def _try(
        self,
        forwarded: _ForwardedRequest,
        score: Score,
        ticket: RouteTicket,
        send: Send,
        others: set[str],
    ) -> _Outcome:
        """Send the request to one instance; ``others`` may be tried after it.

        Cancelling it closes the connection, upon which the instance aborts the request.
        """
        name = score.place.instance
        since = self._health.now()
        begun = abandoned = False
        try:
            async with AsyncExitStack() as stack:
                async with asyncio.timeout(self._timeouts.first_byte_s) as limit:
                    with self._health.waiting(name, others, partial(_expire, limit)) as waiting:
                        try:
                            response = await self._begin(stack, forwarded, score)
                            if response.status_code in _ELSEWHERE and self._any_alive(others):
                                return _Outcome.REFUSED
                            pieces = response.aiter_raw()
                            first = await anext(pieces, b"")
                        finally:
                            abandoned = waiting.abandoned
                self._router.first_token(ticket)
                if response.status_code not in _FAILED:
                    self._health.worked(name)
                begun = True
                if forwarded.turn is not None and response.is_success:
                    self._conversations.answered(forwarded.turn)
                    send = forwarded.reading(send)
                return await self._stream(name, response, first, pieces, send)
        except TimeoutError:
            if abandoned:  # by `Health`, which suspects the instance already
                return _Outcome.SILENT
            log.warning("%s sent no first byte in time", name)
            self._health.failed(name)
            return _Outcome.LATE
        except UpstreamFailed as failure:
            self._health.failed(name)
            log.warning("%s", failure)
            if begun:  # the client sees a truncated response
                return _Outcome.BROKEN_OFF
            return _Outcome.BROKE if failure.reached else _Outcome.UNREACHABLE
        except asyncio.CancelledError:
            if not begun:
                self._health.left(name, since)
            raise

    async def _begin(
        self, stack: AsyncExitStack, forwarded: _ForwardedRequest, score: Score
    ) -> httpx.Response:
        """Return an instance's response head; ``stack`` closes the response."""
        name = score.place.instance
        path, body, headers = forwarded.sent_to(native=self._upstreams.has_messages(name))
        response = await stack.enter_async_context(
            self._upstreams.request(
                name, forwarded.method, path, self._with_rank(headers, score), body
            )
        )
        if response.status_code in _FAILED:
            self._health.failed(name)
        return response

    async def _stream(
        self,
        name: str,
        response: httpx.Response,
        first: bytes,
        pieces: AsyncIterator[bytes],
        send: Send,
    ) -> _Outcome:
        """Forward a response as it arrives, with a timeout for each piece to come and be taken."""
        for message in (_start(response), _part(first)):
            if not await self._taken(send, message):
                return _Outcome.NOT_TAKEN
        while True:
            try:
                async with asyncio.timeout(self._timeouts.idle_s):
                    piece = await anext(pieces, None)
            except TimeoutError:
                log.warning("%s stalled during a response", name)
                self._health.failed(name)
                return _Outcome.STALLED
            if piece is None:
                break
            self._health.heard(name)
            if not await self._taken(send, _part(piece)):
                return _Outcome.NOT_TAKEN
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return _Outcome.REFUSED_AT_LAST if response.is_error else _Outcome.ANSWERED

    async def _taken(self, send: Send, message: Message) -> bool:
        """Send to the client. Return False if it does not read in time."""
        try:
            async with asyncio.timeout(self._timeouts.idle_s):
                await send(message)
        except TimeoutError:
            return False
        return True

    def _any_alive(self, others: set[str]) -> bool:
        """Whether one of these instances answers requests or probes."""
        return any(self._health.state(name) is not InstanceHealth.SUSPECT for name in others)

    def _with_rank(
        self, headers: list[tuple[bytes, bytes]], score: Score
    ) -> list[tuple[bytes, bytes]]:
        if self._router.num_ranks(score.place.instance) < 2:
            return headers
        return [*headers, (b"x-data-parallel-rank", b"%d" % score.place.rank)]


class _ForwardedRequest:
    """A client's request as it is forwarded."""

    def __init__(
        self,
        request: Request,
        headers: list[tuple[bytes, bytes]],
        body: bytes,
        exchange: MessageExchange | None = None,
    ) -> None:
        self.exchange = exchange
        self.method = request.method
        path: bytes = request.scope.get("raw_path") or quote(request.scope["path"]).encode()
        query: bytes = request.scope["query_string"]
        self.path = (path + b"?" * bool(query) + query).decode("latin-1")
        self.log_path = quote(request.scope["path"][:100])  # quoted: no path can forge a log line
        self.headers = headers
        self.body = body
        self.turn: RoutedTurn | None = None
        self._reader: AnswerReader | None = None

    def reading(self, send: Send) -> Send:
        """Return ``send``, which also reads what was sent; a compressed answer says nothing."""
        native = self.exchange is not None and not self.exchange.translates
        reader = self._reader = AnswerReader(messages=native)

        async def send_and_read(message: Message) -> None:
            await send(message)
            if message["type"] == "http.response.body":
                reader.feed(message["body"])

        return send_and_read

    def ended(self, *, complete: bool) -> Ended:
        """Return how the answer ended."""
        return self._reader.ended if complete and self._reader is not None else UNFINISHED

    def sent_to(self, *, native: bool) -> tuple[str, bytes, list[tuple[bytes, bytes]]]:
        """Return path, body and headers for an instance; ``native``: it has Anthropic's API."""
        if self.exchange is not None:
            self.exchange.translates = not native
            if not native:
                headers = self.exchange.headers(self.headers)
                return self.exchange.path, self.exchange.body, headers
        return self.path, self.body, self.headers


def _refused(scope: Scope) -> Response | None:
    """Return the error for a path that is not forwarded, as the next server may rewrite it."""
    if not {".", ".."}.isdisjoint(scope["path"].split("/")):
        return _error(404, "not found")
    if len(scope.get("raw_path") or b"") + len(scope["query_string"]) > _LONGEST_PATH:
        return _error(414, "the request's path is too long")
    return None


def _start(response: httpx.Response) -> Message:
    headers = end_to_end_headers(response.headers.raw)
    length = response.headers.get("content-length")
    if length is not None:
        headers.append((b"content-length", length.encode()))
    return {"type": "http.response.start", "status": response.status_code, "headers": headers}


def _no_response(outcomes: list[_Outcome]) -> Response:
    """Return the error for a request that no instance answered."""
    if _Outcome.BROKE in outcomes:
        return _error(502, "no instance could answer", "server_error")
    if not _REACHED.isdisjoint(outcomes):
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
    """Let this timeout expire now, unless it has already."""
    if not limit.expired():
        limit.reschedule(asyncio.get_running_loop().time())
