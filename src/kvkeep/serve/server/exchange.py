"""One request for text, from its jobs to the last byte of its answer, streamed or in one piece."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack, suppress
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from starlette.responses import Response

from kvkeep.serve.server.errors import ApiError, ClientGone, as_api_error, outcome_of
from kvkeep.serve.server.worker import Call

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence

    from starlette.requests import Request
    from starlette.types import Receive, Scope, Send

    from kvkeep.serve.engine import Completion, Delta
    from kvkeep.serve.server.schemas.base import ResponseModel
    from kvkeep.serve.server.service import ServedRequest, Service
    from kvkeep.serve.server.worker import Job

__all__ = ["Writer", "answer"]

Result = TypeVar("Result")

# A client that does not read is not told for longer than this that its time is over.
_LAST_WORDS_S = 2.0
_EVENT_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # proxies that buffer would hold the tokens back
}


class Writer(Protocol):
    """How one endpoint words its answer, of this ``id``. ``number`` is that of a job, from 0."""

    @property
    def id(self) -> str:
        """As the client is told it."""

    def begin(self) -> Iterable[ResponseModel]:
        """The events before any token."""

    def more(self, number: int, delta: Delta) -> Iterable[ResponseModel]:
        """The events of one delta."""

    def end(self, completions: Sequence[Completion]) -> Iterable[ResponseModel]:
        """The events after the last token."""

    def whole(self, completions: Sequence[Completion]) -> ResponseModel:
        """All of it at once."""


async def answer(
    request: Request,
    service: Service,
    endpoint: str,
    jobs: Callable[[], Sequence[Job]],
    writer: Writer,
    *,
    characters: int,
    stream: bool,
) -> Response:
    """Make the jobs, run them, and word what comes with ``writer``.

    The jobs are made in a tokenizer's thread, chosen by how many ``characters`` there are to
    tokenize. Raises `ApiError` for what goes wrong before the answer begins; a stream ends with an
    error as its last event. A client that goes away ends its jobs; so does the time that a request
    has.
    """
    call = Call(writer.id, endpoint, request.headers)
    try:
        async with AsyncExitStack() as stack:
            ticket = await stack.enter_async_context(service.admitted(call))
            work = _submitted(service, ticket, jobs, characters)
            await _until_gone(request.receive, _in_time(ticket, work))
            if stream:
                return EventStream(service, ticket, writer, stack.pop_all())
            completions = await _until_gone(request.receive, _in_time(ticket, _completions(ticket)))
            body = writer.whole(completions).model_dump_json()
            return Response(body, media_type="application/json")
    except ClientGone:
        return Response(status_code=499)  # nobody reads it
    except Exception as error:
        raise as_api_error(error, retry_after_s=service.retry_after_s) from error


class EventStream(Response):
    """Server-sent events, one a delta; what has come meanwhile is written at once.

    ``stack`` ends the request. Memory: a client that does not read stops the writing, never the
    engine; what its answer may still grow to waits in its `Generation`.
    """

    def __init__(
        self, service: Service, ticket: ServedRequest, writer: Writer, stack: AsyncExitStack
    ) -> None:
        super().__init__()
        self._service = service
        self._ticket = ticket
        self._writer = writer
        self._stack = stack

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Write all of it; a client that goes away is no error."""
        try:
            async with self._stack:
                await _until_gone(receive, self._write(send))
        except ClientGone:
            return

    async def _write(self, send: Send) -> None:
        headers = [(key.encode(), value.encode()) for key, value in _EVENT_HEADERS.items()]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            await _in_time(self._ticket, self._write_all(send))
        except Exception as error:  # noqa: BLE001 - the client is told, and as_api_error logs
            known = as_api_error(error, retry_after_s=self._service.retry_after_s)
            self._ticket.outcome = outcome_of(known)
            with suppress(TimeoutError):
                async with asyncio.timeout(_LAST_WORDS_S):
                    await send(_body(json.dumps(known.body()).encode(), more=False))

    async def _write_all(self, send: Send) -> None:
        completions: dict[int, Completion] = {}
        await send(_body(*map(_json, self._writer.begin())))
        async for arrived in self._ticket.deltas():
            events: list[bytes] = []
            for number, delta in arrived:
                events += map(_json, self._writer.more(number, delta))
                if delta.completion is not None:
                    completions[number] = delta.completion
            if events:
                await send(_body(*events))
        last = map(_json, self._writer.end(_in_order(completions)))
        await send(_body(*last, b"[DONE]", more=False))


async def _submitted(
    service: Service, ticket: ServedRequest, jobs: Callable[[], Sequence[Job]], characters: int
) -> None:
    await ticket.submit(await service.tokenizing(jobs, characters))


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
    """``work``'s result, within the time that the request has."""
    try:
        async with asyncio.timeout_at(ticket.deadline):
            return await work
    except TimeoutError as error:
        message = "the request took longer than this server gives it; ask for fewer tokens"
        raise ApiError(408, message, code="timeout") from error


async def _until_gone(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """``work``'s result; `ClientGone` when the client closes the connection first."""
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _json(event: ResponseModel) -> bytes:
    return event.model_dump_json().encode()


def _body(*events: bytes, more: bool = True) -> dict[str, Any]:
    data = b"".join(b"data: %s\n\n" % event for event in events)
    return {"type": "http.response.body", "body": data, "more_body": more}
