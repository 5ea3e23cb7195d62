"""``/v1/chat/completions``: what is asked."""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from kvkeep.serve.server.schemas.base import RequestModel, SamplingRequest, wrong

__all__ = ["ChatRequest", "Message", "Messages", "TextFormat", "TextPart", "characters"]

_NO_TOOLS = "models here are not given tools"
_TEXT_ONLY = "models here read and write text alone"
_MOST_MESSAGES = 4096
_MOST_PARTS = 8192


class TextPart(RequestModel):
    """A piece of a message."""

    type: Literal["text"]
    text: str


class Message(RequestModel):
    """One turn of a conversation."""

    REFUSED: ClassVar[dict[str, str]] = {
        "tool_calls": _NO_TOOLS,
        "tool_call_id": _NO_TOOLS,
        "function_call": _NO_TOOLS,
        "audio": _TEXT_ONLY,
        "refusal": "say it in content",
        "annotations": "say it in content",
    }
    HARMLESS: ClassVar[dict[str, tuple[Any, ...]]] = {"tool_calls": ([],), "annotations": ([],)}

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)]
    name: str | None = Field(default=None, description="For templates that show it.")

    @property
    def text(self) -> str:
        """What is said."""
        if isinstance(self.content, str):
            return self.content
        return "\n".join(part.text for part in self.content)

    def as_turn(self) -> dict[str, str]:
        """The turn as chat templates know it: parts joined by line breaks, developer as system."""
        turn = {"role": "system" if self.role == "developer" else self.role, "content": self.text}
        return turn if self.name is None else {**turn, "name": self.name}


def _few_parts(messages: object) -> object:
    """Refuse before each of them is looked at: a part takes forty times the memory of its bytes."""
    if isinstance(messages, list):
        contents = (turn.get("content") for turn in messages if isinstance(turn, dict))
        parts = sum(len(content) for content in contents if isinstance(content, list))
        if parts > _MOST_PARTS:
            raise ValueError(f"have {parts:,} parts; {_MOST_PARTS:,} at most")
    return messages


Messages = Annotated[
    list[Message],
    Field(min_length=1, max_length=_MOST_MESSAGES, fail_fast=True),
    BeforeValidator(_few_parts),
]


def characters(messages: Sequence[Message]) -> int:
    """How many there are to tokenize."""
    return sum(len(turn.text) for turn in messages)


class TextFormat(RequestModel):
    """Plain text, the only format there is."""

    type: Literal["text"]


class ChatRequest(SamplingRequest):
    """A conversation to be continued by the model's next turn."""

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
        "prediction": "say kvkeep.draft_tokens for speculation from the prompt",
        "reasoning_effort": "models here are not told how long to think",
        "verbosity": "models here are not told how much to say",
        "web_search_options": "nothing here searches the web",
        "service_tier": "all requests are served alike",
        "store": "answers are not kept; kvkeep.store says whether the cache keeps their pages",
    }

    HARMLESS: ClassVar[dict[str, tuple[Any, ...]]] = {
        "tools": ([],),
        "tool_choice": ("none",),
        "functions": ([],),
        "function_call": ("none",),
        "modalities": (["text"],),
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
        default=None, description="Send the log probability of each token."
    )
    top_logprobs: int | None = Field(
        default=None, ge=0, le=20, description="And of so many of the likeliest in its place."
    )
    response_format: TextFormat | None = None

    @model_validator(mode="after")
    def _go_together(self) -> "ChatRequest":
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise wrong("max_tokens", "is max_completion_tokens' older name; give one of them")
        if self.top_logprobs is not None and not self.logprobs:
            raise wrong("top_logprobs", "needs logprobs; set it to true")
        return self

    @property
    def limit(self) -> int | None:
        """The most tokens to generate, if it was said."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_logprobs(self) -> int | None:
        """What the engine calls ``logprobs``."""
        return (self.top_logprobs or 0) if self.logprobs else None
