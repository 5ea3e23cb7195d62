"""2Q and ARC: their queues against lists, ARC's directory against the paper, and what is known."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep.core.errors import InvalidValue
from kvkeep.core.eviction import ARC, Entry, TwoQ
from kvkeep.core.eviction.arc import Directory
from kvkeep.core.eviction.history import History

if TYPE_CHECKING:
    from kvkeep.core.eviction.queues import OncePolicy

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["new", "new", "known", "hit", "used", "pop", "take", "requested"]),
        st.integers(0, 11),
    ),
    max_size=60,
)


class NaiveQueues:
    """Two lists, and sums over them."""

    def __init__(self) -> None:
        self.once: list[Entry] = []
        self.again: list[Entry] = []

    def add(self, entry: Entry) -> None:
        (self.again if entry.hits else self.once).append(entry)

    def remove(self, entry: Entry) -> None:
        (self.once if entry in self.once else self.again).remove(entry)

    def victim(self, most: int) -> tuple[Entry, int]:
        """The next one, and how much of it goes."""
        beyond = sum(entry.size for entry in self.once) - most
        queue = self.once if (beyond > 0 and self.once) or not self.again else self.again
        oldest = min(queue, key=lambda entry: entry.last_used)
        cut = queue is self.once and beyond > 0
        return oldest, min(beyond, oldest.size) if cut else oldest.size


def stored(policy: OncePolicy, size: int, *, known: bool) -> Entry:
    entry = Entry()
    entry.size = size
    policy.stored(entry, 0, known=known)
    return entry


def walk(policy: OncePolicy, steps: list[tuple[str, int]]) -> None:
    naive = NaiveQueues()
    for step, number in steps:
        entries = naive.once + naive.again
        if step in {"new", "known"}:
            entry = stored(policy, number + 1, known=step == "known")
            policy.add(entry)
            naive.add(entry)
        elif step == "requested":
            policy.requested([bytes([number] * 32)])
        elif entries and step in {"pop", "take"}:
            most = (
                policy._directory.target * policy._block
                if isinstance(policy, ARC)
                else (policy.probation or 0) * 40
                if isinstance(policy, TwoQ)
                else 0
            )
            expected, portion = naive.victim(int(most))
            victim = policy.pop()
            assert victim is expected
            assert policy.portion(victim) == portion
            naive.remove(victim)
            if step == "take" and portion < victim.size:
                victim.size -= portion
                policy.put_back(victim)
                naive.add(victim)
        elif entries:
            entry = entries[number % len(entries)]
            policy.discard(entry)
            naive.remove(entry)
            getattr(policy, "hit" if step == "hit" else "used")(entry)
            policy.add(entry)
            naive.add(entry)
        assert len(policy) == len(naive.once) + len(naive.again)


@pytest.mark.parametrize("probation", [0.0, 0.1, 0.5, 1.0])
@settings(max_examples=150, deadline=None)
@given(steps=STEPS)
def test_2q_against_two_lists(probation: float, steps: list[tuple[str, int]]) -> None:
    policy = TwoQ(probation)
    policy.fit(40, 2)
    walk(policy, steps)


@settings(max_examples=300, deadline=None)
@given(steps=STEPS)
def test_arc_against_two_lists(steps: list[tuple[str, int]]) -> None:
    policy = ARC()
    policy.fit(12, 3)
    walk(policy, steps)


@settings(max_examples=200, deadline=None)
@given(steps=STEPS)
def test_2q_without_probation_is_lru(steps: list[tuple[str, int]]) -> None:
    policy = TwoQ()
    policy.probation = None
    entries: list[Entry] = []
    for step, number in steps:
        if step in {"new", "known"}:
            entries.append(stored(policy, number + 1, known=step == "known"))
            policy.add(entries[-1])
        elif entries and step in {"pop", "take"}:
            victim = policy.pop()
            assert victim is min(entries, key=lambda entry: entry.last_used)
            assert policy.portion(victim) == victim.size
            entries.remove(victim)
        elif entries:
            entry = entries[number % len(entries)]
            policy.discard(entry)
            policy.hit(entry)
            policy.add(entry)


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_2q_refuses_a_share_that_is_none(share: float) -> None:
    with pytest.raises(InvalidValue, match="probation is a share in 0"):
        TwoQ(share)


@pytest.mark.parametrize("remembered", [-1.0, float("nan")])
def test_2q_refuses_to_remember_less_than_nothing(remembered: float) -> None:
    with pytest.raises(InvalidValue, match="number of memories"):
        TwoQ(remembered=remembered)


# --- history -------------------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(
    limit=st.integers(0, 12),
    prompts=st.lists(st.lists(st.integers(0, 15), max_size=6, unique=True), max_size=20),
)
def test_history_against_a_list(limit: int, prompts: list[list[int]]) -> None:
    history = History(limit)
    naive: list[bytes] = []  # oldest first
    for prompt in prompts:
        keys = [bytes([number]) for number in prompt]
        known = 0
        while known < len(keys) and keys[known] in naive:
            known += 1
        assert history.requested(keys) == known
        naive = [key for key in naive if key not in keys] + keys[::-1]
        naive = naive[-max(1, limit) :]
        assert len(history) == len(naive)
        assert all(
            (bytes([number]) in history) == (bytes([number]) in naive) for number in range(16)
        )


# --- ARC over keys, as the paper has it ----------------------------------------------------------


class PaperARC:
    """Megiddo and Modha, figure 4, word for word; lists, least recently used first."""

    def __init__(self, c: int) -> None:
        self.c = c
        self.p = 0.0
        self.t1: list[bytes] = []
        self.t2: list[bytes] = []
        self.b1: list[bytes] = []
        self.b2: list[bytes] = []

    def replace(self, x: bytes) -> None:
        if self.t1 and ((x in self.b2 and len(self.t1) == self.p) or len(self.t1) > self.p):
            self.b1.append(self.t1.pop(0))
        else:
            self.b2.append(self.t2.pop(0))

    def request(self, x: bytes) -> bool:
        c = self.c
        if x in self.t1 or x in self.t2:
            (self.t1 if x in self.t1 else self.t2).remove(x)
            self.t2.append(x)
            return True
        if x in self.b1:
            self.p = min(c, self.p + max(len(self.b2) / len(self.b1), 1))
            self.replace(x)
            self.b1.remove(x)
            self.t2.append(x)
        elif x in self.b2:
            self.p = max(0, self.p - max(len(self.b1) / len(self.b2), 1))
            self.replace(x)
            self.b2.remove(x)
            self.t2.append(x)
        else:
            one = len(self.t1) + len(self.b1)
            two = len(self.t2) + len(self.b2)
            if one == c:
                if len(self.t1) < c:
                    self.b1.pop(0)
                    self.replace(x)
                else:
                    self.t1.pop(0)
            elif one + two >= c:
                if one + two == 2 * c:
                    self.b2.pop(0)
                self.replace(x)
            self.t1.append(x)
        return False


@settings(max_examples=300, deadline=None)
@given(size=st.integers(1, 6), asked=st.lists(st.integers(0, 14), max_size=120))
def test_the_directory_is_the_papers(size: int, asked: list[int]) -> None:
    directory, paper = Directory(size), PaperARC(size)
    for number in asked:
        key = bytes([number])
        assert directory.requested(key) == paper.request(key)
        assert directory.target == paper.p
        assert list(directory.once) == paper.t1
        assert list(directory.again) == paper.t2
        assert list(directory.once_gone) == paper.b1
        assert list(directory.again_gone) == paper.b2
        assert len(directory) == len({*paper.t1, *paper.t2, *paper.b1, *paper.b2}) <= 2 * size


@pytest.mark.parametrize("seed", range(4))
def test_the_directory_is_the_papers_for_long(seed: int) -> None:
    """Among few keys more than fit all its cases come up, ties of target and length too."""
    chance = random.Random(seed)
    ties = 0
    for size in range(1, 13):
        directory, paper = Directory(size), PaperARC(size)
        for turn in range(500):
            wide = 3 * size if turn % 200 < 100 else size + 2
            key = bytes([chance.randrange(wide)])
            ties += key in paper.b2 and len(paper.t1) == paper.p - 1
            assert directory.requested(key) == paper.request(key)
            assert directory.target == paper.p
            assert [*directory.once, *directory.again] == paper.t1 + paper.t2
            assert [*directory.once_gone, *directory.again_gone] == paper.b1 + paper.b2
    assert ties
