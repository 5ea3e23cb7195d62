"""What all endpoints share: how bodies are read, which errors there are, where the service is."""

from collections.abc import Callable, Coroutine
from email.message import Message
from functools import partial
from typing import Annotated, Any

from fastapi import Depends, Request
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from kvkeep.serve.http import body_of
from kvkeep.serve.server.errors import ApiError
from kvkeep.serve.server.parsing import question
from kvkeep.serve.server.schemas.responses import ErrorResponse
from kvkeep.serve.server.service import Service

__all__ = [
    "ERRORS", "EVENTS", "READ_ERRORS", "TEXT_ERRORS", "JSONRoute", "ServiceOf", "check_model",
    "errors",
]  # fmt: skip

_WHAT: dict[int | str, str] = {
    400: "A field is wrong; the message names it.",
    401: "The API key is missing or wrong.",
    404: "There is no such thing here; the message says what there is.",
    408: "The request took longer than this server gives it.",
    413: "The body is too large.",
    415: "The body is not JSON.",
    429: "The queue is full; Retry-After says when to come again.",
    503: "The server is shutting down, or the engine has stopped.",
}


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """These answers, for the OpenAPI document, and that all others have their form too."""
    texts = {status: _WHAT[status] for status in statuses} | {"default": "Any other error."}
    return {status: {"model": ErrorResponse, "description": text} for status, text in texts.items()}


READ_ERRORS = errors(400, 401)
ERRORS = errors(400, 401, 413, 415)
TEXT_ERRORS = errors(400, 401, 408, 413, 415, 429, 503)
EVENTS = {
    "description": "The answer; with stream, server-sent events, the last of them [DONE].",
    "content": {"text/event-stream": {}},  # OpenAPI 3.1 has no words for events
}


class _ParsedRequest(Request):
    """A request whose body was read and checked already; FastAPI is given the result."""

    def __init__(self, request: Request, asked: BaseModel) -> None:
        super().__init__(request.scope, request.receive)
        self._json = asked
        self._body = b"read"  # only asked whether there is one: its bytes are not kept


class JSONRoute(APIRoute):
    """An endpoint whose body, if it takes one, is JSON and says so.

    Asking for the content type also keeps web pages out: a browser asks before it sends JSON to
    another's server, and here nobody answers that it may. Bodies are JSON as RFC 8259 has it:
    UTF-8, no NaN, nested so far as sane people nest. Large ones are parsed in a thread.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's own, with our request."""
        handler = super().get_route_handler()
        model: Any = None if self.body_field is None else self.body_field.field_info.annotation

        async def handle(request: Request) -> Response:
            if model is not None:
                _check_headers(request)
                try:
                    request = _ParsedRequest(request, await _asked(request, model))
                except ClientDisconnect:
                    return Response(status_code=499)  # nobody reads it
            return await handler(request)

        return handle


async def _asked(request: Request, model: type[BaseModel]) -> BaseModel:
    body = body_of(request.scope)
    await body.read()
    return await _service(request).parsing(partial(question, body, model), body.size)


def _check_headers(request: Request) -> None:
    given = Message()
    given["content-type"] = request.headers.get("content-type", "none")
    is_utf8 = (given.get_content_charset() or "utf-8") in {"utf-8", "utf8"}
    if given.get_content_type() != "application/json" or not is_utf8:
        raise ApiError(
            415, "send JSON in UTF-8, and say so: -H 'Content-Type: application/json' -d '{…}'"
        )
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise ApiError(415, "send the body as it is, without a Content-Encoding")


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


ServiceOf = Annotated[Service, Depends(_service)]


def check_model(service: Service, asked: str | None) -> str:
    """The served model's name; `ApiError` 400 for another one."""
    name = service.settings.name
    if asked is not None and asked != name:
        raise ApiError(
            400,
            f"model {asked[:100]!r} is not served here; this is {name!r}",
            param="model",
            code="model_not_found",
        )
    return name
