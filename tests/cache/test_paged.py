"""`PagedCache` and its sequences, feature by feature; the state machine beside this mixes them."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kvkeep import (
    CacheStats,
    InvalidValue,
    OutOfPages,
    PageCopy,
    PagedCache,
)
from kvkeep.core.eviction import LRU, POLICIES
from kvkeep.core.prefix import INDICES

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvkeep import Sequence

SIZE = 4


@pytest.fixture(params=INDICES)
def cache(request: pytest.FixtureRequest) -> PagedCache:
    return PagedCache(16, SIZE, prefix=request.param)


@pytest.fixture
def radix() -> PagedCache:
    return PagedCache(16, SIZE)


def run(cache: PagedCache, tokens: Any, namespace: Any = "", **how: Any) -> None:
    """One request, computed and published."""
    with cache.open(tokens, namespace, **how) as sequence:
        sequence.copies()
        sequence.publish()


def seen(cache: PagedCache) -> tuple[Any, ...]:
    cache.check()
    return (
        cache.stats(), cache.namespaces(),
        [list(map(str, cache.runs(space))) for space in cache.namespaces()],
    )  # fmt: skip


# --- making one ------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [0, -1, True, 1.5, "16", None, [16]])
@pytest.mark.parametrize("argument", ["num_pages", "page_size"])
def test_sizes_are_whole_numbers(argument: str, wrong: Any) -> None:
    arguments = {"num_pages": 16, "page_size": 16, argument: wrong}
    with pytest.raises(InvalidValue, match=f"{argument} is "):
        PagedCache(**arguments)


def test_sizes_that_are_possible() -> None:
    assert PagedCache(1, 1).open([5]).pages.tolist() == [0]
    assert PagedCache(np.int64(4), np.uint8(2)).page_size == 2  # type: ignore[arg-type]
    assert PagedCache(1, 65_536).open(range(65_536)).num_tokens == 65_536
    with pytest.raises(InvalidValue, match="page_size is 65537; a whole number in 1 … 65536"):
        PagedCache(1, 65_537)


@pytest.mark.parametrize("wrong", ["x", "", None, 3, "Radix"])
def test_a_wrong_index_is_told_the_right_ones(wrong: Any) -> None:
    with pytest.raises(InvalidValue, match=r"no prefix index .*; there are radix, chain"):
        PagedCache(16, prefix=wrong)


@pytest.mark.parametrize("wrong", ["x", "", None, 3, LRU])
def test_a_wrong_policy_is_told_the_right_ones(wrong: Any) -> None:
    with pytest.raises(InvalidValue, match=r"no eviction policy .*; there are lru, priority"):
        PagedCache(16, eviction=wrong)


@pytest.mark.parametrize("wrong", [-1, 16, 17, 1.0, True, "4"])
def test_the_budget_of_hard_pins_leaves_room(wrong: Any) -> None:
    with pytest.raises(InvalidValue, match="hard_pin_pages is"):
        PagedCache(16, hard_pin_pages=wrong)
    PagedCache(16, hard_pin_pages=15)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("prefix", INDICES)
def test_every_policy_by_name(prefix: str, name: str) -> None:
    cache = PagedCache(4, SIZE, prefix=prefix, eviction=name)
    for first in range(20):
        run(cache, range(first * 100, first * 100 + 11))
        cache.check()
    stats = cache.stats()
    assert stats.pages_free == 1, "a request needs three, publishes two, and evicts no more"
    assert stats.evicted_pages == 2 * 20 - 3
    assert f", {name}: " in repr(cache)


def test_a_policy_by_object_serves_one_cache() -> None:
    mine = LRU()
    cache = PagedCache(4, SIZE, eviction=mine)
    run(cache, range(8))
    assert len(mine) == 1
    assert repr(mine) == "<lru eviction, 1 candidates>"
    with pytest.raises(InvalidValue, match="serves another cache"):
        PagedCache(4, SIZE, eviction=mine)


def test_a_policy_is_called_for_each_method_that_it_overrides() -> None:
    class Watching(LRU):
        def __init__(self) -> None:
            super().__init__()
            self.calls: list[str] = []

        def used(self, node: Any, owner: Any) -> None:
            assert node.size, "nothing of a root is reused"
            self.calls.append("used")

        def closed(self, *_: Any) -> None:
            self.calls.append("closed")

        def pop(self) -> Any:
            self.calls.append("pop")
            return super().pop()

    mine = Watching()
    cache = PagedCache(4, SIZE, eviction=mine)
    run(cache, range(9))
    assert mine.calls == ["closed"]
    cache.evict(1)
    assert mine.calls == ["closed", "pop"]
    run(cache, range(9))
    assert mine.calls == ["closed", "pop", "used", "closed"]


# --- opening ---------------------------------------------------------------------------------


def test_the_callers_array_is_not_the_caches() -> None:
    cache = PagedCache(8, SIZE)
    prompt = np.arange(9, dtype=np.int32)
    sequence = cache.open(prompt)
    prompt[:] = 99
    sequence.publish()
    assert sequence.tokens.tolist() == list(range(9))
    assert cache.match(range(9)).num_tokens == 8


@pytest.mark.parametrize(
    "wrong", [[], [-1], [2**31], [[1, 2]], "text", [1.5], [True], None, {1: 2}], ids=repr
)
def test_what_is_no_prompt_is_refused(cache: PagedCache, wrong: Any) -> None:
    run(cache, range(9))
    before = seen(cache)
    with pytest.raises(InvalidValue):
        cache.open(wrong)
    assert seen(cache) == before


@pytest.mark.parametrize("wrong", ["high", 1.5, 0.0, None, True])
@pytest.mark.parametrize("eviction", ["lru", "priority"])
def test_a_priority_is_a_whole_number(eviction: str, wrong: Any) -> None:
    cache = PagedCache(4, SIZE, eviction=eviction)
    with pytest.raises(InvalidValue, match=r"priority is .*a whole number"):
        cache.open([1], priority=wrong)
    assert cache.stats() == PagedCache(4, SIZE).stats()


def test_a_match_says_where(radix: PagedCache) -> None:
    run(radix, range(12))
    found = radix.match([0, 1, 2, 3, 4, 5, 99])
    assert (found.num_tokens, found.partial_page, found.partial_tokens) == (6, 1, 2)
    assert found.pages.tolist() == [0]
    nothing = radix.match([99])
    assert (nothing.num_tokens, nothing.pages.tolist(), nothing.partial_page) == (0, [], -1)
    assert radix.match([]).num_tokens == 0
    assert PagedCache(4).match([1]).num_tokens == 0


# --- memory ----------------------------------------------------------------------------------


def test_running_out_changes_nothing(cache: PagedCache) -> None:
    run(cache, range(100, 112))
    held = cache.open(range(30))
    before = seen(cache)
    with pytest.raises(OutOfPages) as caught:
        cache.open([*range(100, 112), *range(200, 231)])
    assert (caught.value.needed, caught.value.available, caught.value.total) == (8, 5, 16)
    after = seen(cache)
    assert after[1:] == before[1:]
    changed = {f.name for f in fields(CacheStats)
               if getattr(after[0], f.name) != getattr(before[0], f.name)}  # fmt: skip
    assert changed == {"out_of_pages"}
    held.close()
    assert cache.open([*range(100, 112), *range(200, 231)]).num_cached == 12


def test_a_partial_hit_gives_way_when_there_is_no_room_for_it(radix: PagedCache) -> None:
    """Fifteen pages are wanted besides the matching one: that one has to go, too."""
    run(radix, range(8))
    sequence = radix.open([0, 1, 2, 3, 4, 5, *range(100, 158)])  # 64 tokens: all 16 pages
    assert sequence.num_cached == 4
    assert sequence.copies() == []
    assert radix.stats().partial_hits_given_up == 1
    assert radix.stats().partial_hits == 0
    radix.check()


@pytest.mark.parametrize("wrong", [-1, 1.5, "1", True, None])
def test_an_eviction_is_of_a_whole_number_of_pages(cache: PagedCache, wrong: Any) -> None:
    with pytest.raises(InvalidValue, match="num_pages is"):
        cache.evict(wrong)


# --- closing ---------------------------------------------------------------------------------


def test_closing_without_keeping_forgets_what_it_published_itself(cache: PagedCache) -> None:
    run(cache, range(8))
    sequence = cache.open(range(17))
    sequence.publish()
    assert cache.match(range(17)).num_tokens == 16
    sequence.close(keep=False)
    assert cache.match(range(17)).num_tokens == 8
    cache.check()


# --- appending, forking, cutting -------------------------------------------------------------


@pytest.mark.parametrize("wrong", [-1, True, 1.5, None, "7", [1.5], [[7]], [-1], {7}], ids=repr)
def test_what_is_no_token_is_not_appended(cache: PagedCache, wrong: Any) -> None:
    sequence = cache.open(range(8))
    before = seen(cache), repr(sequence)
    with pytest.raises(InvalidValue):
        sequence.append(wrong)
    assert (seen(cache), repr(sequence)) == before


def test_a_fork_shares_copies_that_were_not_made(radix: PagedCache) -> None:
    run(radix, range(8))
    parent = radix.open([0, 1, 2, 3, 4, 5, 99])
    fork = parent.fork()
    assert fork.num_cached == 6
    assert fork.copies() == [PageCopy(1, int(parent.pages[1]), 2)]
    assert parent.copies() == []
    radix.check()


def test_a_lone_request_can_have_the_whole_pool(radix: PagedCache) -> None:
    """What it copied from does not hold the rest of a long run that nobody needs."""
    run(radix, range(60))
    sequence = radix.open([0, 99])
    assert sequence.copies() == [PageCopy(0, int(sequence.pages[0]), 1)]
    sequence.append([99] * (14 * SIZE))
    assert sequence.num_tokens == 2 + 14 * SIZE
    sequence.publish(0)
    sequence.append([99] * (2 * SIZE - 2))
    assert len(sequence.pages) == 16
    radix.check()


@pytest.mark.parametrize("wrong", [-1, 9, 4.0, "4", None, True])
def test_a_length_to_keep_is_one_of_the_sequence(cache: PagedCache, wrong: Any) -> None:
    """Also not a float that is whole: it went halfway before it failed."""
    run(cache, range(4))
    sequence = cache.open(range(8))
    sequence.copies()
    sequence.publish()
    before = seen(cache), repr(sequence)
    with pytest.raises(InvalidValue, match="the length to keep, in tokens, is"):
        sequence.truncate(wrong)
    assert (seen(cache), repr(sequence)) == before


def test_rejected_drafts(cache: PagedCache) -> None:
    """Speculative decoding: append drafts, keep those that were right, publish only those."""
    sequence = cache.open(range(6))
    expected = list(range(6))
    for step in range(8):
        drafts = [100 + step, 200, 300, 400, 500]
        sequence.append(drafts)
        accepted = step % 5
        sequence.truncate(sequence.num_tokens - len(drafts) + accepted)
        expected += drafts[:accepted]
        assert sequence.tokens.tolist() == expected
        assert sequence.copies() == []
        sequence.publish()
        cache.check()
    assert cache.match(expected).num_tokens == len(expected) // SIZE * SIZE
    assert cache.stats().pages_used == -(-len(expected) // SIZE)


def test_num_cached_never_exceeds_what_is_left(radix: PagedCache) -> None:
    run(radix, range(12))
    sequence = radix.open(range(12))
    assert sequence.num_cached == 11
    sequence.truncate(6)
    assert sequence.num_cached == 6


# --- arrays ----------------------------------------------------------------------------------


def test_returned_arrays_cannot_corrupt_the_cache(cache: PagedCache) -> None:
    sequence = cache.open(range(10))
    sequence.publish()
    for array in (sequence.pages, sequence.tokens):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 7
        with pytest.raises(ValueError, match="read-only"):
            array.sort()
    for run_ in cache.runs():
        for array in (run_.pages, run_.tokens):
            if array is not None and array.flags.writeable:
                array[:] = 7
    found = cache.match(range(10))
    if found.pages.flags.writeable:
        found.pages[:] = 7
    cache.namespaces().clear()
    cache.check()
    assert cache.match(range(10)).pages.tolist() == [0, 1]


# --- statistics ------------------------------------------------------------------------------


def test_every_statistic_means_something() -> None:
    """A story in which each of them moves, and by how much."""
    cache = PagedCache(16, SIZE, hard_pin_pages=4)
    moved: set[str] = set()
    last = cache.stats().as_dict()

    def expect(step: Callable[[], Any], **changes: float) -> Any:
        """Take a step; exactly these fields change, by so much."""
        nonlocal last
        result = step()
        now = cache.stats().as_dict()
        changed = {name: now[name] - last[name] for name in now if now[name] != last[name]}
        changed.pop("hit_rate", None)
        assert changed == changes
        moved.update(changed)
        last = now
        cache.check()
        return result

    first: Sequence = expect(
        lambda: cache.open(range(10)),
        sequences=1, pages_used=3, pages_free=-3, references=3, namespaces=1, opened=1,
        prompt_tokens=10,
    )  # fmt: skip
    expect(first.publish, pages_cached=2, pages_protected=2, references=2, stored_pages=2)
    second: Sequence = expect(
        lambda: cache.open([0, 1, 2, 3, 4, 5, 60]),
        sequences=1, opened=1, prompt_tokens=7, hit_tokens=6, partial_hits=1, copies=1,
        pages_used=1, pages_free=-1, references=3,  # page 0, its own, and the source of the copy
        pages_shared=1, shares=1,
    )  # fmt: skip
    expect(second.copies)
    expect(second.publish, references=-1)  # the copy was made: its source is let go of
    twin: Sequence = expect(
        second.fork, sequences=1, forked=1, references=2, pages_shared=1, shares=2
    )
    expect(
        lambda: twin.append(61),
        copies=1, pages_used=1, pages_free=-1, references=1, pages_shared=-1, shares=-1,
    )  # fmt: skip
    expect(twin.copies)
    expect(twin.publish, pages_cached=1, pages_protected=1, stored_pages=1)
    expect(lambda: second.append(61))
    expect(
        second.publish, duplicate_pages=1, pages_used=-1, pages_free=1, pages_shared=1,
        shares=1,
    )  # fmt: skip
    expect(second.close, sequences=-1, closed=1, references=-2, pages_shared=-1, shares=-2)
    expect(
        twin.close,
        sequences=-1, closed=1, references=-2, pages_shared=-1, shares=-1,
        pages_protected=-1, pages_evictable=1,
    )  # fmt: skip
    expect(
        first.close,
        sequences=-1, closed=1, references=-3, pages_used=-1, pages_free=1,
        pages_protected=-2, pages_evictable=2,
    )  # fmt: skip
    assert last["pages_used"] == last["references"] == last["pages_cached"] == 3
    soft = expect(lambda: cache.pin([0, 1, 2, 3, 4, 5, 60, 61]), pins=1, pinned_pages=2)
    hard = expect(
        lambda: cache.pin(range(4), hard=True),
        pins=1, hard_pinned_pages=1, pages_evictable=-1, pages_protected=1,
    )  # fmt: skip
    expect(
        lambda: cache.evict(9),
        evictions=1, evicted_pages=2, pages_evictable=-2, pages_cached=-2, pages_used=-2,
        pages_free=2, references=-2, pinned_pages=-1,
    )  # fmt: skip
    assert soft.num_tokens == 4, "it gave way tail first: what the hard pin holds is left"
    with pytest.raises(OutOfPages):
        cache.open(range(500, 600))
    expect(lambda: None, out_of_pages=1)
    expect(
        lambda: cache.unpin(hard),
        pins=-1, hard_pinned_pages=-1, pages_evictable=1, pages_protected=-1,
    )  # fmt: skip
    big: Sequence = expect(
        lambda: cache.open([0, 1, *range(500, 562)]),  # all 16 pages, so not the partial one
        sequences=1, opened=1, prompt_tokens=64, partial_hits_given_up=1, pages_cached=-1,
        pages_evictable=-1, pages_used=15, pages_free=-15, references=15, evictions=1,
        evicted_pages=1, pins=-1, pinned_pages=-1, pins_broken=1,
    )  # fmt: skip
    assert not soft.active
    big.close()
    last = cache.stats().as_dict()
    told = cache.session("told")
    with expect(
        lambda: cache.open(range(9), session="told"),
        sequences=1, opened=1, prompt_tokens=9, sessions=1, pages_used=3, pages_free=-3,
        references=3, namespaces=1,
    ) as sequence:  # fmt: skip
        sequence.publish()
    last = cache.stats().as_dict()
    expect(lambda: told.suspend(60), pages_awaited=2)
    expect(told.close, sessions=-1, pages_awaited=-2, pages_dead=2)
    cache.clear()
    cache.subscribe(lambda _: 1 // 0)
    cache.open([1]).close()
    assert cache.stats().hook_errors == 2
    moved |= {"hook_errors"}
    missing = {field.name for field in fields(CacheStats)} - moved - {"groups", "what_if"}
    assert missing == {"pages_total", "pins_expired"}, "one never moves; the other is test_pins'"


def test_check_notices_what_is_wrong() -> None:
    def broken(change: Callable[[PagedCache, Sequence], object]) -> None:
        cache = PagedCache(8, SIZE)
        sequence = cache.open(range(10))
        sequence.publish()
        cache.check()
        change(cache, sequence)
        with pytest.raises(AssertionError):
            cache.check()

    broken(lambda cache, _: cache.pool.retain_page(0))
    broken(lambda cache, _: cache.pool.take(1))
    broken(lambda cache, _: setattr(cache.tree, "num_pages", 9))
    broken(lambda cache, _: setattr(cache.tree, "num_evictable", 1))
    broken(lambda _, sequence: sequence._table.values.__setitem__(0, 1))
    broken(lambda _, sequence: sequence._table.cut(2))
    broken(lambda _, sequence: setattr(sequence, "_shared", 1))
    broken(lambda cache, sequence: cache.sequences.pop(sequence.id))
