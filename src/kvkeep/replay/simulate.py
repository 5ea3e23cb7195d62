"""`simulate`: a trace through the real `PagedCache`, its memory and its clock virtual."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvkeep.cache import PagedCache
from kvkeep.errors import InvalidValue, OutOfPages, whole
from kvkeep.replay.outcome import Outcome
from kvkeep.replay.watching import Watch

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvkeep.cache import Sequence
    from kvkeep.eviction import EvictionPolicy
    from kvkeep.replay.workload import Ids, Workload

__all__ = ["Paging", "simulate"]

_NOBODY = np.array([2**31 - 1], np.int32)  # the token that is in no prompt, and never stored


@dataclass(frozen=True, slots=True)
class Paging:
    """How the tokens of a workload lie in pages.

    By units (``page_tokens`` None): each unit is a page, the last of a prompt as well, full or not.
    That is how hit rates of traces of block ids are given in the literature. By tokens: a prompt
    has all its tokens, pages of ``page_tokens`` are stored when they are full, and the last token
    of a prompt is always computed, as an engine does it.
    """

    unit_tokens: int
    page_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.page_tokens is not None:
            whole("page_tokens", self.page_tokens, 1, 65_536)

    @property
    def size(self) -> int:
        """Of a page of `PagedCache`, in its tokens."""
        return 1 if self.page_tokens is None else self.page_tokens

    @property
    def tokens(self) -> int:
        """Of a page, in tokens of the trace."""
        return self.unit_tokens if self.page_tokens is None else self.page_tokens

    def pages(self, capacity_tokens: int) -> int:
        """In a capacity; `InvalidValue` where there is none."""
        whole("capacity", capacity_tokens, 1)
        pages = capacity_tokens // self.tokens
        if not pages:
            raise InvalidValue(
                f"a capacity of {capacity_tokens} tokens is less than a page of {self.tokens}"
            )
        return pages

    def prompt(self, ids: Ids, tokens: int) -> Ids:
        """What `PagedCache.open` is given."""
        if self.page_tokens is None:
            return np.concatenate((ids, _NOBODY))  # for `open` never gives the last one
        return ids if self.unit_tokens == 1 else np.repeat(ids, self.unit_tokens)[:tokens]

    def whole_units(self, tokens: int) -> int:
        """How many tokens of the cache lie in the whole units of a prompt of ``tokens``."""
        units = tokens // self.unit_tokens
        return units if self.page_tokens is None else units * self.unit_tokens

    def answer(self, ids: Ids) -> Ids:
        """What is appended behind them."""
        if self.page_tokens is None or self.unit_tokens == 1:
            return ids
        return np.repeat(ids, self.unit_tokens)


def simulate(
    workload: Workload,
    capacity_tokens: int,
    policy: str | EvictionPolicy = "lru",
    *,
    page_tokens: int | None = None,
    prefix: str = "radix",
    progress: Callable[[int], None] | None = None,
) -> Outcome:
    """Replay ``workload`` through one pool of ``capacity_tokens``, requests one after the other.

    Each request is opened at its time, its prompt (and its answer, where the trace has it)
    published, and closed: what an engine does that serves one request at a time. ``page_tokens``
    and what it means is told in `Paging`. ``progress`` is told the number of requests done.

    Cost: some 100 µs a request by units, some 200 by tokens for prompts of 12,000.
    """
    paging = Paging(workload.unit_tokens, page_tokens)
    pages = paging.pages(capacity_tokens)
    begun = time.perf_counter()
    # By units a request has a page more for the token that is nobody's, which is never stored.
    extra = 1 if page_tokens is None else 0
    now = 0.0
    cache = PagedCache(
        pages + extra,
        paging.size,
        prefix=prefix,
        eviction=policy,
        block_pages=None if page_tokens else 1,
        clock=lambda: now,
    )
    named = policy if isinstance(policy, str) else policy.name
    outcome = Outcome(named, capacity_tokens, paging.tokens, workload.name, workload.digest)
    watch = Watch(workload, cache.num_pages, paging.size, outcome)
    cache.subscribe(watch.see)
    for number in range(len(workload)):
        now = watch.now = float(workload.times[number])
        _serve(cache, workload, number, paging, watch)
        if progress is not None and number % 100 == 99:
            progress(number + 1)
    outcome.evicted_pages = cache.stats().evicted_pages
    outcome.seconds = time.perf_counter() - begun
    return watch.done()


def _serve(cache: PagedCache, work: Workload, number: int, paging: Paging, watch: Watch) -> None:
    ids, tokens = work.prompt(number), int(work.tokens[number])
    space = work.namespaces[work.namespace[number]]
    try:
        sequence = cache.open(paging.prompt(ids, tokens), space)
    except OutOfPages:
        watch.outcome.refused += 1
        watch.request(number, 0, 0)
        return
    if paging.page_tokens is None:
        blocks = sequence.num_cached
        hit = min(blocks * paging.unit_tokens, tokens)
        computed = len(ids)
    else:
        hit = sequence.num_cached
        blocks = hit // paging.unit_tokens
        computed = tokens
    watch.request(number, hit, blocks)
    keep = bool(work.store[number])
    sequence.copies()
    if keep:
        sequence.publish(computed)
        answer = work.answer(number)
        if len(answer):
            _append(sequence, paging.whole_units(tokens), paging.answer(answer))
    sequence.close(keep=keep)


def _append(sequence: Sequence, length: int, answer: Ids) -> None:
    """The answer follows the first ``length`` tokens; as much of it as there is room for."""
    sequence.truncate(length)
    try:
        sequence.append(answer)
    except OutOfPages:
        return
    sequence.copies()
    sequence.publish(len(sequence.tokens))
