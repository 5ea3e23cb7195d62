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

import without_gpu  # type: ignore[import-not-found]  # noqa: F401 - before SGLang itself
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.mem_cache.utils import compute_node_hash_values
from tree_scheduler import memory  # type: ignore[import-not-found]

from peers.prompts import SHORT, branches, prompt, short_prompts
from peers.worker import Timed

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from peers.worker import Setting, Steps

TIMES = 10
FEW = 3


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

    def insert(self, tokens: array[int], slots: Any) -> None:
        """Store a prompt in slots that the caller allocated; free those that were stored before."""
        done = self.cache.insert(InsertParams(key=RadixKey(tokens), value=slots))
        if done.prefix_len:
            self.allocator.free(slots[: done.prefix_len])

    def hit(self, tokens: Any) -> int:
        """Serve a request that is cached: match, lock, slots, unlock."""
        given = tokens if isinstance(tokens, array) else array("q", tokens)
        found = self.match(given)
        node = found.last_device_node
        lock = self.cache.lock(node)
        slots = self.cache.path_device_indices(node)
        self.cache.unlock(lock)
        return len(slots)

    def cold(self, tokens: array[int]) -> int:
        """Serve a request that is new: match, allocate, insert."""
        found = self.match(tokens).device_prefix_len
        slots = self.allocator.alloc(len(tokens))
        assert slots is not None
        self.insert(tokens, slots)
        return int(found)

    def evict(self, tokens: int) -> int:
        """Evict at least so many tokens; return how many are gone."""
        return int(self.cache.evict(EvictParams(num_tokens=tokens)).num_tokens_evicted)

    def clear(self) -> None:
        """Forget everything."""
        self.cache.reset()
        self.allocator.clear()


def taken(tokens: npt.NDArray[np.int32]) -> array[int]:
    return array("q", tokens.tolist())


def match(which: int) -> Any:
    def steps(setting: Setting) -> Steps:
        sizes = setting.sizes
        made = Tree(setting, 3 * sizes.tokens)
        tokens = prompt(1, sizes.tokens)
        made.cold(taken(tokens))
        for branch in branches(tokens, sizes.runs[which], sizes.page):
            made.cold(taken(branch))
        given = taken(tokens)
        times = TIMES if sizes.runs[which] < 500 else FEW
        while True:
            found = yield Timed(lambda: made.match(given), times)
            assert found.device_prefix_len == sizes.tokens

    return steps


def hit(*, listed: bool) -> Any:
    def steps(setting: Setting) -> Steps:
        sizes = setting.sizes
        made = Tree(setting, 2 * sizes.tokens)
        tokens = prompt(1, sizes.tokens)
        made.cold(taken(tokens))
        given: Any = tokens.tolist() if listed else taken(tokens)
        while True:
            found = yield Timed(lambda: made.hit(given), TIMES)
            assert found == sizes.tokens

    return steps


def cold(setting: Setting) -> Steps:
    sizes = setting.sizes
    made = Tree(setting, 4 * sizes.tokens)
    for at in count():
        made.clear()
        new = iter([taken(prompt(10 + FEW * at + more, sizes.tokens)) for more in range(FEW)])
        found = yield Timed(lambda: made.cold(next(new)), FEW)  # noqa: B023
        assert found == 0


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
        found = yield Timed(lambda: compute_node_hash_values(node, sizes.page), TIMES)
        assert len(found) == sizes.pages


def evict(*, one: bool) -> Any:
    def steps(setting: Setting) -> Steps:
        sizes = setting.sizes
        prompts = sizes.many if one else sizes.prompts
        times = FEW if one else 1
        tokens = SHORT if one else sizes.evicted * sizes.page
        made = Tree(setting, (prompts + 1) * SHORT)
        first, new = 0, prompts
        while True:
            for short in short_prompts(first, new):
                made.cold(taken(short))
            first += new
            gone = yield Timed(lambda: made.evict(tokens), times)
            assert gone >= tokens
            new = made.allocator.available_size() // SHORT - 1

    return steps


CASES = {
    "match 0": match(0),
    "match 1": match(1),
    "match 2": match(2),
    "hit": hit(listed=False),
    "hit list": hit(listed=True),
    "cold": cold,
    "names": names,
    "evict": evict(one=False),
    "evict one": evict(one=True),
}
