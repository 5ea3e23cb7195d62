"""``/tokenize`` and ``/detokenize``."""

from fastapi import APIRouter

from kvkeep.serve.server.errors import ApiError
from kvkeep.serve.server.jobs import chat_tokens, refuse_far_too_long
from kvkeep.serve.server.routes.base import ERRORS, JSONRoute, ServiceOf, check_model
from kvkeep.serve.server.schemas.tokens import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)

__all__ = ["router"]

router = APIRouter(tags=["tokens"], route_class=JSONRoute)


@router.post("/tokenize", responses=ERRORS, operation_id="tokenize")
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


@router.post("/detokenize", responses=ERRORS, operation_id="detokenize")
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
