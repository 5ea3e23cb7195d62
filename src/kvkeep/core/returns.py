"""`Returns`: when conversations return, and what of their answers is read again, learned online."""

from __future__ import annotations

import threading
from array import array
from bisect import bisect_right
from collections import OrderedDict
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from kvkeep.core.errors import InvalidValue, told, whole

if TYPE_CHECKING:
    from collections.abc import Container, Hashable, Iterator, Sequence

__all__ = ["Answers", "Ended", "Returns", "Tenant", "Wait", "bucket_of", "gittins", "stop_after"]

Table = npt.NDArray[np.float64]

_LONGEST_STOP: Final = 64
_SEARCHED: Final = 8192  # last tokens of an answer


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
        if stop is not None and not (isinstance(stop, str) and len(stop) <= _LONGEST_STOP):
            raise InvalidValue(
                f"stop says in at most {_LONGEST_STOP} characters why the answer ended, got "
                f"{told(stop)}"
            )
        if self.tokens is not None:
            whole("tokens", self.tokens, 0)
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


# --- answers -------------------------------------------------------------------------------------

AnswerKind = tuple[str | None, int | None]
"""How an answer ended (`Ended.stop`), and its first token; None: unknown."""

AnswerClass = tuple[str | None, int | None, int | None]
"""The same, None: any; and the bits of the answer's length."""

_ANY: Final[AnswerClass] = (None, None, None)
_MOST_CLASSES_READ: Final = 64
_SAMPLES: Final = 20
_ENOUGH: Final = 8  # samples; of all answers 20, as they are less alike
_LEAST: Final = 5  # tokens are worth storing if one answer in five is read again up to there


class Answers:
    """Learns how much of its answers a tenant's next prompts contain.

    Chat templates drop reasoning from later prompts, so the next prompt of a conversation goes on
    where the answer began, and the KV of the answer is never read. No model's format is known here:
    all that counts is at which token of the answer the next prompt differs. A model that reasons
    before some of its answers begins these with a token of its own. Answers whose conversations
    never return say nothing; until something is known, all of an answer is worth storing.

    The class of an answer is how it ended, its first token if that is common, and the bits of its
    length; what has not been seen enough is taken from the more general class.

    Memory: the last 20 answers of each of 64 classes. Cost: 2 µs a call. Thread safety: none.
    """

    __slots__ = ("_read",)

    def __init__(self) -> None:
        self._read: OrderedDict[AnswerClass, list[float]] = OrderedDict()

    def returned(self, kind: AnswerKind, tokens: int, again: int) -> None:
        """Record that the next prompt had the ``again`` first tokens of an answer of ``tokens``."""
        assert 0 <= again <= tokens
        if not tokens:
            return
        for each in {*self._classes(kind, tokens), (*kind, None)}:
            samples = self._read.setdefault(each, [])
            self._read.move_to_end(each)
            samples.append(again if again < tokens else inf)
            del samples[:-_SAMPLES]
        while len(self._read) > _MOST_CLASSES_READ:
            self._read.popitem(last=False)

    def worth(self, kind: AnswerKind, tokens: int) -> int:
        """Return how many leading tokens of an answer of ``tokens`` are worth storing."""
        for each in self._classes(kind, tokens):
            worth = self._worth(each)
            if worth is not None:
                return int(min(tokens, worth))
        return tokens

    def sure(self, tokens: int) -> int:
        """Return how many of the first ``tokens`` tokens are worth storing, whatever the kind."""
        worths = [
            worth
            for each in self._read
            if (each[2] is None or tokens < 1 << each[2])  # else it is longer than that already
            and (worth := self._worth(each)) is not None
        ]
        return int(min([tokens, *worths]))

    def _classes(self, kind: AnswerKind, tokens: int) -> tuple[AnswerClass, ...]:
        """Return the classes of an answer, the most general one last."""
        stop, first = kind
        if self._worth((stop, first, None)) is None:
            first = None
        return (stop, first, tokens.bit_length()), (stop, first, None), _ANY

    def _worth(self, each: AnswerClass) -> float | None:
        """Return how many leading tokens one in five contained; None: too few were seen."""
        samples = self._read.get(each, ())
        if len(samples) < (_ENOUGH if each != _ANY else _SAMPLES):
            return None
        return sorted(samples)[-(len(samples) // _LEAST)]


# --- times ---------------------------------------------------------------------------------------

_BEGINS: Final = [2.0, 4.0, *(2 ** (step / 2) for step in range(6, 27))]
"""Seconds at which buckets of ages begin, behind the first: powers of two, from 8 s half ones."""
_BUCKETS: Final = len(_BEGINS) + 1
_WIDTHS: Final = np.diff([0.0, *_BEGINS, _BEGINS[-1] * 2**0.5])  # the last bucket does not end
_MOST_CLASSES: Final = 512  # beyond, what would be a new class counts as the more general one
_MOST_TENANTS: Final = 1024
_MOST_STOPS: Final = 32
_OTHERS: Final = "…"
_LONGEST: Final = 10  # class of the longest answers, of a million tokens and more
_GAPS: Final = 5  # the latest pauses of a conversation, for their median
_LEARN: Final = 64
_HALF_LIFE: Final = 20_000  # of what was counted, in requests
# A class counts as much as its parent once it has seen as many conversations as this.
_WEIGHT: Final = 10.0
# The share that returns in the first bucket of ages, before anything was seen.
_UNSEEN: Final = 0.05
# A tenant's own share of returns counts as much as that of all others after so many returns.
_TENANT_WEIGHT: Final = 8.0
_MOST_OCTAVES: Final = 4


def bucket_of(age: float) -> int:
    """Return the bucket of an age in seconds; negative ages are in the first."""
    return bisect_right(_BEGINS, age)


def gittins(hazards: Table, widths: Table = _WIDTHS) -> Table:
    """Return the Gittins index of waits that reach each bucket, in returns a second.

    The index is the best ratio, over all times to give up, of the chance that the conversation
    returns until then and the expected time for which its KV is kept until then. Keeping KV in the
    order of this ratio is the best that a rule without knowledge of other conversations can do
    (J. C. Gittins, Bandit processes and dynamic allocation indices, 1979).

    ``hazards[class, bucket]`` are the chances of a return in a bucket of waits that reach it,
    ``widths`` the seconds of the buckets. Cost: 1.5 µs a class of 24 buckets.
    """
    hazards = np.minimum(hazards.T, 0.999)
    stays, spent = 1 - hazards, widths[:, None] * (1 - hazards / 2)
    # From a bucket on, by the last bucket that one waits for.
    chances, times, index = (np.zeros_like(hazards) for _ in range(3))
    for bucket in range(len(widths) - 1, -1, -1):
        for sums, here in ((chances, hazards), (times, spent)):
            sums[bucket + 1 :] *= stays[bucket]
            sums[bucket:] += here[bucket]
        index[bucket] = (chances[bucket:] / times[bucket:]).max(axis=0)
    return index.T


class Tenant:
    """What is learned of one tenant: of its answers, and how often its conversations return."""

    __slots__ = ("answers", "octaves", "row")

    def __init__(self, row: int) -> None:
        self.answers = Answers()
        self.octaves = 0
        """How much more often than others' its conversations return, as a power of two."""
        self.row = row  # of its counts in `Returns`; 0 once it is forgotten


class Wait:
    """The time from the end of a conversation's request to the beginning of its next one.

    ``since`` is when it began, ``turns`` how many requests of the conversation are known, and
    ``gaps`` are the latest pauses between them, in seconds.
    """

    __slots__ = (
        "answer", "answer_kind", "end", "evicted", "gaps", "kind", "over", "prompt", "since",
        "slot", "tenant", "turns", "unread", "unread_of",
    )  # fmt: skip

    def __init__(
        self, kind: int, since: float, turns: int, gaps: tuple[float, ...], tenant: Tenant
    ) -> None:
        self.kind = kind  # the row of its class in `Returns`
        self.since = since
        self.turns = turns
        self.gaps = gaps
        self.tenant = tenant
        self.slot = -1
        """Where `Returns` counts it; -1 if nobody follows it, or no longer."""
        self.over = False
        """Its conversation does not wait there any longer."""
        # The rest is of `kvkeep.core.eviction.returns.Waits`.
        self.end = 0
        """Pages in front of the wait."""
        self.evicted = False
        """Whether the run that it was attached to is gone."""
        self.prompt = self.answer = 0
        """Tokens of the request."""
        self.answer_kind: AnswerKind = (None, None)
        self.unread: bytes | None = None
        """Symbols of the first page of its answer that was not expected to be read, b"" while that
        is cached; None if all was."""
        self.unread_of: Wait | None = None
        """The wait of the conversation, for what stands in its place at such an answer."""

    def __repr__(self) -> str:
        return f"<Wait of kind {self.kind} since {self.since:g}, {self.turns} turns>"


class Returns:
    """Counts returns of conversations, by class, and says what each wait's KV is worth.

    The class of a wait is the end of the answer, the number of turns, the median pause of the
    conversation so far, and the length of the answer: each level counts on its own and leans on the
    one before while it has seen little. A wait that is not over counts up to its present age, so
    conversations that never return count, too. A tenant whose conversations return more or less
    often than their classes do has a factor of its own, so no tenant can teach others' KV away.

    Memory: 300 bytes for each of the ``most`` requests that ended last, 300 KB for 512 classes, and
    what `Answers` take of 1,024 tenants. Cost: 4 µs a request, and at most 2 ms to learn. Thread
    safety: all methods, by a lock under which no other is taken.
    """

    def __init__(self, most: int = 32_768) -> None:
        self._lock = threading.RLock()
        self.version = 0
        """Grows as something is learned."""
        prior = np.full((1, _BUCKETS), _UNSEEN)
        self.worths: list[list[float]] = gittins(prior).tolist()
        """Returns a second of keeping the KV of a wait, by its class and the bucket of its age."""
        self._passed: list[list[float]] = prior.cumsum(axis=1).tolist()
        """Returns that are expected before a bucket ends, by class."""
        self._kinds: dict[tuple[Hashable, ...], int] = {(): 0}  # classes
        self._parents = np.zeros(_MOST_CLASSES, np.intp)
        self._levels: list[list[int]] = [[] for _ in range(5)]  # classes, the general one's first
        # Ends of waits by class and bucket, of each class alone: others, and returns.
        self._ends = [array("d", bytes(8 * _BUCKETS * _MOST_CLASSES)) for _ in range(2)]
        self._stops: dict[str | None, int] = {}
        self._tenants: OrderedDict[Hashable, Tenant] = OrderedDict()
        # By tenant: returns, and those that were expected of waits that are over.
        self._returns = array("d", bytes(8 * (1 + _MOST_TENANTS)))
        self._expected = array("d", bytes(8 * (1 + _MOST_TENANTS)))
        # A ring of waits, and of each its class, -1 if it is over, its tenant, and its begin.
        self._waits: list[Wait | None] = [None] * most
        self._wait_kinds = array("i", [-1]) * most
        self._wait_tenants = array("i", [0]) * most
        self._wait_since = array("d", [0.0]) * most
        self._began = self._length = self._changes = 0

    def __len__(self) -> int:
        """Return the number of conversations that wait."""
        return self._length

    def __iter__(self) -> Iterator[Wait]:
        """Return the waits, the one that began first first."""
        next_slot = self._began % len(self._waits)
        ring = self._waits[next_slot:] + self._waits[:next_slot]
        return (wait for wait in ring if wait is not None)

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
        turns, gaps = (1, ()) if before is None else (before.turns + 1, before.gaps)
        usual = bucket_of(sorted(gaps)[len(gaps) // 2]) // 4 if gaps else -1
        levels = min(turns.bit_length(), 4), usual, min(tokens.bit_length() // 2, _LONGEST)
        with self._lock:
            slot = self._began % len(self._waits)
            oldest = self._waits[slot]
            if oldest is not None:
                self.lost(oldest, now)
            kind = self._kind((self._stop(ended.stop), *levels))
            wait = Wait(kind, now, turns, gaps, self._tenant(tenant))
            wait.slot = slot
            self._waits[slot] = wait
            self._wait_kinds[slot] = kind
            self._wait_tenants[slot] = wait.tenant.row
            self._wait_since[slot] = now
            self._began += 1
            self._length += 1
            self._changes += 1
        return wait

    def returned(self, wait: Wait, now: float) -> None:
        """Record that the next request of a conversation has come."""
        self._end(wait, now, returned=1)

    def lost(self, wait: Wait, now: float) -> None:
        """Follow a wait no longer: that it came no sooner counts, and nothing else."""
        self._end(wait, now, returned=0)

    def unknown(self, now: float) -> Wait:
        """Return a wait of the most general class, which begins now and nobody follows."""
        return Wait(0, now, 0, (), self.tenant(None))

    def _end(self, wait: Wait, now: float, *, returned: int) -> None:
        with self._lock:
            slot, wait.over, wait.slot = wait.slot, True, -1
            if slot < 0:
                return
            age = max(0.0, now - wait.since)
            bucket = bucket_of(age)
            if returned:
                wait.gaps = (*wait.gaps[1 - _GAPS :], age)
            self._waits[slot] = None
            self._wait_kinds[slot] = -1
            self._ends[returned][wait.kind * _BUCKETS + bucket] += 1.0
            self._returns[wait.tenant.row] += returned
            self._expected[wait.tenant.row] += self._passed[wait.kind][bucket]
            self._length -= 1
            self._changes += 1

    def _stop(self, stop: str | None) -> str | None:
        """Return the end as which ``stop`` counts: the 32 most common ones are told apart.

        As in Metwally, Agrawal and El Abbadi, Efficient computation of frequent elements (2005): a
        client that makes up ends does not take the places of others'.
        """
        counts = self._stops
        if stop not in counts and len(counts) == _MOST_STOPS:
            rarest = min(counts, key=counts.__getitem__)
            counts[stop] = counts.pop(rarest) + 1
            return _OTHERS
        counts[stop] = counts.get(stop, 0) + 1
        return stop

    def _kind(self, path: tuple[Hashable, ...]) -> int:
        kind = self._kinds.get(path)
        if kind is None:
            parent, kind = self._kind(path[:-1]), len(self._kinds)
            if kind == _MOST_CLASSES:
                return parent
            self._kinds[path] = kind
            self._levels[len(path)].append(kind)
            self._parents[kind] = parent
            self.worths.append(self.worths[parent])
            self._passed.append(self._passed[parent])
        return kind

    def tenant(self, name: Hashable) -> Tenant:
        """Return what is known of a tenant, nothing if it is not among the latest 1,024."""
        with self._lock:
            return self._tenant(name)

    def _tenant(self, name: Hashable) -> Tenant:
        tenant = self._tenants.get(name)
        if tenant is None:
            row = len(self._tenants) + 1
            if row > _MOST_TENANTS:
                oldest = self._tenants.popitem(last=False)[1]
                row, oldest.row = oldest.row, 0
                waiting = np.frombuffer(self._wait_tenants, np.int32)
                waiting[waiting == row] = 0
                self._returns[row] = self._expected[row] = 0.0
            tenant = self._tenants[name] = Tenant(row)
        self._tenants.move_to_end(name)
        return tenant

    # --- what is learned ---------------------------------------------------------------------

    def worth(self, wait: Wait, now: float) -> float:
        """Return what keeping the KV of ``wait`` is worth, in returns a second."""
        return self.worths[wait.kind][bucket_of(now - wait.since)] * 2.0**wait.tenant.octaves

    def study(self, now: float) -> None:
        """Learn from all that was counted, if enough has changed: that bounds the cost of each."""
        if self._changes >= _LEARN + self._length // 2:
            with self._lock:
                if self._changes >= _LEARN + self._length // 2:  # else another one was faster
                    self._learn(now)

    def _learn(self, now: float) -> None:
        fade, self._changes = 0.5 ** (self._changes / _HALF_LIFE), 0
        count = len(self._kinds)
        waiting = np.flatnonzero(np.frombuffer(self._wait_kinds, np.int32)[: self._began] >= 0)
        kinds = np.frombuffer(self._wait_kinds, np.int32)[waiting]
        tenants = np.frombuffer(self._wait_tenants, np.int32)[waiting]
        since = np.frombuffer(self._wait_since)[waiting]
        buckets = np.searchsorted(_BEGINS, now - since, "right")
        places = kinds * _BUCKETS + buckets
        for faded in (*self._ends, self._returns, self._expected):
            np.frombuffer(faded)[:] *= fade
        unseen, came = np.array(self._ends).reshape(2, _MOST_CLASSES, _BUCKETS)[:, :count]
        unseen += np.bincount(places, minlength=count * _BUCKETS).reshape(count, _BUCKETS)
        for rows in self._levels[:0:-1]:
            for counts in (unseen, came):
                np.add.at(counts, self._parents[rows], counts[rows])
        # Those that are in a bucket, or were lost there, have half seen it.
        reached = (came + unseen)[:, ::-1].cumsum(axis=1)[:, ::-1] - unseen / 2
        hazards = np.empty_like(came)
        hazard = _UNSEEN
        for bucket in range(_BUCKETS):  # of later ages than were seen, the last one is expected
            hazard = (came[0, bucket] + _WEIGHT * hazard) / (reached[0, bucket] + _WEIGHT)
            hazards[0, bucket] = hazard
        for rows in self._levels[1:]:
            general = _WEIGHT * hazards[self._parents[rows]]
            hazards[rows] = (came[rows] + general) / (reached[rows] + _WEIGHT)
        passed = hazards.cumsum(axis=1)
        self.worths, self._passed = gittins(hazards).tolist(), passed.tolist()
        expected = np.frombuffer(self._expected) + _TENANT_WEIGHT
        expected += np.bincount(tenants, passed.take(places), 1 + _MOST_TENANTS)
        octaves = np.rint(np.log2((np.frombuffer(self._returns) + _TENANT_WEIGHT) / expected))
        octaves = octaves.clip(-_MOST_OCTAVES, _MOST_OCTAVES).astype(int).tolist()
        for tenant in self._tenants.values():
            tenant.octaves = octaves[tenant.row]
        self.version += 1
