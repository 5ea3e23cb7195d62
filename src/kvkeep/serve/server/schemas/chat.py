"""``/v1/chat/completions``: the request."""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from kvkeep.serve.server.schemas.base import (
    RequestModel,
    SamplingRequest,
    at_most,
    field_error,
)

__all__ = [
    "ChatRequest",
    "Message",
    "Messages",
    "TextFormat",
    "TextPart",
    "characters",
    "few_parts",
]

_NO_TOOLS = "this server does not support tools"
_TEXT_ONLY = "models here read and write text only"
_MOST_MESSAGES = 4096
_MOST_PARTS = 8192
_MOST_MARKS = 16  # fields of a breakpoint


class TextPart(RequestModel):
    """A piece of a message."""

    type: Literal["text"]
    text: str
    prompt_cache_breakpoint: Annotated[dict[str, str] | None, at_most(_MOST_MARKS)] = Field(
        default=None,
        description="Ignored: every beginning of a prompt can be reused. It keeps nothing longer.",
    )


class Message(RequestModel):
    """One turn of a conversation."""

    REFUSED: ClassVar[dict[str, str]] = {
        "tool_calls": _NO_TOOLS,
        "tool_call_id": _NO_TOOLS,
        "function_call": _NO_TOOLS,
        "audio": _TEXT_ONLY,
        "refusal": "put it into content",
        "annotations": "put them into content",
    }
    HARMLESS: ClassVar[dict[str, tuple[Any, ...]]] = {"tool_calls": ([],), "annotations": ([],)}

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)]
    name: str | None = Field(default=None, description="For chat templates that use it.")

    @property
    def text(self) -> str:
        """The content, with parts joined by line breaks."""
        if isinstance(self.content, str):
            return self.content
        return "\n".join(part.text for part in self.content)

    def as_turn(self) -> dict[str, str]:
        """Return the turn for a chat template; "developer" becomes "system"."""
        turn = {"role": "system" if self.role == "developer" else self.role, "content": self.text}
        return turn if self.name is None else {**turn, "name": self.name}


def few_parts(messages: object) -> object:
    """Refuse too many parts before they are parsed: each takes forty times its bytes."""
    if isinstance(messages, list):
        contents = (turn.get("content") for turn in messages if isinstance(turn, dict))
        parts = sum(len(content) for content in contents if isinstance(content, list))
        if parts > _MOST_PARTS:
            raise ValueError(f"have {parts:,} parts; at most {_MOST_PARTS:,}")
    return messages


Messages = Annotated[
    list[Message],
    Field(min_length=1, max_length=_MOST_MESSAGES, fail_fast=True),
    BeforeValidator(few_parts),
]


def characters(messages: Sequence[Message]) -> int:
    """Return the number of characters to tokenize."""
    return sum(len(turn.text) for turn in messages)


class TextFormat(RequestModel):
    """Plain text, the only format supported."""

    type: Literal["text"]


class ChatRequest(SamplingRequest):
    """A conversation for the model to continue."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "messages": [{"role": "user", "content": "What does textwrap.dedent do?"}],
                    "max_tokens": 64,
                    "temperature": 0,
                }
            ]
        }
    )

    REFUSED: ClassVar[dict[str, str]] = {
        "tools": _NO_TOOLS,
        "tool_choice": _NO_TOOLS,
        "parallel_tool_calls": _NO_TOOLS,
        "functions": _NO_TOOLS,
        "function_call": _NO_TOOLS,
        "audio": _TEXT_ONLY,
        "modalities": _TEXT_ONLY,
        "moderation": "this server moderates nothing",
        "prompt_cache_options": "all prompts are cached; kvkeep.store false keeps one out, and "
        "prompt_cache_retention keeps one longer",
        "prediction": "use kvkeep.draft_tokens for speculation from the prompt",
        "reasoning_effort": "models here have no such setting",
        "verbosity": "models here have no such setting",
        "web_search_options": "this server does not search the web",
        "service_tier": "this server treats all requests alike",
        "store": "answers are not kept; kvkeep.store decides if the cache keeps their pages",
    }

    HARMLESS: ClassVar[dict[str, tuple[Any, ...]]] = {
        "tools": ([],),
        "tool_choice": ("none",),
        "functions": ([],),
        "function_call": ("none",),
        "modalities": (["text"],),
        "prompt_cache_options": (
            {},
            {"mode": "implicit"},
            {"ttl": "30m"},
            {"mode": "implicit", "ttl": "30m"},
        ),
        "service_tier": ("auto", "default"),
        "store": (False,),
    }

    messages: Messages
    max_completion_tokens: int | None = Field(
        default=None,
        ge=1,
        le=2**31 - 1,
        description="Default: what fits. max_tokens is its older name.",
    )
    logprobs: bool | None = Field(
        default=None, description="Return the log probability of each token."
    )
    top_logprobs: int | None = Field(
        default=None, ge=0, le=20, description="Also of this many likeliest tokens per position."
    )
    response_format: TextFormat | None = None

    @model_validator(mode="after")
    def _go_together(self) -> "ChatRequest":
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise field_error("max_tokens", "is the older name of max_completion_tokens; set one")
        if self.top_logprobs is not None and not self.logprobs:
            raise field_error("top_logprobs", "needs logprobs; set it to true")
        return self

    @property
    def characters(self) -> int:
        """The number of characters to tokenize."""
        return characters(self.messages)

    @property
    def limit(self) -> int | None:
        """The requested limit of generated tokens."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_logprobs(self) -> int | None:
        """``logprobs`` as the engine takes it: None, or the number of likeliest tokens."""
        return (self.top_logprobs or 0) if self.logprobs else None
