"""S3-FIFO: its queues and its ghost against lists that do what the paper says."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep.core.errors import InvalidValue
from kvkeep.core.eviction import S3FIFO, Entry
from kvkeep.core.eviction.s3fifo import Ghost

SIZE = 20


def stored(policy: S3FIFO, size: int, *, known: bool) -> Entry:
    entry = Entry()
    entry.size = size
    policy.stored(entry, 0, known=known)
    return entry


class NaiveS3FIFO:
    """Entries in two lists in the order in which they came there, and their counters."""

    def __init__(self, small: float, again: int) -> None:
        self.small = int(small * SIZE)
        self.again = again
        self.new: list[Entry] = []
        self.main: list[Entry] = []
        self.counts: dict[Entry, int] = {}
        self.held: dict[Entry, tuple[str, int]] = {}

    def victim(self) -> tuple[Entry, int]:
        """The next one, out of its list, and how much of it goes."""
        while True:
            beyond = sum(entry.size for entry in self.new) - self.small
            if (beyond > 0 or not self.main) and self.new:
                entry = self.new.pop(0)
                if self.counts[entry] < self.again:
                    return entry, min(beyond, entry.size) if beyond > 0 else entry.size
                self.counts[entry] = 0
            else:
                entry = self.main.pop(0)
                if not self.counts[entry]:
                    return entry, entry.size
                self.counts[entry] -= 1
            self.main.append(entry)


@pytest.mark.parametrize(("small", "again"), [(0.1, 2), (0.5, 1), (0.0, 1), (1.0, 3)])
@settings(max_examples=200, deadline=None)
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["new", "new", "known", "hit", "hit", "used", "pop", "take"]),
            st.integers(0, 11),
        ),
        max_size=60,
    )
)
def test_turns_against_two_lists(small: float, again: int, steps: list[tuple[str, int]]) -> None:
    policy, naive = S3FIFO(small, again), NaiveS3FIFO(small, again)
    policy.fit(SIZE, 1)
    for step, number in steps:
        entries = naive.new + naive.main
        if step in {"new", "known"}:
            entry = stored(policy, 1 + number % 4, known=step == "known")
            policy.add(entry)
            naive.counts[entry] = 0
            (naive.main if step == "known" else naive.new).append(entry)
        elif entries and step in {"pop", "take"}:
            expected, portion = naive.victim()
            victim = policy.pop()
            assert victim is expected
            assert policy.portion(victim) == portion
            if step == "take" and portion < victim.size:
                victim.size -= portion
                policy.put_back(victim)
                naive.new.insert(0, victim)  # only there does a part stay
        elif entries:
            entry = entries[number % len(entries)]
            policy.discard(entry)
            if step == "hit":
                policy.hit(entry)
                naive.counts[entry] = min(3, naive.counts[entry] + 1)
            else:
                policy.used(entry)
            policy.add(entry)  # its turn comes when it would have come
        assert len(policy) == len(naive.new) + len(naive.main)


def test_a_prefix_has_its_turn_with_what_hung_from_it() -> None:
    policy = S3FIFO(0.0)
    policy.fit(SIZE, 1)
    parent, child = stored(policy, 1, known=False), stored(policy, 1, known=False)
    other = stored(policy, 1, known=False)
    policy.hit(child)
    policy.hit(child)
    policy.add(child)
    policy.add(other)
    assert policy.pop() is other  # the child has got another turn
    assert policy.pop() is child
    policy.inherit(parent, child)
    late = stored(policy, 1, known=False)
    policy.add(parent)
    policy.add(late)
    assert policy.pop() is late, "the parent is in the main queue, like its child was"
    assert policy.pop() is parent


class PaperS3FIFO:
    """Lists of [key, count], oldest first."""

    def __init__(self, size: int, small: int, again: int) -> None:
        self.size, self.small, self.again = size, small, again
        self.s: list[list[int]] = []
        self.m: list[list[int]] = []
        self.g: list[int] = []

    def read(self, x: int) -> bool:
        for item in self.s + self.m:
            if item[0] == x:
                item[1] = min(3, item[1] + 1)
                return True
        while len(self.s) + len(self.m) >= self.size:
            self.evict()
        if x in self.g:
            self.g.remove(x)
            self.m.append([x, 0])
        else:
            self.s.append([x, 0])
        return False

    def evict(self) -> None:
        if self.s and (len(self.s) >= self.small or not self.m):
            key, count = self.s.pop(0)
            if count >= self.again:
                self.m.append([key, 0])
            else:
                self.g = [*self.g, key][-(self.size - self.small) :] * (self.size > self.small)
        else:
            key, count = self.m.pop(0)
            if count:
                self.m.append([key, count - 1])


@settings(max_examples=300, deadline=None)
@given(
    size=st.integers(1, 10),
    small=st.sampled_from([0.1, 0.3, 0.5, 1.0]),
    again=st.integers(1, 3),
    asked=st.lists(st.integers(0, 14), max_size=120),
)
def test_the_ghost_is_the_papers(size: int, small: float, again: int, asked: list[int]) -> None:
    ghost, paper = Ghost(size, small, again), PaperS3FIFO(size, int(small * size), again)
    for number in asked:
        assert ghost.requested(bytes([number])) == paper.read(number)
        assert [[key[0], count] for key, count in ghost.new.items()] == paper.s
        assert [[key[0], count] for key, count in ghost.main.items()] == paper.m
        assert [key[0] for key in ghost.gone] == paper.g
        assert len(ghost) == len(paper.s) + len(paper.m) + len(paper.g)


@pytest.mark.parametrize("small", [-0.1, 1.1, float("nan")])
def test_it_refuses_a_share_that_is_none(small: float) -> None:
    with pytest.raises(InvalidValue, match="small is a share in 0"):
        S3FIFO(small)


@pytest.mark.parametrize("again", [0, 4, 1.5])
def test_it_counts_to_three(again: int) -> None:
    with pytest.raises(InvalidValue, match=r"again is .* in 1 … 3"):
        S3FIFO(again=again)
