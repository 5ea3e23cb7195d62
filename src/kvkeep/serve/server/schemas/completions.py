"""``/v1/completions``, ``/tokenize`` and ``/detokenize``: requests and responses."""

from typing import Annotated, ClassVar

import numpy as np
import numpy.typing as npt
from pydantic import ConfigDict, Field, PlainValidator, model_validator

from kvkeep.serve.messages import Refused
from kvkeep.serve.server.schemas.base import (
    RequestModel,
    ResponseModel,
    SamplingRequest,
    field_error,
)
from kvkeep.serve.server.schemas.chat import Messages

__all__ = [
    "CompletionRequest", "DetokenizeRequest", "DetokenizeResponse", "Prompt", "Token",
    "TokenizeRequest", "TokenizeResponse",
]  # fmt: skip

Token = Annotated[int, Field(ge=0, le=2**31 - 1)]
Prompt = str | npt.NDArray[np.int32]
"""Tokens are an int32 array, which takes a tenth of a list's memory."""

_MOST_PROMPTS = 128
_INT32 = 2**31 - 1


def _prompts(value: object) -> list[Prompt]:
    """Return the prompts of any allowed form as a list.

    By hand: a union would try each form on each token, and report an error for every one.
    """
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list):
        raise ValueError("must be a text, a list of texts, a list of tokens, or a list of those")
    if value and _is_token(value[0]):
        value = [value]
    if not value:
        raise ValueError("is empty; give it at least one token")
    if len(value) > _MOST_PROMPTS:
        raise ValueError(f"is at most {_MOST_PROMPTS} prompts, got {len(value)}")
    kind = type(value[0])
    return [_checked(number, prompt, kind) for number, prompt in enumerate(value)]


def _checked(number: int, prompt: object, kind: type) -> Prompt:
    if not isinstance(prompt, str | list) or type(prompt) is not kind:
        raise ValueError("must be a text, a list of texts, a list of tokens, or a list of those")
    if not prompt:
        raise ValueError(f"number {number} is empty; give it at least one token")
    if isinstance(prompt, str):
        if not prompt.isascii():
            try:
                prompt.encode()
            except UnicodeEncodeError as error:
                raise ValueError(f"number {number} is not valid Unicode") from error
        return prompt
    if set(map(type, prompt)) == {int}:
        try:
            tokens = np.array(prompt, np.int64)
        except OverflowError:
            pass  # the loop below finds the token
        else:
            if tokens.min() >= 0 and tokens.max() <= _INT32:
                return tokens.astype(np.int32)
    for place, token in enumerate(prompt):
        if not _is_token(token) or not 0 <= token <= _INT32:
            raise ValueError(
                f"number {number} has {str(token)[:20]!r} as token {place}; tokens must be "
                f"whole numbers, 0 … {_INT32}"
            )
    raise AssertionError("one of the tokens is wrong")


def _is_token(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


# The forms that `_prompts` accepts, for the OpenAPI document.
_Tokens = Annotated[list[Token], Field(min_length=1)]
_Text = Annotated[str, Field(min_length=1)]
_PromptForms = (
    _Text
    | Annotated[list[_Text], Field(min_length=1, max_length=_MOST_PROMPTS)]
    | _Tokens
    | Annotated[list[_Tokens], Field(min_length=1, max_length=_MOST_PROMPTS)]
)


class CompletionRequest(SamplingRequest):
    """Text or tokens to continue."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"prompt": "Return a copy of", "max_tokens": 16, "temperature": 0}]
        }
    )

    REFUSED: ClassVar[Refused] = {
        **SamplingRequest.REFUSED,
        "suffix": ("models here only continue texts", ""),
        "add_generation_prompt": ("a prompt here has no template", True),
        "chat_template_kwargs": ("a prompt here has no template", {}),
        "continue_final_message": ("a prompt here has no template", False),
        "add_special_tokens": ("a text begins with the model's start token", True),
        "best_of": ("answers are not ranked here; ask for n, with logprobs", 1),
    }

    prompt: Annotated[
        list[Prompt], PlainValidator(_prompts, json_schema_input_type=_PromptForms)
    ] = Field(description="A text, a list of texts, a list of tokens, or a list of those.")
    echo: bool | None = Field(default=None, description="Put the prompt before the answer.")
    logprobs: int | None = Field(
        default=None,
        ge=0,
        le=5,
        description="Return log probabilities: of each token and this many likeliest ones.",
    )

    @model_validator(mode="after")
    def _go_together(self) -> "CompletionRequest":
        if self.echo and self.logprobs is not None:
            raise field_error("echo", "has no logprobs for the prompt; leave one of them out")
        if len(self.prompt) > 1 and self.extras.session is not None:
            raise field_error("prompt", "must be a single one in a session; send them one by one")
        return self


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
