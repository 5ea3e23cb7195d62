"""Prefix trees of SGLang's scheduler: kvkeep's beside SGLang's own three, the same work in one run.

    make .venv-sglang/.installed && .venv-sglang/bin/python benchmarks/radix_cache.py

A prompt of 32,768 tokens, pages of 16 and of 1. Every tree gets the same calls of SGLang's
interface, over its own allocators without KV. Each round runs all trees in turn, with new tokens;
medians in microseconds of the thread's CPU time, and their ratio to kvkeep's. The prefix of a match
is spread over 1, 64 or 512 runs. Eviction is from 10,000 prompts of 64 tokens behind a common page.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from array import array
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests_sglang"))

import torch
import without_gpu  # type: ignore[import-not-found]  # noqa: F401 - before SGLang itself
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from tree_scheduler import Scheduler, memory  # type: ignore[import-not-found]

from kvkeep.core.eviction import policy
from kvkeep.integrations.sglang.tree import KVKeepTree

if TYPE_CHECKING:
    from collections.abc import Callable

TOKENS = 32_768
LEAVES, LEAF = 10_000, 64
FIRST = "kvkeep"


def unified(core: str) -> Callable[[Any], Any]:
    def make(params: Any) -> Any:
        params.tree_components = (ComponentType.FULL,)
        params.tree_core_backend = core
        cache = UnifiedRadixCache(params)
        assert cache._tree_core_backend == core  # it may fall back to another
        return cache

    return make


TREES: dict[str, Callable[[Any], Any]] = {
    FIRST: lambda params: KVKeepTree(params, lambda: policy("lru")),
    "rust": unified("rust"),
    "unified python": unified("python"),
    "legacy python": RadixCache,
}


class Table:
    """Seconds of CPU by work and tree."""

    def __init__(self) -> None:
        self.seconds: dict[str, dict[str, list[float]]] = {}

    def time(self, work: str, tree: str, call: Callable[..., Any], *given: Any) -> Any:
        gc.disable()  # a collection in the middle would be that of all trees' objects
        began = time.thread_time()
        result = call(*given)
        took = time.thread_time() - began
        gc.enable()
        self.seconds.setdefault(work, {}).setdefault(tree, []).append(took)
        return result

    def print(self) -> None:
        for work, trees in self.seconds.items():
            middle = {tree: statistics.median(taken) for tree, taken in trees.items()}
            cells = [
                f"{tree} {seconds * 1e6:9.1f} ({seconds / middle[FIRST]:5.2f}x)"
                for tree, seconds in middle.items()
            ]
            print(f"{work:44}", *cells, sep="  ")


def prompt(seed: int) -> array[int]:
    return array("q", range(seed * TOKENS, (seed + 1) * TOKENS))


def stored(made: Any, tokens: array[int], slots: Any) -> int:
    done = made.cache.insert(InsertParams(key=RadixKey(tokens), value=slots[: len(tokens)]))
    return int(done.prefix_len)


def matched(made: Any, tokens: array[int]) -> Any:
    return made.cache.match_prefix(MatchPrefixParams(key=RadixKey(tokens)))


def fresh(make: Callable[[Any], Any], page: int, tokens: int, **more: Any) -> Any:
    params = memory(page, tokens // page, rows=4, row=TOKENS + 64, **more)
    made = Scheduler(make(params), params)
    if page > 1:
        made.allocator.debug_mode = False
    made.allocator.free_segment = type(made.allocator).free_segment.__get__(made.allocator)
    return made


def long_prompts(table: Table, page: int, rounds: int) -> None:
    for at in range(rounds):
        for tree, make in TREES.items():
            made = fresh(make, page, 8 * TOKENS)
            stored(made, prompt(90), made.allocator.alloc(TOKENS))  # the first calls are slow
            slots = made.allocator.alloc(2 * TOKENS)
            tokens = prompt(3 * at)
            half = tokens[: TOKENS // 2] + prompt(3 * at + 1)[TOKENS // 2 :]
            table.time(f"page {page}: insert", tree, stored, made, tokens, slots)
            matched(made, tokens)
            found = table.time(f"page {page}: match, 1 run", tree, matched, made, tokens)
            assert found.device_prefix_len == TOKENS
            node = found.last_device_node
            read = made.cache.path_device_indices
            path = table.time(f"page {page}: slots of it", tree, read, node)
            assert path.equal(slots[:TOKENS])
            lock = table.time(f"page {page}: lock", tree, made.cache.lock, node)
            table.time(f"page {page}: unlock", tree, made.cache.unlock, lock)
            rest = slots[TOKENS // 2 :]
            table.time(f"page {page}: insert, half is there", tree, stored, made, half, rest)
            made = fresh(make, page, 4 * TOKENS, enable_kv_cache_events=True)
            slots = made.allocator.alloc(TOKENS)
            table.time(f"page {page}: insert with KV events", tree, told, made, tokens, slots)


def told(made: Any, tokens: array[int], slots: Any) -> None:
    stored(made, tokens, slots)
    assert made.cache.take_events()


def deep_paths(table: Table, page: int, rounds: int) -> None:
    for runs in (64, 512):
        for at in range(rounds):
            for tree, make in TREES.items():
                made = fresh(make, page, 4 * TOKENS)
                tokens = prompt(at)
                slots = made.allocator.alloc(TOKENS + runs * page)
                step = TOKENS // runs
                stored(made, tokens, slots)
                for end in range(step, TOKENS, step):  # a branch at the end of each run
                    stored(made, tokens[:end] + array("q", [10**9] * page), slots)
                work = f"page {page}: match, {runs} runs"
                found = table.time(work, tree, matched, made, tokens)
                assert found.device_prefix_len == TOKENS
                node = found.last_device_node
                made.cache.unlock(
                    table.time(f"page {page}: lock, {runs} runs", tree, made.cache.lock, node)
                )


def chunked(table: Table, page: int, rounds: int) -> None:
    for _ in range(rounds):
        for tree, make in TREES.items():
            made = fresh(make, page, 4 * TOKENS)
            req = made.admit([*range(TOKENS)], chunk=page)
            have = req.kv.kv_committed_len
            rest = made.allocator.alloc(TOKENS - have)
            made.pool.write((req.kv.req_pool_idx, slice(have, TOKENS)), rest.int())
            table.time(f"page {page}: 16 checkpoints of a prefill", tree, checkpoints, made, req)


def checkpoints(made: Any, req: Any) -> None:
    for end in range(2048, TOKENS + 1, 2048):
        req.extend_end = end
        made.cache.checkpoint(req, up_to=end)


def evictions(table: Table, page: int, rounds: int) -> None:
    for _round in range(rounds):
        for tree, make in TREES.items():
            made = fresh(make, page, LEAVES * LEAF + 2 * page)
            slots = made.allocator.alloc(LEAVES * LEAF + page)
            for leaf in range(LEAVES):
                own = range(leaf * LEAF + 1, (leaf + 1) * LEAF + 1 - page)
                begin = page + leaf * (LEAF - page)
                parts = (slots[:page], slots[begin : begin + LEAF - page])
                stored(made, array("q", [*([0] * page), *own]), torch.cat(parts))
            for _ in range(3):  # the first calls are slow
                evicted(made, page)
            for tokens in (page, TOKENS):
                work = f"page {page}: evict {tokens} of {LEAVES} prompts"
                gone = table.time(work, tree, evicted, made, tokens)
                assert gone >= tokens


def evicted(made: Any, tokens: int) -> int:
    return int(made.cache.evict(EvictParams(num_tokens=tokens)).num_tokens_evicted)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    table = Table()
    few = max(3, args.rounds // 3)
    for page in (16, 1):
        long_prompts(table, page, args.rounds)
        chunked(table, page, few)
        evictions(table, page, few)
    deep_paths(table, 16, few)
    print("median µs of each tree, and its ratio to kvkeep's")
    table.print()


if __name__ == "__main__":
    main()
