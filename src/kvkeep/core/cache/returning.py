"""`ReturnBoard`: tells the learner of returns when requests begin and end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvkeep.core.cache.observers import CacheObserver
from kvkeep.core.returns import Ended, Returns

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvkeep.core.cache.opening import CacheQuery
    from kvkeep.core.cache.sequence import Sequence
    from kvkeep.core.pages.table import PageArray
    from kvkeep.core.prefix import PrefixIndex
    from kvkeep.core.returns import Wait

__all__ = ["ReturnBoard"]

_UNKNOWN = Ended()


class ReturnBoard(CacheObserver):
    """Follows the requests of a cache whose policy orders by returns.

    A prompt that extends the end of an earlier request is the return of that conversation; no name
    is needed. Cost: about 5 µs a request. Thread safety: none; under the cache's lock.
    """

    __slots__ = ("_page_size", "_running", "_waits", "returns")

    def __init__(self, index: PrefixIndex, clock: Callable[[], float]) -> None:
        self.returns = Returns()
        self._page_size = index.page_size
        self._waits = index.tree.keep_waits(self.returns, clock)
        # By sequence: the wait that it ended, and the tokens of its prompt.
        self._running: dict[int, tuple[Wait | None, int]] = {}

    def opened(self, sequence: Sequence, query: CacheQuery, cached: PageArray) -> None:
        """End the wait of the conversation that continues."""
        waits, hold = self._waits, sequence.hold
        page = len(cached)
        wait = waits.ended_by(hold, lambda: sequence.encoder.pages(sequence.row, page, page + 1))
        if wait is not None:
            waits.end(wait, hold, waits.clock())
        self._running[sequence.id] = wait, len(query.tokens)

    def forked(self, sequence: Sequence, fork: Sequence) -> None:
        """Let the fork continue the same conversation."""
        self._running[fork.id] = self._running[sequence.id]

    def closed(self, sequence: Sequence, *, keep: bool, ended: Ended | None) -> None:
        """Begin to wait for the next request of the conversation."""
        before, prompt = self._running.pop(sequence.id)
        hold = sequence.hold
        if not keep or hold.parent is None:
            return
        ended = ended or _UNKNOWN
        answer = sequence.num_tokens - prompt if ended.tokens is None else ended.tokens
        wait = self.returns.began(
            ended,
            max(0, answer),
            self._waits.clock(),
            before=before,
            tenant=sequence.namespace,
        )
        self._waits.begin(hold, wait, prompt // self._page_size)
