"""OpenAI's API: chat, completions, models; ``/tokenize`` and ``/detokenize``."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from kvkeep.serve.server.errors import ApiError
from kvkeep.serve.server.exchange import respond
from kvkeep.serve.server.jobs import (
    chat_jobs,
    chat_tokens,
    completion_jobs,
    echoes,
    refuse_far_too_long,
)
from kvkeep.serve.server.pins import Keep
from kvkeep.serve.server.routes.base import (
    ERRORS,
    EVENTS,
    READ_ERRORS,
    TEXT_ERRORS,
    JSONRoute,
    ServiceOf,
    check_model,
)
from kvkeep.serve.server.schemas.chat import ChatRequest
from kvkeep.serve.server.schemas.completions import (
    CompletionRequest,
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from kvkeep.serve.server.schemas.responses import ChatResponse, CompletionResponse, Model, Models
from kvkeep.serve.server.service import Service
from kvkeep.serve.server.worker import Job
from kvkeep.serve.server.writers import ChatWriter, CompletionWriter

__all__ = ["router", "tokenizing"]

router = APIRouter(prefix="/v1", tags=["OpenAI"], route_class=JSONRoute)
tokenizing = APIRouter(tags=["tokens"], route_class=JSONRoute)


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


@tokenizing.post("/tokenize", responses=ERRORS, operation_id="tokenize")
async def tokenize(body: TokenizeRequest, service: ServiceOf) -> TokenizeResponse:
    """The tokens of a text or conversation, as the generation endpoints see them."""
    check_model(service, body.model)

    def encode() -> list[int]:
        if body.messages is not None:
            tokens = chat_tokens(service, body.messages)
        else:
            refuse_far_too_long(service, "prompt", body.prompt)
            tokens = service.tokenizer.encode(body.prompt or "")
        ids: list[int] = tokens.tolist()
        return ids

    tokens = await service.threads.for_inspection(encode, body.characters)
    longest = service.engine.runner.max_tokens
    return TokenizeResponse(count=len(tokens), max_model_len=longest, tokens=tokens)


@tokenizing.post("/detokenize", responses=ERRORS, operation_id="detokenize")
async def detokenize(body: DetokenizeRequest, service: ServiceOf) -> DetokenizeResponse:
    """The text of tokens, without special tokens."""
    check_model(service, body.model)
    known, most = service.engine.runner.vocabulary, 2 * service.engine.runner.max_tokens
    if len(body.tokens) > most:
        message = f"tokens has {len(body.tokens)} tokens; at most {most}, twice what fits"
        raise ApiError(400, message, param="tokens", code="context_length_exceeded")
    largest = max(body.tokens, default=0)
    if largest >= known:
        message = f"tokens has {largest}; the model knows 0 … {known - 1}"
        raise ApiError(400, message, param="tokens")
    text = await service.threads.for_inspection(
        lambda: service.tokenizer.decode(body.tokens), 4 * len(body.tokens)
    )
    return DetokenizeResponse(prompt=text)
