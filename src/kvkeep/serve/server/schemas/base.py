"""Shared by all requests: strict fields without unknown ones, and the sampling parameters."""

from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from kvkeep.core.errors import InvalidValue
from kvkeep.core.public import FOLDED, SALT_MARK
from kvkeep.serve.engine import SamplingParams
from kvkeep.serve.http import text_size
from kvkeep.serve.messages import Refused, first_refused

__all__ = [
    "CacheSalt", "Extras", "RequestModel", "ResponseModel", "SamplingRequest", "StreamOptions",
    "TopK", "field_error",
]  # fmt: skip

_MOST_STOPS = 4
_LONGEST_STOP = 256  # characters; each token is checked for it
_MOST_BIAS = 4096
_MOST_FIELDS = 64
_MOST_METADATA = 16
_MOST_ANSWERS = 128
_INT32 = 2**31 - 1
_DAY_S = 86_400.0
_NO_BEAMS = "answers are sampled one by one"
_NO_REASONING = "reasoning is not told from an answer here"

Value = TypeVar("Value")
Texts = Annotated[list[str], Field(fail_fast=True)]
_OUR_SALTS = (FOLDED, SALT_MARK)


def _salt(salt: str) -> str:
    if salt.startswith(_OUR_SALTS):
        raise PydanticCustomError(
            "wrong_salt",
            "must not begin with {mark}, which is for names that the server makes",
            {"mark": repr(next(mark for mark in _OUR_SALTS if salt.startswith(mark)))},
        )
    return salt


TopK = Annotated[int, Field(ge=-1, le=_INT32), AfterValidator(lambda most: max(most, 0))]
"""A number of tokens; 0, and -1 as in vLLM, stand for all."""
Switch = Annotated[bool, WithJsonSchema({"anyOf": [{"type": "boolean"}, {"type": "null"}]})]
"""True or false; null is the same as not set."""
CacheSalt = Annotated[str, Field(min_length=1, max_length=256), AfterValidator(_salt)]


def field_error(field: str, what: str) -> PydanticCustomError:
    """Return an error about ``field`` of the object being validated, for checks of several."""
    return PydanticCustomError("wrong_field", "{field} {what}", {"field": field, "what": what})


class RequestModel(BaseModel):
    """A JSON object from a client: strict types, no unknown fields.

    Null in any field is the same as not set. ``REFUSED`` are fields that cannot be honoured here,
    with the values that are accepted because they ask for nothing.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    REFUSED: ClassVar[Refused] = {}

    _characters: int = PrivateAttr(default=0)

    @classmethod
    def read(cls, value: object) -> Self:
        """Return a decoded body, validated, with its `characters`."""
        body = cls.model_validate(value)
        body._characters = text_size(value)
        return body

    @property
    def characters(self) -> int:
        """The characters of all texts in the body, names of fields included."""
        return self._characters

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if len(value) > _MOST_FIELDS:  # before an error is made for each
            raise ValueError(f"has {len(value)} fields, more than there are")
        refused = first_refused(value, cls.REFUSED)
        if refused is not None:
            raise field_error(*refused)
        return {
            key: item for key, item in value.items() if item is not None and key not in cls.REFUSED
        }


class ResponseModel(BaseModel):
    """A JSON object for a client."""

    model_config = ConfigDict(extra="forbid")


class StreamOptions(RequestModel):
    """Options of a stream."""

    REFUSED: ClassVar[Refused] = {
        "include_obfuscation": ("events have no padding here", False),
        "continuous_usage_stats": ("the usage comes once, at the end", False),
    }

    include_usage: bool | None = Field(
        default=None, description="Send the usage in a last chunk, without choices."
    )


class Extras(RequestModel):
    """Options that only kvkeep has."""

    store: Switch = Field(
        default=True, description="False keeps this prompt and its answer out of the cache."
    )
    answers: Switch = Field(
        default=True,
        description="False keeps the KV of generated tokens, not the prompt's, out of the tiers. "
        "In the pool it stays until it is evicted.",
    )
    draft_tokens: int | None = Field(
        default=None,
        ge=0,
        le=64,
        description="Tokens to guess per step from repetitions in the prompt. Changes the speed, "
        "never the tokens.",
    )
    session: str | None = Field(
        default=None,
        min_length=1,
        max_length=256,
        description="The conversation that this is a request of; see /kv/sessions.",
    )


def at_most(count: int) -> BeforeValidator:
    """Refuse an object with more fields, before each is validated and makes an error."""

    def check(value: object) -> object:
        if isinstance(value, dict) and len(value) > count:
            raise ValueError(f"has at most {count} fields, got {len(value)}")
        return value

    return BeforeValidator(check)


def _stops(stop: str | list[str] | None) -> str | list[str] | None:
    texts = [stop] if isinstance(stop, str) else stop or []
    if len(texts) > _MOST_STOPS:
        raise ValueError(f"is at most {_MOST_STOPS} texts, got {len(texts)}")
    if not all(0 < len(text) <= _LONGEST_STOP for text in texts):
        raise ValueError(f"texts must have 1 to {_LONGEST_STOP} characters each")
    return stop


def _biases(bias: dict[str, float] | None) -> dict[str, float] | None:
    if bias is None:
        return None
    for token, value in bias.items():
        if not (token.isascii() and token.isdecimal() and len(token) <= 10):
            raise ValueError(f"must have token ids as its keys, got {token[:20]!r}")
        if not -100 <= value <= 100:
            raise ValueError(f"must be in -100 … 100, got {value}")
    return bias


class SamplingRequest(RequestModel):
    """The fields shared by chat and plain completions."""

    # Fields of vLLM and SGLang, whose clients send them with their defaults.
    REFUSED: ClassVar[Refused] = {
        "bad_words": ("use logit_bias", []),
        "early_stopping": (_NO_BEAMS, False),
        "include_reasoning": (_NO_REASONING, True),
        "include_stop_str_in_output": ("answers end before a stop text", False),
        "length_penalty": (_NO_BEAMS, 1),
        "min_tokens": ("use logit_bias against the model's end token", 0),
        "no_stop_trim": ("answers end before a stop text", False),
        "priority": ("requests run in their order", 0),
        "repetition_penalty": ("use presence_penalty or frequency_penalty", 1),
        "return_hidden_states": ("answers are text", False),
        "return_token_ids": ("answers are text", False),
        "return_tokens_as_token_ids": ("answers are text", False),
        "separate_reasoning": (_NO_REASONING, True),
        "skip_special_tokens": ("answers have no special tokens", True),
        "spaces_between_special_tokens": ("answers have no special tokens", True),
        "stop_token_ids": ("use stop", []),
        "stream_reasoning": (_NO_REASONING, True),
        "use_beam_search": (_NO_BEAMS, False),
    }

    model: str | None = Field(default=None, description="The served model's name; optional.")
    temperature: float | None = Field(
        default=None, ge=0, le=2, description="Default 1; 0 is greedy."
    )
    top_p: float | None = Field(default=None, gt=0, le=1, description="Default 1.")
    top_k: TopK | None = Field(default=None, description="Default 0 or -1: all. Ours.")
    min_p: float | None = Field(default=None, ge=0, le=1, description="Default 0. Ours.")
    n: int | None = Field(default=None, ge=1, le=_MOST_ANSWERS, description="Answers; default 1.")
    stop: Annotated[str | Texts | None, AfterValidator(_stops)] = Field(
        default=None, description="Texts before which the answer ends: one, or up to 4."
    )
    seed: int | None = Field(default=None, ge=0, le=2**63 - 1)
    max_tokens: int | None = Field(default=None, ge=1, le=_INT32)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    logit_bias: Annotated[dict[str, float] | None, AfterValidator(_biases), at_most(_MOST_BIAS)] = (
        Field(default=None, description="Token id → what to add to its logit, -100 … 100.")
    )
    ignore_eos: Switch = Field(
        default=False, description="Go on after the model's end token. Ours."
    )
    stream: bool | None = Field(default=None, description="Answer in server-sent events.")
    stream_options: StreamOptions | None = None
    cache_salt: CacheSalt | None = Field(
        default=None,
        description="Prompts share cached pages only with prompts of the same salt. Ours.",
    )
    kvkeep: Extras | None = None
    user: str | None = Field(default=None, description="Ignored.")
    metadata: Annotated[dict[str, str] | None, at_most(_MOST_METADATA)] = Field(
        default=None, description="Ignored."
    )
    safety_identifier: str | None = Field(default=None, description="Ignored.")
    prompt_cache_key: str | None = Field(
        default=None,
        max_length=256,
        description="The session, unless kvkeep.session names one.",
    )
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = Field(
        default=None,
        description="24h: the KV of the prompt is kept in the tiers for a day, within a budget.",
    )

    @model_validator(mode="after")
    def _options_of_a_stream(self) -> "SamplingRequest":
        if self.wants_usage and not self.stream:
            raise field_error("stream_options", "needs stream; set it, or leave both out")
        return self

    @property
    def extras(self) -> Extras:
        """The ``kvkeep`` object, or its defaults."""
        return self.kvkeep or Extras()

    @property
    def session(self) -> str | None:
        """The session: of ``kvkeep``, else ``prompt_cache_key``."""
        return self.extras.session or self.prompt_cache_key or None

    @property
    def retention_s(self) -> float | None:
        """Seconds for which the prompt is to be kept in the tiers; None: as any other."""
        return _DAY_S if self.prompt_cache_retention == "24h" else None

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def sampling(self, *, max_tokens: int, logprobs: int | None) -> SamplingParams:
        """Return the engine's parameters; `InvalidValue` for an impossible combination.

        ``max_tokens`` and ``logprobs`` depend on the endpoint.
        """
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return SamplingParams(
            temperature=_or(self.temperature, 1.0),
            top_p=_or(self.top_p, 1.0),
            top_k=_or(self.top_k, 0),
            min_p=_or(self.min_p, 0.0),
            seed=self.seed,
            presence_penalty=_or(self.presence_penalty, 0.0),
            frequency_penalty=_or(self.frequency_penalty, 0.0),
            logit_bias=tuple((int(key), value) for key, value in (self.logit_bias or {}).items()),
            n=_or(self.n, 1),
            max_tokens=max_tokens,
            stop=tuple(stop),
            ignore_eos=self.ignore_eos,
            logprobs=logprobs,
            draft_tokens=_or(self.extras.draft_tokens, 0),
        )

    def check_bias(self, vocabulary: int) -> None:
        """Raise `InvalidValue` for a bias on a token outside the vocabulary."""
        unknown = [token for token in self.logit_bias or {} if int(token) >= vocabulary]
        if unknown:
            raise InvalidValue(
                f"logit_bias has token {unknown[0]}; the model knows 0 … {vocabulary - 1}"
            )


def _or(value: Value | None, default: Value) -> Value:
    return default if value is None else value
