"""Errors in the form of the Messages API."""

from __future__ import annotations

from typing import Any

__all__ = ["error_body", "error_event", "kind_of"]

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    502: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def kind_of(status: int) -> str:
    """Return the type of an error with this HTTP status."""
    other = "api_error" if status >= 500 else "invalid_request_error"
    return _KINDS.get(status, other)


def error_body(status: int, message: str, *, request_id: str | None = None) -> dict[str, Any]:
    """Return the JSON object of an error."""
    error = {"type": kind_of(status), "message": message}
    return {"type": "error", "error": error, "request_id": request_id}


def error_event(status: int, message: str) -> dict[str, Any]:
    """Return the event of an error in the middle of a stream."""
    return {"type": "error", "error": {"type": kind_of(status), "message": message}}
