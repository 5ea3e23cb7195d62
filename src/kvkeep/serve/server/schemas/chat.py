"""``/v1/chat/completions``: the request."""

from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from kvkeep.serve.messages import Refused
from kvkeep.serve.server.schemas.base import (
    RequestModel,
    SamplingRequest,
    at_most,
    field_error,
)

__all__ = ["ChatRequest", "Message", "Messages", "TextFormat", "TextPart", "few_parts"]

_NO_TOOLS = "this server does not support tools"
_TEXT_ONLY = "models here read and write text only"
_MOST_MESSAGES = 4096
_MOST_PARTS = 8192
_MOST_MARKS = 16  # fields of a breakpoint


Mark = Annotated[dict[str, str] | None, at_most(_MOST_MARKS)]


class TextPart(RequestModel):
    """A piece of a message."""

    type: Literal["text"]
    text: str
    prompt_cache_breakpoint: Mark = Field(
        default=None,
        description="Ignored: every beginning of a prompt can be reused. It keeps nothing longer.",
    )
    cache_control: Mark = Field(default=None, description="The same, as other servers name it.")


class Message(RequestModel):
    """One turn of a conversation."""

    REFUSED: ClassVar[Refused] = {
        "tool_calls": (_NO_TOOLS, []),
        "tool_call_id": (_NO_TOOLS,),
        "function_call": (_NO_TOOLS,),
        "audio": (_TEXT_ONLY,),
        "refusal": ("put it into content", ""),
        "annotations": ("put them into content", []),
        "reasoning": ("leave it out, or put it into content", ""),
        "reasoning_content": ("leave it out, or put it into content", ""),
    }

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = Field(
        default=None, description="Only the assistant's may be null: an empty text, as in vLLM."
    )
    name: str | None = Field(default=None, description="For chat templates that use it.")

    @model_validator(mode="after")
    def _has_content(self) -> "Message":
        if self.content is None and self.role != "assistant":
            raise field_error("content", "is missing")
        return self

    @property
    def text(self) -> str:
        """The content, with parts joined by line breaks."""
        if isinstance(self.content, list):
            return "\n".join(part.text for part in self.content)
        return self.content or ""

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

    # Without tools, which are refused, a choice of "auto" and calls side by side ask for nothing.
    REFUSED: ClassVar[Refused] = {
        **SamplingRequest.REFUSED,
        "tools": (_NO_TOOLS, []),
        "tool_choice": (_NO_TOOLS, "none", "auto"),
        "parallel_tool_calls": (_NO_TOOLS, True, False),
        "functions": (_NO_TOOLS, []),
        "function_call": (_NO_TOOLS, "none", "auto"),
        "audio": (_TEXT_ONLY,),
        "modalities": (_TEXT_ONLY, ["text"]),
        "moderation": ("this server moderates nothing",),
        "prompt_cache_options": (
            "all prompts are cached; kvkeep.store false keeps one out, and prompt_cache_retention "
            "keeps one longer",
            {}, {"mode": "implicit"}, {"ttl": "30m"}, {"mode": "implicit", "ttl": "30m"},
        ),
        "prediction": ("use kvkeep.draft_tokens for speculation from the prompt",),
        "reasoning_effort": ("models here have no such setting", "none"),
        "verbosity": ("models here have no such setting", "medium"),
        "web_search_options": ("this server does not search the web",),
        "service_tier": ("this server treats all requests alike", "auto", "default"),
        "store": (
            "answers are not kept; kvkeep.store decides if the cache keeps their pages", False,
        ),
        # vLLM's
        "add_special_tokens": ("the template has them", False),
        "best_of": ("answers are not ranked here; ask for n, with logprobs", 1),
        "add_generation_prompt": ("the model's turn begins behind every prompt", True),
        "chat_template_kwargs": ("the template gets messages alone", {}),
        "continue_final_message": ("the model's turn is a new one; use /v1/messages", False),
        "echo": ("use /v1/completions", False),
    }  # fmt: skip

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
        newer = self.max_completion_tokens
        if self.max_tokens is not None and newer is not None and self.max_tokens != newer:
            raise field_error("max_tokens", "is the older name of max_completion_tokens; set one")
        if self.top_logprobs and not self.logprobs:
            raise field_error("top_logprobs", "needs logprobs; set it to true")
        return self

    @property
    def limit(self) -> int | None:
        """The requested limit of generated tokens."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_logprobs(self) -> int | None:
        """``logprobs`` as the engine takes it: None, or the number of likeliest tokens."""
        return (self.top_logprobs or 0) if self.logprobs else None
