"""``/tokenize`` and ``/detokenize``: what is asked and answered."""

from typing import Annotated

from pydantic import ConfigDict, Field, model_validator

from kvkeep.serve.server.schemas.base import RequestModel, ResponseModel, wrong
from kvkeep.serve.server.schemas.chat import Messages
from kvkeep.serve.server.schemas.completions import Token

__all__ = ["DetokenizeRequest", "DetokenizeResponse", "TokenizeRequest", "TokenizeResponse"]


class TokenizeRequest(RequestModel):
    """A text or a conversation; one of the two."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"prompt": "Return a copy of"}]})

    model: str | None = None
    prompt: str | None = Field(default=None, description="Text, as /v1/completions takes it.")
    messages: Messages | None = Field(
        default=None, description="A conversation, as /v1/chat/completions takes it."
    )

    @model_validator(mode="after")
    def _one_of_them(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise wrong("prompt", "or messages is needed, one of the two")
        return self


class TokenizeResponse(ResponseModel):
    """Token ids."""

    count: int
    max_model_len: int = Field(description="The longest prompt and answer together, in tokens.")
    tokens: list[int]


class DetokenizeRequest(RequestModel):
    """Token ids."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"tokens": [72, 105]}]})

    model: str | None = None
    tokens: Annotated[list[Token], Field(fail_fast=True)]


class DetokenizeResponse(ResponseModel):
    """The text of tokens, without special ones."""

    prompt: str
