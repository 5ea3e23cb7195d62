"""`CacheObserver`: follows the requests of a cache from inside; and the one for miss ratios."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvkeep.core.extras import signed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvkeep.core.cache.opening import CacheQuery
    from kvkeep.core.cache.sequence import Sequence
    from kvkeep.core.miss_ratio import PromptWatch
    from kvkeep.core.pages.tables import PageArray
    from kvkeep.core.returns import Ended

__all__ = ["CacheObserver", "MissRatioObserver"]


class CacheObserver:
    """Base class of the parts of a cache that follow its requests; every method does nothing.

    The cache calls an observer in the middle of an operation and under its lock, so an observer
    neither raises nor calls the cache. Code outside the cache uses hooks instead
    (`PagedCache.subscribe`), which are called when an operation is complete.
    """

    __slots__ = ()

    def opened(self, sequence: Sequence, query: CacheQuery, cached: PageArray) -> None:
        """``sequence`` holds the ``cached`` pages of its prompt; no other pages were taken yet."""

    def forked(self, sequence: Sequence, fork: Sequence) -> None:
        """``fork`` was made from ``sequence``."""

    def closed(self, sequence: Sequence, *, keep: bool, ended: Ended | None) -> None:
        """``sequence`` is closed and still has its pages; `Sequence.close` explains the others."""

    def evicting(self) -> None:
        """Pages are about to be evicted: bring the order of eviction up to date."""

    def figures(self) -> Mapping[str, Any]:
        """Return this observer's fields of `CacheStats`."""
        return {}

    def check(self) -> None:
        """Assert the invariants of this observer."""


class MissRatioObserver(CacheObserver):
    """Reports the prompts of a cache to the watch that estimates miss ratios of other sizes."""

    __slots__ = ("_reported", "watch")

    def __init__(self, watch: PromptWatch) -> None:
        self.watch = watch
        # By sequence: pages already reported to the watch; only later ones are reported at close.
        self._reported: dict[int, int] = {}

    def opened(self, sequence: Sequence, query: CacheQuery, cached: PageArray) -> None:
        """Report the prompt without its last token, which is never looked up."""
        tokens = signed(query.tokens, query.extras)[:-1]
        self._reported[sequence.id] = self.watch.opened(tokens, query.space, sequence.num_cached)

    def forked(self, sequence: Sequence, fork: Sequence) -> None:
        """Report nothing: the tokens of a fork were reported."""
        self._reported[fork.id] = self._reported[sequence.id]

    def closed(self, sequence: Sequence, *, keep: bool, ended: Ended | None) -> None:
        """Report the full pages that were published since `opened`."""
        reported = self._reported.pop(sequence.id)
        if keep and len(sequence.published_pages) > reported:
            # Later prompts find these pages, like those of a prompt.
            row = signed(sequence.tokens, sequence.extras)[: sequence.num_published]
            self.watch.stored(row, sequence.space)

    def figures(self) -> Mapping[str, Any]:
        """Return the points of the curve."""
        return {"what_if": self.watch.points()}

    def check(self) -> None:
        self.watch.check()
