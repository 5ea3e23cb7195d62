"""Shared by all endpoints: reading bodies, error responses, the service."""

from collections.abc import Callable, Coroutine, Sequence
from email.message import Message
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, get_args

from fastapi import Depends, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from kvkeep.core.errors import did_you_mean
from kvkeep.serve.http import RequestBody, body_of, check_values
from kvkeep.serve.server.errors import ApiError
from kvkeep.serve.server.jobs import request_tokens
from kvkeep.serve.server.schemas.base import RequestModel
from kvkeep.serve.server.schemas.kv import PromptRequest
from kvkeep.serve.server.schemas.responses import ErrorResponse
from kvkeep.serve.server.service import Service

if TYPE_CHECKING:
    from kvkeep.core.tokens import TokenArray

__all__ = [
    "ERRORS", "EVENTS", "READ_ERRORS", "TEXT_ERRORS", "Errors", "JSONRoute", "SaltQuery",
    "ServiceOf", "check_model", "errors", "read_prompt", "require_key",
]  # fmt: skip

_MOST_NEAR = 8  # unknown fields of a request for which a near name is sought


def parse_body(body: RequestBody, model: type[RequestModel]) -> RequestModel:
    """Return the JSON in ``body`` as a ``model``, with the number of its `characters`.

    Raises `ApiError` 400 for invalid JSON, `InvalidValue` for too many values, and
    `RequestValidationError` for wrong fields. Thread safety: safe once ``body`` was read. Cost:
    about 0.2 s for the worst 8 MiB.
    """
    data = body.take()
    check_values(data)
    try:
        value = from_json(data, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from error
    try:
        return model.read(value)
    except ValidationError as error:
        raise RequestValidationError(_errors(error, model)) from error


def _errors(error: ValidationError, model: type[BaseModel]) -> list[dict[str, Any]]:
    """Return pydantic's errors; those of unknown fields have the ``near`` name of a known one."""
    found: list[dict[str, Any]] = []
    for one in error.errors(include_url=False):
        near = ""
        if one["type"] == "extra_forbidden" and len(found) < _MOST_NEAR:
            near = did_you_mean(str(one["loc"][-1]), _fields_at(model, one["loc"][:-1]))
        found.append({**one, "loc": ("body", *one["loc"]), "near": near})
    return found


def _fields_at(model: type[BaseModel], place: Sequence[int | str]) -> set[str]:
    """Return the names of fields that an object at ``place`` can have."""
    models = {model}
    for part in place:
        annotations = [one.model_fields[part].annotation for one in models
                       if isinstance(part, str) and part in one.model_fields]  # fmt: skip
        if annotations:
            models = set().union(*map(_models_in, annotations))
    return {name for one in models for name in one.model_fields}


def _models_in(annotation: object) -> set[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return {annotation}
    return set().union(*map(_models_in, get_args(annotation)))


Errors = dict[int | str, dict[str, Any]]

_DESCRIPTIONS: dict[int | str, str] = {
    400: "A field is wrong; the message names it.",
    401: "The API key is missing or wrong.",
    403: "This server has no API key, which this endpoint requires.",
    404: "There is no such thing here; the message says what there is.",
    408: "The request exceeded the server's time limit.",
    413: "The body is too large.",
    415: "The body is not JSON.",
    429: "The queue is full; Retry-After says when to try again.",
    503: "The server is shutting down, or the engine has stopped.",
}


def errors(*statuses: int) -> Errors:
    """Return the OpenAPI entries of these error responses, and a default for all others."""
    texts = {status: _DESCRIPTIONS[status] for status in statuses} | {"default": "Any other error."}
    return {status: {"model": ErrorResponse, "description": text} for status, text in texts.items()}


READ_ERRORS = errors(400, 401)
ERRORS = errors(400, 401, 413, 415)
TEXT_ERRORS = errors(400, 401, 408, 413, 415, 429, 503)
EVENTS = {
    "description": "The answer; with stream, server-sent events, the last of them [DONE].",
    "content": {"text/event-stream": {}},  # OpenAPI 3.1 cannot describe the events
}


class _ParsedRequest(Request):
    """A request whose body was parsed and validated; FastAPI gets the result as its JSON."""

    def __init__(self, request: Request, body: RequestModel) -> None:
        super().__init__(request.scope, request.receive)
        self._json = body
        self._body = b"read"  # FastAPI only checks that it is not empty


class JSONRoute(APIRoute):
    """An endpoint whose body, if any, is JSON with a content type that says so.

    Requiring the content type keeps web pages out: before it sends JSON to another origin a browser
    sends a preflight request, which fails here. Bodies are JSON as in RFC 8259: UTF-8, no NaN, of
    limited depth. Large ones are parsed in a thread.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return FastAPI's handler, given a request that is parsed already."""
        handler = super().get_route_handler()
        model: Any = None if self.body_field is None else self.body_field.field_info.annotation

        async def handle(request: Request) -> Response:
            if model is not None:
                _check_headers(request)
                try:
                    request = _ParsedRequest(request, await _parsed(request, model))
                except ClientDisconnect:
                    return Response(status_code=499)  # the client has gone; for the access log
            return await handler(request)

        return handle


async def _parsed(request: Request, model: type[RequestModel]) -> RequestModel:
    body = body_of(request.scope)
    await body.read()
    return await _service(request).threads.for_parsing(partial(parse_body, body, model), body.size)


def _check_headers(request: Request) -> None:
    given = Message()
    given["content-type"] = request.headers.get("content-type", "none")
    is_utf8 = (given.get_content_charset() or "utf-8") in {"utf-8", "utf8"}
    if given.get_content_type() != "application/json" or not is_utf8:
        raise ApiError(
            415, "send JSON in UTF-8, and say so: -H 'Content-Type: application/json' -d '{…}'"
        )
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise ApiError(415, "send the body without a Content-Encoding")


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


ServiceOf = Annotated[Service, Depends(_service)]


SaltQuery = Annotated[
    str | None, Query(max_length=256, description="A cache_salt; default: all namespaces.")
]


def check_model(service: Service, requested: str | None) -> str:
    """Return the served model's name; `ApiError` 400 if another one is requested."""
    name = service.settings.name
    if requested is not None and requested != name:
        raise ApiError(
            400,
            f"model {requested[:100]!r} is not served here; this is {name!r}",
            param="model",
            code="model_not_found",
        )
    return name


def require_key(service: Service, action: str) -> None:
    """Raise `ApiError` 403 unless the server has an API key, which `KeyGuard` has checked then."""
    if service.settings.api_key is None:
        message = f"a server without an API key cannot {action}; start it with --api-key-file"
        raise ApiError(403, message, code="no_api_key")


async def read_prompt(service: Service, body: PromptRequest) -> "TokenArray":
    """Return the tokens of the prompt or conversation in ``body``."""
    tokenize = partial(request_tokens, service, body)
    return await service.threads.for_inspection(tokenize, body.characters)
