"""`CacheParts`: the objects that a cache and its sequences share, and eviction from them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvkeep.core.cache.copies import Claims
from kvkeep.core.cache.misses import Misses
from kvkeep.core.cache.pins import Pins
from kvkeep.core.cache.sessions import Sessions
from kvkeep.core.cache.stats import CacheCounters
from kvkeep.core.errors import OutOfPages
from kvkeep.core.events import CacheLock, Evicted, frozen
from kvkeep.core.eviction import EvictionPolicy
from kvkeep.core.pages.pool import EMPTY_PAGES, joined

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvkeep.core.groups import GroupBoard, GroupLayout, SequenceGroups
    from kvkeep.core.miss_ratio import PromptWatch
    from kvkeep.core.pages import PagePool
    from kvkeep.core.pages.pool import PageArray
    from kvkeep.core.prefix import PrefixMatch
    from kvkeep.core.prefix.node import Node
    from kvkeep.core.prefix.tree import Tree

__all__ = ["CacheParts"]


class CacheParts:
    """The parts of a `PagedCache`, and the methods that free pages in them.

    Thread safety: none; under ``lock``, which the cache and its sequences take.
    """

    def __init__(
        self,
        pool: PagePool,
        tree: Tree,
        groups: GroupLayout | None,
        hard_pin_pages: int,
        clock: Callable[[], float],
        *,
        reuse: bool,
    ) -> None:
        self.pool = pool  # it calls `_make_room`
        self.tree = tree
        self.num_pages, self.page_size = pool.num_pages, tree.page_size
        self.reuse = reuse
        self.lock = CacheLock()
        self.counters = CacheCounters()
        self.claims = Claims(pool, tree)
        self.sequences: dict[int, Any] = {}
        """The sequences that are not closed, by id."""
        self.pins = Pins(tree, pool.num_pages, hard_pin_pages, clock)
        self.sessions = Sessions(tree, pool.num_pages, clock)
        self.misses = Misses(tree, pool.num_pages, clock)
        self.reports_requests = reuse and any(
            getattr(type(tree.policy), name) is not getattr(EvictionPolicy, name)
            for name in ("opened", "closed", "forked", "dropped")
        )
        """Whether the policy overrides a method that is called for requests."""
        self.watch: PromptWatch | None = None
        """The miss-ratio curve, of a cache made with ``what_if``."""
        self.board: GroupBoard | None = None
        """Rows and states beside the pages; None for a plain model."""
        if groups is not None:
            from kvkeep.core.groups import GroupBoard  # noqa: PLC0415 - a plain model has none

            self.board = self.pins.board = GroupBoard(
                groups, pool, tree, self.lock, self.pins.covered, reuse=reuse
            )

    def _affordable(
        self, match: PrefixMatch | None, total: int, reserve: int
    ) -> tuple[PrefixMatch | None, int]:
        """Return the match to hold and the pages to allocate; `OutOfPages` before any change.

        Pages of a held match cannot be evicted. A page that matches only in part is left out of the
        match if the request could not be opened with that page held.
        """
        needed = total - (0 if match is None else len(match.pages))
        if needed + reserve <= self.pool.num_free:
            return match, needed
        self.pins.expire()
        available = self._available() - self.tree.protects(match)
        if needed + reserve > available and match is not None and match.source is not None:
            match = match.without_partial()
            available = self._available() - self.tree.protects(match)
            if needed + reserve <= available:
                self.counters.partial_hits_given_up += 1
        if needed + reserve > available:
            raise self._refused(needed + reserve, available)
        return match, needed

    def _resume(
        self, board: GroupBoard, match: PrefixMatch | None, total: int
    ) -> tuple[SequenceGroups, PrefixMatch | None]:
        """Shorten a match to where all groups can resume; take references to the pages they read.

        A request takes ``total`` pages in all, less those that match. If these and the pages that
        the groups read do not fit, it resumes earlier. `OutOfPages` before any change.
        """
        self.pins.expire()
        page = 0 if match is None else len(match.pages)
        given_up = 0
        while True:
            path = EMPTY_PAGES if match is None else match.pages[:page]
            page, checkpoint = board.resume(path)
            shortened = None if match is None or not page else match.first(page)
            needed, available = total - page, self.pool.num_free
            if needed > available:
                beside = board.count_idle(board.used_pages(path[:page], checkpoint))
                available = self._available() - self.tree.protects(shortened) - beside
            if needed <= available:
                board.counters.resumes_given_up += given_up
                from kvkeep.core.groups import SequenceGroups  # noqa: PLC0415 - only where needed

                groups = SequenceGroups(board)
                groups.hold(path[:page], checkpoint)
                return groups, shortened
            if not page:
                raise self._refused(total, available)
            given_up = 1
            # Without states, an earlier position holds about as many pages.
            page = 0 if board.layout.state is None else page - 1

    # --- pages -----------------------------------------------------------------------------------

    def _available(self) -> int:
        """Return the number of pages that are free or evictable."""
        idle = 0 if self.board is None else self.board.idle
        return self.pool.num_free + self.tree.num_evictable + idle

    def _make_room(self, count: int) -> None:
        """Evict until ``count`` pages are free; `OutOfPages` changes nothing."""
        self.pins.expire()
        if count > self._available():
            raise self._refused(count, self._available())
        self._evict(count - self.pool.num_free, "pressure")
        assert count <= self.pool.num_free, "eviction freed less than was available"

    def _refused(self, needed: int, available: int) -> OutOfPages:
        """Count a refusal and return its error."""
        self.counters.out_of_pages += 1
        return OutOfPages(needed, available, self.num_pages)

    def _evict(self, count: int, reason: str) -> int:
        """Evict up to ``count`` pages; return how many."""
        self.sessions.expire()
        self.misses.removing(reason)
        if self.board is None:
            pages = self.tree.evict(count)
            self._forget(pages, reason)
            return len(pages)
        evicted: list[PageArray] = []

        def let_go(pages: PageArray) -> None:
            self._let_go(pages)
            evicted.append(pages)

        freed = self.board.make_room(count, let_go)
        self.counters.evictions += bool(evicted)
        if self.lock.hooks:
            self._report(joined(evicted), reason)
        return freed

    def drop(self, hold: Node, keep: int) -> int:
        """End a hold and remove its path behind ``keep`` pages, except pages in use or pinned.

        Returns the number of pages removed.
        """
        self.pins.expire()
        self.misses.removing("dropped")
        pages = self.tree.drop(hold, keep)
        self._forget(pages, "dropped")
        return len(pages)

    def _forget(self, pages: PageArray, reason: str) -> None:
        """Release ``pages`` that the tree no longer stores, and report them."""
        if len(pages):
            self._let_go(pages)
            self.counters.evictions += 1
        if self.lock.hooks:
            self._report(pages, reason)

    def _let_go(self, pages: PageArray) -> None:
        freed = self.pool.release(pages)
        assert freed == len(pages), "the index evicted a page that a sequence uses"
        if self.tree.marks.living:
            self.tree.marks.forget(pages)
        self.counters.evicted_pages += freed

    def _report(self, pages: PageArray, reason: str) -> None:
        """Report evicted pages, and the rows and states lost since the last report."""
        lost = None if self.board is None else self.board.take_lost()
        if len(pages) or lost is not None:
            self.lock.emit(Evicted(frozen(pages), reason, lost))
