"""`PagedCache` and its sequences, feature by feature; the state machine beside this mixes them."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kvkeep import (
    CacheStats,
    InvalidValue,
    Namespace,
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


def test_in_words(cache: PagedCache) -> None:
    run(cache, range(9))
    sequence = cache.open(range(8))
    name = "radix" if "radix" in repr(cache) else "chain"
    free = 16 - 3
    evictable = 1 if name == "chain" else 0
    assert repr(cache) == (
        f"<PagedCache 16 pages of 4 tokens, {name}, lru: {free} free, {evictable} evictable>"
    )
    sequence.append([1])
    state = "ready" if name == "chain" else "copying"
    assert repr(sequence) == f"<Sequence 2, {state}, 9 tokens, 3 pages, 1 of them published>"


# --- opening ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "form",
    [list, tuple, np.array, lambda t: np.array(t, np.int32), lambda t: np.array(t, ">u8"),
     lambda t: np.repeat(np.array(t, np.int16), 2)[::2]],
)  # fmt: skip
def test_tokens_in_every_form_are_the_same_prompt(
    cache: PagedCache, form: Callable[[list[int]], Any]
) -> None:
    tokens = [3, 1, 4, 1, 5, 9, 2, 6, 5]
    run(cache, tokens)
    sequence = cache.open(form(tokens))
    assert sequence.num_cached == 8
    assert sequence.tokens.tolist() == tokens
    assert sequence.tokens.dtype == sequence.pages.dtype == np.int32
    sequence.append(form([7, 8]))
    assert sequence.tokens.tolist() == [*tokens, 7, 8]
    assert cache.match(form(tokens)).num_tokens == 8


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


@pytest.mark.parametrize("wrong", [None, 3, b"a"])
def test_what_is_no_namespace_is_refused(cache: PagedCache, wrong: Any) -> None:
    run(cache, range(9))
    before = seen(cache)
    for step in (cache.open, cache.match, cache.pin):
        with pytest.raises(InvalidValue, match="a namespace is"):
            step([1], wrong)
    with pytest.raises(InvalidValue, match="a namespace is"):
        cache.runs(wrong)
    if wrong is not None:  # None is all of them
        with pytest.raises(InvalidValue, match="a namespace is"):
            cache.clear(wrong)
    assert seen(cache) == before


@pytest.mark.parametrize("wrong", ["high", 1.5, 0.0, None, True])
@pytest.mark.parametrize("eviction", ["lru", "priority"])
def test_a_priority_is_a_whole_number(eviction: str, wrong: Any) -> None:
    cache = PagedCache(4, SIZE, eviction=eviction)
    with pytest.raises(InvalidValue, match=r"priority is .*a whole number"):
        cache.open([1], priority=wrong)
    assert cache.stats() == PagedCache(4, SIZE).stats()


@pytest.mark.parametrize("length", range(1, 14))
def test_the_last_token_is_always_left_to_compute(cache: PagedCache, length: int) -> None:
    run(cache, range(12))
    exact = "radix" in repr(cache)
    with cache.open(range(length)) as sequence:
        whole = min(length - 1, 12)
        assert sequence.num_cached == (whole if exact else whole // SIZE * SIZE)
        assert sequence.num_cached < sequence.num_tokens == length
        assert len(sequence.pages) == -(-length // SIZE)
        partial = sequence.num_cached % SIZE
        shared = sequence.num_cached // SIZE
        copies = sequence.copies()
        if partial:
            assert copies == [PageCopy(shared, int(sequence.pages[shared]), partial)]
        else:
            assert copies == []
        cache.check()
    assert cache.match(range(length)).num_tokens == (
        min(length, 12) if exact else min(length, 12) // SIZE * SIZE
    )


def test_a_match_says_where(radix: PagedCache) -> None:
    run(radix, range(12))
    found = radix.match([0, 1, 2, 3, 4, 5, 99])
    assert (found.num_tokens, found.partial_page, found.partial_tokens) == (6, 1, 2)
    assert found.pages.tolist() == [0]
    nothing = radix.match([99])
    assert (nothing.num_tokens, nothing.pages.tolist(), nothing.partial_page) == (0, [], -1)
    assert radix.match([]).num_tokens == 0
    assert PagedCache(4).match([1]).num_tokens == 0


def test_namespaces_share_nothing(cache: PagedCache) -> None:
    spaces: list[Any] = [
        "", "a", "b", Namespace(model="a"), Namespace(lora="a"), Namespace(tenant="a", model="a"),
    ]  # fmt: skip
    for number, space in enumerate(spaces, 1):
        assert cache.match(range(8), space).num_tokens == 0
        run(cache, range(8), space)
        assert cache.stats().pages_cached == 2 * number
    tables = [cache.match(range(8), space).pages.tolist() for space in spaces]
    assert len({page for table in tables for page in table}) == 2 * len(spaces)
    assert cache.match(range(8), Namespace(tenant="a")).pages.tolist() == tables[1]
    assert cache.namespaces() == {
        (Namespace(tenant=space) if isinstance(space, str) else space): 2 for space in spaces
    }
    assert cache.stats().namespaces == len(spaces)
    assert cache.clear("a") == 2
    assert [cache.match(range(8), space).num_tokens for space in spaces] == [8, 0, 8, 8, 8, 8]
    assert cache.stats().namespaces == len(spaces) - 1
    cache.check()


def test_a_namespace_leaves_nothing_behind(cache: PagedCache) -> None:
    for number in range(50):
        cache.open(range(8), f"tenant {number}").close()
        cache.match(range(8), f"other {number}")
    assert cache.namespaces() == {}
    assert cache.stats().namespaces == 0


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


def test_a_hit_is_not_evicted_to_make_room_for_its_own_request(cache: PagedCache) -> None:
    run(cache, range(32))  # the oldest
    run(cache, range(1000, 1032))
    sequence = cache.open([*range(32), *range(500, 528)])
    assert sequence.num_cached == 32
    assert cache.match(range(1000, 1032)).num_tokens == 4
    cache.check()


def test_eviction_takes_what_is_needed_and_no_more(cache: PagedCache) -> None:
    run(cache, range(64))
    for count in (1, 3):
        sequence = cache.open(range(1000, 1000 + count * SIZE))
        sequence.close()
    assert cache.stats().evicted_pages == 3, "the second found a free page"
    assert cache.match(range(64)).num_tokens == 13 * SIZE
    assert cache.evict(2) == 2
    assert cache.match(range(64)).num_tokens == 11 * SIZE
    assert cache.evict(100) == 11
    assert cache.evict(1) == 0
    assert cache.stats().pages_free == 16


@pytest.mark.parametrize("wrong", [-1, 1.5, "1", True, None])
def test_an_eviction_is_of_a_whole_number_of_pages(cache: PagedCache, wrong: Any) -> None:
    with pytest.raises(InvalidValue, match="num_pages is"):
        cache.evict(wrong)


def test_running_requests_keep_their_pages(cache: PagedCache) -> None:
    sequence = cache.open(range(32))
    sequence.publish(20)
    pages = sequence.pages.tolist()
    assert cache.clear() == cache.clear("") == cache.evict(16) == 0
    assert cache.match(range(32)).pages.tolist() == pages[:5]
    sequence.close()
    assert cache.clear("another") == 0
    assert cache.clear() == 5
    assert cache.stats().pages_free == 16


def test_priorities_decide_with_the_priority_policy() -> None:
    cache = PagedCache(6, SIZE, eviction="priority")
    run(cache, range(8), priority=np.int64(5))
    run(cache, range(100, 108), priority=-1)
    run(cache, range(200, 208))
    cache.evict(3)
    assert [cache.match(range(n, n + 8)).num_tokens for n in (0, 100, 200)] == [8, 0, 4]
    cache.evict(2)
    assert [cache.match(range(n, n + 8)).num_tokens for n in (0, 100, 200)] == [4, 0, 0]
    cache.check()


def test_a_prefix_has_the_priority_of_the_best_that_went_through_it() -> None:
    cache = PagedCache(8, SIZE, eviction="priority")
    run(cache, range(4), priority=0)
    run(cache, range(8), priority=9)
    run(cache, range(100, 108), priority=3)
    cache.evict(3)
    assert cache.match(range(8)).num_tokens == 4
    assert cache.match(range(100, 108)).num_tokens == 0


def test_a_fork_has_the_priority_of_its_parent() -> None:
    cache = PagedCache(8, SIZE, eviction="priority")
    with cache.open(range(4), priority=7) as parent, parent.fork() as fork:
        assert fork.priority == 7


# --- publishing ------------------------------------------------------------------------------


def test_publishing_in_parts(cache: PagedCache) -> None:
    sequence = cache.open(range(18))
    published = [(n, sequence.publish(n)) for n in (0, 3, 4, 9, 5, 16)]
    assert published == [(0, 0), (3, 0), (4, 4), (9, 8), (5, 8), (16, 16)]
    assert sequence.publish() == 16, "the page that is not full is not reusable"
    assert cache.match(range(18)).num_tokens == 16
    assert cache.open(range(18)).num_cached == 16, "while the first still runs"
    assert sequence.num_published == 16
    assert cache.stats().stored_pages == 4
    cache.check()


@pytest.mark.parametrize("wrong", [-1, 9, 8.0, "8", True])
def test_published_tokens_are_counted(cache: PagedCache, wrong: Any) -> None:
    sequence = cache.open(range(8))
    before = seen(cache), repr(sequence)
    with pytest.raises(InvalidValue, match="the number of computed tokens is"):
        sequence.publish(wrong)
    assert (seen(cache), repr(sequence)) == before


def test_what_was_not_published_is_not_cached(cache: PagedCache) -> None:
    cache.open(range(20)).close()
    sequence = cache.open(range(20))
    assert sequence.num_cached == 0
    sequence.publish(8)
    sequence.close()
    assert cache.match(range(20)).num_tokens == 8
    assert cache.stats().pages_used == 2


def test_two_that_compute_the_same_at_once_end_with_one_copy(cache: PagedCache) -> None:
    first, second = cache.open(range(18)), cache.open([*range(17), 99])
    theirs = second.pages.tolist()
    assert set(first.pages.tolist()).isdisjoint(theirs)
    first.publish()
    second.publish()
    assert second.pages.tolist()[:4] == first.pages.tolist()[:4]
    assert second.pages.tolist()[4:] == theirs[4:], "its own tail stays its own"
    stats = cache.stats()
    assert stats.pages_used == 4 + 2
    assert (stats.stored_pages, stats.duplicate_pages) == (4, 4)
    assert (stats.pages_shared, stats.shares) == (4, 4)
    first.close()
    second.close()
    assert cache.stats().pages_used == 4
    cache.check()


def test_the_second_may_know_more_than_the_first(cache: PagedCache) -> None:
    first, second = cache.open(range(8)), cache.open(range(16))
    first.publish()
    assert second.publish() == 16
    assert second.pages.tolist()[:2] == first.pages.tolist()
    assert cache.stats().pages_cached == cache.stats().pages_used == 4


# --- closing ---------------------------------------------------------------------------------


def test_closing_without_keeping_forgets_what_it_published_itself(cache: PagedCache) -> None:
    run(cache, range(8))
    sequence = cache.open(range(17))
    sequence.publish()
    assert cache.match(range(17)).num_tokens == 16
    sequence.close(keep=False)
    assert cache.match(range(17)).num_tokens == 8
    cache.check()


def test_it_forgets_nothing_that_others_use(cache: PagedCache) -> None:
    sequence = cache.open(range(16))
    sequence.publish()
    other = cache.open(range(13))
    sequence.close(keep=False)
    assert cache.match(range(16)).num_tokens == 12
    other.close(keep=False)
    assert cache.match(range(16)).num_tokens == 12, "the other did not publish it"
    cache.check()


def test_what_another_computed_first_is_not_its_own_to_forget(cache: PagedCache) -> None:
    first, second = cache.open(range(8)), cache.open(range(16))
    first.publish()
    second.publish()
    first.close()
    second.close(keep=False)
    assert cache.match(range(16)).num_tokens == 8
    cache.check()


def test_a_fork_forgets_only_what_it_published_itself(cache: PagedCache) -> None:
    before, after = cache.open(range(8)), None
    early = before.fork()
    before.publish()
    after = before.fork()
    after.append(range(8, 16))
    after.publish()
    before.close()
    early.close(keep=False)
    assert cache.match(range(16)).num_tokens == 16
    after.close(keep=False)
    assert cache.match(range(16)).num_tokens == 8
    cache.check()


# --- appending, forking, cutting -------------------------------------------------------------


@pytest.mark.parametrize("one", [7, [7], (7,), np.int64(7), np.array([7]), np.array([7], "<i4")])
def test_one_token_at_a_time(cache: PagedCache, one: Any) -> None:
    sequence = cache.open(range(3))
    for length in range(4, 12):
        sequence.append(one)
        assert sequence.num_tokens == length
        assert len(sequence.pages) == -(-length // SIZE)
    assert sequence.tokens.tolist() == [0, 1, 2] + [7] * 8
    cache.check()


@pytest.mark.parametrize("wrong", [-1, True, 1.5, None, "7", [1.5], [[7]], [-1], {7}], ids=repr)
def test_what_is_no_token_is_not_appended(cache: PagedCache, wrong: Any) -> None:
    sequence = cache.open(range(8))
    before = seen(cache), repr(sequence)
    with pytest.raises(InvalidValue):
        sequence.append(wrong)
    assert (seen(cache), repr(sequence)) == before


def test_appending_nothing_is_nothing(cache: PagedCache) -> None:
    sequence = cache.open(range(6))
    fork = sequence.fork()
    fork.append([])
    assert fork.copies() == []
    assert fork.pages.tolist() == sequence.pages.tolist()


def test_forks_share_until_they_write(cache: PagedCache) -> None:
    parent = cache.open(range(10))
    forks = [parent.fork() for _ in range(3)]
    assert all(fork.pages.tolist() == parent.pages.tolist() for fork in forks)
    assert cache.stats().pages_used == 3
    assert cache.stats().shares == 9
    for number, fork in enumerate(forks):
        fork.append(100 + number)
    # Each has its own copy of the page with tokens 8 and 9; the full ones are still shared.
    tails = [int(fork.pages[2]) for fork in forks]
    assert len({*tails, int(parent.pages[2])}) == 4
    assert [fork.copies() for fork in forks] == [[PageCopy(2, tail, 2)] for tail in tails]
    parent.append(99)
    assert parent.copies() == [], "the last to hold the page writes where it is"
    assert parent.pages.tolist() == [0, 1, 2]
    assert parent.tokens.tolist() == [*range(10), 99]
    cache.check()


def test_the_last_fork_writes_in_place(cache: PagedCache) -> None:
    parent = cache.open(range(10))
    fork = parent.fork()
    parent.close()
    fork.append(1)
    assert fork.copies() == []
    assert fork.pages.tolist() == [0, 1, 2]


def test_a_fork_at_a_page_boundary_needs_no_copy(cache: PagedCache) -> None:
    parent = cache.open(range(8))
    fork = parent.fork()
    fork.append(1)
    parent.append(2)
    assert fork.copies() == parent.copies() == []
    assert fork.pages.tolist() == [0, 1, 2]
    assert parent.pages.tolist() == [0, 1, 3]


def test_a_fork_shares_copies_that_were_not_made(radix: PagedCache) -> None:
    run(radix, range(8))
    parent = radix.open([0, 1, 2, 3, 4, 5, 99])
    fork = parent.fork()
    assert fork.num_cached == 6
    assert fork.copies() == [PageCopy(1, int(parent.pages[1]), 2)]
    assert parent.copies() == []
    radix.check()


def test_copies_are_handed_over_once_and_in_order(radix: PagedCache) -> None:
    run(radix, range(8))
    parent = radix.open([0, 1, 2, 3, 4, 5, 99])
    first = int(parent.pages[1])
    fork = parent.fork()
    fork.append(1)
    second = int(fork.pages[1])
    assert fork.copies() == [PageCopy(1, first, 2), PageCopy(first, second, 3)]
    assert fork.copies() == []
    radix.check()


def test_a_source_of_a_copy_stays_until_the_copy_is_made(radix: PagedCache) -> None:
    run(radix, range(8))
    sequence = radix.open([0, 1, 2, 3, 4, 5, 99])
    (copy,) = sequence.copies()
    with pytest.raises(OutOfPages):
        radix.open(range(1000, 1000 + 14 * SIZE))  # 13 and the source can be had, but for the copy
    assert radix.clear() == 0
    assert radix.match(range(8)).pages.tolist() == [0, copy.src]
    sequence.publish(6)  # the engine says that it is past the copies
    radix.open(range(1000, 1000 + 14 * SIZE))
    assert radix.match(range(8)).pages.tolist() == [0]
    radix.check()


def test_what_a_copy_has_to_read_is_not_written_over(cache: PagedCache) -> None:
    """Behind it may be written in place; the tokens themselves stay until the copy is made."""
    parent = cache.open(range(7))
    fork = parent.fork()
    fork.append([50])  # its copy reads tokens 4, 5 and 6 of the parent's page
    page = int(parent.pages[1])
    parent.append([60])
    assert parent.copies() == []
    assert parent.pages[1] == page
    parent.truncate(5)
    parent.append([70])
    assert fork.copies() == [PageCopy(page, int(fork.pages[1]), 3)]
    assert parent.copies() == [PageCopy(page, int(parent.pages[1]), 1)]
    assert len({page, int(fork.pages[1]), int(parent.pages[1])}) == 3
    cache.check()


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


def test_cutting_gives_pages_back(cache: PagedCache) -> None:
    sequence = cache.open(range(18))
    for length, pages in ((17, 5), (16, 4), (13, 4), (1, 1), (0, 0)):
        sequence.truncate(length)
        assert sequence.num_tokens == length
        assert len(sequence.pages) == pages
        assert cache.stats().pages_used == pages
        cache.check()
    sequence.append(range(5))
    assert sequence.tokens.tolist() == [0, 1, 2, 3, 4]


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


def test_cutting_into_published_pages_leaves_them_cached(cache: PagedCache) -> None:
    sequence = cache.open(range(12))
    sequence.publish()
    sequence.truncate(6)
    assert sequence.num_published == 6
    assert cache.match(range(12)).num_tokens == 12
    sequence.append([50, 51])
    assert sequence.copies() == [PageCopy(1, int(sequence.pages[1]), 2)]
    assert sequence.publish() == 8
    assert cache.match([0, 1, 2, 3, 4, 5, 50, 51]).num_tokens == 8
    assert cache.match(range(12)).num_tokens == 12, "both ways are there"
    cache.check()


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


def test_statistics_of_an_empty_cache() -> None:
    stats = PagedCache(8, SIZE).stats()
    expected = Counter(pages_total=8, pages_free=8)
    assert stats.as_dict() == {
        **{field.name: expected[field.name] for field in fields(CacheStats)
           if field.name not in {"groups", "what_if"}}, "hit_rate": 0.0,
    }  # fmt: skip
    with pytest.raises(AttributeError):
        stats.opened = 5  # type: ignore[misc]


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
    expect(told.supersede, pages_awaited=-2, pages_dead=2)
    expect(told.close, sessions=-1)
    cache.clear()
    cache.subscribe(lambda _: 1 // 0)
    cache.open([1]).close()
    assert cache.stats().hook_errors == 2
    moved |= {"hook_errors"}
    missing = {field.name for field in fields(CacheStats)} - moved - {"groups", "what_if"}
    assert missing == {"pages_total", "pins_expired"}, "one never moves; the other is test_pins'"


def test_the_hit_rate(cache: PagedCache) -> None:
    assert cache.stats().hit_rate == 0
    run(cache, range(8))
    run(cache, [*range(8), 9, 9])
    stats = cache.stats()
    assert (stats.hit_tokens, stats.prompt_tokens) == (8, 18)
    assert stats.hit_rate == stats.as_dict()["hit_rate"] == pytest.approx(8 / 18)


def test_a_prefix_that_many_use_is_counted_as_shared(cache: PagedCache) -> None:
    run(cache, range(8))
    opened = [cache.open([*range(8), 100 + n]) for n in range(5)]
    stats = cache.stats()
    assert (stats.pages_shared, stats.shares) == (2, 8)
    assert stats.references == 2 * (5 + 1) + 5
    assert (stats.pages_protected, stats.pages_evictable) == (2, 0)
    for sequence in opened:
        sequence.close()
    assert cache.stats().shares == 0


def test_check_notices_what_is_wrong() -> None:
    def broken(change: Callable[[PagedCache, Sequence], object]) -> None:
        cache = PagedCache(8, SIZE)
        sequence = cache.open(range(10))
        sequence.publish()
        cache.check()
        change(cache, sequence)
        with pytest.raises(AssertionError):
            cache.check()

    broken(lambda cache, _: cache._core.pool.retain([0]))
    broken(lambda cache, _: cache._core.pool.allocate(1))
    broken(lambda cache, _: setattr(cache._core.index.tree, "num_pages", 9))
    broken(lambda cache, _: setattr(cache._core.index.tree, "num_evictable", 1))
    broken(lambda _, sequence: sequence._table.values.__setitem__(0, 1))
    broken(lambda _, sequence: sequence._table.cut(2))
    broken(lambda _, sequence: setattr(sequence, "_shared", 1))
    broken(lambda cache, sequence: cache._core.sequences.pop(sequence.id))
