"""Upper bounds of hit rates: an unlimited cache, and an optimal cache that sees the future."""

from __future__ import annotations

import heapq
import time
from typing import TYPE_CHECKING

import numpy as np

from kvkeep.bench.replay.outcome import Outcome, ReplayWatch
from kvkeep.bench.replay.paging import Paging

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from kvkeep.bench.replay.workload import Flags, Ids, Workload

__all__ = ["BELADY", "INFINITE", "belady", "infinite"]

BELADY = "belady"
"""The name of `belady` in a list of policies."""
INFINITE = "infinite"
"""The name of `infinite` in a list of policies."""
_NEVER = 2**31 - 1


def infinite(workload: Workload, progress: Callable[[int], None] | None = None) -> Outcome:
    """Replay through a cache that never evicts, by units: the reuse that is possible at all."""
    return _by_units(workload, INFINITE, workload.num_ids, progress)


def belady(
    workload: Workload, capacity_tokens: int, progress: Callable[[int], None] | None = None
) -> Outcome:
    """Replay through an optimal cache of ``capacity_tokens``, by units.

    The cache evicts the unit whose next request is farthest in the future, and does not admit a
    unit that would be evicted first or is never requested again. (Belady: A study of replacement
    algorithms, 1966.) A unit is requested no later than the units that follow it in a prompt, so
    the cache always holds beginnings of prompts.

    Cost: about 1 µs per unit, times the logarithm of the capacity.
    """
    pages = Paging(workload.unit_tokens).pages(capacity_tokens)
    outcome = _by_units(workload, BELADY, pages, progress)
    outcome.capacity_tokens = capacity_tokens
    return outcome


def _by_units(
    workload: Workload, name: str, pages: int, progress: Callable[[int], None] | None
) -> Outcome:
    begun = time.perf_counter()
    unit = workload.unit_tokens
    outcome = Outcome(name, pages * unit, unit, workload.name, workload.digest)
    watch = ReplayWatch(workload, 0, None, outcome)
    kept = np.zeros(workload.num_ids, bool)
    foresight = _Foresight(workload, pages, kept, watch) if pages < workload.num_ids else None
    for number in range(len(workload)):
        watch.now = float(workload.times[number])
        prompt = workload.prompt(number)
        missing = np.flatnonzero(~kept[prompt])
        hits = int(missing[0]) if len(missing) else len(prompt)
        tokens = int(workload.tokens[number])
        watch.request(number, min(hits * unit, tokens), hits)
        if foresight is not None:
            foresight.keep(number)
        elif workload.store[number]:
            ids = workload.ids[workload.first[number] : workload.last[number]]
            watch.stored(ids[~kept[ids]])
            kept[ids] = True
        if progress is not None and number % 100 == 99:
            progress(number + 1)
    outcome.seconds = time.perf_counter() - begun
    return watch.done()


class _Foresight:
    """Keeps the units whose next requests come soonest."""

    def __init__(self, workload: Workload, pages: int, kept: Flags, watch: ReplayWatch) -> None:
        self._workload = workload
        self._pages = pages
        self._kept = kept
        self._watch = watch
        self._next = _next_requests(workload)
        self._due = np.full(workload.num_ids, _NEVER, np.int64)  # next request, by id
        # (-due, -position in the prompt, id): of units due together the last of a prompt is
        # evicted first. An entry is stale if `_due` has changed.
        self._heap: list[tuple[int, int, int]] = []
        self._count = 0

    def keep(self, number: int) -> None:
        work, kept, due = self._workload, self._kept, self._due
        span = slice(int(work.first[number]), int(work.last[number]))
        ids, comes = work.ids[span], self._next[span]
        known = kept[ids]
        if not work.store[number]:
            ids, comes = ids[known], comes[known]
        due[ids] = comes
        never = ids[kept[ids] & (comes == _NEVER)]
        wanted = comes != _NEVER
        new = ids[wanted & ~kept[ids]]
        self._watch.stored(new)
        kept[new] = True
        self._count += len(new) - len(never)
        if len(never):
            self._forget(never)
        for place in np.flatnonzero(wanted).tolist():
            heapq.heappush(self._heap, (-int(comes[place]), -place, int(ids[place])))
        gone = []
        while self._count > self._pages:
            when, _, one = heapq.heappop(self._heap)
            if kept[one] and due[one] == -when:
                kept[one] = False
                self._count -= 1
                gone.append(one)
        if gone:
            self._forget(np.array(gone, np.int32))

    def _forget(self, ids: Ids) -> None:
        self._kept[ids] = False
        self._watch.gone(ids)


def _next_requests(workload: Workload) -> npt.NDArray[np.int64]:
    """Return, for each place in ``workload.ids``, the next request with that id in its prompt.

    Answers do not count as requests of their ids.
    """
    lengths = workload.last - workload.first
    requests = np.repeat(np.arange(len(workload)), lengths)
    place = np.arange(len(workload.ids)) - np.repeat(workload.first, lengths)
    asked = place < np.repeat(workload.prompt_units, lengths)
    order = np.argsort(workload.ids, kind="stable")
    ids, when = workload.ids[order], np.where(asked, requests, _NEVER)[order]
    following = np.full(len(ids), _NEVER, np.int64)
    # Propagate backwards through the places of one id: few rounds, as few answers repeat an id.
    same = ids[1:] == ids[:-1]
    following[:-1][same] = when[1:][same]
    while True:
        unknown = np.flatnonzero(same & (following[:-1] == _NEVER) & (following[1:] != _NEVER))
        if not len(unknown):
            break
        following[unknown] = following[unknown + 1]
    found = np.empty_like(following)
    found[order] = following
    return found
