"""SGLang's prefix trees, with its own allocator without KV; prompts are ``array("q")``.

``variant``: the Rust core of its unified tree (the default), the Python core of it, or the legacy
`RadixCache`.
"""

from __future__ import annotations

import sys
from array import array
from importlib.metadata import version as version_of
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests_sglang"))

import numpy as np
import torch
import without_gpu  # type: ignore[import-not-found]  # noqa: F401 - before SGLang itself
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.mem_cache.utils import compute_node_hash_values
from tree_scheduler import memory  # type: ignore[import-not-found]

from peers.prompts import SHORT, branches, by_turns, conversations, prompt, short_prompts
from peers.work import by_prefixes

if TYPE_CHECKING:
    import numpy.typing as npt

    from peers.worker import Setting, Steps


def version(variant: str) -> str:
    """Return SGLang's version."""
    assert variant in {"rust", "python", "legacy"}
    return version_of("sglang")


class Tree:
    """A tree and its allocator."""

    def __init__(self, setting: Setting, tokens: int) -> None:
        self.page = setting.sizes.page
        params = memory(self.page, tokens // self.page, rows=4, row=setting.sizes.tokens + 64)
        params.token_to_kv_pool_allocator.debug_mode = False
        self.allocator = params.token_to_kv_pool_allocator
        self._total = self.allocator.available_size()
        # A unified tree frees the slots of what it has by itself.
        self._frees = setting.variant == "legacy"
        if setting.variant == "legacy":
            self.cache: Any = RadixCache(params)
            return
        params.tree_components = (ComponentType.FULL,)
        params.tree_core_backend = setting.variant
        self.cache = UnifiedRadixCache(params)
        assert self.cache._tree_core_backend == setting.variant  # it may fall back to another

    def match(self, tokens: array[int]) -> Any:
        """Return what is found."""
        return self.cache.match_prefix(MatchPrefixParams(key=RadixKey(tokens)))

    def serve(self, tokens: array[int]) -> int:
        """Match, lock, allocate the rest, insert and unlock; return the tokens that were cached.

        As its scheduler does for a prompt that is computed in one pass and ends, without its
        request and its table of slots. The last token is computed again.
        """
        key = RadixKey(tokens, limit=len(tokens) - 1)
        matched = self.cache.match_prefix(MatchPrefixParams(key=key))
        found, node = matched.device_prefix_len, matched.last_device_node
        lock = self.cache.lock(node)
        cached = self.cache.path_device_indices(node)
        slots = self.allocator.alloc(len(tokens) - found)
        assert slots is not None
        self._insert(tokens, torch.cat((cached, slots)), found)
        self.cache.unlock(lock)
        return int(found)

    def keep(self, tokens: array[int]) -> None:
        """Store a prompt, by no more calls than that needs."""
        slots = self.allocator.alloc(len(tokens))
        assert slots is not None
        self._insert(tokens, slots, 0)

    def _insert(self, tokens: array[int], slots: Any, cached: int) -> None:
        """Insert a prompt; slots behind ``cached`` that the tree has no use for are freed."""
        done = self.cache.insert(
            InsertParams(key=RadixKey(tokens), value=slots, prev_prefix_len=cached)
        )
        if self._frees and done.prefix_len > cached:
            self.allocator.free(slots[cached : done.prefix_len])

    def check(self) -> None:
        """Raise unless each slot is free, or in the tree."""
        kept = self.cache.evictable_size() + self.cache.protected_size()
        assert self.allocator.available_size() + kept == self._total, (
            "slots are lost, or free twice"
        )

    def evict(self, tokens: int) -> int:
        """Evict at least so many tokens; return how many are gone."""
        return int(self.cache.evict(EvictParams(num_tokens=tokens)).num_tokens_evicted)

    def clear(self) -> None:
        """Forget everything."""
        self.cache.reset()
        self.allocator.clear()


def taken(tokens: npt.NDArray[np.int32]) -> array[int]:
    return array("q", tokens.tolist())


def filled(setting: Setting, runs: int) -> tuple[Tree, list[Any]]:
    """Return a tree with all conversations, each a path of so many nodes, and their prompts."""
    sizes = setting.sizes
    # A branch needs room for its whole prompt until the tree has told what it knew of it.
    made = Tree(setting, (2 * sizes.conversations + 1) * sizes.tokens)
    prompts = conversations(sizes)
    for tokens in prompts:
        made.keep(taken(tokens))
        for branch in branches(tokens, runs, sizes.page):
            made.keep(taken(branch))
    made.check()
    return made, prompts


def match(which: int) -> Any:
    def steps(setting: Setting) -> Steps:
        made, prompts = filled(setting, setting.sizes.runs[which])
        while True:
            given = by_turns(prompts, setting.times, taken)
            found = yield lambda: made.match(next(given))  # noqa: B023
            assert found.device_prefix_len == setting.sizes.tokens

    return steps


def hit(*, listed: bool) -> Any:
    def steps(setting: Setting) -> Steps:
        sizes = setting.sizes
        made, prompts = filled(setting, 1)
        while True:
            if listed:
                lists = by_turns(prompts, setting.times, np.ndarray.tolist)
                found = yield lambda: made.serve(array("q", next(lists)))  # noqa: B023
            else:
                given = by_turns(prompts, setting.times, taken)
                found = yield lambda: made.serve(next(given))  # noqa: B023
            assert found == sizes.tokens - sizes.page  # it computes the last page again
            made.check()

    return steps


def cold(setting: Setting) -> Steps:
    sizes = setting.sizes
    made = Tree(setting, 4 * sizes.tokens)
    for at in count():
        made.clear()
        seeds = range(10 + at * setting.times, 10 + (at + 1) * setting.times)
        new = iter([taken(prompt(seed, sizes.tokens)) for seed in seeds])
        found = yield lambda: made.serve(next(new))  # noqa: B023
        assert found == 0
        made.check()


class Node:
    """As much of a tree's node as SGLang's function takes."""

    parent = None
    hash_value = None

    def __init__(self, tokens: array[int]) -> None:
        self.key = RadixKey(tokens)


def names(setting: Setting) -> Steps:
    sizes = setting.sizes
    node = Node(taken(prompt(1, sizes.tokens)))
    while True:
        found = yield lambda: compute_node_hash_values(node, sizes.page)
        assert len(found) == sizes.pages


def evict(*, one: bool) -> Any:
    def steps(setting: Setting) -> Steps:
        sizes = setting.sizes
        prompts = sizes.many if one else sizes.prompts
        tokens = SHORT if one else sizes.evicted * sizes.page
        made = Tree(setting, (prompts + 1) * SHORT)
        first, new = 0, prompts
        while True:
            for short in short_prompts(first, new):
                made.keep(taken(short))
            first += new
            gone = yield lambda: made.evict(tokens)
            assert gone >= tokens
            new = made.allocator.available_size() // SHORT - 1

    return steps


CASES = by_prefixes(
    match=match,
    hit=hit(listed=False),
    hit_list=hit(listed=True),
    cold=cold,
    names=names,
    evict=evict,
)
