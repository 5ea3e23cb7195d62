"""What an operation costs does not depend on forks, pins, or what lies before it on its path.

Costs are counted in lines of Python that run, which any loop adds to, and not in seconds. The
figures in seconds come from `benchmarks/growth.py`.
"""

from __future__ import annotations

import sys
import tracemalloc
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kvkeep import PagedCache, Sequence
from kvkeep.core.eviction import POLICIES
from kvkeep.core.groups import GroupLayout, StateSpec, WindowSpec

if TYPE_CHECKING:
    from collections.abc import Callable

SIZE = 4
FEW, MANY = 20, 500
SLACK = 1.2
"""A line more here or there: what is taken off a list, or found at its other end."""
NOISE = 12 << 10
"""Bytes that an eviction may take at any time; a copy of `MANY` entries takes more."""


def steps(do: Callable[[], object]) -> int:
    """Lines of Python that run in ``do``."""
    count = 0

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        do()
    finally:
        sys.settrace(before)
    return count


def store(cache: PagedCache, first: int) -> list[int]:
    tokens = [first, *range(1, 2 * SIZE)]
    with cache.open(tokens) as sequence:
        sequence.copies()
        sequence.publish()
    return tokens


def flat(cost: Callable[[int], int]) -> None:
    few, many = cost(FEW), cost(MANY)
    assert many <= few * SLACK, f"{few} steps with {FEW}, {many} with {MANY}"


# --- forks -----------------------------------------------------------------------------------


def forks(count: int, prompt: int) -> list[Sequence]:
    """A branch for each of ``count`` beams, and what they come from."""
    cache = PagedCache(4 * count + 64, SIZE)
    first = cache.open(range(prompt))
    first.publish()
    return [first, *(first.fork() for _ in range(count))]


def step(fork: Sequence, tokens: list[int]) -> int:
    def run() -> None:
        fork.append(tokens)
        fork.copies()
        fork.publish()

    return steps(run)


@pytest.mark.parametrize("prompt", [4 * SIZE, 4 * SIZE + 2], ids=["pages", "shared last page"])
@pytest.mark.parametrize("which", [1, -1], ids=["first", "last"])
def test_a_fork_goes_on_whatever_others_there_are(prompt: int, which: int) -> None:
    def cost(count: int) -> int:
        running = forks(count, prompt)
        if which == -1:
            for i, fork in enumerate(running[:-1]):  # all others have parted already
                step(fork, [i] * SIZE)
        return step(running[which], [9999] * SIZE)

    flat(cost)


def test_copies_that_were_not_taken_do_not_add_up() -> None:
    """Every fork but one has parted from the last page, and no copy was taken yet."""

    def cost(count: int) -> int:
        running = forks(count, 4 * SIZE + 2)
        for fork in running[:-1]:
            fork.append(1)

        def run() -> None:
            running[-1].append(1)
            running[1].copies()
            running[1].publish()
            running[1].truncate(1)

        return steps(run)

    flat(cost)


# --- pins ------------------------------------------------------------------------------------


@pytest.mark.parametrize("hard", [False, True])
def test_a_pin_looks_at_no_other_pin(hard: bool) -> None:
    def cost(count: int) -> int:
        cache = PagedCache(8 * count + 64, SIZE)
        for i in range(count):
            cache.pin(store(cache, 1000 + i), hard=hard)
        tokens = store(cache, 0)

        def run() -> None:
            pin = cache.pin(tokens, hard=hard)
            assert pin.num_tokens == len(tokens)
            cache.unpin(pin)

        return steps(run)

    flat(cost)


@pytest.mark.parametrize("prefix", ["radix", "chain"])
def test_a_request_that_breaks_a_pin_looks_at_no_other(prefix: str) -> None:
    def cost(count: int) -> int:
        cache = PagedCache(2 * count, SIZE, prefix=prefix)
        for i in range(count):
            cache.pin(store(cache, 1000 + i), ttl=None if i % 2 else 1e9)
        before = cache.stats()
        taken = steps(lambda: [store(cache, first) for first in (1, 2, 3)])
        after = cache.stats()
        assert after.pins_broken > before.pins_broken
        assert after.pins < before.pins
        return taken

    flat(cost)


@pytest.mark.parametrize("look", ["stats", "num_tokens"])
def test_looking_at_pins_looks_at_no_other(look: str) -> None:
    def cost(count: int) -> int:
        cache = PagedCache(8 * count, SIZE)
        for i in range(count):
            cache.pin(store(cache, 1000 + i), hard=i % 2 == 0)
        cache.clear()  # but for the hard pins
        for i in range(count):
            cache.pin(store(cache, 1000 + i))
        pin = cache.pin(store(cache, 0))
        if look == "stats":
            return steps(cache.stats)
        return steps(lambda: pin.num_tokens)

    flat(cost)


# --- eviction --------------------------------------------------------------------------------


@pytest.mark.parametrize("alike", [True, False])
def test_evicting_does_not_depend_on_what_is_stored_or_how_it_begins(alike: bool) -> None:
    def cost(count: int) -> int:
        cache = PagedCache(4 * count, SIZE)
        for i in range(count):
            with cache.open([0 if alike else i + 1, *range(i, i + 2 * SIZE)]) as sequence:
                sequence.copies()
                sequence.publish()
        evict = steps(lambda: cache.evict(20))
        cache.check()
        return evict

    flat(cost)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_evicting_copies_nothing_of_runs_of_one_age(policy: str) -> None:
    def cost(count: int) -> int:
        cache = PagedCache(4 * count, SIZE, eviction=policy, clock=lambda: 0.0)
        for i in range(count):
            store(cache, 1000 + i)
        cache.evict(1)
        tracemalloc.start()
        try:
            cache.evict(2)
            return max(NOISE, tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()

    flat(cost)


# --- groups of layers ------------------------------------------------------------------------

LAYOUTS = {
    "a window": GroupLayout(SIZE, (WindowSpec(16),)),
    "chunks": GroupLayout(SIZE, (WindowSpec(32, 2, chunked=True),)),
    "a state": GroupLayout(SIZE, (), StateSpec(1)),
    "both": GroupLayout(SIZE, (WindowSpec(16),), StateSpec(1)),
}


def compute(cache: PagedCache, tokens: object) -> Sequence:
    """A request of which all is computed and published, in passes that end at its stops."""
    sequence = cache.open(tokens)  # type: ignore[arg-type]
    sequence.copies()
    groups = sequence.groups
    assert groups is not None
    groups.copies()
    while groups.position < sequence.num_tokens:
        stops = [stop for stop in groups.stops if stop > groups.position]
        groups.reach(min([sequence.num_tokens, *stops]))
        if groups.position in stops:
            groups.checkpoint(groups.position)
    sequence.publish()
    return sequence


@pytest.mark.parametrize("branches", [True, False], ids=["many runs", "one run"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("step", ["match", "open and close", "fork and close", "go back"])
def test_a_request_behind_a_long_path(step: str, layout: GroupLayout, branches: bool) -> None:
    def cost(count: int) -> int:
        cache = PagedCache(30 * count + 200, layout)
        path = list(range(SIZE * count + 2 * SIZE + 1))
        compute(cache, path).close()
        for at in range(count if branches else 0, 0, -1):
            compute(cache, [*path[: SIZE * at], *[-at % 2**30] * (SIZE + 1)]).close()
        for _ in range(2):  # the second one finds its path joined
            assert cache.match(path).num_tokens >= SIZE * count
            compute(cache, path).close()
        sequence = compute(cache, path)

        def run() -> None:
            if step == "match":
                cache.match(path)
            elif step == "open and close":
                cache.open(path).close()
            elif step == "fork and close":
                sequence.fork().close()
            else:
                sequence.truncate(len(path) - 1)

        lines = steps(run)
        cache.check()
        return lines

    flat(cost)


def test_a_fork_takes_no_rows_that_it_does_not_read() -> None:
    """Those of the pass before are still with the sequence, which has to publish them."""
    cache = PagedCache(4000, LAYOUTS["a window"])
    sequence = compute(cache, range(4000))
    before = cache.pool.references.copy()
    fork = sequence.fork()
    assert np.count_nonzero(cache.pool.references != before) <= 16 // SIZE + 1
    fork.close()
    cache.check()
