"""`Answer`: one sequence that a request generates; the scheduler's unit of work."""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING

import numpy as np

from kvkeep.core.returns import Ended, stop_after
from kvkeep.serve.engine.drafts import PromptLookup
from kvkeep.serve.engine.offload.writes import Trail
from kvkeep.serve.engine.results import Choice, Delta
from kvkeep.serve.engine.sampling import LogitsRow, chance_of
from kvkeep.serve.engine.text import GrowingText

if TYPE_CHECKING:
    from kvkeep.core.cache import Sequence
    from kvkeep.core.tokens import TokenArray
    from kvkeep.serve.engine.logprobs import TokenLogprob
    from kvkeep.serve.engine.offload.load import Load
    from kvkeep.serve.engine.request import Request
    from kvkeep.serve.engine.results import FinishReason

__all__ = ["BY_ARRIVAL", "Answer"]

BY_ARRIVAL = attrgetter("order")
"""Sort key of answers: older requests first."""


class Answer:
    """One answer of a request: its generated tokens and its progress.

    A waiting answer has no ``sequence``. A running answer's sequence holds the prompt, all
    generated tokens but the newest, and the ``drafts`` of the present step; the KV of the first
    ``computed`` tokens is in pages.
    """

    def __init__(self, request: Request, index: int) -> None:
        self.request = request
        self.index = index
        self.generated: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.finish_reason: FinishReason | None = None
        # While it waits:
        self.overtaken = 0  # times that a younger answer was admitted before it
        self.deferred = False  # whether it was counted in `EngineStats.deferred`
        self.load: Load | None = None  # from the store; until its chunks are written
        # While it runs:
        self.sequence: Sequence | None = None
        self.computed = 0
        self.drafts: list[int] = []
        self.checkpoint: int | None = None  # where its pass ends, if it leaves one there
        prompt_tokens = len(request.prompt)
        self.trail = Trail(prompt_tokens)
        if not request.answers:
            self.trail.limit = prompt_tokens
            self.trail.withheld = True
        tokenizer, params = request.tokenizer, request.params
        self._text = None if tokenizer is None else GrowingText(tokenizer, params.stop)
        self._lookup: PromptLookup | None = None
        self._shown = 0  # tokens already in deltas
        self._unshown = ""  # final text not yet in a delta

    def __repr__(self) -> str:
        state = "waits" if self.sequence is None else f"{self.computed} computed"
        return (
            f"<Answer {self.request.id}.{self.index}: {self.num_tokens} tokens, "
            f"{len(self.generated)} of them generated, {state}>"
        )

    @property
    def running_sequence(self) -> Sequence:
        """Its sequence; only running answers have one."""
        assert self.sequence is not None, self
        return self.sequence

    @property
    def order(self) -> tuple[int, int]:
        """Request id and index: the order of arrival."""
        return self.request.id, self.index

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens."""
        return len(self.request.prompt) + len(self.generated)

    @property
    def slots(self) -> int:
        """Places taken in the batch; until the prompt is computed, one for each future answer."""
        return 1 if self.request.forked else self.request.params.n

    def tokens(self) -> TokenArray:
        """Return prompt and generated tokens as one array."""
        if not self.generated:
            return self.request.prompt
        return np.concatenate((self.request.prompt, np.array(self.generated, np.int32)))

    @property
    def decoding(self) -> bool:
        """Whether it runs, and only its newest tokens are left to compute."""
        return self.sequence is not None and self.computed >= self.num_tokens - 1

    @property
    def loading(self) -> bool:
        """Whether it runs, and KV from the store may still come into its pages."""
        return self.sequence is not None and self.load is not None and not self.load.done

    @property
    def pending(self) -> bool:
        """Whether its newest token is still to be appended to its sequence."""
        return self.sequence is not None and self.sequence.num_tokens < self.num_tokens

    def fork(self, index: int) -> Answer:
        """Return an answer that shares the pages of this one and continues its tokens."""
        assert not self.drafts
        other = Answer(self.request, index)
        other.generated = self.generated.copy()
        other.sequence = self.running_sequence.fork()
        other.computed = self.computed
        other.trail = self.trail.fork()
        return other

    # --- choosing ----------------------------------------------------------------------------

    def row(self, ahead: int = 0) -> LogitsRow:
        """Return the rules that choose the next token, or the token after ``ahead`` drafts."""
        request = self.request
        chance = None
        if not request.params.greedy:
            chance = chance_of(request.seed, self.index, len(self.generated) + ahead)
        return LogitsRow(request.params, chance, self.generated)

    def propose(self, limit: int) -> list[int]:
        """Return up to ``limit`` draft tokens."""
        params = self.request.params
        limit = min(limit, params.draft_tokens, params.max_tokens - len(self.generated) - 1)
        if limit < 1 or params.presence_penalty or params.frequency_penalty:
            return []  # penalties make a token depend on the drafts before it
        if self._lookup is None:
            self._lookup = PromptLookup(self.tokens(), params.draft_tokens)
        return self._lookup.propose(limit)

    def accept(
        self, token: int, logprob: TokenLogprob | None, *, ends: frozenset[int], longest: int
    ) -> None:
        """Append a chosen token; sets ``finish_reason`` if it ends the answer.

        ``ends`` are the model's end tokens, ``longest`` the longest sequence in tokens.
        """
        assert self.finish_reason is None
        params = self.request.params
        self.request.first_token_now()
        self.generated.append(token)
        if logprob is not None:
            self.logprobs.append(logprob)
        ended = token in ends and not params.ignore_eos
        if self._text is not None and not ended:
            self._unshown += self._text.add(token)
            ended = self._text.stopped
        if ended:
            self.finish("stop")
        elif len(self.generated) >= params.max_tokens or self.num_tokens >= longest:
            self.finish("length")
        if self._lookup is not None:
            self._lookup.extend([token])

    def finish(self, reason: FinishReason) -> None:
        """End the answer with the tokens it has."""
        self.finish_reason = reason
        if self._text is not None:
            self._unshown += self._text.finish()

    def verified_drafts(self, accepted: int) -> None:
        """Drop the drafts, of which the first ``accepted`` were right."""
        if self.drafts:
            assert self._lookup is not None
            self._lookup.accepted(accepted, len(self.drafts))
            self.drafts = []

    @property
    def ended(self) -> Ended:
        """How the answer ended, for policies that learn when conversations return.

        `stop_after` tells tool calls from final answers by their tokens: no parser is needed.
        """
        reason: str = self.finish_reason or "unfinished"
        if reason == "stop":
            tokenizer = self.request.tokenizer
            if not self.generated or (self._text is not None and self._text.stopped_by is not None):
                reason = "stop text"
            else:
                reason = stop_after(self.generated, () if tokenizer is None else tokenizer.named)
        return Ended(reason, len(self.generated))

    # --- results -----------------------------------------------------------------------------

    @property
    def handed_out(self) -> int:
        """Generated tokens that were part of a delta."""
        return self._shown

    def delta(self) -> Delta:
        """Return the tokens and text generated since the last delta."""
        start, self._shown = self._shown, len(self.generated)
        text, self._unshown = self._unshown, ""
        return Delta(
            self.request,
            self.index,
            tokens=tuple(self.generated[start:]),
            text=text,
            logprobs=self._shown_logprobs(start),
            finish_reason=self.finish_reason,
        )

    def choice(self) -> Choice:
        """Return the finished answer."""
        assert self.finish_reason is not None
        return Choice(
            self.index,
            text="" if self._text is None else self._text.text,
            tokens=tuple(self.generated),
            finish_reason=self.finish_reason,
            logprobs=self._shown_logprobs(),
            stop=None if self._text is None else self._text.stopped_by,
        )

    def _shown_logprobs(self, start: int = 0) -> tuple[TokenLogprob, ...]:
        return () if self.request.params.logprobs is None else tuple(self.logprobs[start:])
