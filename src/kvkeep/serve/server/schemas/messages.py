"""``/v1/messages``, Anthropic's API: requests and responses."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict, Field

from kvkeep.serve.messages import REFUSED, Refused
from kvkeep.serve.server.schemas.base import (
    CacheSalt,
    Extras,
    RequestModel,
    ResponseModel,
    TopK,
)
from kvkeep.serve.server.schemas.chat import few_parts

__all__ = [
    "CountTokensRequest", "CountTokensResponse", "MessageEvent", "MessageResponse",
    "MessagesErrorResponse", "MessagesRequest",
]  # fmt: skip

_INT32 = 2**31 - 1
Name = Annotated[str, Field(min_length=1, max_length=256)]


class CacheControl(RequestModel):
    """A breakpoint: the prompt up to the end of this block is kept for a while."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = Field(default=None, description="Default: 5m.")


class TextBlock(RequestModel):
    """Text."""

    REFUSED: ClassVar[Refused] = {"citations": ("models here cite nothing", [])}

    type: Literal["text"]
    text: Annotated[str, Field(min_length=1)]
    cache_control: CacheControl | None = None


class ToolUseBlock(RequestModel):
    """A tool call of the assistant."""

    REFUSED: ClassVar[Refused] = {
        "caller": ("only the model calls tools here", {"type": "direct"}),
        "toolset_name": ("there are no toolsets here",),
    }

    type: Literal["tool_use"]
    id: Name
    name: Name
    input: dict[str, Any]
    cache_control: CacheControl | None = None


class ToolResultBlock(RequestModel):
    """The result of a tool call."""

    REFUSED: ClassVar[Refused] = {"toolset_name": ("there are no toolsets here",)}

    type: Literal["tool_result"]
    tool_use_id: Name
    content: str | Annotated[list[TextBlock], Field(fail_fast=True)] | None = None
    is_error: bool | None = Field(default=None, description="Not passed to the model.")
    cache_control: CacheControl | None = None


class ThinkingBlock(RequestModel):
    """Thinking of an earlier answer; left out of the prompt."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(RequestModel):
    """Hidden thinking of an earlier answer; left out of the prompt."""

    type: Literal["redacted_thinking"]
    data: str


Block = Annotated[
    TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock | RedactedThinkingBlock,
    Field(discriminator="type"),
]


class MessageParam(RequestModel):
    """One turn of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], Field(fail_fast=True)]


class ToolParam(RequestModel):
    """The definition of a tool."""

    REFUSED: ClassVar[Refused] = {
        "allowed_callers": ("only the model calls tools here", ["direct"]),
        "defer_loading": ("all tools are in the prompt", False),
        "eager_input_streaming": ("arguments come as they are generated", False),
        "input_examples": ("put them into the description", []),
        "strict": ("arguments are not checked here", False),
    }

    type: Literal["custom"] | None = None
    name: Name
    description: str | None = None
    input_schema: dict[str, Any]
    cache_control: CacheControl | None = None


class ToolChoice(RequestModel):
    """Which tools the model may call."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class MessagesMetadata(RequestModel):
    """Ignored."""

    user_id: str | None = None


class CountTokensRequest(RequestModel):
    """A conversation whose tokens to count."""

    REFUSED: ClassVar[Refused] = REFUSED
    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "model": "kvkeep-tiny",
                    "messages": [{"role": "user", "content": "What does textwrap.dedent do?"}],
                }
            ]
        }
    )

    model: str = Field(description="The served model's name.")
    messages: Annotated[
        list[MessageParam],
        Field(min_length=1, max_length=4096, fail_fast=True),
        BeforeValidator(few_parts),
    ]
    system: str | Annotated[list[TextBlock], Field(fail_fast=True)] | None = None
    tools: Annotated[list[ToolParam], Field(max_length=1024, fail_fast=True)] | None = Field(
        default=None, description="Needs a chat template with tools."
    )
    tool_choice: ToolChoice | None = Field(default=None, description="auto or none.")
    cache_control: CacheControl | None = Field(
        default=None, description="A breakpoint at the end of the last block."
    )


class MessagesRequest(CountTokensRequest):
    """A conversation for the model to continue."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "model": "kvkeep-tiny",
                    "max_tokens": 64,
                    "messages": [{"role": "user", "content": "What does textwrap.dedent do?"}],
                }
            ]
        }
    )

    max_tokens: int = Field(
        ge=0, le=_INT32, description="0: the prompt is computed and cached, without an answer."
    )
    stop_sequences: Annotated[list[str], Field(max_length=16, fail_fast=True)] | None = None
    temperature: float | None = Field(default=None, ge=0, le=1, description="Default 1.")
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: TopK | None = None
    stream: bool | None = None
    metadata: MessagesMetadata | None = Field(default=None, description="Ignored.")
    cache_salt: CacheSalt | None = Field(
        default=None,
        description="Prompts share cached pages only with prompts of the same salt. Ours.",
    )
    kvkeep: Extras | None = None


class CountTokensResponse(ResponseModel):
    """The tokens of a prompt."""

    input_tokens: int


class MessageResponse(ResponseModel):
    """The model's turn, as Anthropic's client reads it."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]] = Field(description="Blocks of text and of tool calls.")
    stop_reason: str | None = Field(
        description="end_turn, max_tokens, stop_sequence, tool_use or "
        "model_context_window_exceeded."
    )
    stop_sequence: str | None
    usage: dict[str, Any] = Field(
        description="input_tokens, cache_creation_input_tokens and cache_read_input_tokens add up "
        "to the prompt."
    )


class MessageEvent(ResponseModel):
    """One event of a stream."""

    model_config = ConfigDict(extra="allow")

    type: str


class MessagesError(ResponseModel):
    """The description of an error."""

    type: str
    message: str


class MessagesErrorResponse(ResponseModel):
    """The body of every error response of these endpoints."""

    type: Literal["error"]
    error: MessagesError
    request_id: str | None
