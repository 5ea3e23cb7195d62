"""kvkeep's `PagedCache`; prompts are NumPy arrays."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Any

import kvkeep
from kvkeep import Namespace, PagedCache
from kvkeep.core.keys import chain_keys, root_key
from peers.prompts import SHORT, branches, prompt, short_prompts
from peers.worker import Timed

if TYPE_CHECKING:
    from peers.worker import Setting, Steps

TIMES = 20


def version(variant: str) -> str:
    """Return kvkeep's version."""
    return str(kvkeep.__version__) + variant


def request(cache: PagedCache, tokens: Any, *, publish: bool = False) -> int:
    """Open and close a request as an engine does; return the tokens that were cached."""
    sequence = cache.open(tokens)
    sequence.copies()
    found = sequence.num_cached
    if publish:
        sequence.publish()
    sequence.close()
    return int(found)


def match(which: int) -> Any:
    def steps(setting: Setting) -> Steps:
        sizes = setting.sizes
        runs = sizes.runs[which]
        cache = PagedCache(2 * sizes.pages, sizes.page)
        tokens = prompt(1, sizes.tokens)
        request(cache, tokens, publish=True)
        for branch in branches(tokens, runs, sizes.page):
            request(cache, branch, publish=True)
        path = sum(run.start + len(run.pages) <= sizes.pages for run in cache.runs())
        assert path >= runs
        while True:
            found = yield Timed(lambda: cache.match(tokens), TIMES)
            assert found.num_tokens == sizes.tokens

    return steps


def hit(*, listed: bool) -> Any:
    def steps(setting: Setting) -> Steps:
        sizes = setting.sizes
        cache = PagedCache(2 * sizes.pages, sizes.page)
        tokens = prompt(1, sizes.tokens)
        request(cache, tokens, publish=True)
        given: Any = tokens.tolist() if listed else tokens
        while True:
            found = yield Timed(lambda: request(cache, given), TIMES)
            assert found >= sizes.tokens - sizes.page

    return steps


def cold(setting: Setting) -> Steps:
    sizes = setting.sizes
    cache = PagedCache(4 * sizes.pages, sizes.page)
    for at in count():
        cache.clear()
        new = iter([prompt(10 + 3 * at + more, sizes.tokens) for more in range(3)])
        found = yield Timed(lambda: request(cache, next(new), publish=True), 3)  # noqa: B023
        assert found == 0


def names(setting: Setting) -> Steps:
    sizes = setting.sizes
    data = prompt(1, sizes.tokens).tobytes()
    root = root_key(Namespace())
    while True:
        found = yield Timed(lambda: chain_keys(root, data, sizes.page * 4), TIMES)
        assert len(found) == sizes.pages


def evict(*, one: bool) -> Any:
    def steps(setting: Setting) -> Steps:
        sizes = setting.sizes
        prompts = sizes.many if one else sizes.prompts
        times = 10 if one else 1
        each = SHORT // sizes.page
        pages = each if one else sizes.evicted
        cache = PagedCache((prompts + 1) * each, sizes.page)
        first, new = 0, prompts
        while True:
            for tokens in short_prompts(first, new):
                request(cache, tokens, publish=True)
            first += new
            gone = yield Timed(lambda: cache.evict(pages), times)
            assert gone >= pages
            new = cache.stats().pages_free // each - 1

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
