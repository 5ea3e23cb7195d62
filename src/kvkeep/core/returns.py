"""`Returns`: learns from the ends of requests when each conversation's next request comes."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from kvkeep.core.errors import InvalidValue, told, whole

if TYPE_CHECKING:
    from collections.abc import Container, Hashable, Iterator, Sequence

__all__ = [
    "AGES", "BUCKETS", "AnswerShares", "Ended", "ReturnTimes", "Returns", "Tenant", "Wait",
    "stop_after",
]  # fmt: skip

Table = npt.NDArray[np.float64]

# --- ends of answers -----------------------------------------------------------------------------

_SEARCHED: Final = 8192  # last tokens of an answer
_LONGEST_STOP: Final = 64


@dataclass(frozen=True, slots=True)
class Ended:
    """How a request ended, as far as its engine knows it; all that is unknown is learned without.

    Raises `InvalidValue` for a text that is too long, and for numbers below 0.
    """

    stop: str | None = None
    """Why the answer ended: "tool_use", "stop", "length" …, in at most 64 characters."""
    tokens: int | None = None
    """Tokens of the answer; None: those that were appended."""
    first: int | None = None
    """The first token of the answer, any number that stands for it; None: as appended."""

    def __post_init__(self) -> None:
        stop: object = self.stop
        tokens: object = self.tokens
        if stop is not None and not (isinstance(stop, str) and len(stop) <= _LONGEST_STOP):
            raise InvalidValue(
                f"stop says in at most {_LONGEST_STOP} characters why the answer ended, got "
                f"{told(stop)}"
            )
        if tokens is not None:
            whole("tokens", tokens, 0)
        if self.first is not None:
            whole("first", self.first, 0)


def stop_after(answer: Sequence[int], named: Container[int]) -> str:
    """Return `Ended.stop` of an answer that ended with an end token, its last one.

    Many models end a tool call with another token than a final answer: "stop 128008". Others end
    both alike, but mark the call inside of the answer, so the last of the ``named`` tokens, which
    were added to the vocabulary by name, is part of it: "stop 151645 after 151658". No parser of
    tool calls is needed. Cost: 30 ns a token behind that mark, of at most 8,192.
    """
    end = len(answer) - 1
    for at in range(end - 1, max(-1, end - 1 - _SEARCHED), -1):
        if answer[at] in named:
            return f"stop {answer[end]} after {answer[at]}"
    return f"stop {answer[end]}"


_AHEAD: Final = 8  # by which a value must be ahead of the rarest common one to take its place
_MOST_COUNTED: Final = 512  # values after which all counts are halved


class _Common:
    """Counts the values of a stream that are most common.

    The first ``places`` values have a place at once. A further one takes that of the rarest as soon
    as it is more common, so made-up values do not keep the places of real ones. Until then it is
    counted by the rule of Misra and Gries (Finding repeated elements, 1982).

    Memory: two counts a place. Cost: 0.2 µs for a value with a place, 3 µs for another.
    """

    __slots__ = ("_common", "_places", "_rare", "total")

    def __init__(self, places: int) -> None:
        self._places = places
        self._common: dict[Any, float] = {}
        self._rare: dict[Any, float] = {}
        self.total = 0.0

    def count(self, value: Any) -> float:
        """Return how often ``value`` was seen lately; 0 if it has no place."""
        return self._common.get(value, 0.0)

    def add(self, value: Any) -> bool:
        """Count a value; return whether it has a place."""
        common, rare = self._common, self._rare
        self.total += 1
        if self.total >= _MOST_COUNTED:
            self.total /= 2
            for counts in (common, rare):
                counts.update({each: count / 2 for each, count in counts.items()})
        if value in common or len(common) < self._places:
            common[value] = common.get(value, 0.0) + 1
            return True
        if value not in rare and len(rare) == self._places:
            self._rare = {each: count - 1 for each, count in rare.items() if count > 1}
            return False
        rare[value] = rare.get(value, 0.0) + 1
        rarest = min(common, key=common.__getitem__)
        if rare[value] < common[rarest] + _AHEAD:
            return False
        del common[rarest]
        common[value] = rare.pop(value)
        return True


# --- answers that are read again -----------------------------------------------------------------

_MOST_LEARNED_OF: Final = 1024  # tenants
_MOST_ANSWER_CLASSES: Final = 64  # of a tenant
_BINS: Final = 9  # of positions in an answer, see `_bin`
# A class counts as much as the more general one once it has seen as many answers as this.
_ANSWERS_WEIGHT: Final = 8.0
# Answers after which all counts are halved: what changes is noticed after half as many.
_MOST_ANSWERS: Final = 64.0
# Tokens are kept while the chance that they are read again is at least this.
_LEAST_CHANCE: Final = 0.2
_FIRST_TOKENS: Final = 16
_FIRST_SHARE: Final = 1 / 8  # of answers that begin with a common first token
_FIRST_COUNT: Final = 4.0

AnswerClass = tuple[str | None, int | None]
"""How answers ended, and the bits of their lengths; None: any."""


class _Answers:
    """How many answers had tokens in each bin, and what share of these was read again."""

    __slots__ = ("had", "read")

    def __init__(self) -> None:
        self.had = array("d", bytes(8 * _BINS))
        self.read = array("d", bytes(8 * _BINS))

    def count(self, tokens: int, again: int) -> None:
        for place in range(_bin(tokens - 1) + 1):
            begin = _begin(place)
            end = min(_begin(place + 1), tokens)
            self.had[place] += 1
            self.read[place] += max(0, min(end, again) - begin) / (end - begin)
        if self.had[0] >= _MOST_ANSWERS:
            for counts in (self.had, self.read):
                counts[:] = array("d", [count / 2 for count in counts])

    def chance(self, place: int, general: float) -> float:
        """Return the chance for a bin, where a more general class says ``general``."""
        return (self.read[place] + _ANSWERS_WEIGHT * general) / (self.had[place] + _ANSWERS_WEIGHT)


class _TenantAnswers:
    """What is learned of a tenant's answers."""

    __slots__ = ("classes", "firsts")

    def __init__(self) -> None:
        self.classes: OrderedDict[AnswerClass, _Answers] = OrderedDict()
        self.firsts = _Common(_FIRST_TOKENS)


class AnswerShares:
    """Learns which tokens of answers are read again, by tenant, kind and length of the answer.

    Chat templates drop reasoning from later prompts, so the next prompt of a conversation goes on
    where the answer began, and the KV of the answer is never read. No model's format is known here:
    all that counts is at which token of the answer the next prompt differs. Answers whose
    conversations never return say nothing. A model that reasons before some of its answers begins
    these with a token of its own, so a common first token is part of an answer's kind.

    A tenant's answers teach about that tenant's answers alone, and until something is known, all of
    an answer is kept.

    Memory: at most 1,024 tenants with 64 classes of 300 bytes each; beyond, the tenants and the
    classes used longest ago are forgotten. Cost: about 5 µs a call. Thread safety: none; under a
    lock of its owner.
    """

    def __init__(self) -> None:
        self._tenants: OrderedDict[Hashable, _TenantAnswers] = OrderedDict()

    def ended(self, tenant: Hashable, stop: str | None, first: int | None) -> str | None:
        """Count an answer that begins with the token ``first``, and return its `kind`."""
        if first is not None:
            self._learned_of(tenant).firsts.add(first)
        return self.kind(tenant, stop, first)

    def kind(self, tenant: Hashable, stop: str | None, first: int | None) -> str | None:
        """Return ``stop``, see `Ended.stop`, with the first token if that is a common one."""
        answers = self._tenants.get(tenant)
        if answers is None or first is None:
            return stop
        least = max(_FIRST_COUNT, _FIRST_SHARE * answers.firsts.total)
        return f"{stop}, from {first}" if answers.firsts.count(first) >= least else stop

    def returned(self, tenant: Hashable, kind: str | None, tokens: int, again: int) -> None:
        """Record that ``again`` leading tokens of an answer of ``tokens`` were in the next prompt.

        ``kind`` is that of the answer, see `ended`.
        """
        assert 0 <= again <= tokens
        if not tokens:
            return
        classes = self._learned_of(tenant).classes
        for each in _answer_classes(kind, tokens):
            answers = classes.get(each)
            if answers is None:
                answers = classes[each] = _Answers()
            answers.count(tokens, again)
            classes.move_to_end(each)
        while len(classes) > _MOST_ANSWER_CLASSES:
            classes.popitem(last=False)

    def worth(self, tenant: Hashable, kind: str | None, tokens: int) -> int:
        """Return how many leading tokens of an answer of ``tokens`` are worth keeping."""
        answers = self._tenants.get(tenant)
        if answers is None or not answers.classes or not tokens:
            return tokens
        levels = [answers.classes.get(each) for each in _answer_classes(kind, tokens)]
        for place in range(_bin(tokens - 1) + 1):
            chance = 1.0
            for level in levels:
                if level is not None:
                    chance = level.chance(place, chance)
            if chance < _LEAST_CHANCE:
                return _begin(place)
        return tokens

    def sure(self, tenant: Hashable, tokens: int) -> int:
        """Return how many tokens of an answer, which has ``tokens`` so far, are worth keeping.

        That is the least of `worth`, over all kinds and lengths that it may have. Cost: that of
        `worth` for each of the tenant's classes, 64 at most.
        """
        answers = self._tenants.get(tenant)
        lengths = {
            (kind, tokens if bits is None else max(tokens, 1 << bits >> 1))
            for kind, bits in ([] if answers is None else answers.classes)
            if bits is None or tokens < 1 << bits
        }
        return min([tokens, *(self.worth(tenant, kind, length) for kind, length in lengths)])

    def _learned_of(self, tenant: Hashable) -> _TenantAnswers:
        answers = self._tenants.get(tenant)
        if answers is None:
            answers = self._tenants[tenant] = _TenantAnswers()
            if len(self._tenants) > _MOST_LEARNED_OF:
                self._tenants.popitem(last=False)
        self._tenants.move_to_end(tenant)
        return answers


def _answer_classes(kind: str | None, tokens: int) -> tuple[AnswerClass, ...]:
    """Return the classes of an answer, the most general one first."""
    return (None, None), (kind, None), (kind, tokens.bit_length())


def _bin(token: int) -> int:
    """Return the bin of a token of an answer: they begin at 0, 1, 4, 16 … 16,384."""
    return min(_BINS - 1, (token.bit_length() + 1) // 2)


def _begin(place: int) -> int:
    """Return the first token of a bin."""
    return 0 if not place else 1 << 2 * (place - 1)


# --- times of returns ----------------------------------------------------------------------------

AGES: Final[tuple[float, ...]] = (0.0, 2.0, 4.0, *(2 ** (step / 2) for step in range(6, 27)))
"""Seconds at which the buckets of ages begin: powers of two, from 8 s on half ones."""
BUCKETS: Final = len(AGES)
_BEGINS: Final = AGES[1:]
# The last bucket does not end, and counts as a half octave.
_WIDTHS: Final = np.diff([*AGES, AGES[-1] * 2**0.5])
# A class counts as much as its parent once it has seen as many conversations as this.
_WEIGHT: Final = 10.0
# The share that returns in the first bucket of ages, before anything was seen.
_UNSEEN: Final = 0.05


def _bucket_of(age: float) -> int:
    """Return the bucket of an age in seconds; negative ages are in the first."""
    return bisect_right(_BEGINS, age)


class ReturnTimes:
    """Counts ends of waits by class and age, and ranks waits by what keeping their KV is worth.

    Classes form a tree: what a class has not seen enough of is taken from its parent. Class 0 is
    the root.

    The worth of a wait is its Gittins index: the best ratio, over all times to give up, of the
    chance that the conversation returns until then and the expected time for which its KV is kept
    until then. Keeping KV in the order of this ratio is the best that a rule without knowledge of
    other conversations can do (J. C. Gittins, Bandit processes and dynamic allocation indices,
    1979).

    Memory: 500 bytes a class. Thread safety: none.
    """

    def __init__(self) -> None:
        self.parents = [0]
        self._levels = [[0]]  # the classes by depth
        self._lines = [(0,)]  # of each class, where its counts begin, and those of its parents
        self._came = array("d", bytes(8 * BUCKETS))
        self._gone = array("d", bytes(8 * BUCKETS))

    def __len__(self) -> int:
        """Return the number of classes."""
        return len(self.parents)

    def add(self, parent: int) -> int:
        """Add a class; return its number."""
        kind, line = len(self.parents), self._lines[parent]
        self.parents.append(parent)
        self._lines.append((*line, kind * BUCKETS))
        if len(line) == len(self._levels):
            self._levels.append([])
        self._levels[len(line)].append(kind)
        for counts in (self._came, self._gone):
            counts.frombytes(bytes(8 * BUCKETS))
        return kind

    def ended(self, kind: int, bucket: int, *, returned: bool) -> None:
        """Count the end of a wait in ``bucket``: the next request came, or it is not followed."""
        counts = self._came if returned else self._gone
        for start in self._lines[kind]:
            counts[start + bucket] += 1.0

    def fade(self, factor: float) -> None:
        """Multiply all counts by ``factor``."""
        for counts in (self._came, self._gone):
            np.frombuffer(counts)[:] *= factor

    def hazards(self, waiting: Table) -> Table:
        """Return the chance of a return in each bucket, by class, of waits that reach it.

        ``waiting[class, bucket]`` counts waits that have not ended and are in that bucket now.
        """
        parents = np.array(self.parents)
        came = np.frombuffer(self._came).reshape(-1, BUCKETS)
        unseen = waiting.copy()
        for level in self._levels[:0:-1]:
            np.add.at(unseen, parents[level], unseen[level])
        unseen += np.frombuffer(self._gone).reshape(-1, BUCKETS)
        # Those that left in a bucket have half seen it.
        reached = np.cumsum((came + unseen)[:, ::-1], axis=1)[:, ::-1] - unseen / 2
        hazards = np.empty_like(came)
        hazard = _UNSEEN
        for bucket in range(BUCKETS):  # of later ages than were seen, the last one is expected
            hazard = (came[0, bucket] + _WEIGHT * hazard) / (reached[0, bucket] + _WEIGHT)
            hazards[0, bucket] = hazard
        for level in self._levels[1:]:
            general = hazards[parents[level]]
            hazards[level] = (came[level] + _WEIGHT * general) / (reached[level] + _WEIGHT)
        return hazards

    @staticmethod
    def worths(hazards: Table) -> Table:
        """Return the worth of a wait in each bucket, by class: returns a second of keeping."""
        hazards = np.minimum(hazards, 0.999)
        stays = np.cumprod(1 - hazards, axis=1)
        before = np.concatenate((np.ones((len(stays), 1)), stays[:, :-1]), axis=1)
        spent = np.cumsum(before * _WIDTHS * (1 - hazards / 2), axis=1)
        spent_before = np.concatenate((np.zeros((len(stays), 1)), spent[:, :-1]), axis=1)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = (before[:, :, None] - stays[:, None, :]) / (
                spent[:, None, :] - spent_before[:, :, None]
            )
        late = np.tri(BUCKETS, k=-1, dtype=bool)  # giving up before now
        ratio[:, late] = 0
        worths: Table = np.nan_to_num(ratio).max(axis=2)
        return worths


# --- conversations -------------------------------------------------------------------------------

_STOPS: Final = 32
_OTHERS: Final = "…"
_MOST_CLASSES: Final = 4096  # beyond, what would be a new class counts as the more general one
_MOST_TENANTS: Final = 4096
_LONGEST: Final = 10  # class of the longest answers, of a million tokens and more
_GAPS: Final = 5  # the latest pauses of a conversation, for their median
# Learned anew after this many changes, or half of all waits and classes: that bounds the cost.
_LEARN: Final = 64
# Half-life of what was counted, in ends of waits.
_HALF_LIFE: Final = 20_000
# A tenant's own share of returns counts as much as that of all others after so many returns.
_TENANT_WEIGHT: Final = 8.0
_MOST_OCTAVES: Final = 4
# Of a step of learning, less than a millisecond each:
_STEP_WAITS: Final = 2048
_STEP_TENANTS: Final = 512
_STEP_CLASSES: Final = 64


class Tenant:
    """How often a tenant's conversations returned, and how often those of others would have."""

    __slots__ = ("_above", "_below", "expected", "octaves", "returns", "waiting")

    def __init__(self) -> None:
        self._above = self._below = 0.0  # the ratios between which `octaves` stays
        self.returns = 0.0
        self.expected = 0.0  # of waits that are over
        self.waiting = 0.0  # returns expected so far of waits that are not over
        self.octaves = 0
        """How much more often than others its conversations return, as a power of two."""

    def judge(self) -> None:
        """Set `octaves` from the counts."""
        expected = self.expected + self.waiting + _TENANT_WEIGHT
        ratio = (self.returns + _TENANT_WEIGHT) / expected
        if not self._below <= ratio < self._above:
            octaves = round(math.log2(ratio))
            self._below, self._above = 2.0 ** (octaves - 0.5), 2.0 ** (octaves + 0.5)
            self.octaves = min(_MOST_OCTAVES, max(-_MOST_OCTAVES, octaves))


class Wait:
    """The time from the end of a conversation's request to the beginning of its next one.

    ``kind`` is its class in `ReturnTimes`, ``since`` when it began, ``turns`` how many requests of
    the conversation are known, and ``gaps`` are the latest pauses between them, in seconds. Without
    turns it stands for what nobody follows.
    """

    __slots__ = (
        "answer", "answer_kind", "end", "evicted", "gaps", "kind", "over", "place", "prompt",
        "since", "tenant", "turns", "unread", "unread_of",
    )  # fmt: skip

    def __init__(
        self, kind: int, since: float, turns: int, gaps: tuple[float, ...], tenant: Tenant
    ) -> None:
        self.kind = kind
        self.since = since
        self.turns = turns
        self.gaps = gaps
        self.tenant = tenant
        self.over = False
        """The next request came, or the wait is not followed any longer."""
        # The rest belongs to `kvkeep.core.eviction.returns.Waits`.
        self.place = self.end = 0
        """Pages that the next prompt must share with this one, and those in front of the wait."""
        self.evicted = False
        """Whether the run that it was attached to is gone."""
        self.prompt = self.answer = 0
        """Tokens of the request."""
        self.answer_kind: str | None = None
        """See `AnswerShares.ended`."""
        self.unread: bytes | None = None
        """Symbols of the first page of its answer that was not expected to be read, b"" while that
        is cached; None if all was."""
        self.unread_of: Wait | None = None
        """The wait of the conversation, for what stands in its place at such an answer."""

    def __repr__(self) -> str:
        return f"<Wait of kind {self.kind} since {self.since:g}, {self.turns} turns>"


class Returns:
    """Counts returns of conversations, by class, and tells what each wait's KV is worth.

    The class of a wait is the end of the answer, the number of turns, the median pause of the
    conversation so far, and the length of the answer: each level counts on its own and leans on the
    one before while it has seen little. A wait that is not over counts up to its present age, so
    conversations that never return count, too. A tenant whose conversations return more or less
    often than their classes do has a factor of its own, so no tenant can teach others' KV away.

    Memory: 300 bytes a wait, at most ``most``, 2 KB for each of 4,096 classes, and 100 bytes for
    each of 4,096 tenants. Cost: about 3 µs a request, and a millisecond at most for each step of
    `study`. Thread safety: none; under the lock of its cache.
    """

    def __init__(self, most: int = 65_536) -> None:
        self.times = ReturnTimes()
        self.answers = AnswerShares()
        """What is learned of answers that no prompt contains."""
        self.version = 0
        """Grows with what was learned."""
        self.forgotten = 0
        """Waits that were dropped because there were too many."""
        hazards = self.times.hazards(np.zeros((1, BUCKETS)))
        self._passed = np.cumsum(hazards, axis=1)  # returns expected before each bucket ends
        self._worths: list[list[float]] = self.times.worths(hazards).tolist()
        self._most = most
        self._kinds: dict[tuple[Hashable, ...], int] = {(): 0}
        self._labels: list[tuple[Hashable, ...]] = [()]
        self._stops = _Common(_STOPS)
        self._waits: OrderedDict[Wait, None] = OrderedDict()
        self._tenants: OrderedDict[Hashable, Tenant] = OrderedDict()
        self._changes = 0
        self._lesson: Iterator[None] | None = None

    def __len__(self) -> int:
        """Return the number of conversations that wait."""
        return len(self._waits)

    def __iter__(self) -> Iterator[Wait]:
        """Return the waits, the one that began first first."""
        return iter(self._waits)

    # --- requests ----------------------------------------------------------------------------

    def began(
        self,
        ended: Ended,
        tokens: int,
        now: float,
        *,
        before: Wait | None = None,
        tenant: Hashable = None,
    ) -> Wait:
        """Record the end of a request with an answer of ``tokens``; return its conversation's wait.

        ``before`` is the wait that this request ended (`returned`), None for a new conversation.
        """
        turns = 1 if before is None else before.turns + 1
        gaps = () if before is None else before.gaps
        usual = _bucket_of(sorted(gaps)[len(gaps) // 2]) // 4 if gaps else -1
        stop = ended.stop if self._stops.add(ended.stop) else _OTHERS
        length = min(tokens.bit_length() // 2, _LONGEST)
        kind = self._kind((stop, min(turns.bit_length(), 4), usual, length))
        wait = Wait(kind, now, turns, gaps, self.tenant(tenant))
        self._waits[wait] = None
        self._changes += 1
        if len(self._waits) > self._most:
            self.forgotten += 1
            self.lost(next(iter(self._waits)), now)
        return wait

    def returned(self, wait: Wait, now: float) -> None:
        """Record that the next request of a conversation has come."""
        if wait.over:
            return
        gap = max(0.0, now - wait.since)
        wait.gaps = (*wait.gaps[1 - _GAPS :], gap)
        self._end(wait, gap, returned=True)

    def lost(self, wait: Wait, now: float) -> None:
        """Follow a wait no longer: that it came no sooner counts, and nothing else."""
        if not wait.over:
            self._end(wait, now - wait.since, returned=False)

    def _kind(self, path: tuple[Hashable, ...]) -> int:
        kind = self._kinds.get(path)
        if kind is None:
            parent = self._kind(path[:-1])
            if len(self.times) >= _MOST_CLASSES:
                return parent
            kind = self._kinds[path] = self.times.add(parent)
            self._labels.append(path)
        return kind

    def _end(self, wait: Wait, age: float, *, returned: bool) -> None:
        wait.over = True
        del self._waits[wait]
        bucket, tenant = _bucket_of(age), wait.tenant
        self.times.ended(wait.kind, bucket, returned=returned)
        tenant.returns += returned
        tenant.expected += float(self._passed[self._learned(wait.kind), bucket])
        tenant.judge()
        self._changes += 1

    def tenant(self, name: Hashable) -> Tenant:
        """Return the counts of a tenant, new ones if it is not among the latest 4,096."""
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = Tenant()
            if len(self._tenants) > _MOST_TENANTS:
                self._tenants.popitem(last=False)
        self._tenants.move_to_end(name)
        return tenant

    def _learned(self, kind: int) -> int:
        """Return the class, or its nearest parent, that was there when it was learned last."""
        while kind >= len(self._worths):
            kind = self.times.parents[kind]
        return kind

    # --- what is learned ---------------------------------------------------------------------

    def study(self, now: float) -> None:
        """Take a step of `learn`, if enough has changed since the last time."""
        if self._lesson is None:
            if self._changes < _LEARN + len(self._waits) // 2:
                return
            self._lesson = self._steps(now)
        if next(self._lesson, self) is self:
            self._lesson = None

    def learn(self, now: float) -> None:
        """Rank all classes by what was counted so far."""
        self._lesson = None
        for _ in self._steps(now):
            pass

    def _steps(self, now: float) -> Iterator[None]:
        """Learn, and yield after each step."""
        fade = 0.5 ** (self._changes / _HALF_LIFE)
        self._changes = 0
        every = list(self._waits)
        waits: list[Wait] = []
        places = [np.empty(0, np.intp)]
        yield
        for at in range(0, len(every), _STEP_WAITS):
            for wait in every[at : at + _STEP_WAITS]:
                if now - wait.since >= AGES[-1]:
                    self.lost(wait, now)
            some = [wait for wait in every[at : at + _STEP_WAITS] if not wait.over]
            ages = now - np.array([wait.since for wait in some])
            buckets = np.searchsorted(_BEGINS, ages, "right")
            places.append(np.array([wait.kind for wait in some], np.intp) * BUCKETS + buckets)
            waits += some
            yield
        self.times.fade(fade)
        size = len(self.times) * BUCKETS
        place = np.concatenate(places)
        waiting = np.bincount(place, minlength=size).astype(np.float64)
        hazards = self.times.hazards(waiting.reshape(-1, BUCKETS))
        passed = np.cumsum(hazards, axis=1)
        yield
        worths: list[list[float]] = []
        for at in range(0, len(hazards), _STEP_CLASSES):
            worths += self.times.worths(hazards[at : at + _STEP_CLASSES]).tolist()
            yield
        expected: dict[Tenant, float] = {}
        for at in range(0, len(waits), _STEP_WAITS):
            shares = passed.ravel()[place[at : at + _STEP_WAITS]].tolist()
            for wait, share in zip(waits[at : at + _STEP_WAITS], shares, strict=True):
                expected[wait.tenant] = expected.get(wait.tenant, 0.0) + share
            yield
        tenants = list(self._tenants.values())
        for at in range(0, len(tenants), _STEP_TENANTS):
            for tenant in tenants[at : at + _STEP_TENANTS]:
                tenant.returns *= fade
                tenant.expected *= fade
                tenant.waiting = expected.get(tenant, 0.0)
                tenant.judge()
            yield
        self._passed, self._worths = passed, worths
        self.version += 1

    def worth(self, kind: int, age: float) -> float:
        """Return what a wait of a class is worth at an age: returns a second of keeping its KV."""
        return self._worths[self._learned(kind)][bisect_right(_BEGINS, age)]

    def label(self, kind: int) -> tuple[Hashable, ...]:
        """Return the levels that define a class, from the first one on."""
        return self._labels[kind]
