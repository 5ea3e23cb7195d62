"""Beam search: which beams are continued by which tokens, and which answers are the best."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch

from kvkeep.core.errors import InvalidValue
from kvkeep.serve.engine.sampling import LogitsRow, adjust, likeliest

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from kvkeep.serve.engine.params import SamplingParams

__all__ = ["BeamSearch", "Hypothesis", "Pick"]


class Pick(NamedTuple):
    """A beam that goes on: row ``parent`` of the logits given, continued by ``token``.

    ``score`` is the summed log probability of all its generated tokens.
    """

    parent: int
    token: int
    score: float


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished answer: its generated tokens, including an end token, and its score.

    ``score`` is the summed log probability divided by length to the ``length_penalty``.
    """

    tokens: tuple[int, ...]
    score: float
    finish_reason: Literal["stop", "length"]


class BeamSearch:
    """A search for the likeliest whole answers to one prompt, with ``params.beams`` beams.

    Pure logic: it reads logits and returns which beams to fork with which tokens; it uses neither
    cache nor model. Call `start` with the logits behind the prompt, then compute each pick and
    call `advance` with their logits in the same order, until `done` or until there is no room;
    `finish` returns the answers.

    The rules are those of Transformers' ``generate(num_beams=…, early_stopping=False)``. A step
    ranks all continuations and considers the best ``2 * beams`` of them (``beams`` more for each
    further end token). Those that end and are among the best ``beams`` become hypotheses; the best
    ``beams`` that do not end live on. The search is done when no live beam, were it to end now,
    would beat the worst of ``beams`` hypotheses, or at ``max_length``.

    ``end_tokens`` end an answer unless ``params.ignore_eos``. ``has_stop`` returns whether an
    answer's tokens contain a stop text; it is called for each considered continuation that no end
    token ends. ``max_length`` is the longest sequence of model and pool, including the
    ``prompt_tokens``.

    Thread safety: none. Cost: one log-softmax and one ranking of beams × vocabulary a step.
    """

    def __init__(
        self,
        params: SamplingParams,
        end_tokens: Collection[int],
        prompt_tokens: int,
        max_length: int,
        *,
        has_stop: Callable[[list[int]], bool] | None = None,
    ) -> None:
        if not params.beams:
            raise InvalidValue("a beam search needs beams of 1 or more, got 0")
        if prompt_tokens >= max_length:
            raise InvalidValue(
                f"the prompt has {prompt_tokens} tokens and a sequence at most {max_length}; "
                "there is no room for an answer"
            )
        self._params = params
        self._end_tokens = frozenset() if params.ignore_eos else frozenset(end_tokens)
        self._has_stop = has_stop
        self._longest = min(params.max_tokens, max_length - prompt_tokens)
        self._looked_at = max(2, 1 + len(self._end_tokens)) * params.beams
        self.restart()

    def restart(self) -> None:
        """Forget all beams and hypotheses; `start` is next."""
        self._live: list[tuple[list[int], float]] = [([], 0.0)]  # generated tokens, score
        self._finished: list[Hypothesis] = []  # at most `beams`, the best first
        self._done = False

    @property
    def done(self) -> bool:
        """Whether the search has ended: no beam is live."""
        return self._done

    def start(self, logits: torch.Tensor) -> list[Pick]:
        """Return the first beams, from the ``logits`` [vocabulary] behind the prompt."""
        assert self._live == [([], 0.0)], "a search starts once"
        return self.advance(logits[None])

    def advance(self, logits: torch.Tensor) -> list[Pick]:
        """Return the next beams, best first, from the ``logits`` [beams, vocabulary] of live beams.

        Parents are rows of ``logits``. Returns fewer than ``beams`` only if there are not so many
        continuations that do not end, and none when the search is done.
        """
        assert not self._done, "the search is done"
        assert len(logits) == len(self._live), f"{len(self._live)} beams, {len(logits)} rows"
        beams = self._params.beams
        live: list[tuple[list[int], float]] = []
        picks: list[Pick] = []
        for rank, pick in enumerate(self._continuations(logits)):
            tokens = [*self._live[pick.parent][0], pick.token]
            reason = self._finish_reason(tokens)
            if reason is None and len(live) < beams:
                live.append((tokens, pick.score))
                picks.append(pick)
            elif reason is not None and rank < beams:
                self._keep(tokens, pick.score, reason)
        self._live = live
        self._done = not live or not self._can_improve()
        return [] if self._done else picks

    def finish(self) -> list[Hypothesis]:
        """Return the best ``n`` answers, best first; fewer if the vocabulary offers no more.

        If the search is not done, live beams end with the tokens they have.
        """
        if not self._done:
            for tokens, score in self._live:
                if tokens:
                    self._keep(tokens, score, "length")
            self._live, self._done = [], True
        return self._finished[: self._params.n]

    def _continuations(self, logits: torch.Tensor) -> list[Pick]:
        """Return the best continuations of all live beams, best first."""
        scores = logits.to(torch.float32, copy=True)
        adjust(scores, [LogitsRow(self._params, None, ())] * len(scores))
        scores = scores.log_softmax(-1)
        scores += scores.new_tensor([score for _, score in self._live])[:, None]
        vocabulary = scores.shape[-1]
        flat = scores.reshape(1, -1)
        best = likeliest(flat, min(self._looked_at, flat.shape[-1]))
        values: list[float] = flat.gather(-1, best)[0].tolist()
        places: list[int] = best[0].tolist()
        return [
            Pick(*divmod(place, vocabulary), value)
            for place, value in zip(places, values, strict=True)
        ]

    def _finish_reason(self, tokens: list[int]) -> Literal["stop", "length"] | None:
        if tokens[-1] in self._end_tokens or (
            self._has_stop is not None and self._has_stop(tokens)
        ):
            return "stop"
        return "length" if len(tokens) >= self._longest else None

    def _keep(self, tokens: list[int], score: float, reason: Literal["stop", "length"]) -> None:
        """Add a hypothesis; drop the worst if there are more than ``beams``."""
        normed = self._normed(score, len(tokens))
        self._finished.append(Hypothesis(tuple(tokens), normed, reason))
        self._finished.sort(key=lambda one: -one.score)  # stable: the earlier of equals first
        del self._finished[self._params.beams :]

    def _can_improve(self) -> bool:
        """Whether a live beam may still become one of the best."""
        if len(self._finished) < self._params.beams:
            return True
        tokens, score = self._live[0]
        return self._normed(score, len(tokens)) > self._finished[-1].score

    def _normed(self, score: float, length: int) -> float:
        return score / math.pow(length, self._params.length_penalty)
