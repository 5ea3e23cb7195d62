"""What OpenAI's API has: chat, completions, models."""

from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import Response

from kvkeep.serve.server.errors import ApiError
from kvkeep.serve.server.exchange import answer
from kvkeep.serve.server.jobs import chat_jobs, completion_jobs, echoes
from kvkeep.serve.server.routes.base import (
    EVENTS,
    READ_ERRORS,
    TEXT_ERRORS,
    JSONRoute,
    ServiceOf,
    check_model,
)
from kvkeep.serve.server.schemas.chat import ChatRequest, characters
from kvkeep.serve.server.schemas.completions import CompletionRequest
from kvkeep.serve.server.schemas.responses import ChatResponse, CompletionResponse, Model, Models
from kvkeep.serve.server.service import Service
from kvkeep.serve.server.worker import Job
from kvkeep.serve.server.writers import ChatWriter, CompletionWriter

__all__ = ["router"]

router = APIRouter(prefix="/v1", tags=["OpenAI"], route_class=JSONRoute)


@router.post(
    "/chat/completions",
    response_model=ChatResponse,
    responses={200: EVENTS, **TEXT_ERRORS},
    operation_id="chat",
)
async def chat(asked: ChatRequest, request: Request, service: ServiceOf) -> Response:
    """Continue a conversation."""
    writer = ChatWriter(
        check_model(service, asked.model),
        service.tokenizer,
        n=asked.n or 1,
        logprobs=bool(asked.logprobs),
        usage=asked.wants_usage,
    )
    jobs = partial(chat_jobs, service, asked)
    return await answer(
        request, service, "chat", jobs, writer,
        characters=characters(asked.messages), stream=bool(asked.stream),
    )  # fmt: skip


@router.post(
    "/completions",
    response_model=CompletionResponse,
    responses={200: EVENTS, **TEXT_ERRORS},
    operation_id="complete",
)
async def complete(asked: CompletionRequest, request: Request, service: ServiceOf) -> Response:
    """Continue texts."""
    writer = CompletionWriter(
        check_model(service, asked.model),
        service.tokenizer,
        n=asked.n or 1,
        logprobs=asked.logprobs is not None,
        usage=asked.wants_usage,
        prompts=len(asked.prompt),
    )

    def jobs() -> list[Job]:
        made = completion_jobs(service, asked)
        if asked.echo:
            writer.echoes = echoes(service, asked)
        return made

    return await answer(
        request, service, "completions", jobs, writer,
        characters=asked.characters, stream=bool(asked.stream),
    )  # fmt: skip


@router.get("/models", responses=READ_ERRORS, operation_id="models")
async def models(service: ServiceOf) -> Models:
    """The model that is served."""
    return Models(data=[_model(service)])


@router.get("/models/{model:path}", responses=READ_ERRORS, operation_id="model")
async def model(model: str, service: ServiceOf) -> Model:
    """One model by its name."""
    name = service.settings.name
    if model != name:
        message = f"model {model[:100]!r} is not served here; this is {name!r}"
        raise ApiError(404, message, param="model", code="model_not_found")
    return _model(service)


def _model(service: Service) -> Model:
    return Model(
        id=service.settings.name,
        created=service.began,
        max_model_len=service.engine.runner.max_tokens,
    )
