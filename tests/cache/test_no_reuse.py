"""A cache that reuses nothing: cold opens, free pages, and forks that share all the same."""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvkeep import InvalidValue, NotCached, OutOfPages, PagedCache
from kvkeep.core.events import Evicted, Stored
from kvkeep.core.eviction import POLICIES

PROMPT = list(range(20))


@pytest.mark.parametrize("eviction", sorted(POLICIES))
@pytest.mark.parametrize("prefix", ["radix", "chain"])
def test_nothing_is_found_and_nothing_stays(prefix: str, eviction: str) -> None:
    cache = PagedCache(32, 4, prefix=prefix, eviction=eviction, reuse=False, what_if=1.0)
    events: list[Any] = []
    cache.subscribe(events.append)
    for _ in range(3):
        with cache.open(PROMPT, session="s", extra=[(1, b"a")]) as sequence:
            assert sequence.num_cached == 0
            assert sequence.publish() == sequence.num_published == 0
            fork = sequence.fork()
            assert fork.pages.tolist() == sequence.pages.tolist()
            assert cache.stats().pages_used == 5
            fork.append(7)
            fork.publish()
            fork.close(keep=False)
            assert cache.match(PROMPT, extra=[(1, b"a")]).num_tokens == 0
            with pytest.raises(NotCached):
                cache.pin(PROMPT)
            cache.check()
        assert cache.stats().pages_free == 32
    stats = cache.stats()
    assert (stats.hit_tokens, stats.stored_pages, stats.pages_cached) == (0, 0, 0)
    assert not any(isinstance(event, Stored | Evicted) for event in events)
    assert not cache.namespaces()
    (point,) = cache.what_if([64])
    assert point.hit_rate > 0, "what reuse would have brought"


def test_the_switch_is_a_bool() -> None:
    assert PagedCache(4).reuse is True
    with pytest.raises(InvalidValue, match="reuse is 'no'"):
        PagedCache(4, reuse="no")  # type: ignore[arg-type]


def test_wrong_tokens_are_refused_all_the_same() -> None:
    cache = PagedCache(4, reuse=False)
    for call in (cache.open, cache.match, cache.pin):
        with pytest.raises(InvalidValue, match="position 1"):
            call([1, -1, 2])


class NoReuse(RuleBasedStateMachine):
    """Pages in use are those of the tables, and a page has one family."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = PagedCache(12, 2, reuse=False)
        self.live: list[Any] = []

    @rule(length=st.integers(1, 9))
    def open(self, length: int) -> None:
        try:
            sequence = self.cache.open([0] * length)
        except OutOfPages:
            assert self.cache.stats().pages_free < -(-length // 2)
            return
        assert sequence.num_cached == 0
        self.live.append(sequence)

    @precondition(lambda self: self.live)
    @rule(pick=st.integers(0, 9), step=st.sampled_from(["append", "truncate", "fork", "publish"]))
    def step(self, pick: int, step: str) -> None:
        sequence = self.live[pick % len(self.live)]
        try:
            match step:
                case "append":
                    sequence.append([0] * (pick % 4))
                case "truncate":
                    sequence.truncate(pick % (sequence.num_tokens + 1))
                case "fork":
                    self.live.append(sequence.fork())
                case _:
                    sequence.copies()
                    assert sequence.publish() == 0
        except OutOfPages:
            pass

    @precondition(lambda self: self.live)
    @rule(pick=st.integers(0, 9), keep=st.booleans())
    def close(self, pick: int, keep: bool) -> None:
        self.live.pop(pick % len(self.live)).close(keep=keep)

    @invariant()
    def agrees(self) -> None:
        self.cache.check()
        used = {page for one in self.live for page in one.pages.tolist()}
        used |= {claim.copy.src for one in self.live for claim in one.claims()}
        stats = self.cache.stats()
        assert (stats.pages_used, stats.pages_cached) == (len(used), 0)

    def teardown(self) -> None:
        for sequence in self.live:
            sequence.close()
        assert self.cache.stats().pages_free == 12


TestNoReuse = NoReuse.TestCase
TestNoReuse.settings = settings(
    max_examples=40 * (20 if os.environ.get("KVKEEP_FUZZ") == "long" else 1),
    stateful_step_count=30,
    deadline=None,
)
