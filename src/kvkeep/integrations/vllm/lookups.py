"""Lookups of a request's blocks, some of which take longer than a step of the scheduler."""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvkeep.integrations.load_choice import LookupPatience
from kvkeep.integrations.options import LOOKUP_S
from kvkeep.integrations.vllm.groups import BlockReach
from kvkeep.integrations.vllm.kept import log_fault
from kvkeep.integrations.vllm.messages import RankLookup

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvkeep.integrations.load_costs import RunCost
    from kvkeep.integrations.vllm.groups import Groups
    from kvkeep.integrations.vllm.messages import WorkerNews
    from kvkeep.integrations.vllm.requests import FollowedRequest
    from kvkeep.integrations.vllm.shared import SharedStore
    from kvkeep.integrations.vllm.stats import Counts

__all__ = ["BlockLookups", "LookupPatience", "PendingLookup"]

_THREADS = 4
_RANKS_S = 5.0  # for the answer of workers, which comes with the end of a step


@dataclass(slots=True)
class PendingLookup:
    """A lookup of the blocks ``first`` … ``limit - 1`` that takes longer than one step.

    ``result`` is how far a request is stored, once it is known, and ``runs`` what loading it takes,
    if workers told; ``message`` is the last question to the workers. It is waited for until
    ``until`` (monotonic seconds).
    """

    first: int
    limit: int
    since: float
    until: float
    number: int = 0
    future: Future[BlockReach] | None = None
    message: RankLookup | None = None
    covered: int | None = None
    result: BlockReach | None = None
    runs: Sequence[RunCost] = ()

    def drop(self) -> None:
        """Forget the thread's answer; if no thread has begun, none will."""
        if self.future is not None:
            self.future.cancel()
            self.future = None


class BlockLookups:
    """Finds how far requests are stored.

    With the store in the same process, known blocks are found at once, and threads query shared
    tiers. Otherwise the workers look them up, with the plan of the next step.

    Thread safety: none; it belongs to the scheduler's thread.
    """

    def __init__(
        self,
        groups: Groups,
        shared: SharedStore | None,
        counts: Counts,
        *,
        ranks: int,
    ) -> None:
        self._groups = groups
        self._shared = shared
        self._counts = counts
        self._ranks = ranks
        self._patience = LookupPatience(LOOKUP_S)
        self._answers: deque[tuple[float, float]] = deque()  # seconds and share of each, by threads
        self._threads = ThreadPoolExecutor(_THREADS, "kvkeep lookup")
        self._number = 0
        self._pending: dict[int, PendingLookup] = {}  # lookups by workers, by number
        self._found: dict[int, list[BlockReach]] = {}  # by number, the results of ranks so far
        self._messages: list[RankLookup] = []

    def reach(
        self, followed: FollowedRequest, first: int, limit: int, saves_s: float | None = None
    ) -> BlockReach | None:
        """Return how far the request is stored; None: not known yet.

        Loading all of it would save ``saves_s``; None: that is unknown. After
        `LOOKUP_S`, or when waiting takes longer than it brings, returns how far it is known to be
        stored.
        """
        while self._answers:
            self._patience.answered(*self._answers.popleft())
        lookup = followed.lookup
        if lookup is None or (lookup.first, lookup.limit) != (first, limit):
            hashes = followed.hashes(0, limit)
            if self._shared is not None:
                self._shared.delete_expired()
                known = self._groups.reach(hashes, first, self._shared.knows)
                if known.end == limit or not self._shared.must_ask:
                    return known
                patience = self._patience.seconds(saves_s)
                if not patience and not self._patience.due():
                    self._counts.add(skipped_lookups=1)
                    return known
            else:  # every lookup is one of workers, and most of its time is that of a step
                patience = _RANKS_S
            lookup = followed.lookup = self._start(followed, hashes, first, limit)
            lookup.until = lookup.since + patience
        if lookup.future is not None and lookup.future.done():
            failed = lookup.future.exception() is not None
            lookup.result = BlockReach(first, first) if failed else lookup.future.result()
        if lookup.result is not None:
            return lookup.result
        if time.monotonic() < lookup.until:
            return None
        if lookup.until > lookup.since:
            self._counts.add(late_lookups=1)
            lookup.drop()
        else:  # it goes on, to see what lookups take now
            self._counts.add(skipped_lookups=1)
            lookup.future = None
        lookup.result = BlockReach(first, first)
        if self._shared is not None:
            hashes = followed.hashes(0, limit)
            lookup.result = self._groups.reach(hashes, first, self._shared.knows)
        return lookup.result

    def runs(self, followed: FollowedRequest, first: int, end: int) -> Sequence[RunCost]:
        """Return what loading the blocks ``first`` … ``end - 1`` of the request takes, in pieces.

        Empty if that is not known.
        """
        if self._shared is not None:
            return self._shared.runs(followed.hashes(0, end), first, end)
        runs = () if followed.lookup is None else followed.lookup.runs
        return [run._replace(end=min(run.end, end)) for run in runs if run.end > first]

    def _start(
        self, followed: FollowedRequest, hashes: Sequence[bytes], first: int, limit: int
    ) -> PendingLookup:
        now = time.monotonic()
        lookup = PendingLookup(first, limit, now, now)
        if self._shared is not None:
            lookup.future = self._threads.submit(self._query, self._shared, list(hashes), first)
            lookup.future.add_done_callback(log_fault)
            return lookup
        self._number += 1
        lookup.number = self._number
        self._pending[lookup.number] = lookup
        self._ask(
            lookup, RankLookup(followed.request.request_id, lookup.number, first, list(hashes))
        )
        return lookup

    def _ask(self, lookup: PendingLookup, message: RankLookup) -> None:
        lookup.message = message
        self._messages.append(message)

    def _query(self, shared: SharedStore, hashes: list[bytes], first: int) -> BlockReach:
        """In a thread: look the blocks up, in shared tiers too."""
        began, found = time.monotonic(), first
        until = began + LOOKUP_S

        def count(keys: list[bytes]) -> int:
            return shared.lookup(keys, max(0.0, until - time.monotonic()))

        try:
            reach = self._groups.reach(hashes, first, count)
            found = reach.end
            return reach
        finally:
            share = (found - first) / max(1, len(hashes) - first)
            self._answers.append((time.monotonic() - began, share))
            shared.news.set()

    def take_messages(self) -> list[RankLookup]:
        """Return and forget the lookups that were not yet sent to the workers."""
        messages, self._messages = self._messages, []
        return messages

    def receive(self, results: WorkerNews) -> None:
        """Take results of workers; a block counts as stored if all ranks have it."""
        for number, found in results.found.items():
            lookup = self._pending.get(number)
            if lookup is None:
                continue
            all_found = self._found.setdefault(number, [])
            all_found += found
            lookup.runs = max([lookup.runs, *results.runs.get(number, ())], key=_total_s)
            if len(all_found) < self._ranks:
                continue
            end = min(reach.end for reach in all_found)
            if lookup.covered is None:
                lookup.covered = min(reach.covered for reach in all_found)
            differ = any(reach.end != end for reach in all_found)
            if differ and end > lookup.first and not self._groups.resumes_anywhere:
                # The other ranks may have no window or state there: all are asked again.
                del self._found[number]
                message = lookup.message
                assert message is not None
                hashes = message.hashes[:end]
                lookup.runs = ()
                self._ask(lookup, RankLookup(message.request, number, lookup.first, hashes))
                continue
            lookup.result = BlockReach(end, max(end, lookup.covered))
            self.forget(lookup)

    def forget(self, lookup: PendingLookup) -> None:
        """Ignore later results of a lookup."""
        self._pending.pop(lookup.number, None)
        self._found.pop(lookup.number, None)
        lookup.drop()

    def close(self) -> None:
        """Cancel the lookups that have not begun."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _total_s(runs: Sequence[RunCost]) -> float:
    return sum(run.seconds or 0.0 for run in runs)
