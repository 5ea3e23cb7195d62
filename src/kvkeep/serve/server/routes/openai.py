"""OpenAI's API: chat, completions, models."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from kvkeep.serve.server.errors import ApiError
from kvkeep.serve.server.exchange import respond
from kvkeep.serve.server.jobs import chat_jobs, completion_jobs, echoes
from kvkeep.serve.server.pins import Keep
from kvkeep.serve.server.routes.base import (
    EVENTS,
    READ_ERRORS,
    TEXT_ERRORS,
    JSONRoute,
    ServiceOf,
    check_model,
)
from kvkeep.serve.server.schemas.chat import ChatRequest
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
async def chat(body: ChatRequest, request: Request, service: ServiceOf) -> Response:
    """Continue a conversation."""
    writer = ChatWriter(
        check_model(service, body.model),
        service.tokenizer,
        n=body.n or 1,
        logprobs=bool(body.logprobs),
        usage=body.wants_usage,
    )

    def jobs() -> list[Job]:
        made = chat_jobs(service, body)
        writer.retains = _retains(made)
        return made

    return await respond(
        request, service, "chat", jobs, writer,
        characters=body.characters, stream=bool(body.stream),
    )  # fmt: skip


@router.post(
    "/completions",
    response_model=CompletionResponse,
    responses={200: EVENTS, **TEXT_ERRORS},
    operation_id="complete",
)
async def complete(body: CompletionRequest, request: Request, service: ServiceOf) -> Response:
    """Continue texts."""
    writer = CompletionWriter(
        check_model(service, body.model),
        service.tokenizer,
        n=body.n or 1,
        logprobs=body.logprobs is not None,
        usage=body.wants_usage,
        prompts=len(body.prompt),
    )

    def jobs() -> list[Job]:
        made = completion_jobs(service, body)
        writer.retains = _retains(made)
        if body.echo:
            writer.echoes = echoes(service, body)
        return made

    return await respond(
        request, service, "completions", jobs, writer,
        characters=body.characters, stream=bool(body.stream),
    )  # fmt: skip


@router.get("/models", responses=READ_ERRORS, operation_id="models")
async def models(service: ServiceOf) -> Models:
    """The model that is served."""
    return Models(data=[_model(service)])


@router.get("/models/{model:path}", responses=READ_ERRORS, operation_id="model")
async def model(model: str, service: ServiceOf) -> Model:
    """The model of this name."""
    name = service.settings.name
    if model != name:
        message = f"model {model[:100]!r} is not served here; this is {name!r}"
        raise ApiError(404, message, param="model", code="model_not_found")
    return _model(service)


def _retains(jobs: list[Job]) -> list[Keep]:
    return [job.retain for job in jobs if job.retain is not None]


def _model(service: Service) -> Model:
    return Model(
        id=service.settings.name,
        created=service.began,
        max_model_len=service.engine.runner.max_tokens,
    )
