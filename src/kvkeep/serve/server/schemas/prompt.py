"""The request body shared by endpoints about one prompt."""

from typing import Annotated

from pydantic import Field, model_validator

from kvkeep.serve.server.schemas.base import CacheSalt, RequestModel, field_error
from kvkeep.serve.server.schemas.chat import Messages
from kvkeep.serve.server.schemas.completions import Token

__all__ = ["PromptRequest"]

_Text = Annotated[str, Field(min_length=1)]


class PromptRequest(RequestModel):
    """A prompt as text, token ids or a conversation, and its cache_salt."""

    prompt: _Text | Annotated[list[Token], Field(min_length=1, fail_fast=True)] | None = Field(
        default=None, description="Text or token ids, as /v1/completions takes it."
    )
    messages: Messages | None = Field(
        default=None, description="A conversation, as /v1/chat/completions takes it."
    )
    cache_salt: CacheSalt | None = None

    @model_validator(mode="after")
    def _one_of_them(self) -> "PromptRequest":
        if (self.prompt is None) == (self.messages is None):
            raise field_error("prompt", "or messages is needed, but not both")
        return self
