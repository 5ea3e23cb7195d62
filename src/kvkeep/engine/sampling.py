"""How the next token is chosen from the logits."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvkeep.errors import InvalidValue

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["SamplingParams", "choose", "generator"]

_COLDEST = 1e-30  # what float32 can divide by


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request's tokens are chosen, and when it ends.

    ``temperature`` 0 takes the likeliest token. Above 0 a token is drawn: from the ``top_k``
    likeliest (0 is all), of these from the fewest whose probabilities add up to ``top_p``. The
    same ``seed`` draws the same tokens from the same logits, whatever else is in the batch; None
    draws anew each time. A request ends after ``max_tokens`` tokens, with the model's end token,
    or before the first of the ``stop`` texts that it writes.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    max_tokens: int = 128
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if not _is_number(self.temperature) or not 0 <= self.temperature < math.inf:
            raise InvalidValue(f"temperature is a number of 0 or more, got {self.temperature!r}")
        if not _is_number(self.top_p) or not 0 < self.top_p <= 1:
            raise InvalidValue(f"top_p lies above 0 and at most at 1, got {self.top_p!r}")
        if not _is_count(self.top_k) or self.top_k < 0:
            raise InvalidValue(f"top_k is a number of tokens, 0 for all, got {self.top_k!r}")
        if not _is_count(self.max_tokens) or self.max_tokens < 1:
            raise InvalidValue(f"max_tokens is 1 or more, got {self.max_tokens!r}")
        if self.seed is not None and not (_is_count(self.seed) and 0 <= self.seed < 2**63):
            raise InvalidValue(f"seed is None or lies in 0 … 2⁶³-1, got {self.seed!r}")
        stop: object = self.stop
        if not isinstance(stop, tuple) or not all(map(_is_text, stop)):
            raise InvalidValue(f"stop is a tuple of non-empty texts, got {self.stop!r}")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != ""


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def generator(params: SamplingParams, device: torch.device) -> torch.Generator | None:
    """The source of chance of one request; greedy ones need none."""
    if params.temperature == 0:
        return None
    source = torch.Generator(device=device)
    if params.seed is None:
        source.seed()
    else:
        source.manual_seed(params.seed)
    return source


def choose(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    sources: Sequence[torch.Generator | None],
) -> list[int]:
    """The next token of each row of ``logits`` [n, vocabulary]."""
    tokens: list[int] = logits.argmax(-1).tolist()
    for row, (one, source) in enumerate(zip(params, sources, strict=True)):
        if source is not None:
            tokens[row] = _draw(logits[row], one, source)
    return tokens


def _draw(logits: torch.Tensor, params: SamplingParams, source: torch.Generator) -> int:
    scores = logits.float()
    # From the top downwards, so that a low temperature ends in -inf and never in NaN.
    scores = (scores - scores.max()) / max(params.temperature, _COLDEST)
    if 0 < params.top_k < len(scores):
        scores, candidates = scores.topk(params.top_k)  # sorted, the likeliest first
    else:
        scores, candidates = scores.sort(descending=True, stable=True)
    chances = scores.softmax(-1)
    if params.top_p < 1:
        before = chances.cumsum(-1) - chances
        chances = chances.where(before < params.top_p, 0.0)
    return int(candidates[torch.multinomial(chances, 1, generator=source)])
