"""``/tokenize`` and ``/detokenize``: requests and responses."""

from typing import Annotated

from pydantic import ConfigDict, Field, model_validator

from kvkeep.serve.server.schemas.base import RequestModel, ResponseModel, field_error
from kvkeep.serve.server.schemas.chat import Messages
from kvkeep.serve.server.schemas.completions import Token

__all__ = ["DetokenizeRequest", "DetokenizeResponse", "TokenizeRequest", "TokenizeResponse"]


class TokenizeRequest(RequestModel):
    """Either a text or a conversation."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"prompt": "Return a copy of"}]})

    model: str | None = None
    prompt: str | None = Field(default=None, description="Text, as /v1/completions takes it.")
    messages: Messages | None = Field(
        default=None, description="A conversation, as /v1/chat/completions takes it."
    )

    @model_validator(mode="after")
    def _one_of_them(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise field_error("prompt", "or messages is needed, but not both")
        return self


class TokenizeResponse(ResponseModel):
    """Token ids."""

    count: int
    max_model_len: int = Field(description="Most tokens of a prompt and its answer together.")
    tokens: list[int]


class DetokenizeRequest(RequestModel):
    """Token ids."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"tokens": [72, 105]}]})

    model: str | None = None
    tokens: Annotated[list[Token], Field(fail_fast=True)]


class DetokenizeResponse(ResponseModel):
    """The text of tokens, without special tokens."""

    prompt: str
