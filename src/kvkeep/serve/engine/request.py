"""A `Request`, the `Answer`s that it generates, and what comes back of them."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from operator import attrgetter
from time import perf_counter
from typing import TYPE_CHECKING, Literal

import numpy as np

from kvkeep.core.errors import InvalidValue
from kvkeep.core.returns import Ended, stop_after
from kvkeep.core.tokens import as_tokens
from kvkeep.observe.usage import RequestEnded, RequestOrigin, RequestRecord
from kvkeep.serve.engine.offload.writes import Trail
from kvkeep.serve.engine.sampling import LogitsRow, chance_of, fresh_seed
from kvkeep.serve.engine.text import GrowingText

if TYPE_CHECKING:
    from collections.abc import Sequence as Row

    import numpy.typing as npt

    from kvkeep.core.cache import Sequence
    from kvkeep.core.keys import Namespace
    from kvkeep.core.tokens import TokenArray, TokensLike
    from kvkeep.observe.usage import Outcome
    from kvkeep.serve.engine.offload.load import Load
    from kvkeep.serve.engine.params import Limits, SamplingParams
    from kvkeep.serve.engine.runner import Runner
    from kvkeep.serve.engine.sampling import TokenLogprob
    from kvkeep.serve.engine.text import Tokenizer

__all__ = [
    "BY_ARRIVAL",
    "Answer",
    "CacheUse",
    "Choice",
    "Completion",
    "Delta",
    "FinishReason",
    "PromptLookup",
    "Request",
    "RequestChecks",
]

# Lengths of matches, tried in this order: a longer match is likelier to be the place that is being
# copied. In text edited every 30 tokens, 8-4-2 makes 4.1 tokens a step, 4-3-2 makes 3.5 and 2 alone
# 1.5; others that begin with 6 to 12 are within 5 % of 8-4-2.
_LENGTHS = (8, 4, 2)
_LONGEST_REST = 64  # proposals


class PromptLookup:
    """Drafts for one growing sequence, from the latest earlier place that matches its end.

    ``tokens`` are the prompt; at most ``max_draft`` tokens are proposed at a time. The length of
    drafts adapts to how many were accepted (see `accepted`), separately for each length of match:
    two equal tokens predict less than four.

    Thread safety: none. Cost, whatever the length of the sequence: 0.3 µs a prompt token, 1 µs for
    each further one, 1 µs a proposal. Memory: about 400 bytes a token.
    """

    def __init__(self, tokens: npt.NDArray[np.int32], max_draft: int) -> None:
        if max_draft < 1:
            raise InvalidValue(f"max_draft is 1 or more, got {max_draft}")
        self._tokens = array("i", np.asarray(tokens, np.int32).tobytes())
        # For each length: that many tokens as bytes → position of the token after them. The tokens
        # at the very end are missing, since nothing follows them yet.
        self._after = {length: _index(self._tokens, length) for length in _LENGTHS}
        self._pace = {length: _Pace(max_draft) for length in _LENGTHS}
        self._matched = _LENGTHS[0]

    def extend(self, tokens: Row[int]) -> None:
        """Append tokens that were chosen; drafts that were only proposed do not belong here."""
        ours = self._tokens
        for token in tokens:
            end = len(ours)
            for length, after in self._after.items():
                if length <= end:
                    after[ours[end - length :].tobytes()] = end
            ours.append(token)

    def propose(self, limit: int) -> list[int]:
        """Return at most ``limit`` draft tokens; none without a match, or while drafting rests.

        They are the tokens behind the longest earlier match. If fewer tokens follow the match than
        wanted, they are repeated: the sequence is taken to be periodic.
        """
        ours = self._tokens
        for length, after in self._after.items():
            found = after.get(ours[-length:].tobytes()) if length <= len(ours) else None
            if found is None:
                continue
            self._matched = length
            count = min(limit, self._pace[length].next())
            draft = ours[found : found + count].tolist() if count > 0 else []
            while 0 < len(draft) < count:
                draft += draft[: count - len(draft)]
            return draft
        return []

    def accepted(self, count: int, of: int) -> None:
        """Adapt to the last proposal: ``count`` of its ``of`` verified tokens were right.

        If all were right, the next draft is twice as long, up to ``max_draft``; else it is two
        shorter, but longer than ``count``. After two failures in a row drafting rests, for twice as
        many proposals with each further failure, up to 64, so that text without repetition is
        hardly slowed down.
        """
        assert 0 <= count <= of, (count, of)
        if of:
            self._pace[self._matched].learn(count, of)


class _Pace:
    """The length of the next draft, and how many proposals to skip."""

    __slots__ = ("_count", "_failures", "_max", "_rest")

    def __init__(self, max_draft: int) -> None:
        self._max = max_draft
        self._count = max_draft
        self._failures = 0  # in a row
        self._rest = 0  # proposals still to skip

    def next(self) -> int:
        if self._rest:
            self._rest -= 1
            return 0
        return self._count

    def learn(self, count: int, of: int) -> None:
        if count == of:
            self._count = min(self._max, max(self._count, 2 * of))
        else:
            self._count = max(count + 1, self._count - 2)
        self._failures = 0 if count else self._failures + 1
        if self._failures > 1:
            self._rest = min(2**self._failures, _LONGEST_REST)


def _index(tokens: array[int], length: int) -> dict[bytes, int]:
    """Map each ``length`` tokens, as bytes, to the position after their last occurrence."""
    if len(tokens) <= length:
        return {}
    row = np.frombuffer(tokens, np.int32)
    windows = np.lib.stride_tricks.sliding_window_view(row, length)[:-1]  # nothing follows the last
    keys = np.ascontiguousarray(windows).view(f"V{row.itemsize * length}")[:, 0].tolist()
    return dict(zip(keys, range(length, len(tokens)), strict=True))


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


FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Choice:
    """One finished answer.

    ``tokens`` are all generated ids, including an end token or a stop text's tokens; ``text``
    excludes both, and is empty without a tokenizer. ``finish_reason`` is "stop" (end token or stop
    text) or "length" (``max_tokens``, or the longest sequence of pool or model). ``stop`` is the
    stop text that ended it, None if none did. ``logprobs`` has one entry a token if the request
    asked for them.
    """

    index: int
    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprob, ...] = ()
    stop: str | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """The answers of a finished request.

    ``cached_tokens`` of the ``prompt_tokens`` were reused, of which ``loaded_tokens`` came from the
    store, of which ``lossy_tokens`` are not exact. ``ttft_s`` and ``seconds`` run from the
    request's arrival to its first and last token.
    """

    choices: tuple[Choice, ...]
    prompt_tokens: int
    cached_tokens: int
    ttft_s: float
    seconds: float
    loaded_tokens: int = 0
    lossy_tokens: int = 0

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
    """New tokens of answer ``index`` of a request, and the text that became final with them.

    An answer's last delta has its ``finish_reason``; a request's last delta has its
    ``completion``, or the ``error`` that ended it.
    """

    request: Request
    index: int
    tokens: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    completion: Completion | None = None
    error: Exception | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheUse:
    """A request's use of cache and store; see `Engine.add`."""

    namespace: Namespace
    store: bool = True
    answers: bool = True
    session: str | None = None


class Request:
    """A prompt, its parameters, and its answers. Made by `Engine.add`; belongs to its engine.

    ``id`` counts up in order of arrival. ``store`` False publishes nothing; ``answers`` False
    writes the KV of the prompt alone to a store.
    """

    def __init__(
        self,
        id: int,
        prompt: TokenArray,
        params: SamplingParams,
        use: CacheUse,
        *,
        tokenizer: Tokenizer | None,
        origin: RequestOrigin | None = None,
    ) -> None:
        self.id = id
        origin = RequestOrigin(str(id)) if origin is None else origin
        self.record = RequestRecord(origin, prompt, use.namespace, use.session, use.store)
        """The description of this request in each event for observers."""
        self.prompt = prompt
        self.params = params
        self.namespace = use.namespace
        self.store = use.store
        self.answers = use.answers
        self.session = use.session
        self.tokenizer = tokenizer
        self.cached_tokens: int | None = None
        """Prompt tokens reused from pool and store; None before the first admission."""
        self.loaded_tokens = 0
        """Those of ``cached_tokens`` that came from the store."""
        self.lossy_tokens = 0
        """Those of ``loaded_tokens`` that are not exact."""
        self.seed = fresh_seed() if params.seed is None else params.seed
        self.live: list[Answer] = [Answer(self, 0)]
        """Answers that wait or run."""
        self.ended: list[Answer] = []
        self._began = perf_counter()
        self._first_token = 0.0

    def __repr__(self) -> str:
        return (
            f"<Request {self.id}: {len(self.prompt)} prompt tokens, {len(self.live)} live answers, "
            f"{len(self.ended)} ended>"
        )

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens of the prompt."""
        return len(self.prompt)

    @property
    def forked(self) -> bool:
        """Whether the prompt is computed and its answers are separate."""
        return bool(self.ended) or len(self.live) > 1 or bool(self.live and self.live[0].generated)

    def note_loaded(self, tokens: int, lossy: int) -> None:
        """Count prompt tokens that came from the store, and those of them that are not exact."""
        self.loaded_tokens += tokens
        self.lossy_tokens += lossy
        self.cached_tokens = (self.cached_tokens or 0) + tokens

    def first_token_now(self) -> None:
        """Set the time of the first token, once."""
        if not self._first_token:
            self._first_token = perf_counter()

    def completion(self, choices: tuple[Choice, ...]) -> Completion:
        """Return the result of this request, which ends now, with these finished answers."""
        now = perf_counter()
        return Completion(
            choices=choices,
            prompt_tokens=len(self.prompt),
            cached_tokens=self.cached_tokens or 0,
            ttft_s=(self._first_token or now) - self._began,
            seconds=now - self._began,
            loaded_tokens=self.loaded_tokens,
            lossy_tokens=self.lossy_tokens,
        )

    def ended_as(self, completion: Completion) -> RequestEnded:
        """Return the event of the request's completion."""
        generated = sum(len(choice.tokens) for choice in completion.choices)
        return RequestEnded(self.record, "done", generated, completion.ttft_s, completion.seconds)

    def ended_now(self, outcome: Outcome) -> RequestEnded:
        """Return the event of an end without completion, with the tokens handed out so far."""
        now, first = perf_counter(), self._first_token
        ttft_s = first - self._began if first else None
        generated = sum(answer.handed_out for answer in (*self.live, *self.ended))
        return RequestEnded(self.record, outcome, generated, ttft_s, now - self._began)


@dataclass(frozen=True, slots=True)
class RequestChecks:
    """Checks prompts and parameters against the model, the pool and the limits of an engine."""

    runner: Runner
    tokenizer: Tokenizer | None
    limits: Limits

    def tokens(self, prompt: str | TokensLike) -> TokenArray:
        """Return a copy of the tokens of ``prompt``, whose memory may change while it waits.

        Raises `InvalidValue` if the model cannot compute them.
        """
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise InvalidValue("text prompts need a tokenizer; give the engine one, or tokens")
            prompt = self.tokenizer.encode(prompt)
        tokens = as_tokens(prompt).copy()
        runner = self.runner
        if not len(tokens):
            raise InvalidValue("it has no tokens; a prompt has at least one")
        pool = runner.num_pages * runner.page_size
        if len(tokens) > pool:
            raise InvalidValue(
                f"it has {len(tokens)} tokens and the pool holds {pool} "
                f"({runner.num_pages} pages of {runner.page_size}); give it more memory"
            )
        if len(tokens) > runner.max_tokens:
            raise InvalidValue(
                f"it has {len(tokens)} tokens, and the model is made for at most "
                f"{runner.max_tokens}"
            )
        if tokens.max() >= runner.vocabulary:
            raise InvalidValue(
                f"it has token {tokens.max()}; the model knows 0 … {runner.vocabulary - 1}"
            )
        return tokens

    def params(self, params: SamplingParams) -> None:
        """Raise `InvalidValue` for parameters that this engine cannot follow."""
        if self.tokenizer is None and params.stop:
            raise InvalidValue("stop texts need a tokenizer; give the engine one")
        if params.n > self.limits.max_running:
            raise InvalidValue(
                f"{params.n} answers are more than run at once ({self.limits.max_running}); "
                "ask for fewer, or raise max_running"
            )
        for token, _ in params.logit_bias:
            if token >= self.runner.vocabulary:
                raise InvalidValue(
                    f"logit_bias has token {token}; the model knows 0 … "
                    f"{self.runner.vocabulary - 1}"
                )
