"""Responses of OpenAI's endpoints, and errors. OpenAI's own client reads them."""

from typing import Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from kvkeep.serve.server.pins import Unkept
from kvkeep.serve.server.schemas.base import ResponseModel

__all__ = [
    "AssistantMessage", "ChatChoice", "ChatChunk", "ChatChunkChoice", "ChatLogprobs",
    "ChatResponse", "CompletionChoice", "CompletionLogprobs", "CompletionResponse",
    "ErrorResponse", "ExtraUsage", "MessageDelta", "Model", "Models", "PromptDetails",
    "ScoredToken", "TokenScore", "Usage",
]  # fmt: skip

FinishReason = Literal["stop", "length"]


class ErrorBody(ResponseModel):
    """The description of an error."""

    message: str
    type: str
    param: str | None = Field(description="The field that is wrong.")
    code: str | None = Field(description="A name of the error, for programs.")


class ErrorResponse(ResponseModel):
    """The body of every error response."""

    error: ErrorBody


class PromptDetails(ResponseModel):
    """Details of the prompt tokens."""

    cached_tokens: int = Field(description="Tokens reused, not computed. Exact.")


class ExtraUsage(ResponseModel):
    """Details that only kvkeep has."""

    loaded_tokens: int = Field(description="Those of the cached tokens that came from the store.")
    lossy_tokens: int | None = Field(
        default=None,
        description="Those of the loaded tokens whose KV is not exact: decoded from records of a "
        "lossy codec, or computed behind such. Only if there are any.",
    )
    retained_tokens: int | None = Field(
        default=None,
        description="Prompt tokens kept in the tiers for prompt_cache_retention. Only if asked.",
    )
    unretained_tokens: int | None = Field(
        default=None, description="Prompt tokens that are not kept so. Only if asked."
    )
    unretained: Unkept | None = Field(
        default=None, description="Why; only if there are unretained tokens."
    )

    @model_serializer(mode="wrap")
    def _without_nulls(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {key: value for key, value in dump(self).items() if value is not None}


class Usage(ResponseModel):
    """Token counts, summed over all prompts and all answers."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    kvkeep: ExtraUsage


class TokenScore(ResponseModel):
    """A token that is possible in a position."""

    token: str
    logprob: float
    bytes: list[int] | None = Field(description="For tokens that are parts of characters.")


class ScoredToken(TokenScore):
    """A token of the answer, and the likeliest ones in its position."""

    top_logprobs: list[TokenScore]


class ChatLogprobs(ResponseModel):
    """The log probabilities of an answer's tokens."""

    content: list[ScoredToken]
    refusal: None = None


class AssistantMessage(ResponseModel):
    """The model's turn."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(ResponseModel):
    """One of the n answers."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class ChatResponse(ResponseModel):
    """The model's next turn."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int = Field(description="Unix seconds.")
    model: str
    choices: list[ChatChoice]
    usage: Usage


class MessageDelta(ResponseModel):
    """A piece of the model's turn; the first has the role."""

    role: Literal["assistant"] | None = None
    content: str | None = None

    @model_serializer(mode="wrap")
    def _without_nulls(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {key: value for key, value in dump(self).items() if value is not None}


class ChatChunkChoice(ResponseModel):
    """A piece of one of the n answers."""

    index: int
    delta: MessageDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None


class ChatChunk(ResponseModel):
    """One event of a stream."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


class CompletionLogprobs(ResponseModel):
    """Lists with one entry per token."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int] = Field(description="Characters before each token.")


class CompletionChoice(ResponseModel):
    """One of the n answers to one of the prompts, in order of the prompts; or a piece of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None


class CompletionResponse(ResponseModel):
    """The continuations; in a stream, one of its events."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int = Field(description="Unix seconds.")
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class Model(ResponseModel):
    """The served model."""

    id: str
    object: Literal["model"] = "model"
    created: int = Field(description="Unix seconds at which the server started.")
    owned_by: str = "kvkeep"
    max_model_len: int = Field(description="Most tokens of a prompt and its answer together.")


class Models(ResponseModel):
    """All served models: one."""

    object: Literal["list"] = "list"
    data: list[Model]
