"""What questions about one prompt have in common."""

from typing import Annotated

from pydantic import Field, model_validator

from kvkeep.serve.server.schemas.base import RequestModel, wrong
from kvkeep.serve.server.schemas.chat import Messages
from kvkeep.serve.server.schemas.completions import Token

__all__ = ["PromptRequest"]

_Text = Annotated[str, Field(min_length=1)]


class PromptRequest(RequestModel):
    """A prompt as text, as token ids or as a conversation, and whose it is."""

    prompt: _Text | Annotated[list[Token], Field(min_length=1, fail_fast=True)] | None = Field(
        default=None, description="Text or token ids, as /v1/completions takes it."
    )
    messages: Messages | None = Field(
        default=None, description="A conversation, as /v1/chat/completions takes it."
    )
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None

    @model_validator(mode="after")
    def _one_of_them(self) -> "PromptRequest":
        if (self.prompt is None) == (self.messages is None):
            raise wrong("prompt", "or messages is needed, one of the two")
        return self
