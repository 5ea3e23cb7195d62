"""Generation requests, from admission to the last byte of the response, streamed or whole."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, suppress
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response

from kvkeep.serve.http import unless_disconnected
from kvkeep.serve.server.errors import ApiError, as_api_error, outcome_of
from kvkeep.serve.server.worker import Call

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence

    from starlette.requests import Request
    from starlette.types import Message, Receive, Scope, Send

    from kvkeep.serve.engine import Completion, Delta
    from kvkeep.serve.server.schemas.base import ResponseModel
    from kvkeep.serve.server.service import ServedRequest, Service
    from kvkeep.serve.server.worker import Job
    from kvkeep.serve.server.writers import Frames

__all__ = ["Writer", "respond"]

Result = TypeVar("Result")

# Seconds to send a last error to a client that may not be reading.
_LAST_WORDS_S = 2.0
_EVENT_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # buffering proxies would delay the tokens
}


class Writer(Protocol):
    """Builds the response of one endpoint. ``number`` is that of a job, from 0."""

    @property
    def id(self) -> str:
        """The response's id."""

    @property
    def frames(self) -> Frames:
        """The form in which its events are sent."""

    def begin(self) -> Iterable[ResponseModel]:
        """Yield the events before any token."""

    def more(self, number: int, delta: Delta) -> Iterable[ResponseModel]:
        """Yield the events of one delta."""

    def end(self, completions: Sequence[Completion]) -> Iterable[ResponseModel]:
        """Yield the events after the last token."""

    def whole(self, completions: Sequence[Completion]) -> ResponseModel:
        """Return the response of a request that is not streamed."""


async def respond(
    request: Request,
    service: Service,
    endpoint: str,
    jobs: Callable[[], Sequence[Job]],
    writer: Writer,
    *,
    characters: int,
    stream: bool,
) -> Response:
    """Create the jobs, run them, and return the response that ``writer`` builds of their deltas.

    ``jobs`` runs in a tokenizer thread, chosen by the number of ``characters`` to tokenize. Raises
    `ApiError` for errors before the response begins; a stream ends with an error as its last event.
    A disconnect aborts the jobs, as does the request timeout.
    """
    call = Call(writer.id, endpoint, request.headers)
    try:
        async with AsyncExitStack() as stack:
            ticket = await stack.enter_async_context(service.admitted(call))
            work = _submitted(service, ticket, jobs, characters)
            await unless_disconnected(request.receive, _in_time(ticket, work))
            if stream:
                return EventStream(service, ticket, writer, stack.pop_all())
            completions = await unless_disconnected(
                request.receive, _in_time(ticket, _completions(ticket))
            )
            body = writer.whole(completions).model_dump_json()
            return Response(body, media_type="application/json")
    except ClientDisconnect:
        return Response(status_code=499)  # the client has gone; for the access log
    except Exception as error:
        raise as_api_error(error, retry_after_s=service.retry_after_s) from error


class EventStream(Response):
    """A response of server-sent events, one per delta; deltas that wait are sent together.

    ``stack`` ends the request. Memory: a client that does not read stops the sending, not the
    engine; the rest of its answer waits in its `Generation`.
    """

    def __init__(
        self, service: Service, ticket: ServedRequest, writer: Writer, stack: AsyncExitStack
    ) -> None:
        super().__init__()
        self._service = service
        self._ticket = ticket
        self._writer = writer
        self._frames = writer.frames
        self._stack = stack

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all events; a disconnect is no error."""
        try:
            async with self._stack:
                await unless_disconnected(receive, self._write(send))
        except ClientDisconnect:
            return

    async def _write(self, send: Send) -> None:
        headers = [(key.encode(), value.encode()) for key, value in _EVENT_HEADERS.items()]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            await _in_time(self._ticket, self._write_all(send))
        except Exception as error:  # noqa: BLE001 - sent to the client; as_api_error logs it
            known = as_api_error(error, retry_after_s=self._service.retry_after_s)
            self._ticket.outcome = outcome_of(known)
            with suppress(TimeoutError):
                async with asyncio.timeout(_LAST_WORDS_S):
                    await send(_body(self._frames.error(known), more=False))

    async def _write_all(self, send: Send) -> None:
        if self._frames.ping:
            sending = _Pinging(send, self._frames.ping, self._service.settings.ping_s)
            pings = asyncio.create_task(sending.run())
            try:
                last = await self._write_events(sending.send)
            finally:
                pings.cancel()
                await asyncio.wait([pings])
                if not pings.cancelled():
                    pings.result()  # raises what ended them
        else:
            last = await self._write_events(send)
        await send(last)  # nothing may wait behind it: the end of a response reads as a disconnect

    async def _write_events(self, send: Send) -> dict[str, Any]:
        """Send all events but the last ones; return these."""
        completions: dict[int, Completion] = {}
        frame = self._frames.event
        if begin := [*map(frame, self._writer.begin())]:
            await send(_body(*begin))
        async for arrived in self._ticket.deltas():
            events: list[bytes] = []
            for number, delta in arrived:
                events += map(frame, self._writer.more(number, delta))
                if delta.completion is not None:
                    completions[number] = delta.completion
            if events:
                await send(_body(*events))
        last = map(frame, self._writer.end(_in_order(completions)))
        return _body(*last, self._frames.last, more=False)


class _Pinging:
    """Sends an event after each ``seconds`` of silence, between those of `send`."""

    def __init__(self, send: Send, ping: bytes, seconds: float) -> None:
        self._send = send
        self._ping = ping
        self._seconds = seconds
        self._one = asyncio.Lock()
        self._due = asyncio.get_running_loop().time() + seconds

    async def send(self, message: Message) -> None:
        async with self._one:
            await self._send(message)
            self._due = asyncio.get_running_loop().time() + self._seconds

    async def run(self) -> None:
        """Send pings until this is cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            wait = self._due - loop.time()
            if wait > 0:
                await asyncio.sleep(wait)
            elif not self._one.locked():  # else a client that does not read holds it
                await self.send(_body(self._ping))
            else:
                await asyncio.sleep(self._seconds)


async def _submitted(
    service: Service, ticket: ServedRequest, jobs: Callable[[], Sequence[Job]], characters: int
) -> None:
    await ticket.submit(await service.threads.for_generation(jobs, characters))


async def _completions(ticket: ServedRequest) -> list[Completion]:
    done: dict[int, Completion] = {}
    async for arrived in ticket.deltas():
        for number, delta in arrived:
            if delta.completion is not None:
                done[number] = delta.completion
    return _in_order(done)


def _in_order(completions: Mapping[int, Completion]) -> list[Completion]:
    return [completions[number] for number in range(len(completions))]


async def _in_time(ticket: ServedRequest, work: Coroutine[Any, Any, Result]) -> Result:
    """Return the result of ``work``, within the request timeout."""
    try:
        async with asyncio.timeout_at(ticket.deadline):
            return await work
    except TimeoutError as error:
        message = "the request exceeded this server's time limit; ask for fewer tokens"
        raise ApiError(408, message, code="timeout") from error


def _body(*events: bytes, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": b"".join(events), "more_body": more}
