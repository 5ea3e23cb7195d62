"""Beam search: which continuations of which beams live on, and which answers are the best."""

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
    """A live beam: row ``parent`` of the logits given, continued by ``token``.

    ``score`` is the summed log probability of all its generated tokens.
    """

    parent: int
    token: int
    score: float


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished answer: its generated tokens, an end token included, and how good it is.

    ``score`` is the summed log probability divided by length to the ``length_penalty``.
    """

    tokens: tuple[int, ...]
    score: float
    finish_reason: Literal["stop", "length"]


class BeamSearch:
    """The likeliest whole answers to one prompt, with ``params.beams`` beams.

    Pure logic: it sees logits and says which sequence to fork where; it holds neither cache nor
    model. Call `start` with the logits behind the prompt, then compute each pick and call
    `advance` with their logits in the same order, until `done`, or until there is no room for it;
    `finish` has the answers.

    The rules are those of Transformers' ``generate(num_beams=…, early_stopping=False)``: from all
    continuations the best twice as many as there are beams are looked at (one time more for each
    further end token); of the best ``beams`` among them, those that end become hypotheses; of all,
    the best that do not end live on. The search is done when no live beam, were it to end now,
    would beat the worst of ``beams`` hypotheses, or at ``max_length``.

    ``end_tokens`` end an answer unless ``params.ignore_eos``; so does ``ends``, which is given an
    answer's tokens and says whether a stop text is in them. It is asked for each continuation that
    is looked at and whose token does not end it anyway. ``max_length`` is the longest sequence the
    model and the pool take, the ``prompt_tokens`` included.

    Thread safety: none. Cost: one log-softmax and one ranking of beams × vocabulary a step.
    """

    def __init__(
        self,
        params: SamplingParams,
        end_tokens: Collection[int],
        prompt_tokens: int,
        max_length: int,
        *,
        ends: Callable[[list[int]], bool] | None = None,
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
        self._ends = ends
        self._longest = min(params.max_tokens, max_length - prompt_tokens)
        self._looked_at = max(2, 1 + len(self._end_tokens)) * params.beams
        self.restart()

    def restart(self) -> None:
        """Forget all that was found; `start` is next."""
        self._live: list[tuple[list[int], float]] = [([], 0.0)]  # generated tokens, score
        self._finished: list[Hypothesis] = []  # at most `beams`, the best first
        self._done = False

    @property
    def done(self) -> bool:
        """Whether the search has ended; then nothing lives any more."""
        return self._done

    def start(self, logits: torch.Tensor) -> list[Pick]:
        """The first beams, from the ``logits`` [vocabulary] behind the prompt."""
        assert self._live == [([], 0.0)], "a search starts once"
        return self.advance(logits[None])

    def advance(self, logits: torch.Tensor) -> list[Pick]:
        """The next beams, from the ``logits`` [beams, vocabulary] of those that live.

        They come best first; parents are rows of ``logits``. Fewer than ``beams`` come only where
        there are not so many continuations that do not end, and none when the search is done.
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
        """The best ``n`` answers, the best first; fewer if the vocabulary offers no more.

        Asked for before the search is done, what lives ends as it is: it cannot go on.
        """
        if not self._done:
            for tokens, score in self._live:
                if tokens:
                    self._keep(tokens, score, "length")
            self._live, self._done = [], True
        return self._finished[: self._params.n]

    def _continuations(self, logits: torch.Tensor) -> list[Pick]:
        """The best continuations of all live beams, best first."""
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
        if tokens[-1] in self._end_tokens or (self._ends is not None and self._ends(tokens)):
            return "stop"
        return "length" if len(tokens) >= self._longest else None

    def _keep(self, tokens: list[int], score: float, reason: Literal["stop", "length"]) -> None:
        """A hypothesis more; the worst goes if there are too many."""
        normed = self._normed(score, len(tokens))
        self._finished.append(Hypothesis(tuple(tokens), normed, reason))
        self._finished.sort(key=lambda one: -one.score)  # stable: the earlier of equals first
        del self._finished[self._params.beams :]

    def _can_improve(self) -> bool:
        """Whether a live beam might still become one of the best."""
        if len(self._finished) < self._params.beams:
            return True
        tokens, score = self._live[0]
        return self._normed(score, len(tokens)) > self._finished[-1].score

    def _normed(self, score: float, length: int) -> float:
        return score / math.pow(length, self._params.length_penalty)
