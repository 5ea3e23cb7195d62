"""Requests on their way through the engine, and what comes out of them.

A `Request` is a prompt with its parameters. It has one `Answer` while its prompt is computed, and
``params.width`` of them from then on, forked from the first one: an answer is what is scheduled,
has a sequence of the cache while it runs, and can be taken off the batch and put back.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from time import perf_counter
from typing import TYPE_CHECKING, Literal

import numpy as np

from kvkeep.observe.usage import RequestEnded, RequestOrigin, RequestRecord
from kvkeep.serve.engine.drafts import PromptLookup
from kvkeep.serve.engine.offload.writes import Trail
from kvkeep.serve.engine.sampling import LogitsRow, chance_of, fresh_seed
from kvkeep.serve.engine.text import GrowingText

if TYPE_CHECKING:
    import torch

    from kvkeep.core.cache import Sequence
    from kvkeep.core.keys import Namespace
    from kvkeep.core.tokens import TokenArray
    from kvkeep.observe.usage import Outcome
    from kvkeep.serve.engine.beams import BeamSearch
    from kvkeep.serve.engine.logprobs import TokenLogprob
    from kvkeep.serve.engine.offload.loads import Load
    from kvkeep.serve.engine.params import SamplingParams
    from kvkeep.serve.engine.text import Tokenizer

__all__ = ["BY_ARRIVAL", "Answer", "Choice", "Completion", "Delta", "FinishReason", "Request"]

FinishReason = Literal["stop", "length"]

BY_ARRIVAL = attrgetter("order")
"""Sorts answers."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One finished answer.

    ``tokens`` are all generated ids, an end token or stop text's tokens included; ``text`` has
    neither, and is empty without a tokenizer. ``finish_reason``: "stop" (end token or stop text)
    or "length" (``max_tokens``, or the pool or the model takes no longer sequence). ``logprobs``
    has one entry a token where they were asked for.
    """

    index: int
    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """What a request produced: its answers, the best first where they were compared.

    ``cached_tokens`` of the ``prompt_tokens`` were reused, not computed; ``loaded_tokens`` of them
    came from the store. ``ttft_s`` and ``seconds`` run from the request's arrival to its first and
    to its last token.
    """

    choices: tuple[Choice, ...]
    prompt_tokens: int
    cached_tokens: int
    ttft_s: float
    seconds: float
    loaded_tokens: int = 0

    @property
    def text(self) -> str:
        """The text of the first answer."""
        return self.choices[0].text

    @property
    def tokens(self) -> tuple[int, ...]:
        """The tokens of the first answer."""
        return self.choices[0].tokens

    @property
    def finish_reason(self) -> FinishReason:
        """Why the first answer ended."""
        return self.choices[0].finish_reason


@dataclass(frozen=True, slots=True)
class Delta:
    """More tokens of answer ``index`` of a request, with the text that became final by them.

    The last of an answer has its ``finish_reason``, the last of the request its ``completion``, or
    the ``error`` that ended it.
    """

    request: Request
    index: int
    tokens: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    completion: Completion | None = None
    error: Exception | None = None


class Request:
    """A prompt, its parameters, and its answers. Made by `Engine.add`; belongs to its engine.

    ``id`` counts up in the order of arrival. ``store`` False reuses what is cached and publishes
    nothing; ``answers`` False writes its prompt alone to a store, and what it generates stays in
    the pool. ``cached_tokens`` is None until the request was first admitted; ``loaded_tokens`` of
    them came from the store. ``turn`` is None until then, unless it was given: the turn of its
    ``session`` that it is.
    """

    def __init__(
        self,
        id: int,
        prompt: TokenArray,
        params: SamplingParams,
        *,
        namespace: Namespace,
        store: bool,
        answers: bool = True,
        tokenizer: Tokenizer | None,
        search: BeamSearch | None,
        session: str | None = None,
        turn: int | None = None,
        origin: RequestOrigin | None = None,
    ) -> None:
        self.id = id
        origin = RequestOrigin(str(id)) if origin is None else origin
        self.record = RequestRecord(origin, prompt, namespace, session, store)
        """What observers get with each event."""
        self.prompt = prompt
        self.params = params
        self.namespace = namespace
        self.store = store
        self.answers = answers
        self.search = search
        self.session = session
        self.turn = turn
        self.cached_tokens: int | None = None
        self.loaded_tokens = 0
        self.seed = fresh_seed() if params.seed is None else params.seed
        self.tokenizer = tokenizer
        self.live: list[Answer] = [Answer(self, 0)]
        """The answers that wait or run."""
        self.ended: list[Answer] = []
        self._begun = perf_counter()
        self._first = 0.0

    def __repr__(self) -> str:
        return (
            f"<Request {self.id}: {len(self.prompt)} prompt tokens, {len(self.live)} answers "
            f"on their way, {len(self.ended)} ended>"
        )

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt)

    @property
    def compares(self) -> bool:
        """Whether answers are compared when all are there, so that none can be shown before."""
        params = self.params
        return self.search is not None or params.width > params.n

    @property
    def forked(self) -> bool:
        """Whether the prompt was computed and its answers have gone their own ways."""
        return bool(self.ended) or len(self.live) > 1 or bool(self.live and self.live[0].generated)

    def note_loaded(self, tokens: int) -> None:
        """So many tokens of its prompt came from the store, and are not computed."""
        self.loaded_tokens += tokens
        self.cached_tokens = (self.cached_tokens or 0) + tokens

    def first_token_now(self) -> None:
        """Note the time of the first token, once."""
        if not self._first:
            self._first = perf_counter()

    def completion(self, choices: tuple[Choice, ...]) -> Completion:
        """The record of this request, ended now with these answers."""
        now = perf_counter()
        return Completion(
            choices=choices,
            prompt_tokens=len(self.prompt),
            cached_tokens=self.cached_tokens or 0,
            ttft_s=(self._first or now) - self._begun,
            seconds=now - self._begun,
            loaded_tokens=self.loaded_tokens,
        )

    def ended_as(self, completion: Completion) -> RequestEnded:
        """Return the event of the request's completion."""
        generated = sum(len(choice.tokens) for choice in completion.choices)
        return RequestEnded(self.record, "done", generated, completion.ttft_s, completion.seconds)

    def ended_now(self, outcome: Outcome) -> RequestEnded:
        """Return the event of an end without completion, with the tokens handed out so far."""
        ttft_s = self._first - self._begun if self._first else None
        generated = sum(answer.handed_out for answer in (*self.live, *self.ended))
        return RequestEnded(self.record, outcome, generated, ttft_s, perf_counter() - self._begun)


class Answer:
    """One answer of a request on its way: what was generated, and where it stands.

    While it runs, ``sequence`` holds the prompt, all generated tokens but the newest, and the
    ``drafts`` of the present step; ``computed`` of them have their KV in pages.
    """

    def __init__(self, request: Request, index: int) -> None:
        self.request = request
        self.index = index
        self.generated: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.sum_logprob = 0.0
        self.finish_reason: FinishReason | None = None
        # While it waits:
        self.overtaken = 0
        self.deferred = False
        self.load: Load | None = None  # what the store has of it, while it waits and at first
        # While it runs:
        self.sequence: Sequence | None = None
        self.computed = 0
        self.drafts: list[int] = []
        self.logits: torch.Tensor | None = None  # of a beam that waits for the others
        # What was handed to the store; a search leaves its prompt there, not all that it tried.
        prompt_tokens = len(request.prompt)
        self.trail = Trail(prompt_tokens)
        if request.search is not None or not request.answers:
            self.trail.limit = prompt_tokens
            self.trail.withheld = not request.answers
        tokenizer, params = request.tokenizer, request.params
        self._text = None if tokenizer is None else GrowingText(tokenizer, params.stop)
        self._lookup: PromptLookup | None = None
        self._shown = 0  # tokens that were handed out in deltas
        self._unshown = ""  # text that was not

    def __repr__(self) -> str:
        state = "waits" if self.sequence is None else f"{self.computed} computed"
        return (
            f"<Answer {self.request.id}.{self.index}: {self.num_tokens} tokens, "
            f"{len(self.generated)} of them generated, {state}>"
        )

    @property
    def order(self) -> tuple[int, int]:
        """Who came first."""
        return self.request.id, self.index

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens."""
        return len(self.request.prompt) + len(self.generated)

    @property
    def slots(self) -> int:
        """Places in the batch that it takes; before a prompt is computed, those of all answers."""
        return 1 if self.request.forked else self.request.params.width

    def tokens(self) -> TokenArray:
        """Prompt and generated tokens, as one array."""
        if not self.generated:
            return self.request.prompt
        return np.concatenate((self.request.prompt, np.array(self.generated, np.int32)))

    @property
    def decoding(self) -> bool:
        """Whether it runs, and nothing but its newest tokens is left to compute."""
        return self.sequence is not None and self.computed >= self.num_tokens - 1

    @property
    def loading(self) -> bool:
        """Whether it runs, and what the store has is still on its way into its pages."""
        return self.load is not None and self.load.loading

    @property
    def pending(self) -> bool:
        """Whether its newest token is still to be appended to its sequence."""
        return self.sequence is not None and self.sequence.num_tokens < self.num_tokens

    def fork(self, index: int, *next_token: int) -> Answer:
        """Another answer that goes on from where this one stands, sharing its pages."""
        assert self.sequence is not None
        assert not self.drafts
        other = Answer(self.request, index)
        other.generated = [*self.generated, *next_token]
        other.sequence = self.sequence.fork()
        other.computed = self.computed
        other.trail = self.trail.fork()
        return other

    @property
    def waits(self) -> bool:
        """Whether it is a beam with logits, which goes on together with the others."""
        return self.logits is not None

    # --- choosing ----------------------------------------------------------------------------

    @property
    def wanted_logprobs(self) -> int | None:
        """How many log probabilities are wanted besides the token's own; None: not even that."""
        wanted = self.request.params.logprobs
        return 0 if wanted is None and self.request.compares else wanted

    @property
    def mean_logprob(self) -> float:
        """By which answers are compared."""
        return self.sum_logprob / max(1, len(self.generated))

    def row(self, ahead: int = 0) -> LogitsRow:
        """How its next token is chosen, or the one after ``ahead`` drafts."""
        request = self.request
        chance = None
        if not request.params.greedy:
            chance = chance_of(request.seed, self.index, len(self.generated) + ahead)
        return LogitsRow(request.params, chance, self.generated)

    def propose(self, limit: int) -> list[int]:
        """Guess up to ``limit`` tokens that may follow."""
        params = self.request.params
        limit = min(limit, params.draft_tokens, params.max_tokens - len(self.generated) - 1)
        if limit < 1 or params.presence_penalty or params.frequency_penalty:
            return []  # with penalties, how a token is chosen depends on those before it
        if self._lookup is None:
            self._lookup = PromptLookup(self.tokens(), params.draft_tokens)
        return self._lookup.propose(limit)

    def accept(
        self, token: int, logprob: TokenLogprob | None, *, ends: frozenset[int], longest: int
    ) -> None:
        """Take the next token; it may end the answer (``finish_reason``)."""
        assert self.finish_reason is None
        params = self.request.params
        self.request.first_token_now()
        self.generated.append(token)
        if logprob is not None:
            self.sum_logprob += logprob.logprob
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
        """No more tokens come."""
        self.finish_reason = reason
        if self._text is not None:
            self._unshown += self._text.finish()

    def checked_drafts(self, accepted: int) -> None:
        """``accepted`` of the drafts were right; there are none any more."""
        if self.drafts:
            assert self._lookup is not None
            self._lookup.accepted(accepted, len(self.drafts))
            self.drafts = []

    # --- handing out -------------------------------------------------------------------------

    @property
    def handed_out(self) -> int:
        """Generated tokens that were part of a delta."""
        return self._shown

    def delta(self) -> Delta:
        """What has come since the last delta."""
        start, self._shown = self._shown, len(self.generated)
        text, self._unshown = self._unshown, ""
        shown = self.request.params.logprobs is not None
        return Delta(
            self.request,
            self.index,
            tokens=tuple(self.generated[start:]),
            text=text,
            logprobs=tuple(self.logprobs[start:]) if shown else (),
            finish_reason=self.finish_reason,
        )

    def choice(self) -> Choice:
        """The finished answer."""
        assert self.finish_reason is not None
        shown = self.request.params.logprobs is not None
        return Choice(
            self.index,
            text="" if self._text is None else self._text.text,
            tokens=tuple(self.generated),
            finish_reason=self.finish_reason,
            logprobs=tuple(self.logprobs) if shown else (),
        )
