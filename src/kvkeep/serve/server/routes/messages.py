"""Anthropic's API: messages, and their tokens."""

from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import Response

from kvkeep.serve.server.errors import ApiError
from kvkeep.serve.server.exchange import respond
from kvkeep.serve.server.message_jobs import MessageWriter, call_of, message_jobs, message_prompt
from kvkeep.serve.server.routes.base import Errors, JSONRoute, ServiceOf
from kvkeep.serve.server.schemas.messages import (
    CountTokensRequest,
    CountTokensResponse,
    MessageResponse,
    MessagesErrorResponse,
    MessagesRequest,
)
from kvkeep.serve.server.service import Service

__all__ = ["router"]

router = APIRouter(prefix="/v1/messages", tags=["Anthropic"], route_class=JSONRoute)

_ERRORS: Errors = {
    status: {"model": MessagesErrorResponse, "description": "An error in Anthropic's form."}
    for status in (400, 401, 404, 408, 413, 415, 429, 503)
} | {"default": {"model": MessagesErrorResponse, "description": "Any other error."}}
_EVENTS = {
    "description": "The answer; with stream, server-sent events, the last of them message_stop.",
    "content": {"text/event-stream": {}},
}


@router.post(
    "",
    response_model=MessageResponse,
    responses={200: _EVENTS, **_ERRORS},
    operation_id="messages",
)
async def messages(body: MessagesRequest, request: Request, service: ServiceOf) -> Response:
    """Continue a conversation, in the form of Anthropic's API."""
    writer = MessageWriter(_model(service, body.model))
    jobs = partial(message_jobs, service, body, writer)
    return await respond(
        request, service, "messages", jobs, writer,
        characters=body.characters, stream=bool(body.stream),
    )  # fmt: skip


@router.post("/count_tokens", responses=_ERRORS, operation_id="count_message_tokens")
async def count_tokens(body: CountTokensRequest, service: ServiceOf) -> CountTokensResponse:
    """Count the tokens of a conversation; nothing is computed."""
    _model(service, body.model)

    def count() -> int:
        return len(message_prompt(service, call_of(body)).tokens)

    found = await service.threads.for_inspection(count, body.characters)
    return CountTokensResponse(input_tokens=found)


def _model(service: Service, requested: str) -> str:
    """Return the served model's name; `ApiError` 404, as Anthropic's, for another one."""
    name = service.settings.name
    if requested != name:
        message = f"model: {requested[:100]!r} is not served here; this is {name!r}"
        raise ApiError(404, message, param="model", code="model_not_found")
    return name
