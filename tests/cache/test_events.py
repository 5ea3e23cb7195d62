"""What hooks are told, in which order, and what they can do to the cache: nothing."""

from __future__ import annotations

import logging
import threading
from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import pytest

from kvkeep import InvalidValue, Namespace, OutOfPages, PagedCache
from kvkeep.core.events import Closed, Event, Evicted, Opened, Stored
from kvkeep.core.prefix import INDICES

SIZE = 4


@pytest.fixture(params=INDICES)
def cache(request: pytest.FixtureRequest) -> PagedCache:
    return PagedCache(8, SIZE, prefix=request.param)


@pytest.fixture
def events(cache: PagedCache) -> list[Event]:
    seen: list[Event] = []
    cache.subscribe(seen.append)
    return seen


def run(cache: PagedCache, tokens: Any, namespace: str = "") -> None:
    with cache.open(tokens, namespace) as sequence:
        sequence.copies()
        sequence.publish()


def kinds(events: list[Event]) -> list[str]:
    return [type(event).__name__ for event in events]


# --- what is told ----------------------------------------------------------------------------


def test_the_life_of_a_request_in_order(cache: PagedCache, events: list[Event]) -> None:
    space = Namespace(tenant="a")
    sequence = cache.open(range(10), space)
    sequence.publish(5)
    sequence.append(range(10, 13))
    sequence.publish()
    fork = sequence.fork()
    sequence.close()
    fork.close()
    opened, first, second, forked, closed, fork_closed = events
    assert isinstance(opened, Opened)
    assert (opened.sequence, opened.namespace) == (sequence.id, space)
    assert (opened.prompt_tokens, opened.cached_tokens, opened.forked_from) == (10, 0, None)
    assert isinstance(first, Stored)
    assert (first.sequence, first.parent) == (sequence.id, -1)
    assert first.pages.tolist() == [0]
    assert first.tokens.tolist() == [0, 1, 2, 3]
    assert isinstance(second, Stored)
    assert second.namespace == space
    assert second.parent == 0
    assert second.pages.tolist() == [1, 2]
    assert second.tokens.tolist() == list(range(4, 12))
    assert isinstance(forked, Opened)
    assert (forked.sequence, forked.forked_from) == (fork.id, sequence.id)
    assert (forked.prompt_tokens, forked.cached_tokens) == (13, 12)
    assert isinstance(closed, Closed)
    assert (closed.sequence, closed.tokens, closed.stored_pages) == (sequence.id, 13, 3)
    assert isinstance(fork_closed, Closed)
    assert fork_closed.sequence == fork.id


@pytest.mark.parametrize(
    ("reason", "do"),
    [
        ("pressure", lambda cache: cache.open(range(1000, 1000 + 7 * SIZE))),
        ("asked", lambda cache: cache.evict(1)),
        ("cleared", lambda cache: cache.clear()),
        ("cleared", lambda cache: cache.clear("")),
    ],
)
def test_why_pages_went(cache: PagedCache, events: list[Event], reason: str, do: Any) -> None:
    run(cache, range(8))
    do(cache)
    (evicted,) = [event for event in events if isinstance(event, Evicted)]
    assert evicted.reason == reason
    assert set(evicted.pages.tolist()) <= {0, 1}
    assert 1 in evicted.pages, "tail first"


def test_dropping_ones_own_pages_is_told(cache: PagedCache, events: list[Event]) -> None:
    sequence = cache.open(range(8))
    sequence.publish()
    sequence.close(keep=False)
    assert kinds(events) == ["Opened", "Stored", "Evicted", "Closed"]
    evicted, closed = events[2:]
    assert isinstance(evicted, Evicted)
    assert evicted.reason == "dropped"
    assert sorted(evicted.pages) == [0, 1]
    assert isinstance(closed, Closed)
    assert closed.stored_pages == 0


def test_what_was_there_before_is_not_stored_again(cache: PagedCache, events: list[Event]) -> None:
    first, second = cache.open(range(9)), cache.open([*range(8), 50, 51, 52, 53])
    first.publish()
    del events[:]
    second.publish()
    (stored,) = events
    assert isinstance(stored, Stored)
    assert stored.parent == first.pages[1]
    assert stored.tokens.tolist() == [50, 51, 52, 53]
    run(cache, range(9))
    assert kinds(events) == ["Stored", "Opened", "Closed"]


class Mirror:
    """What a router keeps to know the cache from its events alone."""

    def __init__(self) -> None:
        self.pages: dict[int, tuple[Namespace, int, tuple[int, ...]]] = {}

    def __call__(self, event: Event) -> None:
        if isinstance(event, Stored):
            parent = event.parent
            for page, tokens in zip(event.pages.tolist(), event.tokens.reshape(-1, SIZE),
                                    strict=True):  # fmt: skip
                assert page not in self.pages, "stored twice without leaving"
                assert parent == -1 or parent in self.pages
                self.pages[page] = (event.namespace, parent, tuple(tokens.tolist()))
                parent = page
        elif isinstance(event, Evicted):
            for page in event.pages.tolist():
                del self.pages[page]
            parents = {parent for _, parent, _ in self.pages.values()}
            assert parents <= {-1, *self.pages}, "a page is left without what stands before it"

    def prefix(self, page: int) -> list[int]:
        _, parent, tokens = self.pages[page]
        return [*(self.prefix(parent) if parent >= 0 else []), *tokens]


def test_page_ids_name_stored_pages_until_they_are_evicted(cache: PagedCache) -> None:
    """A mirror that hears the events knows what is cached, through eviction and reuse of ids."""
    mirror = Mirror()
    cache.subscribe(mirror)
    rng = np.random.default_rng(5)
    running: list[Any] = []
    for step in range(600):
        prompt = rng.integers(0, 2, rng.integers(1, 17)).tolist()
        space = "ab"[int(rng.integers(2))]
        try:
            if step % 7 == 3 and running:
                running.pop().close(keep=bool(step % 2))
            elif step % 11 == 5 and running:
                running[-1].copies()
                running[-1].publish()
            elif step % 5 == 1:
                running.append(cache.open(prompt, space))
            else:
                run(cache, prompt, space)
        except OutOfPages:
            running.pop(0).close()
        if step % 97 == 0:
            cache.clear(space)
        found = cache.match(prompt, space)
        if len(found.pages):
            assert mirror.prefix(int(found.pages[-1])) == prompt[: len(found.pages) * SIZE]
        assert len(mirror.pages) == cache.stats().pages_cached
    stored = {page for name in "ab" for part in cache.runs(name) for page in part.pages.tolist()}
    assert set(mirror.pages) == stored
    assert cache.stats().hook_errors == 0
    cache.check()


# --- frozen ----------------------------------------------------------------------------------


def test_events_are_frozen_with_their_arrays(cache: PagedCache, events: list[Event]) -> None:
    run(cache, range(8))
    cache.clear()
    for event in events:
        for name in event.__dataclass_fields__:
            with pytest.raises(FrozenInstanceError):
                setattr(event, name, None)
            value = getattr(event, name)
            if isinstance(value, np.ndarray):
                with pytest.raises(ValueError, match="read-only"):
                    value[0] = 7
    assert {type(event) for event in events} == {Opened, Stored, Closed, Evicted}


def test_an_event_keeps_what_it_said(cache: PagedCache, events: list[Event]) -> None:
    sequence = cache.open(range(8))
    sequence.publish()
    stored = events[-1]
    assert isinstance(stored, Stored)
    sequence.truncate(2)
    sequence.append(range(100, 110))
    sequence.close(keep=False)
    cache.clear()
    run(cache, range(500, 530))
    assert stored.pages.tolist() == [0, 1]
    assert stored.tokens.tolist() == list(range(8))


# --- hooks -----------------------------------------------------------------------------------


def test_a_hook_that_raises_is_logged_and_counted_and_stays(
    cache: PagedCache, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[Event] = []

    def faulty(event: Event) -> None:
        calls.append(event)
        raise RuntimeError("the hook's own fault")

    cache.subscribe(faulty)
    after: list[Event] = []
    cache.subscribe(after.append)
    with caplog.at_level(logging.ERROR, "kvkeep.cache"):
        run(cache, range(8))
    assert kinds(calls) == kinds(after) == ["Opened", "Stored", "Closed"]
    assert cache.stats().hook_errors == 3
    assert [record.getMessage() for record in caplog.records] == [
        f"a cache hook failed on {kind}" for kind in ("Opened", "Stored", "Closed")
    ]
    assert all("the hook's own fault" in str(record.exc_info) for record in caplog.records)
    cache.check()


def test_what_is_no_fault_of_a_hook_is_not_swallowed(cache: PagedCache) -> None:
    def interrupted(_: Event) -> None:
        raise KeyboardInterrupt

    end = cache.subscribe(interrupted)
    with pytest.raises(KeyboardInterrupt):
        cache.open(range(8))
    end()
    cache.check()
    assert cache.open([1]).num_tokens == 1, "the lock was given back"


def test_the_events_behind_an_interrupt_are_told_later(cache: PagedCache) -> None:
    run(cache, range(32))

    def interrupted(event: Event) -> None:
        if isinstance(event, Evicted):
            raise KeyboardInterrupt

    end = cache.subscribe(interrupted)
    events: list[Event] = []
    cache.subscribe(events.append)
    with pytest.raises(KeyboardInterrupt):
        cache.open(range(100, 108))
    end()
    cache.open([1])
    assert [event.sequence for event in events if isinstance(event, Opened)] == [2, 3]


def test_a_hook_may_use_the_cache(cache: PagedCache) -> None:
    """It finds the cache complete; what it sets off is told after what it was told."""
    told: list[str] = []
    deepest = depth = 0

    def busy(event: Event) -> None:
        nonlocal depth, deepest
        depth += 1
        deepest = max(deepest, depth)
        told.append(type(event).__name__)
        cache.check()
        if isinstance(event, Stored) and event.namespace.tenant == "":
            assert cache.match(event.tokens).num_tokens == len(event.tokens)
            run(cache, event.tokens, "copy")
            cache.evict(1)
        depth -= 1

    cache.subscribe(busy)
    run(cache, range(8))
    assert deepest == 1, "a hook is not called while it is running"
    assert told == ["Opened", "Stored", "Opened", "Stored", "Closed", "Evicted", "Closed"]
    assert cache.stats().hook_errors == 0


def test_another_thread_waits_for_a_hook_and_does_not_deadlock(cache: PagedCache) -> None:
    waiting = threading.Thread(target=lambda: run(cache, range(100, 108)), daemon=True)

    def hook(event: Event) -> None:
        if isinstance(event, Stored) and not waiting.ident:
            waiting.start()
            assert cache.stats().sequences == 1

    cache.subscribe(hook)
    run(cache, range(8))
    waiting.join(timeout=60)
    assert not waiting.is_alive()
    assert cache.match(range(100, 108)).num_tokens == 8
    assert cache.stats().hook_errors == 0


def test_a_subscription_ends(cache: PagedCache) -> None:
    seen: list[Event] = []
    end = cache.subscribe(seen.append)
    cache.open([1])
    end()
    cache.open([2])
    end()  # twice is no harm
    assert kinds(seen) == ["Opened"]


@pytest.mark.parametrize("wrong", [None, "print", 5])
def test_what_cannot_be_called_is_no_hook(cache: PagedCache, wrong: Any) -> None:
    with pytest.raises(InvalidValue, match="a hook is called with each event"):
        cache.subscribe(wrong)
