"""The faults of the systems that kvkeep unites: one test each, which fails where the fault is.

Those of slot caches are in `tests/slots/test_slots_faults.py`.

    paged    a paged cache that shares by a hash of the prompt's beginning
    chain    hashed blocks with a free queue
    radix    a radix tree with locked paths
"""

from __future__ import annotations

import gc
import os
import random
import subprocess
import sys
import tracemalloc
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kvkeep import Namespace, OutOfPages, PageCopy, PagedCache
from kvkeep.core.eviction import LRU, Entry
from kvkeep.core.prefix import INDICES, tree

if TYPE_CHECKING:
    from collections.abc import Iterator

SIZE = 4


@pytest.fixture(params=INDICES)
def cache(request: pytest.FixtureRequest) -> PagedCache:
    return PagedCache(64, SIZE, prefix=request.param)


def run(cache: PagedCache, tokens: Any, namespace: Any = "") -> list[int]:
    """One request, computed and published; its pages."""
    with cache.open(tokens, namespace) as sequence:
        sequence.copies()
        sequence.publish()
        return sequence.pages.tolist()


# --- paged -----------------------------------------------------------------------------------


def test_paged_prompts_equal_in_their_first_hundred_tokens_do_not_collide(
    cache: PagedCache,
) -> None:
    """Its prefix hash read only the first 100 tokens."""
    first = [*range(100), *[7] * 60]
    second = [*range(100), *[8] * 60]
    run(cache, first)
    sequence = cache.open(second)
    assert sequence.num_cached == 100
    assert set(sequence.pages[25:]).isdisjoint(cache.match(first).pages)
    # Nor do prompts that differ in their very last token.
    assert cache.match([*first[:-1], 0]).num_tokens in (156, 159)


def test_paged_pages_replaced_by_shared_ones_are_freed(cache: PagedCache) -> None:
    """It allocated pages, found the same content, and forgot the pages it had allocated."""
    running = [cache.open(range(20)) for _ in range(3)]
    assert cache.stats().pages_used == 15
    for sequence in running:
        sequence.publish()
    assert cache.stats().pages_used == 5
    for sequence in running:
        sequence.close()
    for _ in range(100):
        run(cache, range(20))
    assert cache.stats().pages_used == 5
    assert cache.clear() == 5
    assert cache.stats().pages_free == 64
    cache.check()


def test_paged_the_index_never_names_a_page_that_was_freed() -> None:
    """Its prefix map was never purged, and handed out pages that belonged to someone else."""
    cache = PagedCache(8, SIZE)
    rng = random.Random(1)
    content: dict[int, tuple[str, list[int]]] = {}  # page → whose, and what it was computed for
    for _ in range(500):
        tokens = [rng.randrange(2) for _ in range(rng.randrange(4, 25))]
        space = rng.choice("ab")
        with cache.open(tokens, space) as sequence:
            sequence.copies()
            for at in range(sequence.num_cached // SIZE, len(tokens) // SIZE):
                content[int(sequence.pages[at])] = (space, tokens[: (at + 1) * SIZE])
            sequence.publish()
        for other in "ab":
            for at, page in enumerate(cache.match(tokens, other).pages.tolist()):
                assert content[page] == (other, tokens[: (at + 1) * SIZE])
    assert cache.stats().evicted_pages > 100


def test_paged_the_first_owner_does_not_free_pages_under_a_later_sharer(
    cache: PagedCache,
) -> None:
    """The first owner's pages were not counted as shared, and went when it was done."""
    first = cache.open(range(20))
    first.publish()
    sharer = cache.open(range(20))
    shared = sharer.pages.tolist()[:4]
    assert shared == first.pages.tolist()[:4]
    first.close(keep=False)
    cache.clear()
    cache.evict(64)
    others = [cache.open(range(1000 * n, 1000 * n + 60)) for n in range(1, 4)]
    assert all(set(shared).isdisjoint(other.pages.tolist()) for other in others)
    assert cache.match(range(16)).pages.tolist() == shared
    cache.check()


def test_paged_what_is_returned_is_neither_a_copy_nor_a_way_to_corrupt_the_cache(
    cache: PagedCache,
) -> None:
    """It made a deep copy at every read, to be safe."""
    sequence = cache.open(range(40))
    for name in ("pages", "tokens"):
        array, again = getattr(sequence, name), getattr(sequence, name)
        assert np.shares_memory(array, again), "reading does not copy"
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


def test_paged_speculative_decoding_works(cache: PagedCache) -> None:
    """Its hook did nothing. Drafts are appended, the rejected cut, and their pages given back."""
    sequence = cache.open(range(10))
    before = cache.stats().pages_used
    sequence.append([500, 501, 502, 503, 504, 505])
    assert cache.stats().pages_used == before + 1
    sequence.truncate(12)  # two were right
    assert sequence.tokens.tolist() == [*range(10), 500, 501]
    assert cache.stats().pages_used == before
    sequence.append([11, 12])
    sequence.publish()
    assert cache.match([*range(10), 500, 501]).num_tokens == 12
    assert cache.match([*range(10), 500, 501, 502, 503]).num_tokens == 12, "drafts are not cached"
    cache.check()


def test_paged_data_that_differs_is_copied_on_write() -> None:
    """What it did do, kept: a sharer that goes another way gets a page of its own."""
    cache = PagedCache(64, SIZE)
    pages = run(cache, range(12))
    sequence = cache.open([*range(9), 99])
    assert sequence.num_cached == 9
    assert sequence.copies() == [PageCopy(pages[2], int(sequence.pages[2]), 1)]
    assert sequence.pages.tolist()[:2] == pages[:2]


# --- chain -----------------------------------------------------------------------------------

PROMPT = 16_384


def set_apart() -> None:
    """Exclude objects of earlier tests from garbage collections and counts."""
    gc.collect()
    gc.freeze()


def objects() -> int:
    gc.collect()
    return len(gc.get_objects())


@pytest.mark.parametrize("prefix", INDICES)
def test_chain_there_is_no_object_per_page(prefix: str) -> None:
    """It kept an object, a hash and a tuple of tokens for every block."""
    cache = PagedCache(4 * PROMPT // SIZE, SIZE, prefix=prefix)
    run(cache, range(SIZE))  # whatever is made once is made
    prompt = np.arange(10, 10 + PROMPT, dtype=np.int32)
    set_apart()
    before = objects()
    run(cache, prompt)
    assert cache.stats().pages_cached == PROMPT // SIZE + 1
    assert objects() - before < 50, f"for {PROMPT // SIZE} pages"


@pytest.mark.parametrize(("prefix", "a_page"), [("radix", 4 * SIZE + 4), ("chain", 32 + 4)])
def test_chain_the_memory_of_a_page_is_its_symbols_and_its_id(prefix: str, a_page: int) -> None:
    cache = PagedCache(4 * PROMPT // SIZE, SIZE, prefix=prefix)
    run(cache, range(SIZE))
    prompt = np.arange(10, 10 + PROMPT, dtype=np.int32)
    set_apart()
    tracemalloc.start()
    try:
        run(cache, prompt)
        gc.collect()
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    pages = PROMPT // SIZE
    assert kept < 1.1 * pages * a_page + 4096, f"{kept / pages:.1f} bytes for each of {pages} pages"


def test_chain_keys_are_the_same_in_every_process() -> None:
    """Its keys were `hash` of a tuple, which differs between processes (and was attacked)."""
    program = (
        "from kvkeep import *\n"
        "cache = PagedCache(8, 4, prefix='chain')\n"
        "sequence = cache.open(range(16), Namespace(tenant='a', lora='b'))\n"
        "sequence.publish()\n"
        "print(next(cache.runs(sequence.namespace)).symbols.hex())\n"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True, text=True, check=True,
        ).stdout
        for seed in ("0", "12345")
    }  # fmt: skip
    assert len(printed) == 1
    assert len(printed.pop().strip()) == 2 * 32 * 4


def test_chain_known_collisions_of_hash_are_none() -> None:
    """-1 and -2 have the same `hash`, and so have 0 and 2⁶¹-1; tuples of them too."""
    assert hash((0, 1)) == hash((2**61 - 1, 1)), "what could be used against it"
    cache = PagedCache(8, 2, prefix="chain")
    run(cache, [0, 1])
    assert cache.match([2**31 - 1, 1]).num_tokens == 0
    run(cache, [0, 1], Namespace(tenant="0"))
    assert cache.match([0, 1], Namespace(model="0")).num_tokens == 0


@pytest.mark.parametrize("field", ["tenant", "model", "revision", "dtype", "layout", "geometry",
                                   "lora", "rank"])  # fmt: skip
def test_chain_the_key_has_room_for_all_that_must_not_be_mixed(
    cache: PagedCache, field: str
) -> None:
    """LoRA, tenant and the like had no place in its keys."""
    run(cache, range(12))
    mine = Namespace(**{field: "mine"})
    assert cache.match(range(12), mine).num_tokens == 0
    run(cache, range(12), mine)
    assert cache.match(range(12), Namespace(**{field: "yours"})).num_tokens == 0
    assert set(cache.match(range(12), mine).pages).isdisjoint(cache.match(range(12)).pages)


def test_chain_what_it_did_well_is_kept(cache: PagedCache) -> None:
    """Freed pages stay findable until handed out again, and the tail of a chain goes first."""
    pages = run(cache, range(40))
    sequence = cache.open(range(1000, 1000 + 56 * SIZE))  # two more than are free
    assert cache.match(range(40)).pages.tolist() == pages[:8]
    assert sorted(sequence.pages.tolist()[-2:]) == sorted(pages[8:])


# --- radix -----------------------------------------------------------------------------------


@pytest.fixture
def bushy(cache: PagedCache) -> PagedCache:
    """Ten prompts that part after three pages, nothing of them in use."""
    for last in range(10):
        run(cache, [*range(12), *[100 + last] * 12])
    return cache


def drawn(cache: PagedCache) -> list[str]:
    return [str((run.depth, run.start, run.pages, run.state)) for run in cache.runs()]


def test_radix_reading_does_not_split_and_is_no_use(bushy: PagedCache) -> None:
    """Looking something up cut its nodes in two, and counted as a use of them."""
    before = drawn(bushy), bushy.stats()
    for length in range(1, 24):
        bushy.match([*range(12), *[105] * 12][:length])
        bushy.match([*range(length), 77])
    assert (drawn(bushy), bushy.stats()) == before


def test_radix_tokens_are_not_compared_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted in calls and lines of Python: as many for a long prompt as for a short one."""
    monkeypatch.setattr(tree, "_GROW_PAGES", 10**9)
    steps = []
    for length in (20_000, 1_280_000):  # both are compared where they lie, without a copy
        cache = PagedCache(length, SIZE)
        prompt = np.arange(length, dtype=np.int32)
        run(cache, prompt)
        steps.append(lines_of(lambda cache=cache, prompt=prompt: cache.match(prompt)))
        # Also where it differs in the middle: the place is found by halves.
        other = prompt.copy()
        other[length // 2 + 1] = 2**31 - 1
        steps.append(lines_of(lambda cache=cache, other=other: cache.match(other)))
    full, inside, full_long, inside_long = steps
    assert full_long == full
    assert inside_long <= inside + 6 * 7, "64 is 2 to the 6; some lines for each halving"


def lines_of(what: Any) -> int:
    """How many lines of Python an operation runs."""
    count = 0

    def trace(_frame: Any, event: str, _argument: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        what()
    finally:
        sys.settrace(before)
    return count


def test_radix_eviction_frees_exactly_what_was_asked(bushy: PagedCache) -> None:
    """It evicted whole nodes, so more than asked."""
    total = bushy.stats().pages_cached
    assert total == 33
    for count in (1, 2, 5, 1, 7):
        assert bushy.evict(count) == count
        total -= count
        assert bushy.stats().pages_cached == total
        bushy.check()
    # And a request that is one page short evicts one.
    bushy.open(range(5000, 5000 + (bushy.stats().pages_free + 1) * SIZE))
    assert bushy.stats().pages_cached == total - 1


class CountingLRU(LRU):
    """Counts what the index asks of it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def add(self, entry: Entry) -> None:
        self.calls += 1
        super().add(entry)

    def discard(self, entry: Entry) -> None:
        self.calls += 1
        super().discard(entry)

    def pop(self) -> Entry | None:
        self.calls += 1
        return super().pop()

    def inherit(self, parent: Entry, child: Entry) -> None:
        self.calls += 1
        super().inherit(parent, child)


@pytest.mark.parametrize("prefix", INDICES)
def test_radix_the_cost_of_eviction_does_not_grow_with_the_leaves(prefix: str) -> None:
    """It collected all leaves and made a heap of them whenever memory was short."""
    costs = []
    for leaves in (100, 3_000):
        policy = CountingLRU()
        cache = PagedCache(leaves + 1, 1, prefix=prefix, eviction=policy)
        for leaf in range(leaves):
            run(cache, [7, leaf + 10])
        policy.calls = 0
        lines = lines_of(lambda cache=cache: cache.evict(20))
        costs.append((policy.calls, lines))
        assert cache.stats().pages_cached == leaves + 1 - 20
    small, large = costs
    assert small[0] > 0
    assert large[0] == small[0], "operations of the policy"
    assert large[1] <= 1.1 * small[1], f"lines of Python: {costs}"


def test_radix_nothing_is_printed(cache: PagedCache, capfd: pytest.CaptureFixture[str]) -> None:
    """It printed from library code."""
    run(cache, range(20))
    with pytest.raises(OutOfPages):
        cache.open(range(1000))
    cache.match(range(20))
    repr(cache)
    list(cache.runs())
    cache.pin(range(20))
    cache.evict(3)
    cache.clear()
    cache.check()
    assert tuple(capfd.readouterr()) == ("", "")


def test_radix_it_can_be_reset(bushy: PagedCache) -> None:
    """There was no reset."""
    bushy.pin([*range(12)])
    assert bushy.clear() == 33
    assert list(bushy.runs()) == []
    stats = bushy.stats()
    assert (stats.pages_free, stats.references, stats.pins, stats.namespaces) == (64, 0, 0, 0)
    assert bushy.match(range(12)).num_tokens == 0
    bushy.check()
    run(bushy, range(12))
    assert bushy.match(range(12)).num_tokens == 12


class Interrupted(Exception):
    """What may happen to a request in the middle."""


def test_radix_an_interrupted_request_leaks_nothing(bushy: PagedCache) -> None:
    """Its lock on the path stayed for ever, and the path could never be evicted again."""
    before = bushy.stats()

    def request(step: int) -> Iterator[None]:
        with bushy.open([*range(12), 100, 100, 7]) as sequence:
            yield
            sequence.copies()
            yield
            sequence.append(range(20))
            yield
            with sequence.fork() as fork:
                fork.append([step])
                yield
                fork.copies()
                yield

    for step in range(5):
        interrupted = request(step)
        for _ in range(step + 1):
            next(interrupted)
        assert bushy.stats().pages_protected >= 3
        with pytest.raises(Interrupted):
            interrupted.throw(Interrupted())  # type: ignore[attr-defined]
        stats = bushy.stats()
        assert (stats.sequences, stats.pages_protected) == (0, 0)
        assert stats.pages_used == stats.pages_cached == before.pages_cached
        bushy.check()
    assert bushy.evict(64) == 33


def test_radix_two_caches_share_no_counter() -> None:
    """Its nodes were numbered by a global counter."""
    caches = [PagedCache(8, SIZE), PagedCache(8, SIZE)]
    stories = []
    for cache in caches:
        run(cache, range(8))
        with cache.open(range(9)) as sequence:
            stories.append((sequence.id, sequence.pages.tolist(), drawn(cache), cache.stats()))
        caches[0].evict(1)  # whatever is done to the one …
    assert str(stories[0]) == str(stories[1])  # … is not seen in the other


def test_radix_the_protected_and_evictable_sizes_are_kept(bushy: PagedCache) -> None:
    """What it did well: sizes by state, and a lock on the path of a running request."""
    sequence = bushy.open([*range(12), *[103] * 12, 1])
    stats = bushy.stats()
    assert (stats.pages_protected, stats.pages_evictable) == (6, 27)
    assert bushy.evict(64) == 27
    assert sequence.num_cached == 24
    bushy.check()
