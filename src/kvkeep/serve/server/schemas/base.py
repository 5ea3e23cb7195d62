"""What all requests have in common: strict fields, no unknown ones, and sampling."""

from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    model_validator,
)
from pydantic_core import PydanticCustomError

from kvkeep.core.errors import InvalidValue
from kvkeep.serve.engine import SamplingParams

__all__ = ["Extras", "RequestModel", "ResponseModel", "SamplingRequest", "StreamOptions", "wrong"]

_MOST_STOPS = 4
# A stop text is looked for at every token.
_LONGEST_STOP = 256
_MOST_BIAS = 4096
_MOST_FIELDS = 64
_MOST_METADATA = 16
_MOST_ANSWERS = 128
_INT32 = 2**31 - 1

Value = TypeVar("Value")
Texts = Annotated[list[str], Field(fail_fast=True)]


def wrong(field: str, what: str) -> PydanticCustomError:
    """An error about ``field`` of the object that is validated, for those that concern several."""
    return PydanticCustomError("wrong_field", "{field} {what}", {"field": field, "what": what})


class RequestModel(BaseModel):
    """A JSON object that a client sends: no type is guessed and no unknown field passed over.

    ``REFUSED`` are fields of OpenAI's that cannot be honoured here, and why. None of them may be
    set; null, as some clients send it, sets nothing, and neither do the ``HARMLESS`` values, which
    ask for what is done anyway.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    REFUSED: ClassVar[dict[str, str]] = {}
    HARMLESS: ClassVar[dict[str, tuple[Any, ...]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if len(value) > _MOST_FIELDS:  # before each of them is objected to
            raise ValueError(f"has {len(value)} fields, which are more than there are")
        for name, why in cls.REFUSED.items():
            if value.get(name) is not None and value[name] not in cls.HARMLESS.get(name, ()):
                raise wrong(name, f"cannot be honoured: {why}")
        return {key: item for key, item in value.items() if key not in cls.REFUSED}


class ResponseModel(BaseModel):
    """A JSON object that a client is sent."""

    model_config = ConfigDict(extra="forbid")


class StreamOptions(RequestModel):
    """What a stream has besides the answer."""

    include_usage: bool | None = Field(
        default=None, description="Send the usage in a last chunk, which has no choices."
    )


class Extras(RequestModel):
    """What kvkeep offers besides."""

    store: bool = Field(
        default=True, description="False keeps this prompt and its answer out of the cache"
    )
    answers: bool = Field(
        default=True,
        description="False keeps the KV of generated tokens out of the tiers; the prompt's goes "
        "there. In the pool it stays until it is evicted.",
    )
    draft_tokens: int | None = Field(
        default=None,
        ge=0,
        le=64,
        description="Guess so many tokens a step from what the prompt repeats. Changes the speed, "
        "never the tokens. Default: the server's.",
    )
    beams: int = Field(
        default=0,
        ge=0,
        le=_MOST_ANSWERS,
        description="Search for the likeliest answers with so many beams",
    )
    length_penalty: float = Field(
        default=1.0,
        ge=-10,
        le=10,
        description="Beams are compared by sum / length to the length_penalty",
    )
    session: str | None = Field(
        default=None,
        min_length=1,
        max_length=256,
        description="The conversation that this is a turn of. What its earlier turns alone used, "
        "and this one does not continue, is evicted first.",
    )
    turn: int | None = Field(
        default=None,
        ge=0,
        le=_INT32,
        description="Requests of the same turn stand side by side. Default: the next one.",
    )

    @model_validator(mode="after")
    def _turns_of_a_session(self) -> "Extras":
        if self.turn is not None and self.session is None:
            raise wrong("turn", "is one of a session; give session, too")
        return self


def at_most(count: int) -> BeforeValidator:
    """Refuse an object of more fields before each of them is looked at, and objected to."""

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
        raise ValueError(f"texts have 1 to {_LONGEST_STOP} characters each")
    return stop


def _biases(bias: dict[str, float] | None) -> dict[str, float] | None:
    if bias is None:
        return None
    for token, value in bias.items():
        if not (token.isascii() and token.isdecimal() and len(token) <= 10):
            raise ValueError(f"has token ids as its keys, got {token[:20]!r}")
        if not -100 <= value <= 100:
            raise ValueError(f"lies in -100 … 100, got {value}")
    return bias


class SamplingRequest(RequestModel):
    """The fields that chat and plain completions share. Null is the same as not there."""

    model: str | None = Field(default=None, description="The served model's name; may be left out.")
    temperature: float | None = Field(
        default=None, ge=0, le=2, description="Default 1; 0 is greedy."
    )
    top_p: float | None = Field(default=None, gt=0, le=1, description="Default 1.")
    top_k: int | None = Field(
        default=None, ge=0, le=_INT32, description="0, the default: all. Ours."
    )
    min_p: float | None = Field(default=None, ge=0, le=1, description="Default 0. Ours.")
    n: int | None = Field(default=None, ge=1, le=_MOST_ANSWERS, description="Answers; default 1.")
    stop: Annotated[str | Texts | None, AfterValidator(_stops)] = Field(
        default=None, description="The answer ends before these texts: one, or up to 4."
    )
    seed: int | None = Field(default=None, ge=0, le=2**63 - 1)
    max_tokens: int | None = Field(default=None, ge=1, le=_INT32)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    logit_bias: Annotated[dict[str, float] | None, AfterValidator(_biases), at_most(_MOST_BIAS)] = (
        Field(default=None, description="Token id → what is added to its logit, -100 … 100.")
    )
    ignore_eos: bool = Field(default=False, description="Go on after the model's end token. Ours.")
    stream: bool | None = Field(default=None, description="Answer in server-sent events.")
    stream_options: StreamOptions | None = None
    cache_salt: str | None = Field(
        default=None,
        min_length=1,
        max_length=256,
        description="Prompts share cached pages only with prompts of the same salt. Ours.",
    )
    kvkeep: Extras | None = None
    user: str | None = Field(default=None, description="Ignored.")
    metadata: Annotated[dict[str, str] | None, at_most(_MOST_METADATA)] = Field(
        default=None, description="Ignored."
    )
    safety_identifier: str | None = Field(default=None, description="Ignored.")
    prompt_cache_key: str | None = Field(
        default=None, description="Ignored: what is cached is found without it."
    )

    @model_validator(mode="after")
    def _options_of_a_stream(self) -> "SamplingRequest":
        if self.stream_options is not None and not self.stream:
            raise wrong("stream_options", "is for streams; set stream, or leave it out")
        return self

    @property
    def extras(self) -> Extras:
        """The ``kvkeep`` object, or what it is by default."""
        return self.kvkeep or Extras()

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def sampling(
        self,
        *,
        max_tokens: int,
        draft_tokens: int,
        logprobs: int | None,
        best_of: int | None = None,
    ) -> SamplingParams:
        """The engine's parameters; `InvalidValue` for those that do not go together.

        ``max_tokens`` and ``logprobs`` are each endpoint's own; ``draft_tokens`` is the default.
        """
        extras = self.extras
        drafts = draft_tokens if extras.draft_tokens is None else extras.draft_tokens
        searching = extras.beams > 0
        if searching and extras.draft_tokens is None:
            drafts = 0
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return SamplingParams(
            temperature=_or(self.temperature, 0.0 if searching else 1.0),
            top_p=_or(self.top_p, 1.0),
            top_k=_or(self.top_k, 0),
            min_p=_or(self.min_p, 0.0),
            seed=self.seed,
            presence_penalty=_or(self.presence_penalty, 0.0),
            frequency_penalty=_or(self.frequency_penalty, 0.0),
            logit_bias=tuple((int(key), value) for key, value in (self.logit_bias or {}).items()),
            n=_or(self.n, 1),
            best_of=best_of,
            beams=extras.beams,
            length_penalty=extras.length_penalty,
            max_tokens=max_tokens,
            stop=tuple(stop),
            ignore_eos=self.ignore_eos,
            logprobs=logprobs,
            draft_tokens=drafts,
        )

    def check_bias(self, vocabulary: int) -> None:
        """Refuse a bias on a token that the model does not know."""
        unknown = [token for token in self.logit_bias or {} if int(token) >= vocabulary]
        if unknown:
            raise InvalidValue(
                f"logit_bias has token {unknown[0]}; the model knows 0 … {vocabulary - 1}"
            )


def _or(value: Value | None, default: Value) -> Value:
    return default if value is None else value
