"""kvkeep's tree inside SGLang's scheduler: random schedules beside a model of what is stored."""

from __future__ import annotations

import random
from typing import Any

import pytest
from sglang.srt.mem_cache.radix_cache import RadixCache
from tree_scheduler import Scheduler, memory

from kvkeep.core.eviction import POLICIES
from kvkeep.core.eviction import policy as named
from kvkeep.integrations.sglang.tree import KVKeepTree

SPACES: list[dict[str, Any]] = [{}, {}, {"extra_key": "lora a"}, {"cache_salt": "b"},
                                {"extra_key": "lora a", "cache_salt": "b"}]  # fmt: skip


def ours(page: int, pages: int, policy: str = "lru", **more: Any) -> Scheduler:
    params = memory(page, pages, **more)
    return Scheduler(KVKeepTree(params, lambda: named(policy)), params)


class Model:
    """Which pages are stored, by all tokens up to their ends: a set of tuples, nothing else."""

    def __init__(self, made: Scheduler) -> None:
        self.made = made
        self.stored: dict[tuple[Any, ...], int] = {}

    def paths(self, tokens: list[int], space: dict[str, Any], length: int) -> list[tuple[Any, ...]]:
        page, pairs = self.made.page, self.made.pairs
        ends = range(page, length + 1, page)
        return [self.made.history(tokens[: end + pairs], end - 1, space) for end in ends]

    def stores(self, req: Any) -> None:
        """The pages of a request that the tree has now."""
        space = space_of(req)
        tokens = list(req.full_untruncated_fill_ids)
        row = self.made.rows[req.kv.req_pool_idx].tolist()
        self.keep(tokens, space, req.kv.cache_protected_len, row)

    def keep(self, tokens: list[int], space: dict[str, Any], length: int, row: list[int]) -> None:
        for at, path in enumerate(self.paths(tokens, space, length)):
            first = row[at * self.made.page]
            assert self.stored.setdefault(path, first) == first, "stored twice"

    def longest(self, tokens: list[int], space: dict[str, Any]) -> int:
        usable = len(tokens) - self.made.pairs
        for at, path in enumerate(self.paths(tokens, space, usable)):
            if path not in self.stored:
                return at * self.made.page
        return max(usable, 0) // self.made.page * self.made.page

    def locked(self) -> set[tuple[Any, ...]]:
        return {
            path
            for req in self.made.running
            for path in self.paths(
                list(req.full_untruncated_fill_ids),
                space_of(req),
                req.kv.cache_protected_len,
            )
        }

    def follow(self) -> int:
        """Remove what was evicted since; what is left is stored from its first page on."""
        gone = [path for path, first in self.stored.items() if first in self.made.freed]
        self.made.freed.clear()
        for path in gone:
            del self.stored[path]
        page = self.made.page
        for path in self.stored:
            end = len(path) - 2 - self.made.pairs
            assert end == page or path[: 2 + end - page + self.made.pairs] in self.stored
        return len(gone)

    def check(self) -> None:
        assert self.made.cache.total_size() == len(self.stored) * self.made.page
        locked = len(self.locked()) * self.made.page
        assert self.made.cache.protected_size() == locked
        self.made.check()
        self.made.cache.check_integrity()


def space_of(req: Any) -> dict[str, Any]:
    return {"extra_key": req.extra_key, "cache_salt": req.cache_salt}


class Walk:
    """Random steps of a scheduler; everything is compared with the model after each."""

    def __init__(self, made: Scheduler, rng: random.Random) -> None:
        self.made, self.rng, self.model = made, rng, Model(made)
        self.seen: list[tuple[list[int], dict[str, Any]]] = [([1], {})]
        self.retracted: list[Any] = []

    def run(self, steps: int) -> None:
        made, model = self.made, self.model
        chances = {self.admit: 35, self.go_on: 35, self.finish: 10, self.retract: 5,
                   self.resume: 5, self.evict: 7, self.flush: 1}  # fmt: skip
        for step in self.rng.choices([*chances], [*chances.values()], k=steps):
            step()
            prompt, space = self.rng.choice(self.seen)
            assert len(made.match(prompt, **space)) == model.longest(prompt, space)
            model.check()
        for req in made.running[:]:
            made.finish(req)
        made.evict(10**9)
        assert made.allocator.available_size() == made.total

    def admit(self) -> None:
        rng = self.rng
        base, space = rng.choice(self.seen)
        prompt = base[: rng.randint(0, len(base))]
        prompt = [*prompt, *(rng.randrange(3) for _ in range(rng.randint(1, 12)))]
        if rng.random() < 0.2:
            prompt[-1] = (1 << 40) + prompt[-1]  # of an image
        if rng.random() < 0.3:
            space = rng.choice(SPACES)
        want = self.model.longest(prompt[:-1], space)
        chunk, priority = rng.choice([3, 7, 10_000]), rng.randrange(3)
        req = self.made.admit(prompt, chunk, priority=priority, **space)
        assert self.made.matched[-1] == want
        self.seen.append((prompt, space))
        if req is not None:
            self.stores(req)

    def go_on(self) -> None:
        if self.made.running:
            req = self.rng.choice(self.made.running)
            if not self.made.prefilled(req):
                self.made.compute(req, self.rng.choice([1, 5, 10_000]))
            elif len(req.output_ids) < 20:
                self.made.decode(req, self.rng.randrange(3))
            self.stores(req)

    def finish(self) -> None:
        if self.made.running:
            req = self.rng.choice(self.made.running)
            kept = list(req.full_untruncated_fill_ids)[: req.kv.kv_committed_len]
            space = space_of(req)
            self.made.finish(req)
            self.model.follow()
            self.seen.append((kept, space))
            slots = self.made.match(kept, **space)
            pairs, page = self.made.pairs, self.made.page
            assert len(slots) == max(0, len(kept) - pairs) // page * page
            self.model.keep(kept, space, len(slots), slots)

    def retract(self) -> None:
        if self.made.running:
            req = self.rng.choice(self.made.running)
            self.made.retract(req)
            self.retracted.append(req)

    def resume(self) -> None:
        if self.retracted and self.made.resume(self.retracted[-1], self.rng.choice([4, 10_000])):
            self.stores(self.retracted.pop())

    def evict(self) -> None:
        asked = self.rng.randint(0, 20)
        could = self.made.cache.evictable_size()
        gone = self.made.evict(asked)
        assert gone == min(self.made.paged(asked), could)
        assert self.model.follow() * self.made.page == gone

    def flush(self) -> None:
        if not self.made.running:
            self.made.flush()
            self.model.stored.clear()

    def stores(self, req: Any) -> None:
        self.model.follow()
        self.model.stores(req)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("page", "eagle"), [(1, False), (1, True), (4, False), (3, True)])
def test_random_schedules(page: int, eagle: bool, seed: int) -> None:
    rng = random.Random(seed)
    Walk(ours(page, rng.choice([12, 40, 90]), is_eagle=eagle), rng).run(150)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_policy(policy: str) -> None:
    Walk(ours(2, 24, policy), random.Random(policy)).run(150)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("page", "eagle"), [(1, False), (4, False), (4, True)])
def test_matches_as_long_as_those_of_sglang(page: int, eagle: bool, seed: int) -> None:
    """Without eviction the policies do not matter: both trees must find the same."""
    made: list[Scheduler] = []
    for kind in ("ours", "theirs"):
        params = memory(page, 4000, is_eagle=eagle)
        cache = KVKeepTree(params, lambda: named("lru")) if kind == "ours" else RadixCache(params)
        made.append(Scheduler(cache, params))
    for one in made:
        rng = random.Random(seed)
        seen = [[1]]
        for _ in range(60):
            base = rng.choice(seen)
            prompt = [*base[: rng.randint(0, len(base))], *(rng.randrange(3) for _ in range(9))]
            seen.append(prompt)
            space = rng.choice(SPACES)
            one.admit(prompt, rng.choice([3, 10_000]), **space)
            if one.running and rng.random() < 0.6:
                req = rng.choice(one.running)
                while not one.prefilled(req):
                    one.compute(req, 4)
                for _ in range(rng.randrange(6)):
                    one.decode(req, rng.randrange(3))
                one.finish(req)
            one.match(prompt, **space)
            one.check()
    assert made[0].matched == made[1].matched
    assert made[0].cache.total_size() == made[1].cache.total_size()
    assert made[0].allocator.available_size() == made[1].allocator.available_size()
