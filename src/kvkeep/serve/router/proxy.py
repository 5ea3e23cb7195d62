"""`create_proxy`: a reverse proxy that sends each prompt to the instance with the lowest cost."""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import time
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kvkeep.serve.http import BodyBudget, BodyGuard, BodyRefused, body_of, unless_disconnected
from kvkeep.serve.router.health import InstanceHealth, Timeouts
from kvkeep.serve.router.listening import RouterApp
from kvkeep.serve.router.membership import Membership
from kvkeep.serve.router.metrics import RouterMetrics
from kvkeep.serve.router.prompts import Prompt, PromptParser
from kvkeep.serve.router.router import Text
from kvkeep.serve.router.upstreams import Probes, UpstreamFailed, end_to_end_headers

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

# Paths of inference are forwarded. All others of an instance are for those who run it: they read
# its state, or change one instance of many (weights, caches, adapters, sleep).
_FORWARDED = ("/v1/", "/v2/")
_FORWARDED_ALONE = frozenset({
    "/tokenize", "/detokenize", "/score", "/rerank", "/pooling", "/classify", "/generate",
    "/generative_scoring", "/inference/v1/generate",
})  # fmt: skip
_OPERATION = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter"})
# Requests that only compute: executed twice, they cost time and change nothing. A "response" does
# more: the instance stores it, and may run tools for it.
_COMPUTED = (PromptParser.PATHS - {"/v1/responses"}) | _FORWARDED_ALONE | {
    "/v1/embeddings", "/v1/score", "/v1/rerank", "/v2/rerank", "/v1/messages/count_tokens",
    "/v1/audio/transcriptions", "/v1/audio/translations",
}  # fmt: skip
_SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
# Statuses that count as a failure of the instance, those worth a try at another one, and those of
# them with which nothing was executed.
_FAILED = frozenset({502, 503, 504, 508})
_ELSEWHERE = _FAILED | {429}
_UNTOUCHED = frozenset({429, 503})
_LONGEST_PATH = 32 << 10  # bytes, with its query


class _Outcome(Enum):
    """The outcome of sending a request to one instance."""

    ANSWERED = "answered"
    REFUSED_AT_LAST = "refused"  # an error status, forwarded to the client
    BROKEN_OFF = "broken off"  # after the first byte was forwarded
    STALLED = "stalled"  # likewise: the next piece did not come in time
    NOT_TAKEN = "not taken"  # the client stopped reading
    GIVEN_UP = "given up"  # the client disconnected
    REFUSED = "refused, asked elsewhere"
    UNREACHABLE = "unreachable"
    BROKE = "broke"  # connected, but no response
    LATE = "no first byte in time"
    SILENT = "silent, asked elsewhere"  # probes found it stopped, and another instance is up


# The instance may have begun to process the request.
_REACHED = frozenset({_Outcome.BROKE, _Outcome.LATE, _Outcome.SILENT})
# The client has no response, so another instance may be asked.
_OPEN = _REACHED | {_Outcome.REFUSED, _Outcome.UNREACHABLE}


def create_proxy(
    router: PrefixRouter,
    upstreams: Upstreams,
    reader: EventReader | None = None,
    *,
    tokenize: Tokenize | None = None,
    hosts: Sequence[str] | None = ("localhost", "127.0.0.1", "[::1]"),
    timeouts: Timeouts | None = None,
    bodies: BodyBudget | None = None,
    membership: Membership | None = None,
    api_key: str | None = None,
) -> RouterApp:
    """Return an ASGI application in front of ``upstreams``, whose names are the router's instances.

    ``membership`` adds and removes instances; without one, it begins with those of ``upstreams``.
    ``reader`` is used for it and for /metrics. ``hosts`` are the accepted names in the Host header
    (None: all). With ``api_key``, /metrics and the instances in /health are for those who send it.
    See `PromptParser` for ``tokenize``, `Timeouts` for time limits and tries, `BodyBudget` for the
    memory of request bodies.

    Paths below ``/v1/`` and ``/v2/`` and a few others of inference are forwarded, with any method;
    those that operate an instance are not. API keys and bodies are forwarded unchanged and never
    logged.
    """
    bodies = bodies or BodyBudget()
    metrics = RouterMetrics(bodies, router.cost.tiers)
    timeouts = timeouts or Timeouts()
    membership = membership or Membership(router, upstreams, reader)
    membership.on_resolved = metrics.resolved
    proxy = _Proxy(router, upstreams, reader, PromptParser(tokenize), timeouts, metrics, api_key)
    upstreams.health.on_doubt = metrics.doubted
    probes = Probes(upstreams, timeouts, metrics.probed, on_gone=metrics.forget)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        tasks = [
            asyncio.create_task(probes.run(), name="the health probes"),
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
            proxy.prompts.close()
            await upstreams.close()

    guards = [Middleware(BodyGuard, bodies)]
    if hosts is not None:
        guards.insert(0, Middleware(TrustedHostMiddleware, list(hosts)))
    app = Starlette(
        routes=[
            Route("/health", proxy.health, methods=["GET"]),
            Route("/metrics", proxy.metrics, methods=["GET"]),
            Route("/{path:path}", proxy),
        ],
        middleware=guards,
        lifespan=lifespan,
    )
    return RouterApp(app, upstreams.health, metrics)


def _log_failure(task: asyncio.Task[None]) -> None:
    """Log a bug in a task. Requests go on, and their outcomes still update `Health`."""
    error = None if task.cancelled() else task.exception()
    if error is not None:
        log.error("%s has ended", task.get_name(), exc_info=error)


class _Proxy:
    """The state and handlers shared by all endpoints.

    As an ASGI application it forwards a request: in plain ASGI, so that responses stream without
    buffering.
    """

    def __init__(  # noqa: PLR0917 - the parts of `create_proxy`
        self,
        router: PrefixRouter,
        upstreams: Upstreams,
        reader: EventReader | None,
        prompts: PromptParser,
        timeouts: Timeouts,
        metrics: RouterMetrics,
        api_key: str | None,
    ) -> None:
        self.prompts = prompts
        self._router = router
        self._upstreams = upstreams
        self._health = upstreams.health
        self._reader = reader
        self._timeouts = timeouts
        self._metrics = metrics
        self._api_key = None if api_key is None else api_key.encode()
        # In the header ``Via`` (RFC 9110, 7.6.3): a router can be among its own instances, if its
        # name is discovered or two routers list each other. Only instances get it: nobody else
        # can forge a loop.
        self._name = b"kvkeep-%s" % secrets.token_hex(8).encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward a request, unless it or its body is refused."""
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
        forwarding = self._forward(Request(scope, receive), body.take(), send)
        with suppress(ClientDisconnect):
            await unless_disconnected(receive, forwarding)

    def _may_see(self, request: Request) -> bool:
        """Whether a client may see the instances: it sends the key, or there is none."""
        if self._api_key is None:
            return True
        scheme, _, given = (
            request.headers.get("authorization", "").encode("latin-1").partition(b" ")
        )
        bearer = hmac.compare_digest(given, self._api_key) and scheme.lower() == b"bearer"
        plain = request.headers.get("x-api-key", "").encode("latin-1")
        return hmac.compare_digest(plain, self._api_key) or bearer

    async def health(self, request: Request) -> Response:
        """Report the state of each instance; 200 while one is up, else 503."""
        states = self._health.states()
        up = sum(state is InstanceHealth.UP for state in states.values())
        body: dict[str, Any] = {"status": "ok" if up else "unavailable", "instances": up}
        if self._may_see(request):
            body["each"] = {name: state.value for name, state in states.items()}
        return JSONResponse(body, 200 if up else 503)

    async def metrics(self, request: Request) -> Response:
        """Return the metrics in Prometheus' text format, which a thread writes."""
        if not self._may_see(request):
            refused = _error(401, "the metrics need the router's API key, as Authorization: Bearer")
            refused.headers["www-authenticate"] = "Bearer"
            return refused
        states = self._health.states()
        text = await asyncio.to_thread(self._metrics.exposition, states, self._router, self._reader)
        return Response(text, headers={"content-type": self._metrics.content_type})

    async def _forward(self, request: Request, body: bytes, send: Send) -> None:
        """Send the request to the best instance, or after a failure to the next best.

        No other instance is tried once a response to the client has begun, and none where one may
        have executed a request that does more than compute.
        """
        headers = end_to_end_headers(request.scope["headers"])
        if any(self._name in value for name, value in headers if name == b"via"):
            log.error("a request came back: this router is among its own instances")
            message = "this router is among its own instances"
            await _error(508, message, "server_error")(request.scope, request.receive, send)
            return
        headers.append((b"via", b"1.1 %s" % self._name))
        path = request.scope["path"]
        placed = request.method == "POST" and path in PromptParser.PATHS
        prompt = await self.prompts.read(path, body, headers) if placed else Prompt(None)
        by_name = isinstance(prompt.tokens, Text) or self._router.is_adapter(prompt.model)
        lora = prompt.model if by_name else ""
        forwarded = _ForwardedRequest(request, headers, body)
        tried: set[str] = set()
        outcomes: list[_Outcome] = []
        while (score := self._next(prompt, lora, tried)) is not None:
            name = score.place.instance
            if placed and not tried:
                self._metrics.placed_at(score, prompt.tokens)
            tried.add(name)
            others = set(self._upstreams.names) - tried
            # A request that crashes instances must not be sent to all of them.
            if sum(one in _REACHED for one in outcomes) >= self._timeouts.tries - 1:
                others = set()
            ticket = self._router.begin(score, prompt.tokens, lora=lora, salt=prompt.salt)
            outcome = _Outcome.GIVEN_UP
            try:
                outcome = await self._try(forwarded, score, ticket, send, others)
            finally:
                self._router.end(ticket)
                self._metrics.requests.labels(name, outcome.value).inc()
            log.info("%s to %s: %s", forwarded.log_path, name, outcome.value)
            if outcome not in _OPEN:
                return
            outcomes.append(outcome)
            if not others or (outcome in _REACHED and not forwarded.only_computes):
                break
            self._metrics.retries.labels(name).inc()
        await _no_response(outcomes)(request.scope, request.receive, send)

    def _next(self, prompt: Prompt, lora: str, tried: set[str]) -> Score | None:
        """Return the best instance not tried yet, preferring those that are up."""
        begun = time.perf_counter()
        chosen = self._router.choose(
            prompt.tokens,
            lora=lora,
            salt=prompt.salt,
            without=self._health.barred(tried),
            key=prompt.key,
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

        Without others, it is not abandoned for a silent instance. Cancelling it closes the
        connection, upon which the instance aborts the request.
        """
        name = score.place.instance
        since = self._health.now()
        begun = abandoned = False
        elsewhere = _ELSEWHERE if forwarded.only_computes else _UNTOUCHED
        replacing = others if forwarded.only_computes else set[str]()
        try:
            async with AsyncExitStack() as stack:
                async with asyncio.timeout(self._timeouts.first_byte_s) as limit:
                    give_up = partial(_expire, limit)
                    with self._health.waiting(name, replacing, give_up) as waiting:
                        try:
                            response = await self._begin(stack, forwarded, score)
                            if response.status_code in elsewhere and self._any_alive(others):
                                return _Outcome.REFUSED
                            pieces = response.aiter_raw()
                            first = await anext(pieces, b"")
                        finally:
                            abandoned = waiting.abandoned
                if response.is_success:
                    self._router.first_token(ticket)
                if response.status_code not in _FAILED:
                    self._health.worked(name)
                begun = True
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
        headers = self._with_rank(forwarded.headers, score)
        response = await stack.enter_async_context(
            self._upstreams.request(name, forwarded.method, forwarded.path, headers, forwarded.body)
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
    ) -> None:
        self.method = request.method
        path: bytes = request.scope.get("raw_path") or quote(request.scope["path"]).encode()
        query: bytes = request.scope["query_string"]
        self.path = (path + b"?" * bool(query) + query).decode("latin-1")
        self.log_path = quote(request.scope["path"][:100])  # quoted: no path can forge a log line
        self.headers = headers
        self.body = body
        self.only_computes = self.method in _SAFE or request.scope["path"] in _COMPUTED


def _refused(scope: Scope) -> Response | None:
    """Return the error for a path that is not forwarded, also if the next server rewrites it."""
    path: str = scope["path"]
    target = (scope.get("raw_path") or b"") + scope["query_string"]
    if b"#" in target:  # what is behind it is not sent, so another path than this would be
        return _error(400, "a request's target has no fragment; write # as %23")
    if scope["method"] == "CONNECT":  # a success opens a tunnel, behind which no answer fits
        return _error(405, "this is no forward proxy: it takes no CONNECT")
    rewritten = not {"", ".", ".."}.isdisjoint(path.strip("/").split("/")) or "\\" in path
    inference = path.startswith(_FORWARDED) or path in _FORWARDED_ALONE
    if rewritten or not inference or path.rstrip("/") in _OPERATION:
        return _error(404, "not found: a router forwards paths of inference, such as /v1/…, alone")
    if len(target) > _LONGEST_PATH:
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
