"""`Core`: the state that a cache and its sequences share: pages, index, claims, lock, events."""

from __future__ import annotations

import logging
import threading
import weakref
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from kvkeep.core.cache.copies import Forks
from kvkeep.core.cache.observers import CacheObserver
from kvkeep.core.cache.pins import PinBoard
from kvkeep.core.cache.sessions import SessionBoard
from kvkeep.core.cache.stats import CacheCounters
from kvkeep.core.errors import InvalidValue, OutOfPages, told
from kvkeep.core.events import Evicted, Returned, frozen
from kvkeep.core.prefix.results import EMPTY_PAGES, joined
from kvkeep.core.prefix.tree import tops
from kvkeep.core.public import PublicPrefixes
from kvkeep.core.returns import Returns

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Self

    from kvkeep.core.cache.copies import PendingCopies
    from kvkeep.core.cache.opening import CacheQuery
    from kvkeep.core.cache.sequence import Sequence
    from kvkeep.core.events import Event, Hook
    from kvkeep.core.groups import GroupBoard, GroupLayout
    from kvkeep.core.keys import Namespace
    from kvkeep.core.pages import PageCopy, PagePool
    from kvkeep.core.pages.tables import PageArray
    from kvkeep.core.prefix import PrefixIndex
    from kvkeep.core.prefix.waits import RunningPrompt
    from kvkeep.core.returns import Ended

__all__ = ["LEAST_PINS", "Claim", "Core"]

LEAST_PINS = 1024
"""A cache keeps as many pins at a time as it has pages, but at least this many."""

_log = logging.getLogger("kvkeep.cache")


@dataclass(slots=True, eq=False)
class Claim:
    """Keeps a page unchanged until it is copied: one reference, and a hold if the index stores it.

    Forks share the claims of the sequence they were made from: ``sharers`` still need the copy.
    """

    copy: PageCopy
    hold: Any
    sharers: dict[PendingCopies, None]


class _PageClaims:
    """The claims on one page, and how many of its leading tokens they copy."""

    __slots__ = ("claims", "tokens")

    def __init__(self) -> None:
        self.claims: dict[Claim, None] = {}
        self.tokens: dict[int, int] = {}  # tokens to copy → number of claims

    def add(self, claim: Claim) -> None:
        self.claims[claim] = None
        tokens = claim.copy.tokens
        self.tokens[tokens] = self.tokens.get(tokens, 0) + 1

    def remove(self, claim: Claim) -> None:
        del self.claims[claim]
        tokens = claim.copy.tokens
        self.tokens[tokens] -= 1
        if not self.tokens[tokens]:
            del self.tokens[tokens]


class Core:
    """The state that every operation works on, under one lock.

    ``with core:`` begins and ends an operation: it takes the lock; when the outermost operation is
    done, it delivers the events to the hooks, in order, still under the lock.

    Lock order: this lock is the innermost. A thread may take it while it holds any other lock; a
    thread that holds it waits for no other lock. Hooks, eviction policies and the clock run under
    it.
    """

    def __init__(
        self,
        pool: PagePool,
        index: PrefixIndex,
        pins: int,
        clock: Callable[[], float],
        *,
        reuse: bool,
        groups: GroupLayout | None = None,
    ) -> None:
        self.pool = pool
        self.index = index
        self.marks = index.marks
        self.public = PublicPrefixes()  # what all tenants share
        self.page_size = index.page_size
        self.reuse = reuse
        self.counters = CacheCounters()
        self.pins = PinBoard(index, pins, max(LEAST_PINS, pool.num_pages), clock)
        self.sessions = SessionBoard(index, pool.num_pages, clock)
        follows = index.policy.awaits and reuse  # conversations
        self.returning = ReturnBoard(index, clock) if follows else None
        self.observers: tuple[CacheObserver, ...] = (self.returning,) if self.returning else ()
        self.groups: GroupBoard | None = None
        """Rows and states beside the pages; None for a plain model."""
        if groups is not None:
            from kvkeep.core.groups import GroupBoard  # noqa: PLC0415 - only where needed
            from kvkeep.core.groups.units import PinnedGroups  # noqa: PLC0415 - as above

            self.groups = index.tree.listener = GroupBoard(groups, pool, index.tree)
            self.pins.groups = PinnedGroups(self.groups, self)
        self.sequences: dict[int, Sequence] = {}
        self.opened = 0  # the number of the newest sequence: 1, 2, 3 …
        self._memory: weakref.ref[object] | None = None  # what the pages are bound to
        self._claimed: dict[int, _PageClaims] = {}  # by source page
        self.forks = Forks()
        self.hooks: tuple[Hook, ...] = ()
        self._events: list[Event] = []
        self._lock = threading.RLock()
        self._depth = 0
        self._hooking: int | None = None  # the thread that is running hooks

    def __enter__(self) -> Self:
        self._lock.acquire()
        self._depth += 1
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if self._depth == 1 and self._events:
                self._deliver()
        finally:
            self._depth -= 1
            self._lock.release()

    # --- memory ------------------------------------------------------------------------------

    def bind(self, memory: object) -> None:
        """Bind the pages to ``memory``; see `PagedCache.bind`."""
        bound = None if self._memory is None else self._memory()
        if bound is memory:
            return
        if bound is not None:
            raise InvalidValue(
                f"this cache's pages lie in another memory ({type(bound).__name__} at "
                f"{id(bound):#x}), and their ids mean nothing in this one; give each runner a "
                "PagedCache of its own"
            )
        if self._memory is not None and self.pool.num_used:
            raise InvalidValue(
                f"this cache holds {self.pool.num_used} pages of a memory that is gone; make "
                "another PagedCache, or close its sequences and clear() it first"
            )
        try:
            self._memory = weakref.ref(memory)
        except TypeError as error:
            raise InvalidValue(
                f"the memory is {told(memory)}; the object that owns it is needed, and it must "
                "support weak references"
            ) from error

    # --- observers and hooks -----------------------------------------------------------------

    def observe(self, observer: CacheObserver) -> None:
        """Call ``observer`` from now on; no effect if it is called already."""
        if observer not in self.observers:
            self.observers = (*self.observers, observer)

    def subscribe(self, hook: Hook) -> Callable[[], None]:
        """See `PagedCache.subscribe`."""
        own = partial(hook)  # distinguishes it from the same hook subscribed twice
        with self:
            self._set_hooks((*self.hooks, own))

        def end() -> None:
            with self:
                self._set_hooks(tuple(other for other in self.hooks if other is not own))

        return end

    def _set_hooks(self, hooks: tuple[Hook, ...]) -> None:
        self.hooks = hooks
        if self.groups is not None:
            self.groups.journal.on = bool(hooks)

    def emit(self, event: Event) -> None:
        """Queue ``event`` until this operation ends. Callers check ``hooks`` first."""
        self._events.append(event)

    @property
    def in_hook(self) -> bool:
        """Whether this thread is running a hook, and so holds the lock until the hook returns."""
        return self._hooking == threading.get_ident()

    def _deliver(self) -> None:
        self._hooking = threading.get_ident()
        try:
            # A hook may use the cache: this same loop delivers the events of that, in order.
            while self._events:
                events, self._events = self._events, []
                for event in events:
                    for hook in self.hooks:
                        self._call(hook, event)
        finally:
            self._hooking = None

    def _call(self, hook: Hook, event: Event) -> None:
        try:
            hook(event)
        except Exception:  # noqa: BLE001 - a failing hook must not fail the cache
            self.counters.hook_errors += 1
            _log.exception("a cache hook failed on %s", type(event).__name__)

    # --- pages -------------------------------------------------------------------------------

    def available(self) -> int:
        """Return how many pages are free or evictable."""
        idle = 0 if self.groups is None else self.groups.units.idle
        return self.pool.num_free + self.index.num_evictable + idle

    def has_free(self, count: int) -> bool:
        """Whether ``count`` pages are free without evicting any."""
        return count <= self.pool.num_free

    def take(self, count: int) -> PageArray:
        """Allocate ``count`` pages, evicting others if needed; `OutOfPages` changes nothing."""
        short = count - self.pool.num_free
        if short > 0:
            self.pins.expire()
            if count > self.available():
                raise self.short_of(count, self.available())
            self.evict(short, "pressure")
            assert count <= self.pool.num_free, "eviction freed less than was available"
        return self.pool.allocate(count)

    def short_of(self, needed: int, available: int) -> OutOfPages:
        """Count a refusal and return its error."""
        self.counters.out_of_pages += 1
        return OutOfPages(needed, available, self.pool.num_pages)

    def evict(self, count: int, reason: str) -> int:
        """Evict up to ``count`` pages; return how many."""
        self.before_eviction()
        if self.groups is not None:
            return self._evict_groups(self.groups, count, reason)
        pages = self.index.evict(count)
        self.forget(pages, reason)
        return len(pages)

    def _evict_groups(self, groups: GroupBoard, count: int, reason: str) -> int:
        from kvkeep.core.groups.units import make_room  # noqa: PLC0415 - only where needed

        gone: list[PageArray] = []

        def let_go(pages: PageArray) -> None:
            self._let_go(pages)
            gone.append(pages)

        freed = make_room(groups, self.index.tree, self.pool, count, let_go)
        self._report_evicted(joined(gone), reason)
        return freed

    def before_eviction(self) -> None:
        """Let observers bring the order of eviction up to date."""
        for observer in self.observers:
            observer.evicting()

    def forget(self, pages: PageArray, reason: str) -> None:
        """Release the references to ``pages`` that the index no longer stores, and report it.

        Also what was lost of groups of layers since the last report.
        """
        self._let_go(pages)
        self._report_evicted(pages, reason)

    def _let_go(self, pages: PageArray) -> None:
        if len(pages):
            freed = self.pool.release_known(pages)
            assert freed == len(pages), "the index evicted a page that a sequence uses"
            self.marks.forget(pages)
            self.counters.evicted_pages += len(pages)

    def _report_evicted(self, pages: PageArray, reason: str) -> None:
        if len(pages):
            self.counters.evictions += 1
        lost = None if self.groups is None else self.groups.journal.take_lost()
        if self.hooks and (len(pages) or lost is not None):
            self.emit(Evicted(frozen(pages), reason, lost))

    def report_groups(self, sequence: int | None) -> None:
        """Report rows and checkpoints that a sequence or a pin stored, and those replaced."""
        stored = None if self.groups is None else self.groups.journal.take_stored(sequence)
        if stored is not None and self.hooks:
            self.emit(stored)
        self._report_evicted(EMPTY_PAGES, "replaced")

    def drop_below(self, top: Any, reason: str) -> int:
        """Drop a run and all behind it that is not in use; return how many pages became free."""
        before = self.pool.num_free
        if self.groups is not None:
            self.groups.drop_idle(top)
        self.forget(self.index.evict_below(top), reason)
        return self.pool.num_free - before

    def clear(self, namespace: Namespace | None) -> int:
        """Drop all that is not in use, of one namespace or of all; return the pages freed."""
        before = self.pool.num_free
        if self.groups is not None:
            tree = self.index.tree
            for top in tree.roots.values() if namespace is None else tops(tree.roots, namespace):
                self.groups.drop_idle(top)
        self.forget(self.index.clear(namespace), "cleared")
        return self.pool.num_free - before

    # --- claims ------------------------------------------------------------------------------

    def claim(self, copy: PageCopy, hold: Any, sharer: PendingCopies) -> Claim:
        """Keep the source of ``copy`` unchanged; takes over the caller's reference and hold."""
        claim = Claim(copy, hold, {sharer: None})
        on_page = self._claimed.get(copy.src)
        if on_page is None:
            on_page = self._claimed[copy.src] = _PageClaims()
        on_page.add(claim)
        self.counters.copies += 1
        return claim

    def unclaim(self, claims: list[Claim], sharer: PendingCopies) -> None:
        """Remove ``sharer`` from ``claims``, whose copies it made or does not need."""
        for claim in claims:
            del claim.sharers[sharer]
            if claim.sharers:
                continue
            on_page = self._claimed[claim.copy.src]
            on_page.remove(claim)
            if not on_page.claims:
                del self._claimed[claim.copy.src]
            if claim.hold is not None:
                # Not a use of the source: the copy, published later, counts as the use.
                self.index.release(claim.hold, used=False)
            self.pool.release_page(claim.copy.src)

    def now_stored(self, pages: PageArray, hold: Any, start: int) -> None:
        """Give holds to the claims on ``pages``, which the index now stores.

        ``start`` is the index of the first page on its path; ``hold`` protects the path.
        """
        if self._claimed:
            for at, page in enumerate(pages.tolist()):
                on_page = self._claimed.get(page)
                for claim in () if on_page is None else on_page.claims:
                    assert claim.hold is None
                    claim.hold = self.index.move(self.index.again(hold), hold, start + at + 1)

    def may_write(self, page: int, offset: int) -> bool:
        """Whether a user of ``page``, which the index lacks, may write to it from ``offset`` on.

        A claim on the page reads only its leading tokens, so writing behind those is allowed.
        """
        references = int(self.pool.references[page])
        if references == 1:
            return True
        on_page = self._claimed.get(page)
        if on_page is None or references > 1 + len(on_page.claims):
            return False
        return max(on_page.tokens) <= offset

    def claims(self) -> list[Claim]:
        """Return all claims of all sequences, each once."""
        claims = [claim for sequence in self.sequences.values() for claim in sequence.claims()]
        return list(dict.fromkeys(claims))

    def check(self) -> None:
        """Recount everything from scratch and assert that it agrees; see `PagedCache.check`."""
        holds = [sequence.hold for sequence in self.sequences.values()]
        holds += [claim.hold for claim in self.claims() if claim.hold is not None]
        holds += self.pins.hard_holds()
        stored = self.index.check(holds)
        assert len(np.unique(stored)) == len(stored), "the index stores a page twice"
        expected = np.zeros(self.pool.num_pages, np.int64)
        expected[stored] += 1
        for sequence in self.sequences.values():
            sequence.check(stored)
            expected[sequence.unpublished] += 1
        if self.groups is not None:
            from kvkeep.core.groups.board import check_groups  # noqa: PLC0415 - as above

            kept = [one.groups for one in self.sequences.values() if one.groups is not None]
            kept += self.pins.hard_groups()
            check_groups(self.groups, self.index.tree, kept, expected)
        for claim in self.claims():
            expected[claim.copy.src] += 1
        self.forks.check(self.sequences.values())
        wrong = np.flatnonzero(expected != self.pool.references)
        assert not len(wrong), f"reference counts of pages {wrong[:8]} are wrong"
        self.pool.check()
        self.marks.check(stored, [sequence.row for sequence in self.sequences.values()])
        for observer in self.observers:
            observer.check()


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
