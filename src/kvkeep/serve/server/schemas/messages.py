"""``/v1/messages``, Anthropic's API: requests and responses."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict, Field

from kvkeep.serve.server.schemas.base import CacheSalt, Extras, RequestModel, ResponseModel
from kvkeep.serve.server.schemas.chat import few_parts

__all__ = [
    "CountTokensRequest", "CountTokensResponse", "MessageEvent", "MessageResponse",
    "MessagesErrorResponse", "MessagesRequest",
]  # fmt: skip

_INT32 = 2**31 - 1
_NO_ANSWER: tuple[Any, ...] = ({"type": "disabled"}, {"type": "adaptive"})
Name = Annotated[str, Field(min_length=1, max_length=256)]


class CacheControl(RequestModel):
    """A breakpoint: the prompt up to the end of this block is kept for a while."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = Field(default=None, description="Default: 5m.")


class TextBlock(RequestModel):
    """Text."""

    REFUSED: ClassVar[dict[str, str]] = {"citations": "models here cite nothing"}
    HARMLESS: ClassVar[dict[str, tuple[Any, ...]]] = {"citations": ([],)}

    type: Literal["text"]
    text: Annotated[str, Field(min_length=1)]
    cache_control: CacheControl | None = None


class ToolUseBlock(RequestModel):
    """A tool call of the assistant."""

    REFUSED: ClassVar[dict[str, str]] = {
        "caller": "only the model calls tools here",
        "toolset_name": "there are no toolsets here",
    }
    HARMLESS: ClassVar[dict[str, tuple[Any, ...]]] = {"caller": ({"type": "direct"},)}

    type: Literal["tool_use"]
    id: Name
    name: Name
    input: dict[str, Any]
    cache_control: CacheControl | None = None


class ToolResultBlock(RequestModel):
    """The result of a tool call."""

    REFUSED: ClassVar[dict[str, str]] = {"toolset_name": "there are no toolsets here"}

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

    REFUSED: ClassVar[dict[str, str]] = {
        "allowed_callers": "only the model calls tools here",
        "defer_loading": "all tools are in the prompt",
        "eager_input_streaming": "arguments come as they are generated",
        "input_examples": "put them into the description",
        "strict": "arguments are not checked here",
    }
    HARMLESS: ClassVar[dict[str, tuple[Any, ...]]] = {
        "allowed_callers": (["direct"],),
        "defer_loading": (False,),
        "eager_input_streaming": (False,),
        "input_examples": ([],),
        "strict": (False,),
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

    REFUSED: ClassVar[dict[str, str]] = {
        "container": "this server runs no code",
        "context_management": "this server edits no conversation",
        "diagnostics": "ask /kv/explain instead",
        "inference_geo": "this server is where it is",
        "mcp_servers": "this server calls no tools by itself",
        "output_config": "answers have no other format",
        "service_tier": "this server treats all requests alike",
        "speed": "this server has one speed",
        "thinking": "models here have no thinking that can be set",
    }
    HARMLESS: ClassVar[dict[str, tuple[Any, ...]]] = {
        "mcp_servers": ([],),
        "output_config": ({},),
        "service_tier": ("auto", "standard_only"),
        "speed": ("standard",),
        "thinking": _NO_ANSWER,
    }
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

    @property
    def characters(self) -> int:
        """About the number of characters to tokenize."""
        return sum(map(_length, (self.system, *(turn.content for turn in self.messages))))


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
    top_k: int | None = Field(default=None, ge=0, le=_INT32)
    stream: bool | None = None
    metadata: MessagesMetadata | None = Field(default=None, description="Ignored.")
    cache_salt: CacheSalt | None = Field(
        default=None,
        description="Prompts share cached pages only with prompts of the same salt. Ours.",
    )
    kvkeep: Extras | None = None


def _length(content: object) -> int:
    if isinstance(content, str):
        return len(content)
    if isinstance(content, list):
        return sum(map(_length, content))
    if isinstance(content, TextBlock):
        return len(content.text)
    if isinstance(content, ToolResultBlock):
        return _length(content.content)
    return 0


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
