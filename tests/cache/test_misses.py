"""Why prompts are computed: each reason in its smallest form, and all against a model."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from kvkeep import OutOfPages, PagedCache
from kvkeep.core.events import Evicted, Opened, PrefixMiss, Stored
from kvkeep.core.groups import GroupLayout, StateSpec, WindowSpec

if TYPE_CHECKING:
    from kvkeep.core.cache import Sequence
    from kvkeep.core.extras import ExtraLike

PAGE = 4
A = list(range(16))


@pytest.fixture(params=["radix", "chain"])
def cache(request: pytest.FixtureRequest) -> PagedCache:
    return PagedCache(64, PAGE, prefix=request.param, clock=lambda: 7.0)


def serve(
    cache: PagedCache, tokens: list[int], tenant: str = "", extra: ExtraLike = ()
) -> Sequence:
    with cache.open(tokens, tenant, extra=extra) as sequence:
        sequence.copies()
        sequence.publish()
    return sequence


def test_a_prompt_that_nobody_sent(cache: PagedCache) -> None:
    miss = serve(cache, A).miss
    assert miss is not None
    assert (miss.cause, miss.token) == ("unseen", 0)
    miss = cache.match([*A, 1, 2, 3, 4]).miss
    assert miss is not None
    assert (miss.cause, miss.token) == ("unseen", 16)


def test_the_last_token_is_always_computed(cache: PagedCache) -> None:
    serve(cache, [*A, 99])
    miss = cache.open([*A, 98]).miss
    assert miss is not None
    assert (miss.cause, miss.token) == ("last token", 16)
    assert cache.match(A).miss is None, "nothing of it would be computed"


def test_a_prompt_that_differs_says_where_and_from_how_many() -> None:
    cache = PagedCache(64, PAGE)
    serve(cache, A)
    miss = cache.match([*A[:6], 99, *A[7:]]).miss
    assert miss is not None
    assert (miss.cause, miss.token, miss.others) == ("differs", 6, 1)
    for other in range(3):
        serve(cache, [*A[:8], 100 + other, *range(7)])
    miss = cache.match([*A[:8], 99, *A[:8]]).miss
    assert miss is not None
    assert (miss.cause, miss.token, miss.others) == ("differs", 8, 4)


@pytest.mark.parametrize("by", ["asked", "cleared", "dropped", "pressure"])
def test_what_was_evicted_says_when_and_by_what(cache: PagedCache, by: str) -> None:
    if by == "dropped":
        sequence = cache.open(A)
        sequence.publish()
        sequence.close(keep=False)
    else:
        serve(cache, A)
    if by == "asked":
        cache.evict(64)
    elif by == "cleared":
        cache.clear()
    elif by == "pressure":
        cache.open(list(range(1000, 1000 + 64 * PAGE))).close()
    miss = cache.match([*A, 17]).miss
    assert miss is not None
    assert (miss.cause, miss.token, miss.by, miss.at) == ("evicted", 0, by, 7.0)


def test_a_tail_that_was_evicted() -> None:
    cache = PagedCache(64, PAGE)
    serve(cache, A[:8])
    cache.evict(1)
    miss = cache.match([*A, 17]).miss
    assert miss is not None
    assert (miss.cause, miss.token, miss.by) == ("evicted", 4, "asked")


def test_a_page_that_is_being_computed(cache: PagedCache) -> None:
    first = cache.open(A)
    second = cache.open(A)
    assert second.miss is not None
    assert (second.miss.cause, second.miss.sequence) == ("computing", first.id)
    first.close()
    second.close()
    assert cache.open(A).miss.cause == "unseen", "nobody computes it any longer"


def test_others_are_told_to_operators_alone() -> None:
    cache = PagedCache(64, PAGE)
    serve(cache, A, "alice")
    assert cache.match(A, "bob").miss.cause == "unseen"
    told = cache.match(A, "bob", everywhere=True).miss
    assert (told.cause, told.namespace.tenant) == ("elsewhere", "alice")
    cache.public.declare(A[:8])
    serve(cache, A, "alice")
    assert cache.match(A, "bob").miss.cause in {"unseen", "differs"}
    told = cache.match(A, "bob", everywhere=True).miss
    assert (told.cause, told.token, told.namespace.tenant) == ("elsewhere", 8, "alice")


def test_a_tenant_is_told_nothing_of_others_behind_a_public_prefix() -> None:
    cache = PagedCache(64, PAGE)
    cache.public.declare(A[:8])
    for last in range(3):
        serve(cache, [*A, *range(last, last + 4)], "alice")
    assert cache.match(A, "bob").miss == PrefixMiss("unseen", 8)


def test_what_was_evicted_behind_a_public_prefix(cache: PagedCache) -> None:
    cache.public.declare(A[:8])
    serve(cache, A, "alice")
    cache.evict(2)
    assert cache.match(A, "alice").miss.cause == "evicted"
    assert cache.match(A, "bob").miss.cause == "unseen"


def test_pages_with_extras_are_known_as_others_are(cache: PagedCache) -> None:
    running = cache.open(A, extra=[(5, b"cat")])
    running.publish(4)
    miss = cache.match(A, extra=[(5, b"cat")]).miss
    assert (miss.cause, miss.sequence) == ("computing", running.id)
    running.publish()
    running.close()
    cache.clear()
    serve(cache, A)
    cache.evict(3)
    assert cache.match(A, extra=[(5, b"cat")]).miss.cause == "unseen"
    serve(cache, A, extra=[(5, b"cat")])
    cache.evict(3)
    assert cache.match(A, extra=[(5, b"cat")]).miss.cause == "evicted"
    assert cache.match(A, extra=[(5, b"dog")]).miss.cause == "unseen"


def test_elsewhere_looks_at_whole_prefixes_and_their_extras() -> None:
    cache = PagedCache(64, PAGE)
    serve(cache, A, "alice", extra=[(6, b"cat")])
    serve(cache, A[:5], "bob")
    told = cache.match(A, "bob", extra=[(6, b"cat")], everywhere=True).miss
    assert (told.cause, told.token, told.namespace.tenant) == ("elsewhere", 4, "alice")
    assert cache.match(A, "bob", everywhere=True).miss.cause == "unseen"


def test_less_than_a_page_is_not_said_to_differ() -> None:
    cache = PagedCache(64, PAGE, prefix="chain")
    serve(cache, A)
    assert cache.open(A).miss == PrefixMiss("part of a page", 12)
    assert cache.open(A[:11]).miss == PrefixMiss("part of a page", 8)


def test_a_sequence_that_went_back_computes_the_page_no_longer(cache: PagedCache) -> None:
    serve(cache, A)
    running = cache.open([*A, *A])
    assert cache.match([*A, *A]).miss.sequence == running.id
    running.truncate(8)
    assert cache.match([*A, *A]).miss.cause == "unseen"


def test_a_page_behind_one_that_took_the_place_of_others(cache: PagedCache) -> None:
    """A run loses its tail and grows again to the same length: what was behind it is not now."""
    for last in (1, 2):
        serve(cache, [*A, *[last] * PAGE])
    cache.evict(4)
    serve(cache, [*A[:8], *[7] * 8])
    assert cache.match([*A[:8], *[7] * 8, *[1] * PAGE]).miss.cause == "unseen"


def test_a_missing_state_names_the_nearest_place() -> None:
    cache = PagedCache(64, GroupLayout(PAGE, state=StateSpec(pages=1, grid=8)))
    sequence = cache.open([*A, 1])
    assert sequence.groups is not None
    for stop in (8, 17):
        sequence.groups.copies()
        sequence.groups.reach(stop)
        if stop == 8:
            sequence.groups.checkpoint(stop)
    sequence.publish()
    sequence.close()
    miss = cache.match([*A, 2, 3]).miss
    assert miss is not None
    assert (miss.cause, miss.token, miss.until) == ("no state", 8, 16)


def test_tokens_of_a_page_that_matches_in_part_are_computed_in_a_cache_with_groups() -> None:
    cache = PagedCache(64, GroupLayout(PAGE, windows=(WindowSpec(4),)))
    with cache.open([*A, 1]) as sequence:
        sequence.groups.copies()
        sequence.groups.reach(17)
        sequence.publish()
    with cache.open([*A[:10], 99, 98, 97]) as sequence:
        assert sequence.num_cached == 8
        assert sequence.miss == PrefixMiss("differs", 8, others=1)


def test_events_tell_it() -> None:
    cache = PagedCache(64, PAGE)
    seen = []
    cache.subscribe(lambda event: seen.append(event.miss) if isinstance(event, Opened) else None)
    sequence = cache.open(A)
    sequence.fork()
    assert seen == [sequence.miss, None]


def test_memory_is_bounded() -> None:
    cache = PagedCache(16, 1)
    for number in range(2_000):
        serve(cache, [number, number + 1])
    misses = cache.misses
    assert len(misses._new) + len(misses._old) <= 16 + 2 * 16


class Memory:
    """All that was ever stored, by whole prefixes, and what of it was removed since."""

    def __init__(self, cache: PagedCache) -> None:
        self.size = cache.page_size
        self.stored: set[tuple[int, ...]] = set()
        self.removed: set[tuple[int, ...]] = set()
        self._prefix: dict[int, tuple[int, ...]] = {-1: ()}  # by page
        cache.subscribe(self.see)

    def see(self, event: object) -> None:
        if isinstance(event, Stored):
            prefix = self._prefix[event.parent]
            tokens = event.tokens.tolist()
            for at, page in enumerate(event.pages.tolist()):
                prefix = (*prefix, *tokens[at * self.size : (at + 1) * self.size])
                self._prefix[page] = prefix
                self.stored.add(prefix)
                if prefix in self.removed:  # what was behind it is forgotten
                    self.removed = {each for each in self.removed if each[: len(prefix)] != prefix}
        elif isinstance(event, Evicted):
            self.removed.update(self._prefix[page] for page in event.pages.tolist())


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("prefix", ["radix", "chain"])
def test_the_cause_is_that_of_a_model(prefix: str, seed: int) -> None:
    """What is told is right. Not told is what began where runs were joined, or grew, since."""
    chance = random.Random(seed)
    size = chance.choice([1, 2, 3])
    cache = PagedCache(4_000, size, prefix=prefix)
    memory = Memory(cache)
    running: list[Sequence] = []
    prompts: list[list[int]] = []
    causes: dict[str, int] = {}
    untold = [0, 0]
    for turn in range(1_500):
        roll = chance.random()
        if roll < 0.5:
            stem = chance.choice(prompts)[: chance.randrange(20)] if prompts else []
            prompt = [*stem, *(chance.randrange(3) for _ in range(chance.randrange(1, 9)))]
            prompts.append(prompt)
            whole = (len(prompt) - (prefix == "chain")) // size
            held = len(cache.match(prompt[:-1]).pages)
            following = tuple(prompt[: (held + 1) * size])
            computed = {
                each.id
                for each in running
                if tuple(each.tokens[: len(following)].tolist()) == following
                and each.num_published < len(following)
            }
            sequence = cache.open(prompt)
            miss = sequence.miss
            assert miss is not None
            assert miss.token == sequence.num_cached
            causes[miss.cause] = causes.get(miss.cause, 0) + 1
            if sequence.num_cached == len(prompt) - 1:
                assert miss.cause == "last token"
            elif held == whole:
                less = {"unseen", "differs"} if cache.tree.exact else {"part of a page"}
                assert miss.cause in less, "less than a page"
            elif miss.cause == "computing":
                assert miss.sequence in computed
            elif miss.cause == "evicted":
                assert following in memory.stored
            else:
                untold[0] += following in memory.removed
                untold[1] += bool(computed)
            running.append(sequence)
        elif roll < 0.8 and running:
            sequence = running.pop(chance.randrange(len(running)))
            sequence.copies()
            if chance.random() < 0.7:
                sequence.publish()
            sequence.close(keep=chance.random() < 0.8)
        elif roll < 0.85:
            cache.evict(chance.randrange(1, 9))
        if turn % 100 == 0:
            cache.check()
    assert causes.get("evicted", 0) > 20, causes
    assert causes.get("computing", 0) > 50, causes
    assert untold[0] <= causes["evicted"] // 5, (untold, causes)
    assert untold[1] <= causes["computing"] // 3, (untold, causes)


def test_a_refused_request_leaves_no_trace(cache: PagedCache) -> None:
    with pytest.raises(OutOfPages):
        cache.open(list(range(65 * PAGE)))
    miss = cache.match(list(range(65 * PAGE))).miss
    assert miss is not None
    assert miss.cause == "unseen"
