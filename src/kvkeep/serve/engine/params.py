"""What an engine is given: `SamplingParams` of a request, and the `Limits` of its batch."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from kvkeep.core.errors import InvalidValue, told, whole

__all__ = ["Limits", "SamplingParams"]

_MAX_LOGPROBS = 100
# Larger values overflow the tensors of a step, which would fail its other requests, too.
_INT32 = 2**31 - 1
_FINITE = sys.float_info.max


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """The rules for one request: choice of tokens, number of answers, and when they end.

    ``temperature`` 0 takes the likeliest token. Above 0 a token is drawn: from the ``top_k``
    likeliest (0: all), of these from the fewest whose probabilities add up to ``top_p``, of these
    from those at least ``min_p`` times as likely as the likeliest. The same ``seed`` draws the same
    tokens from the same logits, whatever else is in the batch; None draws a new seed for each
    request.

    Before that, ``logit_bias`` (token, bias) is added to the logits. From each token that the
    answer already contains, ``presence_penalty`` is subtracted once and ``frequency_penalty`` once
    per occurrence.

    ``n`` answers are returned. An answer ends after ``max_tokens`` tokens, with the model's end
    token (not with ``ignore_eos``), or before the first of the ``stop`` texts that it generates.
    ``logprobs`` (0 …) returns the log probability of each token and of that many of the likeliest
    in its place.
    ``draft_tokens`` above 0 drafts up to that many tokens a step by prompt lookup, which changes
    the speed and never the tokens.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    n: int = 1
    max_tokens: int = 128
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    draft_tokens: int = 0

    def __post_init__(self) -> None:
        _number("temperature", self.temperature, 0, _FINITE)
        _number("min_p", self.min_p, 0, 1)
        if not _is_number(self.top_p) or not 0 < self.top_p <= 1:
            raise InvalidValue(f"top_p lies above 0 and at most at 1, got {told(self.top_p)}")
        _number("presence_penalty", self.presence_penalty, -2, 2)
        _number("frequency_penalty", self.frequency_penalty, -2, 2)
        _count("top_k", self.top_k, 0)
        _count("max_tokens", self.max_tokens, 1)
        _count("n", self.n, 1)
        _count("draft_tokens", self.draft_tokens, 0)
        if self.seed is not None:
            _count("seed", self.seed, 0, 2**63 - 1)
        if self.logprobs is not None:
            _count("logprobs", self.logprobs, 0, _MAX_LOGPROBS)
        stop: object = self.stop
        if not isinstance(self.ignore_eos, bool):
            raise InvalidValue(f"ignore_eos is True or False; got {told(self.ignore_eos)}")
        if not isinstance(stop, tuple) or not all(map(_is_text, stop)):
            raise InvalidValue(f"stop is a tuple of non-empty texts, got {told(self.stop)}")
        self._check_bias()

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken, without drawing."""
        return self.temperature == 0

    def _check_bias(self) -> None:
        bias: object = self.logit_bias
        if not isinstance(bias, tuple):
            raise InvalidValue(f"logit_bias is a tuple of (token, bias), got {told(bias)}")
        for pair in bias:
            if not isinstance(pair, tuple) or len(pair) != 2:
                raise InvalidValue(
                    f"logit_bias is a tuple of (token, bias), got {told(pair)} in it"
                )
            _count("a token in logit_bias", pair[0], 0)
            _number("a bias in logit_bias", pair[1], -100, 100)


def _number(name: str, value: object, low: float, high: float) -> None:
    if not _is_number(value) or not low <= value <= high:  # type: ignore[operator]
        raise InvalidValue(f"{name} is a number in {low} … {high}; got {told(value)}")


def _count(name: str, value: object, low: int, high: int = _INT32) -> None:
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or not low <= value <= high:  # type: ignore[operator]
        raise InvalidValue(f"{name} is a whole number in {low} … {high}; got {told(value)}")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds on an engine's batch and queue.

    ``max_running`` answers are computed together, and ``step_tokens`` tokens in one forward pass:
    decoding answers come first, and chunks of prompts take the rest. ``max_waiting``
    requests may wait (None: any number). A request with more of its prompt cached may overtake
    others; each is overtaken at most ``max_overtaken`` times. ``watermark`` is the share of the
    pool that admission keeps free for running answers to grow into.
    """

    max_running: int = 32
    step_tokens: int = 1024
    max_waiting: int | None = None
    max_overtaken: int = 32
    watermark: float = 0.01

    def __post_init__(self) -> None:
        whole("max_running", self.max_running, 1)
        whole("step_tokens", self.step_tokens, 1)
        whole("max_overtaken", self.max_overtaken, 0)
        if self.max_waiting is not None:
            whole("max_waiting", self.max_waiting, 0)
        if self.step_tokens < self.max_running:
            raise InvalidValue(
                f"step_tokens has to allow a token for each of {self.max_running} running answers, "
                f"got {self.step_tokens}"
            )
        if not 0 <= self.watermark < 1:
            raise InvalidValue(f"watermark is a share of the pool, got {self.watermark!r}")
