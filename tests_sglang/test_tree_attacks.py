"""kvkeep's tree inside SGLang under harsher schedules: batches, aborts, unpublished requests.

The same scheduler and model as in test_tree.py, with what a server adds: requests that lock before
others of their batch publish, aborts in the middle of a prefill, published or not, stops before the
last computed token, requests that are not stored, and pages of 1 and 64.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
from sglang.srt.managers.schedule_batch import FINISH_ABORT, FINISH_LENGTH
from sglang.srt.mem_cache.common import release_kv_cache
from test_tree import SPACES, Walk, ours, space_of

if TYPE_CHECKING:
    from tree_scheduler import Scheduler


class Attack(Walk):
    """Random steps, with tokens of 3 kinds in pieces as long as half a page."""

    def __init__(self, made: Scheduler, rng: random.Random) -> None:
        super().__init__(made, rng)
        self.piece = max(1, made.page // 2)

    def attack(self, steps: int) -> None:
        chances = {self.batch: 30, self.go_on: 30, self.stop: 12, self.abort: 6, self.retract: 6,
                   self.resume: 6, self.evict: 8, self.flush: 1}  # fmt: skip
        for step in self.rng.choices([*chances], [*chances.values()], k=steps):
            step()
            prompt, space = self.rng.choice(self.seen)
            assert len(self.made.match(prompt, **space)) == self.model.longest(prompt, space)
            self.model.check()
        for req in self.made.running[:]:
            self.made.finish(req)
        self.made.evict(10**9)
        assert self.made.allocator.available_size() == self.made.total

    def prompt(self) -> tuple[list[int], dict[str, Any]]:
        base, space = self.rng.choice(self.seen)
        prompt = base[: self.rng.randint(0, len(base))]
        for _ in range(self.rng.randint(1, 6)):
            prompt = [*prompt, *[self.rng.randrange(3)] * self.rng.choice([1, self.piece])]
        prompt = prompt[: 400 - self.rng.randrange(9)]
        return prompt, self.rng.choice(SPACES) if self.rng.random() < 0.3 else space

    def batch(self) -> None:
        """Lock up to three requests, then compute all of them; alike prompts meet in the tree."""
        rng, batch = self.rng, []
        same = self.prompt()
        for _ in range(rng.randint(1, 3)):
            prompt, space = same if rng.random() < 0.5 else self.prompt()
            want = self.model.longest(prompt[:-1], space)
            req = self.made.admit(prompt, 0, priority=rng.randrange(3), **space)
            self.model.follow()
            assert self.made.matched[-1] == want
            self.seen.append((prompt, space))
            if req is not None:
                req.skip_radix_cache_insert = rng.random() < 0.1
                batch.append(req)
        chunk = rng.choice([3, self.made.page, 10_000])
        for req in batch:
            self.made.compute(req, chunk)
            self.stores(req)

    def stop(self) -> None:
        """End a request, sometimes before its last computed token."""
        if not self.made.running:
            return
        rng, made = self.rng, self.made
        req = rng.choice(made.running)
        # What was published when it resumed after a retraction was sampled before the stop.
        published = req.kv.cache_protected_len + made.pairs
        done = max(1, published - len(req.origin_input_ids))
        if len(req.output_ids) > done and rng.random() < 0.3:
            req.finished_len = rng.randint(done, len(req.output_ids))
        kept = list(req.full_untruncated_fill_ids)[: req.owned_kv_len()]
        self.release(req, kept, FINISH_LENGTH(length=0), checkpoint=True)
        if not req.skip_radix_cache_insert:
            self.seen.append((kept, space_of(req)))

    def abort(self) -> None:
        """Abort a request in the middle; SGLang publishes what it has, or not."""
        if self.made.running:
            req = self.rng.choice(self.made.running)
            kept = list(req.full_untruncated_fill_ids)[: req.kv.kv_committed_len]
            self.release(req, kept, FINISH_ABORT(), checkpoint=self.rng.random() < 0.5)

    def release(self, req: Any, kept: list[int], reason: Any, *, checkpoint: bool) -> None:
        made = self.made
        made.running.remove(req)
        req.finished_reason = reason
        release_kv_cache(req, made.cache, checkpoint=checkpoint)
        self.model.follow()
        if checkpoint and not req.skip_radix_cache_insert:
            space = space_of(req)
            slots = made.match(kept, **space)
            assert len(slots) == self.stored_of(kept)
            self.model.keep(kept, space, len(slots), slots)

    def stored_of(self, kept: list[int]) -> int:
        return max(0, len(kept) - self.made.pairs) // self.made.page * self.made.page

    def flush(self) -> None:
        if not self.made.running:
            super().flush()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    ("page", "eagle", "pages"), [(1, False, 400), (1, True, 300), (4, True, 90), (64, False, 14),
                                 (64, True, 14)],
)  # fmt: skip
def test_attacks(page: int, eagle: bool, pages: int, seed: int) -> None:
    rng = random.Random(f"{page} {eagle} {seed}")
    Attack(ours(page, pages, is_eagle=eagle), rng).attack(150)
