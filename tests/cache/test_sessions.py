"""Sessions: who goes first, who goes last, what a hostile one can do, and what it is worth."""

from __future__ import annotations

import gc
import gzip
import json
import random
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from paged_model import Clock

from kvkeep import InvalidValue, PagedCache
from kvkeep.core.prefix.node import Node

TRACE = Path(__file__).parents[3] / "shared" / "traces" / "mooncake_conversation.jsonl.gz"
SENTINEL = 2**31 - 1

Tokens = list[int]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=["radix", "chain"])
def cache(request: pytest.FixtureRequest, clock: Clock) -> PagedCache:
    """Pages of one token: a prompt's pages are its tokens, and one more that is not published."""
    return PagedCache(20, 1, prefix=request.param, clock=clock)


def run(cache: PagedCache, tokens: Tokens, session: str | None = None) -> int:
    """A whole request; the tokens that were cached."""
    with cache.open([*tokens, SENTINEL], session=session) as sequence:
        sequence.publish(len(tokens))
        return sequence.num_cached


def cached(cache: PagedCache, *prompts: Tokens) -> list[int]:
    """How much of each is cached."""
    return [cache.match(prompt).num_tokens for prompt in prompts]


A, B, C = [1, 2, 3, 4], [11, 12, 13, 14], [21, 22, 23, 24]


def test_what_is_over_goes_first(cache: PagedCache) -> None:
    for tokens, session in ((A, "a"), (B, "b"), (C, "c")):
        run(cache, tokens, session)
    assert cache.session("c").close() == 4
    assert cache.session("b").close() == 4
    assert cache.stats().pages_dead == 8
    cache.evict(3)
    assert cached(cache, A, B, C) == [4, 4, 1], "the first death first, its tail first"
    cache.evict(2)
    assert cached(cache, A, B, C) == [4, 3, 0]
    cache.evict(4)
    assert cached(cache, A, B, C) == [3, 0, 0]


def test_what_others_use_does_not_die(cache: PagedCache) -> None:
    run(cache, [*A, 5], "a")
    run(cache, [*A, 6], "b")
    run(cache, [*B, 7], "b2")
    run(cache, [*B, 8])
    assert cache.session("a").close() == 1
    assert cache.session("b2").close() == 1
    assert cache.session("b").close() == 1
    assert cache.stats().pages_dead == 3


def test_dead_pages_that_are_used_again_live(cache: PagedCache) -> None:
    run(cache, [*A, 5, 6], "a")
    assert cache.session("a").close() == 6
    assert run(cache, [*A, 5, 7], "a") == 5, "dead is not gone"
    assert cache.stats().pages_dead == 1
    cache.evict(1)
    assert cached(cache, [*A, 5, 6], [*A, 5, 7]) == [5, 6]


def test_a_request_that_outlives_its_session(cache: PagedCache) -> None:
    with cache.open([*A, SENTINEL], session="a") as sequence:
        sequence.publish(2)
        assert cache.session("a").close() == 2
        sequence.publish(4)
        fork = sequence.fork()
    fork.close()
    assert cache.stats().pages_dead == 4
    run(cache, A, "a")
    assert cache.stats().pages_dead == 0
    cache.check()


# --- away ----------------------------------------------------------------------------------------


def test_who_is_away_goes_last_the_latest_return_first(cache: PagedCache) -> None:
    for tokens, session in ((A, "a"), (B, "b"), (C, None)):
        run(cache, tokens, session)
    assert cache.session("a").suspend(9) == 4
    assert cache.session("b").suspend(5) == 4
    assert cache.stats().pages_awaited == 8
    cache.evict(5)
    assert cached(cache, A, B, C) == [3, 4, 0]
    assert run(cache, [1, 2, 3], "a") == 3, "it is back"
    cache.evict(1)
    assert cached(cache, A, B) == [2, 4]


def test_nobody_is_awaited_for_more_than_an_hour(cache: PagedCache, clock: Clock) -> None:
    run(cache, A, "a")
    cache.session("a").suspend(float("inf"))
    clock.now = 3599.0
    assert cache.stats().pages_awaited == 4
    clock.now = 3600.0
    assert cache.stats().pages_awaited == 0


def test_more_than_half_is_not_awaited(cache: PagedCache) -> None:
    for tokens, session in ((A, "a"), (B, "b"), (C, "c")):
        run(cache, tokens, session)
    assert [cache.session(name).suspend(60) for name in "abc"] == [4, 4, 4]
    assert cache.stats().pages_awaited == 8, "of 20; who went first is not awaited any more"
    cache.evict(4)
    assert cached(cache, A, B, C) == [0, 4, 4]
    run(cache, list(range(30, 41)), "d")
    assert cache.session("d").suspend(60) == 0, "it alone is more than half"


@pytest.mark.parametrize("eta", [0, -1, float("nan"), "30", None, True])
def test_an_eta_that_is_none(cache: PagedCache, eta: float) -> None:
    with pytest.raises(InvalidValue, match="seconds above 0 is needed"):
        cache.session("a").suspend(eta)


# --- the hostile ---------------------------------------------------------------------------------


def test_hints_can_wedge_nobody(cache: PagedCache) -> None:
    """All is awaited, dead or pinned softly, and a request still gets the whole pool."""
    for number in range(4):
        run(cache, list(range(100 * number, 100 * number + 4)), str(number))
        cache.session(str(number)).suspend(1e9)
    cache.pin(range(4))
    cache.session("2").close()
    with cache.open(list(range(1000, 1020))) as sequence:
        assert len(sequence.pages) == 20
    cache.check()


def test_sessions_beyond_the_most_are_forgotten(
    cache: PagedCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache.sessions, "most", 50)
    run(cache, A, "mine")
    for number in range(1000):
        run(cache, [number], f"hostile {number}")
    assert cache.stats().sessions == 50
    mine = cache.session("mine")
    assert not mine.known
    assert (mine.close(), mine.suspend(5), mine.num_pages) == (0, 0, 0)
    cache.check()


def test_hints_alone_make_nothing(cache: PagedCache) -> None:
    for number in range(100):
        told = cache.session(str(number))
        assert (told.close(), told.suspend(5)) == (0, 0)
    assert cache.stats().sessions == 0
    assert not cache.sessions.observing, "nor does a cache without sessions keep owners"


def test_what_is_evicted_is_gone(cache: PagedCache) -> None:
    """No session, and no hint, keeps a run of the tree alive."""

    def runs() -> int:
        gc.collect()
        # Not isinstance: that asks objects of others, and some of theirs warn.
        return sum(type(found) is Node for found in gc.get_objects())

    before = runs()
    for number in range(1000):
        run(cache, [number, 1000, number], str(number % 7))
        cache.session(str(number % 5)).suspend(60)
        cache.session(str(number % 3)).close()
    cache.clear()
    assert cache.stats().sessions <= 7
    assert runs() < before + 200, "queues may keep a few dozen that left them"
    stats = cache.stats()
    assert stats.pages_free == stats.pages_total
    assert stats.pages_dead == stats.pages_awaited == 0


@pytest.mark.parametrize("name", ["", "x" * 257, 1, None])
def test_a_name_that_is_none(cache: PagedCache, name: object) -> None:
    with pytest.raises(InvalidValue, match="1 … 256 characters"):
        cache.session(name)  # type: ignore[arg-type]


def test_sessions_belong_to_their_namespace(cache: PagedCache) -> None:
    with cache.open(A, "tenant", session="a") as sequence:
        sequence.publish()
    assert cache.session("a").close() == 0
    assert cache.session("a", "tenant").close() == 4


# --- what it is worth ----------------------------------------------------------------------------


def conversations(prompts: list[Tokens]) -> list[int]:
    """Which conversation each prompt is of: that whose last prompt it continues.

    A prompt's last block may be shorter than the others, and is another one in the next turn.
    """
    latest: dict[int, tuple[int, int]] = {}  # block → conversation, blocks of its prompt
    names: list[int] = []
    for prompt in prompts:
        known = next((at for at, block in enumerate(prompt) if block not in latest), len(prompt))
        name = len(names)
        if known > 1:
            before, blocks = latest[prompt[known - 1]]
            name = before if known >= blocks - 1 else name
        names.append(name)
        latest.update((block, (name, len(prompt))) for block in prompt)
    return names


def hit_rate(
    prompts: list[Tokens], pages: int, *, recall: float = 0.0, false_alarms: float = 0.0
) -> float:
    """Of all blocks, those that were cached.

    After each request its conversation is closed: if no more of it comes with a chance of
    ``recall``, and if more does with one of ``false_alarms``.
    """
    names = conversations(prompts)
    last = {name: at for at, name in enumerate(names)}
    chance = random.Random(1)
    cache = PagedCache(pages, 1)
    hits = 0
    for at, (prompt, name) in enumerate(zip(prompts, names, strict=True)):
        told = recall or false_alarms
        row = np.array([*prompt, SENTINEL], np.int32)
        with cache.open(row, session=str(name) if told else None) as sequence:
            sequence.publish(len(prompt))
            hits += sequence.num_cached
        if told and chance.random() < (recall if last[name] == at else false_alarms):
            cache.session(str(name)).close()
    cache.check()
    return hits / sum(map(len, prompts))


def test_poor_hints_are_worth_more_than_any_policy() -> None:
    """An hour of a chat service: hints that miss a fifth, and are wrong one time in ten."""
    if not TRACE.exists():
        pytest.skip(f"the trace is not there: {TRACE.name}")
    with gzip.open(TRACE, "rt") as file:
        prompts = [json.loads(line)["hash_ids"] for line in file]
    plain = hit_rate(prompts, 5859)
    hinted = hit_rate(prompts, 5859, recall=0.8, false_alarms=0.1)
    assert plain == pytest.approx(0.136, abs=0.001)
    assert hinted >= 0.21, "2Q, the best policy without hints, has 0.174"


def test_the_better_the_hints_the_better_the_cache() -> None:
    """The same with conversations made up, so that it is tried wherever the trace is not."""
    chance = random.Random(5)
    serial = iter(range(10, 10**6))
    running: list[Tokens] = []
    prompts: list[Tokens] = []
    for _ in range(3000):
        if len(running) < 60 or chance.random() < 0.3:
            running.append([0, 1])
        talk = chance.choice(running)
        talk.extend(next(serial) for _ in range(4))
        prompts.append(list(talk))
        if chance.random() < 0.25:
            running.remove(talk)
    rates = [hit_rate(prompts, 400, recall=recall, false_alarms=0.1) for recall in (0, 0.5, 1)]
    assert all(worse < better for worse, better in pairwise(rates)), rates


# --- clocks ----------------------------------------------------------------------------------


@pytest.mark.parametrize("start", [0.0, -5.0, -1e9])
@pytest.mark.parametrize("prefix", ["radix", "chain"])
def test_a_clock_may_show_any_time(prefix: str, start: float) -> None:
    """A return is due at 0, or before: that is a time like any other."""
    clock = Clock()
    clock.now = start
    cache = PagedCache(20, 1, prefix=prefix, clock=clock)
    for tokens, session in ((A, "a"), (B, "b"), (C, "c")):
        run(cache, tokens, session)
    assert cache.session("a").suspend(5) == 4
    assert cache.session("b").suspend(2.5) == 4
    assert cache.stats().pages_awaited == 8
    cache.check()
    cache.evict(4)
    assert cached(cache, A, B, C) == [4, 4, 0]
    clock.now += 2.5
    assert cache.stats().pages_awaited == 4
    cache.check()
    cache.evict(4)
    assert cached(cache, A, B, C) == [4, 0, 0]
    clock.now += 2.5
    assert cache.stats().pages_awaited == 0
    cache.check()
    pin = cache.pin(A, ttl=1.0)
    assert pin.num_tokens == 4
    clock.now += 1.0
    assert not pin.num_tokens
    assert cache.stats().pins_expired == 1
