"""kvkeep's tree inside SGLang under harsher schedules: batches, aborts, pins, unpublished requests.

The same scheduler and model as in test_tree.py, with what a server adds: requests that lock before
others of their batch publish, aborts in the middle of a prefill, published or not, stops before the
last computed token, requests that are not stored, pins, and pages of 1 and 64.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
from sglang.srt.managers.schedule_batch import FINISH_ABORT, FINISH_LENGTH
from sglang.srt.mem_cache.common import release_kv_cache
from test_tree import SPACES, Model, Walk, ours, space_of

if TYPE_CHECKING:
    from tree_scheduler import Scheduler

Path = tuple[Any, ...]


class PinnedModel(Model):
    """And which pages hard pins protect: those of a request, until so many more have ended."""

    def __init__(self, made: Scheduler) -> None:
        super().__init__(made)
        self.pins: list[tuple[int, bool, set[Path]]] = []
        self.ended = 0

    def hard(self) -> set[Path]:
        return set().union(*(paths for _, hard, paths in self.pins if hard))

    def soft(self) -> set[Path]:
        return set().union(*(paths for _, hard, paths in self.pins if not hard))

    def locked(self) -> set[Path]:
        return super().locked() | self.hard()

    def follow(self) -> int:
        """An evicted page that is stored anew is not what the pin was set on."""
        gone = super().follow()
        for _, hard, paths in self.pins:
            assert not hard or paths <= set(self.stored), "a page with a hard pin was evicted"
            paths &= set(self.stored)
        return gone

    def end(self) -> None:
        self.ended += 1
        self.pins = [pin for pin in self.pins if pin[0] > self.ended]

    def unprotected_leaves(self) -> set[Path]:
        """Stored ends of prompts that nothing protects, and no pin names."""
        inner = {self.parent(path) for path in self.stored}
        return {path for path in self.stored if path not in inner} - self.locked() - self.soft()

    def parent(self, path: Path) -> Path:
        page, pairs = self.made.page, self.made.pairs
        end = len(path) - 2 - pairs - page
        return path[: 2 + end + pairs] if end > 0 else ()


class Attack(Walk):
    """Random steps, with tokens of 3 kinds in pieces as long as half a page."""

    def __init__(self, made: Scheduler, rng: random.Random) -> None:
        super().__init__(made, rng)
        self.model: PinnedModel = PinnedModel(made)
        self.piece = max(1, made.page // 2)
        self.gone_soft = 0

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
        for _ in range(60):  # pins end with requests
            req = self.made.admit([9] * (self.made.page + 1))
            if req is not None:
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
        """End a request, sometimes before its last computed token, sometimes with a pin."""
        if not self.made.running:
            return
        rng, made, model = self.rng, self.made, self.model
        req = rng.choice(made.running)
        pin = rng.choice(["soft", "hard"]) if rng.random() < 0.4 else None
        lasting = rng.randint(1, 20)
        if pin:
            req.sampling_params.custom_params = {"kvkeep": {"pin": pin, "requests": lasting}}
        # What was published when it resumed after a retraction was sampled before the stop.
        published = req.kv.cache_protected_len + made.pairs
        done = max(1, published - len(req.origin_input_ids))
        if len(req.output_ids) > done and rng.random() < 0.3:
            req.finished_len = rng.randint(done, len(req.output_ids))
        kept = list(req.full_untruncated_fill_ids)[: req.owned_kv_len()]
        self.release(req, kept, FINISH_LENGTH(length=0), checkpoint=True)
        if req.skip_radix_cache_insert:
            return
        model.end()
        if pin and made.cache.pins_refused == self.refused:
            paths = set(model.paths(kept, space_of(req), self.stored_of(kept)))
            model.pins.append((model.ended + lasting, pin == "hard", paths))
        self.seen.append((kept, space_of(req)))

    def abort(self) -> None:
        """Abort a request in the middle; SGLang publishes what it has, or not."""
        if self.made.running:
            req = self.rng.choice(self.made.running)
            kept = list(req.full_untruncated_fill_ids)[: req.kv.kv_committed_len]
            checkpoint = self.rng.random() < 0.5
            self.release(req, kept, FINISH_ABORT(), checkpoint=checkpoint)
            if checkpoint and not req.skip_radix_cache_insert:
                self.model.end()

    def release(self, req: Any, kept: list[int], reason: Any, *, checkpoint: bool) -> None:
        made = self.made
        self.refused = made.cache.pins_refused
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

    def evict(self) -> None:
        before = self.model.soft() & set(self.model.stored)
        super().evict()
        if before - set(self.model.stored):
            self.gone_soft += 1
            assert not self.model.unprotected_leaves(), "a pinned page went before another one"

    def flush(self) -> None:
        if not self.made.running:
            super().flush()
            self.model.pins.clear()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    ("page", "eagle", "pages"), [(1, False, 400), (1, True, 300), (4, True, 90), (64, False, 14),
                                 (64, True, 14)],
)  # fmt: skip
def test_attacks(page: int, eagle: bool, pages: int, seed: int) -> None:
    rng = random.Random(f"{page} {eagle} {seed}")
    Attack(ours(page, pages, is_eagle=eagle), rng).attack(150)
