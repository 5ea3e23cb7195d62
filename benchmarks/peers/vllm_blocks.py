"""vLLM's `KVCacheManager`, driven as its scheduler drives it; prompts are Python lists.

It has no tree: a match walks over the blocks of a prompt, whichever prompts share them. So the
cases of paths are one case here, from the hashes on; a request computes its hashes when it is made.
"""

from __future__ import annotations

import os
from itertools import count
from typing import TYPE_CHECKING, Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import numpy as np
import torch
from vllm import SamplingParams
from vllm import __version__ as vllm_version
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from peers.prompts import SHORT, branches, by_turns, conversations, prompt, short_prompts
from peers.work import by_prefixes

if TYPE_CHECKING:
    from peers.worker import Setting, Steps

init_none_hash(sha256)


def version(variant: str) -> str:
    """Return vLLM's version."""
    return str(vllm_version) + variant


class Blocks:
    """A manager over so many blocks of one group of layers."""

    def __init__(self, blocks: int, page: int, longest: int) -> None:
        spec = FullAttentionSpec(
            block_size=page, num_kv_heads=8, head_size=128, dtype=torch.bfloat16
        )
        config = KVCacheConfig(
            num_blocks=blocks + 1,  # it never uses block 0
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
        )
        self.manager = KVCacheManager(
            config, longest + page, page, page, max_in_flight_tokens=longest + page,
            enable_caching=True,
        )  # fmt: skip
        self.hasher = get_request_block_hasher(page, sha256)
        self._params = SamplingParams(max_tokens=1)
        self._number = count()

    def make(self, tokens: list[int], *, hashed: bool = True) -> Any:
        """Return a request, with its hashes."""
        return Request(
            str(next(self._number)), tokens, self._params, None,
            block_hasher=self.hasher if hashed else None,
        )  # fmt: skip

    def serve(self, tokens: list[int]) -> int:
        """Make, look up, allocate, and free a request; return the tokens that were cached."""
        request, manager = self.make(tokens), self.manager
        blocks, hit, _ = manager.get_computed_blocks(request)
        manager.new_step_starts()
        slots = manager.allocate_slots(request, len(tokens) - hit, hit, blocks)
        assert slots is not None
        manager.free(request)
        return int(hit)


def stored(setting: Setting, runs: int) -> tuple[Blocks, list[Any]]:
    """Return a manager with all conversations, and so many branches of each, and their prompts."""
    sizes = setting.sizes
    made = Blocks(2 * sizes.conversations * sizes.pages + 2, sizes.page, sizes.tokens)
    prompts = conversations(sizes)
    for tokens in prompts:
        made.serve(tokens.tolist())
        for branch in branches(tokens, runs, sizes.page):
            made.serve(branch.tolist())
    return made, prompts


def match(which: int) -> Any:
    def steps(setting: Setting) -> Steps:
        sizes = setting.sizes
        made, prompts = stored(setting, sizes.runs[which])
        while True:
            given = by_turns(prompts, setting.times, lambda tokens: made.make(tokens.tolist()))
            found = yield lambda: made.manager.get_computed_blocks(next(given))  # noqa: B023
            assert found[1] == sizes.tokens - sizes.page  # it computes the last block again

    return steps


def hit(setting: Setting) -> Steps:
    sizes = setting.sizes
    made, prompts = stored(setting, 1)
    while True:
        given = by_turns(prompts, setting.times, np.ndarray.tolist)
        found = yield lambda: made.serve(next(given))  # noqa: B023
        assert found == sizes.tokens - sizes.page


def cold(setting: Setting) -> Steps:
    sizes = setting.sizes
    made = Blocks(4 * sizes.pages, sizes.page, sizes.tokens)
    for at in count():
        assert made.manager.reset_prefix_cache()
        seeds = range(10 + at * setting.times, 10 + (at + 1) * setting.times)
        new = iter([prompt(seed, sizes.tokens).tolist() for seed in seeds])
        found = yield lambda: made.serve(next(new))  # noqa: B023
        assert found == 0


def names(setting: Setting) -> Steps:
    sizes = setting.sizes
    made = Blocks(2, sizes.page, sizes.tokens)
    request = made.make(prompt(1, sizes.tokens).tolist(), hashed=False)
    while True:
        found = yield lambda: made.hasher(request)
        assert len(found) == sizes.pages


def evict(*, one: bool) -> Any:
    """New blocks, whose old contents are evicted: it does so only when it allocates."""

    def steps(setting: Setting) -> Steps:
        sizes = setting.sizes
        prompts = sizes.many if one else sizes.prompts
        each = SHORT // sizes.page
        pages = each if one else sizes.evicted
        made = Blocks(prompts * each, sizes.page, SHORT)
        pool = made.manager.block_pool
        first, new = 0, prompts
        while True:
            for tokens in short_prompts(first, new):
                made.serve(tokens.tolist())
            first += new
            kept: list[Any] = []
            yield lambda: kept.extend(pool.get_new_blocks(pages))  # noqa: B023
            assert len(kept) == pages * setting.times
            pool.free_blocks(kept)
            new = len(kept) // each

    return steps


CASES = by_prefixes(match=match, hit=hit, hit_list=hit, cold=cold, names=names, evict=evict)
