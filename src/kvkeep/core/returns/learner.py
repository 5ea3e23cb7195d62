"""`Returns`: learns from the ends of requests when each conversation's next request comes."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from kvkeep.core.errors import InvalidValue, told, whole
from kvkeep.core.returns.answers import AnswerShares, FirstTokens
from kvkeep.core.returns.times import AGES, BUCKETS, ReturnTimes, bucket_of

if TYPE_CHECKING:
    from collections.abc import Container, Hashable, Iterator, Sequence

    from kvkeep.core.returns.times import Table

__all__ = ["CommonStops", "Ended", "Returns", "Wait", "stop_after"]

_SEARCHED: Final = 8192  # last tokens of an answer
_MOST: Final = 32
_OTHERS: Final = "…"
_MORE: Final = 8  # answers by which a new end must be ahead of the rarest one to take its place
_MOST_SEEN: Final = 4096  # answers with one end after which all counts are halved


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


class CommonStops:
    """The 32 most common ends of answers; all others count as one.

    The first 32 are told apart at once. A further one takes the place of the rarest as soon as it
    is more common, so a client that makes up ends does not take the places of others' for good.

    Memory: 64 counts. Cost: 0.1 µs for a common end, 3 µs for another. Thread safety: none.
    """

    __slots__ = ("_common", "_rare")

    def __init__(self) -> None:
        self._common: dict[str | None, int] = {}
        self._rare: dict[str | None, int] = {}  # counted as by Misra and Gries: too small, if wrong

    def count(self, stop: str | None) -> str | None:
        """Count an answer that ended with ``stop``; return the end as which it counts."""
        common, rare = self._common, self._rare
        if stop in common or len(common) < _MOST:
            common[stop] = common.get(stop, 0) + 1
            if common[stop] >= _MOST_SEEN:
                self._common = {one: count // 2 for one, count in common.items()}
                self._rare = {one: count // 2 for one, count in rare.items() if count > 1}
            return stop
        if stop not in rare and len(rare) == _MOST:
            self._rare = {one: count - 1 for one, count in rare.items() if count > 1}
            return _OTHERS
        rare[stop] = rare.get(stop, 0) + 1
        rarest = min(common, key=common.__getitem__)
        if rare[stop] < common[rarest] + _MORE:
            return _OTHERS
        del common[rarest]
        common[stop] = rare.pop(stop)
        return stop


_LONGEST_STOP: Final = 64
_MOST_CLASSES: Final = 4096  # beyond, what would be a new class counts as the more general one
_MOST_TENANTS: Final = 4096
_LONGEST: Final = 10  # class of the longest answers, of a million tokens and more
_GAPS: Final = 5  # the latest pauses of a conversation, for their median
# Learned anew after this many changes, or half of what waits: that bounds the cost of each.
_LEARN: Final = 64
# Half-life of what was counted, in ends of waits.
_HALF_LIFE: Final = 20_000
# A tenant's own share of returns counts as much as that of all others after so many returns.
_TENANT_WEIGHT: Final = 8.0
_MOST_OCTAVES: Final = 4


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
    the conversation are known, and ``gaps`` are the latest pauses between them, in seconds.
    The other attributes belong to what keeps the wait.
    """

    __slots__ = (
        "answer", "answer_kind", "blocks", "end", "evicted", "gaps", "kind", "over", "place",
        "prompt", "since", "tenant", "turns", "unread", "unread_of",
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
        self.place = self.end = 0
        """Pages that the next prompt must share with this one, and those in front of the wait."""
        self.evicted = False
        """Whether the run that it was attached to is gone."""
        self.prompt = self.answer = 0
        """Tokens of the request."""
        self.answer_kind: str | None = None
        """Why its answer ended, and with which token it began, if many do."""
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
    each of 4,096 tenants. Cost: about 3 µs a request, and 1 ms for learning after every 64 of them
    or more. Thread safety: none; under the lock of its cache.
    """

    def __init__(self, most: int = 65_536) -> None:
        self.times = ReturnTimes()
        self.answers = AnswerShares()
        self.first_tokens = FirstTokens()
        """What is learned of answers that no prompt contains."""
        self.version = 0
        """Grows with each `learn`."""
        self.worths: Table = self.times.worths(np.zeros((1, BUCKETS)))
        """Worth of a wait by class and bucket of age, as learned last."""
        # Rows as lists, since single values of arrays are slow: worths, and the returns expected
        # before each bucket ends.
        self._worths: list[list[float]] = self.worths.tolist()
        self._passed: list[list[float]] = [[0.0] * BUCKETS]
        self._most = most
        self._kinds: dict[tuple[Hashable, ...], int] = {(): 0}
        self._labels: list[tuple[Hashable, ...]] = [()]
        self._stops = CommonStops()
        self._waits: OrderedDict[Wait, None] = OrderedDict()
        self._tenants: OrderedDict[Hashable, Tenant] = OrderedDict()
        self._changes = 0
        self.forgotten = 0
        """Waits that were dropped because there were too many."""

    def __len__(self) -> int:
        """Return the number of conversations that wait."""
        return len(self._waits)

    def __iter__(self) -> Iterator[Wait]:
        """Return the waits, the one that began first first."""
        return iter(self._waits)

    def __contains__(self, wait: object) -> bool:
        return wait in self._waits

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
        usual = bucket_of(sorted(gaps)[len(gaps) // 2]) // 4 if gaps else -1
        stop = self._stops.count(ended.stop)
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
        self._end(wait, bucket_of(gap), returned=True)

    @staticmethod
    def left(wait: Wait) -> Wait:
        """Return what stands at KV that the conversation of ``wait`` is expected not to need."""
        left = Wait(wait.kind, wait.since, wait.turns, (), wait.tenant)
        left.over = True
        left.unread_of = wait
        return left

    def lost(self, wait: Wait, now: float) -> None:
        """Follow a wait no longer: that it came no sooner counts, and nothing else."""
        if not wait.over:
            self._end(wait, bucket_of(now - wait.since), returned=False)

    def _kind(self, path: tuple[Hashable, ...]) -> int:
        kind = self._kinds.get(path)
        if kind is None:
            parent = self._kind(path[:-1])
            if len(self.times) >= _MOST_CLASSES:
                return parent
            kind = self._kinds[path] = self.times.add(parent)
            self._labels.append(path)
        return kind

    def _end(self, wait: Wait, bucket: int, *, returned: bool) -> None:
        wait.over = True
        del self._waits[wait]
        self.times.ended(wait.kind, bucket, returned=returned)
        wait.tenant.returns += returned
        wait.tenant.expected += self._passed[self._known(wait.kind)][bucket]
        wait.tenant.judge()
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

    def _known(self, kind: int) -> int:
        """Return the class, or its nearest parent, that was there when it was learned last."""
        while kind >= len(self._worths):
            kind = self.times.parents[kind]
        return kind

    # --- what is learned ---------------------------------------------------------------------

    @property
    def due(self) -> bool:
        """Whether enough has changed to learn anew."""
        return self._changes >= _LEARN + len(self._waits) // 2

    def learn(self, now: float) -> None:
        """Rank all classes by what was counted so far."""
        fade = 0.5 ** (self._changes / _HALF_LIFE)
        self.times.fade(fade)
        for tenant in self._tenants.values():
            tenant.returns *= fade
            tenant.expected *= fade
            tenant.waiting = 0.0
        for wait in [wait for wait in self._waits if now - wait.since >= AGES[-1]]:
            self.lost(wait, now)
        kinds = np.array([wait.kind for wait in self._waits], np.intp)
        since = np.array([wait.since for wait in self._waits], np.float64)
        buckets = np.maximum(0, np.searchsorted(AGES, now - since, "right") - 1)
        waiting = np.zeros((len(self.times), BUCKETS))
        np.add.at(waiting, (kinds, buckets), 1)
        hazards = self.times.hazards(waiting)
        passed = np.cumsum(hazards, axis=1)
        self._passed = passed.tolist()
        self.worths = self.times.worths_of(hazards)
        self._worths = self.worths.tolist()
        for wait, expected in zip(self._waits, passed[kinds, buckets].tolist(), strict=True):
            wait.tenant.waiting += expected
        for tenant in self._tenants.values():
            tenant.judge()
        self._changes = 0
        self.version += 1

    def worth(self, kind: int, bucket: int) -> float:
        """Return the worth of a wait of a class at an age: returns a second of keeping its KV."""
        return self._worths[self._known(kind)][bucket]

    def label(self, kind: int) -> tuple[Hashable, ...]:
        """Return the levels that define a class, from the first one on."""
        return self._labels[kind]
