"""`ReturnBoard`: tells the learner of returns when requests begin and end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvkeep.core.cache.observers import CacheObserver
from kvkeep.core.events import Returned
from kvkeep.core.returns import Returns

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvkeep.core.cache.opening import CacheQuery
    from kvkeep.core.cache.sequence import Sequence
    from kvkeep.core.pages.tables import PageArray
    from kvkeep.core.prefix import PrefixIndex
    from kvkeep.core.prefix.waits import RunningPrompt
    from kvkeep.core.returns import Ended

__all__ = ["ReturnBoard"]


class ReturnBoard(CacheObserver):
    """Follows the requests of a cache whose policy orders by returns.

    A prompt that extends the end of an earlier request is the return of that conversation; no name
    is needed. What a longer prompt repeats of the last answer teaches which part of answers is
    never read; that part of later ones is left behind from the beginning. Cost: about 5 µs a
    request. Thread safety: none; under the cache's lock.
    """

    __slots__ = ("_running", "_waits", "returns")

    def __init__(self, index: PrefixIndex, clock: Callable[[], float]) -> None:
        self.returns = Returns()
        self._waits = index.tree.keep_waits(self.returns, clock, index.page_size)
        self._running: dict[int, RunningPrompt] = {}  # by sequence

    def opened(self, sequence: Sequence, query: CacheQuery, cached: PageArray) -> None:
        """End the wait of the conversation that continues."""
        page = len(cached)

        def following() -> bytes:
            return sequence.encoder.pages(sequence.row, page, page + 1)

        assert sequence.hold.end == page
        self._running[sequence.id] = self._waits.opened(
            sequence.hold, len(query.tokens), sequence.namespace, following
        )

    def returned(self, sequence: int) -> Returned | None:
        """Return what the prompt of a running sequence continued, None for nothing known."""
        wait = self._running[sequence].before
        return None if wait is None else Returned(wait.gaps[-1], wait.turns)

    def forked(self, sequence: Sequence, fork: Sequence) -> None:
        """Let the fork continue the same conversation."""
        self._running[fork.id] = self._running[sequence.id]

    def closed(self, sequence: Sequence, *, keep: bool, ended: Ended | None) -> None:
        """Begin to wait for the next request of the conversation."""
        request = self._running.pop(sequence.id)
        hold = sequence.hold
        if not keep or hold.parent is None:
            return
        tokens = max(0, sequence.num_tokens - request.tokens)
        first = int(sequence.row[request.tokens]) if tokens else None
        self._waits.closed(hold, request, tokens, ended, first)
