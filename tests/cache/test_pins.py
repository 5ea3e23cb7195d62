"""Pins: what they keep, when they give way, and that they never stand in the way of a request."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep import InvalidValue, NotCached, OutOfPages, PagedCache
from kvkeep.core.prefix import INDICES

SIZE = 4


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=INDICES)
def cache(request: pytest.FixtureRequest, clock: Clock) -> PagedCache:
    return PagedCache(16, SIZE, prefix=request.param, clock=clock)


def store(cache: PagedCache, first: int, pages: int = 2, namespace: str = "") -> list[int]:
    """Cache a prompt of its own: ``pages`` pages of tokens that begin with ``first``."""
    tokens = list(range(first, first + pages * SIZE))
    with cache.open(tokens, namespace) as sequence:
        sequence.copies()
        sequence.publish()
    return tokens


def fill(cache: PagedCache, pages: int, first: int = 10_000) -> None:
    """Ask for so many pages, and give them back unpublished."""
    cache.open(range(first, first + pages * SIZE)).close()


# --- soft ------------------------------------------------------------------------------------


def test_a_soft_pin_gives_way_tail_first_when_nothing_else_is_left(cache: PagedCache) -> None:
    pinned = store(cache, 0, pages=3)
    pin = cache.pin(pinned)
    store(cache, 1000)
    fill(cache, 14)
    assert pin.num_tokens == 8
    assert pin.active
    assert cache.match(pinned).num_tokens == 8
    assert cache.stats().pins_broken == 0
    fill(cache, 16)
    assert pin.num_tokens == 0
    stats = cache.stats()
    assert (stats.pins, stats.pinned_pages, stats.pins_broken) == (0, 0, 1)
    assert not pin.active
    cache.check()


def test_only_full_pages_are_pinned(cache: PagedCache) -> None:
    prompt = store(cache, 0, pages=2)
    assert cache.pin(prompt[:7]).num_tokens == 4
    assert cache.pin([*prompt, 1, 2, 3]).num_tokens == 8


# --- hard ------------------------------------------------------------------------------------


def test_hard_pins_have_a_budget_which_counts_each_page_once(clock: Clock) -> None:
    cache = PagedCache(16, SIZE, hard_pin_pages=4, clock=clock)
    prompt = store(cache, 0, pages=4)
    other = store(cache, 1000, pages=1)
    cache.pin(prompt[:8], hard=True)
    cache.pin(prompt, hard=True)
    cache.pin(prompt[:4], hard=True)
    stats = cache.stats()
    assert (stats.pins, stats.hard_pinned_pages, stats.pinned_pages) == (3, 4, 4)
    with pytest.raises(InvalidValue, match="hard pins would hold 5 pages, their budget is 4"):
        cache.pin(other, hard=True)
    assert cache.stats() == stats, "a refusal changes nothing"
    cache.check()
    cache.pin(other)  # softly it may
    assert cache.stats().pinned_pages == 5
    assert cache.stats().hard_pinned_pages == 4
    cache.check()


def test_the_default_budget_is_half_the_pool(cache: PagedCache) -> None:
    prompt = store(cache, 0, pages=12)
    cache.pin(prompt[: 8 * SIZE], hard=True)
    with pytest.raises(InvalidValue, match="budget is 8"):
        cache.pin(prompt[: 9 * SIZE], hard=True)


# --- time ------------------------------------------------------------------------------------


@pytest.mark.parametrize("hard", [False, True])
def test_a_pin_ends_when_its_time_is_over(cache: PagedCache, clock: Clock, hard: bool) -> None:
    prompt = store(cache, 0)
    pin = cache.pin(prompt, ttl=10, hard=hard)
    assert pin.expires == 110
    clock.now += 9.999
    assert pin.num_tokens == 8
    assert cache.stats().pins == 1
    clock.now += 0.001
    assert pin.num_tokens == 0
    stats = cache.stats()
    assert (stats.pins, stats.pinned_pages, stats.pins_expired) == (0, 0, 1)
    assert stats.pages_evictable == 2
    assert not pin.active
    assert cache.match(prompt).num_tokens == 8, "it may go now, it has not gone"
    cache.check()


def test_memory_pressure_ends_expired_hard_pins_by_itself(cache: PagedCache, clock: Clock) -> None:
    cache.pin(store(cache, 0), ttl=1, hard=True)
    clock.now += 1
    fill(cache, 16)  # nobody asked for statistics in between
    sequence = cache.open(range(5000, 5000 + 15 * SIZE))
    sequence.append(range(SIZE))
    assert cache.stats().pins_expired == 1


def test_pins_that_ended_early_are_not_kept_until_their_time(
    cache: PagedCache, clock: Clock
) -> None:
    prompt = store(cache, 0)
    cache.pin(prompt, ttl=1)
    for _ in range(1000):
        cache.unpin(cache.pin(prompt, ttl=1_000_000))
    assert len(cache.pins._expiry) < 100
    clock.now += 1
    assert cache.stats().pins_expired == 1


@pytest.mark.parametrize("ttl", [0, -1, math.nan])
def test_a_time_to_live_is_some_seconds(cache: PagedCache, ttl: float) -> None:
    prompt = store(cache, 0)
    with pytest.raises(InvalidValue, match="seconds above 0 is needed"):
        cache.pin(prompt, ttl=ttl)
    assert cache.pin(prompt, ttl=math.inf).num_tokens == 8


# --- how many --------------------------------------------------------------------------------


@pytest.mark.parametrize("hard", [False, True])
def test_pins_have_a_bound(cache: PagedCache, hard: bool) -> None:
    """Also pins of one prefix; a refusal changes nothing, and one that ended makes room."""
    prompt = store(cache, 0)
    pins = [cache.pin(prompt, hard=hard) for _ in range(1024)]
    before = cache.stats()
    with pytest.raises(InvalidValue, match=r"1024 pins are set, .* unpin some"):
        cache.pin(prompt, hard=hard)
    assert cache.stats() == before
    cache.check()
    cache.unpin(pins.pop())
    cache.pin(prompt, hard=hard)
    cache.check()


def test_a_larger_pool_keeps_as_many_pins_as_it_has_pages() -> None:
    cache = PagedCache(1100, SIZE)
    prompt = store(cache, 0)
    for _ in range(1100):
        cache.pin(prompt)
    with pytest.raises(InvalidValue, match="1100 pins"):
        cache.pin(prompt)


# --- mistakes --------------------------------------------------------------------------------


@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize("tokens", [[], [5, 6, 7, 8], [0, 1, 2], [0, 1, 2, 99]])
def test_a_pin_of_what_is_not_cached_says_so(
    cache: PagedCache, tokens: list[int], hard: bool
) -> None:
    for _ in range(2):  # with an empty cache, and with another prompt in it
        before = cache.stats(), list(map(str, cache.runs()))
        with pytest.raises(NotCached, match=f"not one full page of these {len(tokens)} tokens"):
            cache.pin(tokens, hard=hard)
        assert (cache.stats(), list(map(str, cache.runs()))) == before
        store(cache, 0)
    with pytest.raises(NotCached):
        cache.pin(range(8), "another tenant")


def test_a_pin_ends_once(cache: PagedCache, clock: Clock) -> None:
    prompt = store(cache, 0)
    pin = cache.pin(prompt)
    cache.unpin(pin)
    with pytest.raises(NotCached, match=r"<soft pin, 0 tokens, ended> is not a running pin"):
        cache.unpin(pin)
    late = cache.pin(prompt, ttl=1)
    clock.now += 1
    cache.stats()
    with pytest.raises(NotCached):
        cache.unpin(late)
    cache.check()


def test_a_pin_of_another_cache_is_refused(cache: PagedCache) -> None:
    other = PagedCache(16, SIZE)
    pin = other.pin(store(other, 0))
    cache.pin(store(cache, 0))
    with pytest.raises(NotCached):
        cache.unpin(pin)
    assert pin.active


# --- never in the way ------------------------------------------------------------------------

prompts = st.lists(st.integers(0, 1), min_size=1, max_size=24)
scripts = st.lists(
    st.tuples(st.sampled_from(["run", "open", "close", "pin", "append", "take"]), prompts),
    max_size=30,
)


@settings(deadline=None, max_examples=150)
@given(script=scripts, prefix=st.sampled_from(sorted(INDICES)))
def test_soft_pins_never_make_a_request_fail(script: list[Any], prefix: str) -> None:
    """Whatever is pinned: what can be had is what nobody uses, and all of it can be had."""
    cache = PagedCache(8, SIZE, prefix=prefix)
    running: list[Any] = []
    for step, prompt in script:
        try:
            if step == "run":
                with cache.open(prompt) as sequence:
                    sequence.copies()
                    sequence.publish()
            elif step == "open":
                running.append(cache.open(prompt))
            elif step == "close" and running:
                running.pop().close()
            elif step == "pin":
                cache.pin(prompt)
            elif step == "append" and running:
                running[0].append(prompt)
            elif step == "take" and running:
                running[0].copies()
                running[0].publish()
        except (OutOfPages, NotCached):
            pass
        cache.check()
    stats = cache.stats()
    used = {int(page) for sequence in running for page in sequence.pages}
    sources = {claim.copy.src for each in running for claim in each.claims()}
    protected = stats.pages_total - stats.pages_free - stats.pages_evictable
    # A claim on a stored page protects all pages before it; without claims the count is exact.
    assert protected >= len(used | sources)
    if not sources:
        assert protected == len(used)
    # And the promise is kept: so many pages can be had now.
    room = stats.pages_free + stats.pages_evictable
    if room:
        unheard = cache.open([5] * (room * SIZE))
        assert unheard.num_cached == 0
        assert cache.stats().pages_evictable == 0
        cache.check()
