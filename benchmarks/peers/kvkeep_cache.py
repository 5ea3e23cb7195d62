"""kvkeep's `PagedCache`; prompts are NumPy arrays."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np

import kvkeep
from kvkeep import Namespace, PagedCache
from kvkeep.core.keys import chain_keys, root_key
from peers.prompts import SHORT, branches, by_turns, conversations, prompt, short_prompts
from peers.work import by_prefixes

if TYPE_CHECKING:
    from peers.worker import Setting, Steps


def version(variant: str) -> str:
    """Return kvkeep's version."""
    return str(kvkeep.__version__) + variant


def request(cache: PagedCache, tokens: Any) -> int:
    """Open, publish and close a request as an engine does; return the tokens that were cached."""
    sequence = cache.open(tokens)
    sequence.copies()
    found = sequence.num_cached
    sequence.publish()
    sequence.close()
    return int(found)


def filled(setting: Setting, runs: int) -> tuple[PagedCache, list[Any]]:
    """Return a cache with all conversations, each a path of so many runs, and their prompts."""
    sizes = setting.sizes
    cache = PagedCache(2 * sizes.conversations * sizes.pages, sizes.page)
    prompts = conversations(sizes)
    for tokens in prompts:
        request(cache, tokens)
        for branch in branches(tokens, runs, sizes.page):
            request(cache, branch)
    path = sum(run.start + len(run.pages) <= sizes.pages for run in cache.runs())
    assert path >= runs * len(prompts)
    return cache, prompts


def match(which: int) -> Any:
    def steps(setting: Setting) -> Steps:
        cache, prompts = filled(setting, setting.sizes.runs[which])
        while True:
            given = by_turns(prompts, setting.times, np.copy)
            found = yield lambda: cache.match(next(given))  # noqa: B023
            assert found.num_tokens == setting.sizes.tokens

    return steps


def hit(*, listed: bool) -> Any:
    def steps(setting: Setting) -> Steps:
        sizes = setting.sizes
        cache, prompts = filled(setting, 1)
        form: Any = np.ndarray.tolist if listed else np.copy
        while True:
            given = by_turns(prompts, setting.times, form)
            found = yield lambda: request(cache, next(given))  # noqa: B023
            assert found >= sizes.tokens - sizes.page

    return steps


def cold(setting: Setting) -> Steps:
    sizes = setting.sizes
    cache = PagedCache(4 * sizes.pages, sizes.page)
    for at in count():
        cache.clear()
        seeds = range(10 + at * setting.times, 10 + (at + 1) * setting.times)
        new = iter([prompt(seed, sizes.tokens) for seed in seeds])
        found = yield lambda: request(cache, next(new))  # noqa: B023
        assert found == 0


def names(setting: Setting) -> Steps:
    sizes = setting.sizes
    data = prompt(1, sizes.tokens).tobytes()
    root = root_key(Namespace())
    while True:
        found = yield lambda: chain_keys(root, data, sizes.page * 4)
        assert len(found) == sizes.pages


def evict(*, one: bool) -> Any:
    def steps(setting: Setting) -> Steps:
        sizes = setting.sizes
        prompts = sizes.many if one else sizes.prompts
        each = SHORT // sizes.page
        pages = each if one else sizes.evicted
        cache = PagedCache((prompts + 1) * each, sizes.page)
        first, new = 0, prompts
        while True:
            for tokens in short_prompts(first, new):
                request(cache, tokens)
            first += new
            gone = yield lambda: cache.evict(pages)
            assert gone >= pages
            new = cache.stats().pages_free // each - 1

    return steps


CASES = by_prefixes(
    match=match,
    hit=hit(listed=False),
    hit_list=hit(listed=True),
    cold=cold,
    names=names,
    evict=evict,
)
