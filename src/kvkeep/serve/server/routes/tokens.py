"""Text to tokens and back."""

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
async def tokenize(asked: TokenizeRequest, service: ServiceOf) -> TokenizeResponse:
    """The tokens of a text or of a conversation, as the endpoints for text see them."""
    check_model(service, asked.model)

    texts = [asked.prompt] if asked.messages is None else [turn.text for turn in asked.messages]
    given = [text for text in texts if text]

    def encode() -> list[int]:
        refuse_far_too_long(service, "prompt" if asked.messages is None else "messages", *given)
        if asked.messages is not None:
            tokens = chat_tokens(service.tokenizer, asked.messages)
        else:
            tokens = service.tokenizer.encode(asked.prompt or "")
        ids: list[int] = tokens.tolist()
        return ids

    tokens = await service.counting(encode, sum(map(len, given)))
    longest = service.engine.runner.max_tokens
    return TokenizeResponse(count=len(tokens), max_model_len=longest, tokens=tokens)


@router.post("/detokenize", responses=ERRORS, operation_id="detokenize")
async def detokenize(asked: DetokenizeRequest, service: ServiceOf) -> DetokenizeResponse:
    """The text of tokens, without special ones."""
    check_model(service, asked.model)
    known, most = service.engine.runner.vocabulary, 2 * service.engine.runner.max_tokens
    if len(asked.tokens) > most:
        message = f"tokens has {len(asked.tokens)} of them; {most} at most, twice what fits"
        raise ApiError(400, message, param="tokens", code="context_length_exceeded")
    largest = max(asked.tokens, default=0)
    if largest >= known:
        message = f"tokens has {largest}; the model knows 0 … {known - 1}"
        raise ApiError(400, message, param="tokens")
    text = await service.counting(
        lambda: service.tokenizer.decode(asked.tokens), 4 * len(asked.tokens)
    )
    return DetokenizeResponse(prompt=text)
