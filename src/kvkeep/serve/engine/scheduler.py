"""Who computes what in the next step: admission, growth, preemption, and the token budget.

    waiting ──admit──▶ running ──grow──▶ chunks ──(a forward pass)──▶ …
       ▲                  │
       └────preempt───────┘   the youngest, when pages run out

The scheduler holds no tensors and computes nothing. Every answer that runs has a sequence of the
cache; that it was opened is what admission is. All orders are orders of arrival, so that whoever
came first can always go on, and everybody comes to an end.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass
from math import ceil
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

from kvkeep.core.errors import InvalidValue, OutOfPages, whole
from kvkeep.observe.usage import Notifier, RequestAdmitted
from kvkeep.serve.engine.request import BY_ARRIVAL, Answer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvkeep.core.cache import PagedCache
    from kvkeep.core.tokens import TokenArray
    from kvkeep.serve.engine.offload.keeper import Keeper
    from kvkeep.serve.engine.request import Request
    from kvkeep.serve.engine.stats import EngineStats

__all__ = ["Chunk", "Limits", "Refused", "Scheduler"]

# Of a long queue, so many are looked at for the one with the longest cached prefix.
_LOOK_AHEAD = 64
# What others do to the cache can make room too: look again after so many steps.
_PATIENCE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How much an engine takes on at once.

    ``max_running`` answers are computed together, ``step_tokens`` tokens in one forward pass: long
    prompts are computed in chunks of what the running answers leave of it. ``max_waiting``
    requests may wait (None: any number). A request with more of its prompt cached may overtake
    others; nobody is overtaken more than ``max_overtaken`` times. ``watermark`` is the share of
    the pool that admission leaves to running answers to grow into.
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


class Chunk(NamedTuple):
    """Tokens ``start`` … ``stop - 1`` of an answer's sequence, to be computed in this step.

    Of the last ``outputs`` of them logits are wanted: none while a prompt goes on.
    """

    answer: Answer
    start: int
    stop: int
    outputs: int


class Refused(NamedTuple):
    """An answer that cannot have its pages though nobody else runs."""

    answer: Answer
    error: OutOfPages


class Scheduler:
    """The answers that wait and those that run, in order of arrival.

    Thread safety: none. Cost of a step: O(running), and for admission one lookup in the cache for
    each of the first requests that wait, when there is room for one.
    """

    def __init__(
        self,
        cache: PagedCache,
        limits: Limits,
        did: EngineStats,
        keeper: Keeper | None = None,
        notifier: Notifier | None = None,
    ) -> None:
        self.requests: dict[int, Request] = {}
        """Those that have not ended, by id."""
        self.waiting: list[Answer] = []
        self.running: list[Answer] = []
        self._cache = cache
        self._limits = limits
        self._did = did
        self._keeper = keeper
        self._notifier = notifier or Notifier()
        self._watermark = ceil(limits.watermark * cache.num_pages)
        self._blocked = 0  # steps for which nothing is admitted, unless somebody makes room

    # --- coming and going --------------------------------------------------------------------

    def enter(self, request: Request) -> None:
        """Let a new request wait for its turn."""
        self.requests[request.id] = request
        for answer in request.live:
            self._wait(answer)

    def leave(self, request: Request) -> None:
        """Take a request out, with all that it has here."""
        del self.requests[request.id]
        for answer in request.live:
            self.remove(answer)
        request.live = []

    def _wait(self, answer: Answer) -> None:
        insort(self.waiting, answer, key=BY_ARRIVAL)

    def run(self, answer: Answer) -> None:
        """Let ``answer``, which has a sequence already, run from now on."""
        assert answer.sequence is not None
        insort(self.running, answer, key=BY_ARRIVAL)

    def remove(self, answer: Answer) -> None:
        """Take ``answer`` out; its pages go back, what it published stays cached."""
        if self._keeper is not None:
            self._keeper.forget(answer)
        if answer.sequence is None:
            self.waiting.remove(answer)
            return
        self.running.remove(answer)
        answer.sequence.close()
        answer.sequence = None
        self._blocked = 0

    def _preempt(self, answer: Answer) -> None:
        """Back to those who wait. What survives in the cache until its turn is not computed again.

        A beam search begins anew behind its prompt. Its beams can only go on together, and they
        might not come in together again: what they shared as forks, each would need for itself.
        """
        request = answer.request
        if request.search is None:
            self.remove(answer)
            answer.computed, answer.drafts = 0, []
            self._wait(answer)
            self._did.preempted += 1
            return
        for beam in request.live:
            self.remove(beam)
        self._did.preempted += len(request.live)
        request.search.restart()
        first = Answer(request, 0)
        first.overtaken = self._limits.max_overtaken  # whoever has run before is next
        request.live = [first]
        self._wait(first)

    # --- admission ---------------------------------------------------------------------------

    def admit(self) -> Refused | None:
        """Open sequences for those who wait, as far as batch and pages allow.

        Returns who is refused for good: when nobody runs and an answer still cannot have its
        pages, then somebody outside has them.
        """
        if self._keeper is not None:
            self._keeper.look_ahead(self.waiting)
        if self._blocked and self.running:
            self._blocked -= 1
            return None
        slots = self._limits.max_running - sum(answer.slots for answer in self.running)
        if not self.waiting or slots <= 0:
            return None
        for answer in self._ranked():
            if self._computed_by_another(answer):
                continue
            if answer.slots > slots:
                break
            if self._keeper is not None and self._keeper.holds_back(answer):
                continue
            try:
                self._open(answer)
            except OutOfPages as error:
                self._blocked = _PATIENCE
                return None if self.running else Refused(answer, error)
            slots -= answer.slots
            self._now_running(answer)
        return None

    def _ranked(self) -> list[Answer]:
        """Who should come next: whoever must wait no longer, then by what is cached of them."""
        if len(self.waiting) == 1:
            return self.waiting.copy()
        front = self.waiting[:_LOOK_AHEAD]
        urgent = [answer for answer in front if self._is_urgent(answer)]
        others = [answer for answer in front if not self._is_urgent(answer)]
        if len(others) > 1:
            cached = {id(answer): self._cached(answer) for answer in others}
            others.sort(key=lambda answer: -cached[id(answer)])  # stable: then by arrival
        return urgent + others

    def _is_urgent(self, answer: Answer) -> bool:
        return bool(answer.generated) or answer.overtaken >= self._limits.max_overtaken

    def _cached(self, answer: Answer) -> int:
        return self._cache.match(answer.tokens(), answer.request.namespace).num_tokens

    def _computed_by_another(self, answer: Answer) -> bool:
        """Whether one that runs is about to publish more of this prompt than is cached of it.

        To wait for it costs nothing: those tokens would be computed no sooner by this one.
        """
        if not self._cache.reuse:
            return False
        mine = answer.tokens()
        namespace, size = answer.request.namespace, self._cache.page_size
        shared = 0
        for other in self._prefilling():
            if other.request.store and other.request.namespace == namespace:
                theirs = other.request.prompt
                common = _common_tokens(mine, theirs) // size * size
                if common > other.computed:
                    shared = max(shared, common)
        if not shared or self._is_urgent(answer):
            return False
        if shared - self._cached(answer) < size:
            return False
        if not answer.deferred:
            answer.deferred = True
            self._did.deferred += 1
        return True

    def _prefilling(self) -> Iterator[Answer]:
        return (answer for answer in self.running if not answer.decoding)

    def _open(self, answer: Answer) -> None:
        request = answer.request
        reserve = 0
        if self.running:
            # Soon each that runs needs a page more, and each answer of this one a page of its own.
            reserve = self._watermark + len(self.running) + answer.slots - 1
        observed = bool(self._notifier.observers)
        began = perf_counter() if observed else 0.0
        answer.sequence = self._cache.open(
            answer.tokens(),
            request.namespace,
            reserve=reserve,
            session=request.session,
            turn=request.turn,
        )
        request.turn = answer.sequence.turn  # who is opened again, or beside others, is no new one
        answer.computed = answer.sequence.num_cached
        if request.cached_tokens is None:
            request.cached_tokens = answer.sequence.num_cached
            self._did.prompt_tokens += len(request.prompt)
            self._did.cached_tokens += request.cached_tokens
            if answer.load is not None:
                answer.load.counts = True
            if observed:
                self._notifier.emit(
                    RequestAdmitted(
                        request.record,
                        answer.sequence.id,
                        request.cached_tokens,
                        request.turn,
                        perf_counter() - began,
                    )
                )

    def _now_running(self, answer: Answer) -> None:
        at = self.waiting.index(answer)
        for other in self.waiting[:at]:
            other.overtaken += 1
        del self.waiting[at]
        self.run(answer)
        if self._keeper is not None:
            self._keeper.admitted(answer)

    # --- a step ------------------------------------------------------------------------------

    def grow(self) -> list[Answer]:
        """Give each decoding answer room for its newest token, and for drafts, the oldest first.

        Whoever came last goes back to those who wait when pages run out. Returns answers that
        cannot grow though nobody is left to yield: they are as long as they can be.
        """
        spare = self._limits.step_tokens - sum(answer.decoding for answer in self.running)
        stuck: list[Answer] = []
        position = 0
        while position < len(self.running):
            answer = self.running[position]
            if answer.pending:
                drafted = self._append(answer, spare)
                if drafted is None:
                    victim = self.running[-1]
                    if victim.request is answer.request and self._alone(answer):
                        stuck.append(answer)
                        position += 1
                    else:
                        self._preempt(victim)
                    continue
                spare -= drafted
            position += 1
        return stuck

    def _alone(self, answer: Answer) -> bool:
        """Whether nobody could yield for ``answer``: beams of one search cannot for each other."""
        if answer.request.search is not None:
            return self.running[0].request is answer.request
        return len(self.running) == 1

    def _append(self, answer: Answer, spare: int) -> int | None:
        """Append its newest token and drafts; the number of drafts, or None without pages."""
        sequence = answer.sequence
        assert sequence is not None
        newest = answer.generated[-1]
        drafts = answer.propose(spare)
        if drafts:
            try:
                sequence.append([newest, *drafts])
            except OutOfPages:
                pass  # guesses are not worth anybody's pages: try without them
            else:
                answer.drafts = drafts
                return len(drafts)
        try:
            sequence.append(newest)
        except OutOfPages:
            return None
        return 0

    def chunks(self) -> list[Chunk]:
        """What to compute now: the newest tokens of all that decode, then prompts, in order.

        Nothing of those whose prompts are being loaded.
        """
        chunks: list[Chunk] = []
        prompts: list[Answer] = []
        budget = self._limits.step_tokens
        for answer in self.running:
            sequence = answer.sequence
            assert sequence is not None
            if answer.loading:
                continue
            if not answer.decoding:
                prompts.append(answer)
            elif answer.computed < sequence.num_tokens:
                chunk = Chunk(answer, answer.computed, sequence.num_tokens, 1 + len(answer.drafts))
                chunks.append(chunk)
                budget -= chunk.stop - chunk.start
        for answer in prompts:
            if budget <= 0:
                break
            stop = min(answer.computed + budget, answer.num_tokens)
            outputs = 1 if stop == answer.num_tokens else 0
            chunks.append(Chunk(answer, answer.computed, stop, outputs))
            budget -= stop - answer.computed
        return chunks

    def beams_in_step(self) -> Iterator[Request]:
        """Beam searches of which every beam has its logits."""
        searches = {answer.request.id: answer.request for answer in self.running if answer.waits}
        for request in searches.values():
            if all(answer.waits for answer in request.live):
                yield request


def _common_tokens(a: TokenArray, b: TokenArray) -> int:
    """How many tokens ``a`` and ``b`` begin with alike."""
    length = min(len(a), len(b))
    if not length or a[0] != b[0]:
        return 0
    differ = a[:length] != b[:length]
    first = int(differ.argmax())
    return first if differ[first] else length
