"""Errors for clients, all in one JSON form."""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING, Any

from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from kvkeep.core.errors import InvalidValue, OutOfPages, QueueFull
from kvkeep.serve.http import BodyRefused
from kvkeep.serve.messages import error_body, new_id
from kvkeep.serve.server.worker import EngineStopped

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fastapi import FastAPI
    from starlette.requests import Request

__all__ = ["ApiError", "as_api_error", "install", "outcome_of"]

log = logging.getLogger("kvkeep.server")

_ANTHROPIC = "/v1/messages"
INVALID = "invalid_request_error"
SERVER = "server_error"
_KINDS = {401: "authentication_error", 408: "timeout_error", 429: "rate_limit_error"}
# Parts of pydantic's error locations that are no fields: the part of the request, and branches of a
# union. Other names of branches are no identifiers.
_NO_FIELD = {"body", "query", "path", "str"}
# The subject of pydantic's messages, which the field's name replaces; and messages of our own.
_SUBJECT = re.compile(r"^(Input|String|List|Dictionary|Value error,) ")
_WORDS = {
    "missing": "is missing",
    "dict_type": "should be a JSON object",
    "model_type": "should be a JSON object",
    "model_attributes_type": "should be a JSON object",
}


class ApiError(HTTPException):
    """An error for the client: ``{"error": {"message", "type", "param", "code"}}``.

    ``param`` is the wrong field, ``code`` a name for programs.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, headers)
        self.param = param
        self.code = code

    def body(self) -> dict[str, dict[str, str | None]]:
        """The JSON object."""
        kind = SERVER if self.status_code >= 500 else _KINDS.get(self.status_code, INVALID)
        error = {"message": self.detail, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self, path: str = "") -> JSONResponse:
        """The HTTP response, in the form of the API to which ``path`` belongs."""
        if not path.startswith(_ANTHROPIC):
            return JSONResponse(self.body(), self.status_code, self.headers)
        id = new_id("req")
        body = error_body(self.status_code, str(self.detail), request_id=id)
        return JSONResponse(body, self.status_code, {**(self.headers or {}), "request-id": id})


def as_api_error(error: Exception, *, retry_after_s: int = 1) -> ApiError:
    """Return the `ApiError` for ``error``; ``retry_after_s`` is sent if a retry may succeed."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InvalidValue):
        return ApiError(400, str(error), param=_first_word(str(error)))
    if isinstance(error, QueueFull):
        headers = {"Retry-After": str(retry_after_s)}
        return ApiError(429, str(error), code="queue_full", headers=headers)
    if isinstance(error, BodyRefused):
        return ApiError(error.status, str(error), code=error.code, headers=error.headers)
    if isinstance(error, EngineStopped):
        return ApiError(503, "the engine has stopped; restart the server", code="engine_stopped")
    if isinstance(error, OutOfPages):
        return ApiError(503, str(error), code="out_of_pages")
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, _sentence(error), headers=error.headers)
    # The message may concern other requests or this machine, so only the log has it.
    log.error("a request failed", exc_info=error)
    return ApiError(500, "the engine failed on this request; the log says why", code="engine_error")


def outcome_of(error: Exception) -> str:
    """Return how a request that ended with ``error`` is counted: one word for metrics."""
    if isinstance(error, ClientDisconnect):
        return "gone"
    if isinstance(error, ApiError) and error.code == "timeout":
        return "timeout"
    refused = isinstance(error, InvalidValue | QueueFull)
    if isinstance(error, ApiError):
        refused = error.status_code < 500 or error.code in {"shutting_down", "engine_stopped"}
    return "refused" if refused else "failed"


def install(app: FastAPI) -> None:
    """Let every error of ``app`` take this form."""

    async def known(request: Request, error: Exception) -> JSONResponse:
        return as_api_error(error).response(request.url.path)

    async def unknown(request: Request, error: Exception) -> JSONResponse:
        return ApiError(500, "internal error; see the server's log").response(request.url.path)

    async def invalid(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return _of_fields(error.errors()).response(request.url.path)

    app.add_exception_handler(HTTPException, known)
    app.add_exception_handler(InvalidValue, known)
    app.add_exception_handler(EngineStopped, known)
    app.add_exception_handler(BodyRefused, known)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(Exception, unknown)


def _of_fields(found: Sequence[Any]) -> ApiError:
    """Return an error about the first wrong field, with the number of further ones."""
    places = [(_path(error), _what(error)) for error in found]
    first = places[0][0]
    # Where a union allows several forms, each reports an error: take the deepest, the best match.
    chosen = max((path for path, _ in places if path[: len(first)] == first), key=len)
    whats = dict.fromkeys(what for path, what in places if path == chosen)
    param = ".".join(chosen) or None
    message = f"{param or 'the body'} {' or '.join(whats)}"
    others = len({path for path, _ in places if path[: len(first)] != first})
    if others:
        message += f" (and {others} more wrong field{'s' * (others > 1)})"
    return ApiError(400, message, param=param)


def _path(error: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the field's name, after those of the objects that contain it."""
    parts = [part for part in error["loc"] if part not in _NO_FIELD]
    if error["type"] == "wrong_field":  # from `field_error`, about a field of the object here
        parts.append(error["ctx"]["field"])
    return tuple(str(part) for part in parts if isinstance(part, int) or str(part).isidentifier())


def _what(error: Mapping[str, Any]) -> str:
    if error["type"] == "wrong_field":
        what: str = error["ctx"]["what"]
        return what
    if error["type"] == "extra_forbidden":
        return f"is no field of this request{error.get('near') or '; leave it out'}"
    if error["type"] == "union_tag_invalid":  # pydantic's message repeats the whole value
        return f"has a type that is none of {error['ctx']['expected_tags']}"
    return _WORDS.get(error["type"]) or _SUBJECT.sub("", error["msg"])


def _first_word(message: str) -> str | None:
    """Return the field that a message of kvkeep's names: its first word."""
    word = re.match(r"[a-z]+(_[a-z]+)+(?= )|(stop|temperature|n|prompt)(?= )", message)
    return word and word[0]


def _sentence(error: HTTPException) -> str:
    if error.status_code == 404:
        return "there is nothing at this address; see /openapi.json for what there is"
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        return f"this address does not take the method; it takes {allowed}"
    return str(error.detail)
