"""What clients are sent by the endpoints that OpenAI defines; its own client reads it."""

from typing import Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from kvkeep.serve.server.schemas.base import ResponseModel

__all__ = [
    "AssistantMessage",
    "ChatChoice",
    "ChatChunk",
    "ChatChunkChoice",
    "ChatLogprobs",
    "ChatResponse",
    "CompletionChoice",
    "CompletionLogprobs",
    "CompletionResponse",
    "ErrorResponse",
    "ExtraUsage",
    "MessageDelta",
    "Model",
    "Models",
    "PromptDetails",
    "ScoredToken",
    "TokenScore",
    "Usage",
]

FinishReason = Literal["stop", "length"]


class ErrorBody(ResponseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None = Field(description="The field that is wrong.")
    code: str | None = Field(description="What a program can go by.")


class ErrorResponse(ResponseModel):
    """Every answer that is no success."""

    error: ErrorBody


class PromptDetails(ResponseModel):
    """Of the prompt tokens."""

    cached_tokens: int = Field(description="Were reused, not computed. Exact.")


class ExtraUsage(ResponseModel):
    """What kvkeep tells besides."""

    loaded_tokens: int = Field(description="Of the cached tokens: came from the store.")


class Usage(ResponseModel):
    """Tokens of all prompts and all answers."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    kvkeep: ExtraUsage


class TokenScore(ResponseModel):
    """A token that could stand in a place."""

    token: str
    logprob: float
    bytes: list[int] | None = Field(description="Tokens may be parts of characters.")


class ScoredToken(TokenScore):
    """A token of the answer, and the likeliest in its place."""

    top_logprobs: list[TokenScore]


class ChatLogprobs(ResponseModel):
    """Token by token."""

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
    """More of the model's turn; the first has the role."""

    role: Literal["assistant"] | None = None
    content: str | None = None

    @model_serializer(mode="wrap")
    def _only_what_is_there(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {key: value for key, value in dump(self).items() if value is not None}


class ChatChunkChoice(ResponseModel):
    """More of one of the n answers."""

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
    """Lists with one entry a token."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int] = Field(description="Characters of the text before each token.")


class CompletionChoice(ResponseModel):
    """One of the n answers to one of the prompts, or more of it; prompts come in their order."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None


class CompletionResponse(ResponseModel):
    """The continuations; in a stream, one event of it."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int = Field(description="Unix seconds.")
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class Model(ResponseModel):
    """The model that is served."""

    id: str
    object: Literal["model"] = "model"
    created: int = Field(description="Unix seconds at which the server began.")
    owned_by: str = "kvkeep"
    max_model_len: int = Field(description="The longest prompt and answer together, in tokens.")


class Models(ResponseModel):
    """All models that are served: one."""

    object: Literal["list"] = "list"
    data: list[Model]
