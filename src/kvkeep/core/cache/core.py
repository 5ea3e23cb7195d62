"""`Core`: what the cache and its sequences share: pages, index, claims, lock, events."""

from __future__ import annotations

import logging
import threading
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvkeep.core.cache.ages import Ages
from kvkeep.core.cache.forks import Forks
from kvkeep.core.cache.pins import PinBoard
from kvkeep.core.cache.sessions import SessionBoard
from kvkeep.core.cache.stats import CacheCounters
from kvkeep.core.errors import InvalidValue, OutOfPages, told
from kvkeep.core.events import Evicted, PagesShort, frozen

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from kvkeep.core.cache.sequence import Sequence
    from kvkeep.core.events import Event, Hook
    from kvkeep.core.keys import Namespace
    from kvkeep.core.miss_ratio import PromptWatch
    from kvkeep.core.pages import PageCopy, PagePool
    from kvkeep.core.pages.table import PageArray
    from kvkeep.core.prefix import PrefixIndex, PrefixMatch

__all__ = ["LEAST_PINS", "Claim", "Core"]

LEAST_PINS = 1024
"""A cache keeps as many pins as it has pages, and so many if it has fewer."""

_log = logging.getLogger("kvkeep.cache")


@dataclass(slots=True, eq=False)
class Claim:
    """A page that waits to be copied from: one reference, and a hold if the index stores it.

    Forks share the claims that they were made with; the ``sharers`` still want the copy.
    """

    copy: PageCopy
    hold: Any
    sharers: dict[Sequence, None]


class _PageClaims:
    """The claims on one page, and how many of its first tokens they want."""

    __slots__ = ("claims", "tokens")

    def __init__(self) -> None:
        self.claims: dict[Claim, None] = {}
        self.tokens: dict[int, int] = {}  # tokens wanted → by how many claims

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
    """State that every operation works on, under one lock.

    ``with core:`` is how an operation begins and ends: it takes the lock, and when the outermost
    operation is done and everything is consistent again, it hands the events to the hooks, in
    order, still under the lock.

    Lock order: this lock is the innermost. A thread may take it while it holds any other lock; a
    thread that holds it waits for no other lock. Hooks run under it, and so do eviction policies
    and the clock. Code that a hook can call therefore asks `in_hook` before it takes a lock of its
    own, and if that is so it tries instead of waiting (see `kvkeep.core.cache.looking`).
    """

    def __init__(
        self,
        pool: PagePool,
        index: PrefixIndex,
        pins: int,
        clock: Callable[[], float],
        *,
        reuse: bool = True,
    ) -> None:
        self.pool = pool
        self.index = index
        self.marks = index.marks
        self.page_size = index.page_size
        self.reuse = reuse
        self.counters = CacheCounters()
        self.pins = PinBoard(index, pins, max(LEAST_PINS, pool.num_pages), clock)
        self.ages = Ages(clock)
        self.sessions = SessionBoard(index, pool.num_pages, clock)
        self.watch: PromptWatch | None = None
        """Who tells what more memory would do, if somebody asked for that."""
        self.sequences: dict[int, Sequence] = {}
        self.opened = 0  # names sequences: 1, 2, 3 …
        self._memory: weakref.ref[object] | None = None  # that the pages lie in, once bound
        self._claimed: dict[int, _PageClaims] = {}  # by the page to be copied from
        self.forks = Forks()
        self.hooks: tuple[Hook, ...] = ()
        self._events: list[Event] = []
        self._lock = threading.RLock()
        self._depth = 0
        self._hooking: int | None = None  # the thread that runs hooks now

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1

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

    # --- events ------------------------------------------------------------------------------

    def emit(self, event: Event) -> None:
        """Tell the hooks, when this operation is done. Callers look at ``hooks`` first."""
        self._events.append(event)

    @property
    def in_hook(self) -> bool:
        """Whether this thread runs a hook: it holds the lock, and will until the hook returns."""
        return self._hooking == threading.get_ident()

    def _deliver(self) -> None:
        self._hooking = threading.get_ident()
        try:
            # A hook may use the cache: what that emits is delivered by this same loop, in order.
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
        except Exception:  # noqa: BLE001 - a hook's fault is not the cache's
            self.counters.hook_errors += 1
            _log.exception("a cache hook failed on %s", type(event).__name__)

    # --- prompts -----------------------------------------------------------------------------

    def hold(self, match: PrefixMatch | None, space: Namespace) -> tuple[Any, Any]:
        """Protect what a prompt matched, see `PrefixIndex.hold`; the time is noted."""
        if self.ages.clock() >= self.ages.due:
            self.ages.note(self.index.policy.moment)
        return self.index.hold(match, space)

    # --- pages -------------------------------------------------------------------------------

    def available(self) -> int:
        """Pages that can be had: free or evictable."""
        return self.pool.num_free + self.index.num_evictable

    def take(self, count: int) -> PageArray:
        """Allocate ``count`` pages, evicting for them if need be; all or nothing."""
        short = count - self.pool.num_free
        if short > 0:
            self.pins.expire()
            if short > self.index.num_evictable:
                raise self.short_of(count, self.available())
            self.evict(short, "pressure")
        return self.pool.allocate(count)

    def short_of(self, needed: int, available: int) -> OutOfPages:
        """The error for pages that cannot be had; counted."""
        self.counters.out_of_pages += 1
        if self.hooks:
            self.emit(PagesShort(needed, available))
        return OutOfPages(needed, available, self.pool.num_pages)

    def evict(self, count: int, reason: str) -> int:
        """Evict up to ``count`` pages; returns how many."""
        self.sessions.settle()
        pages = self.index.evict(count)
        self.forget(pages, reason)
        return len(pages)

    def forget(self, pages: PageArray, reason: str) -> None:
        """The index gave up ``pages``: so does its reference."""
        if len(pages):
            freed = self.pool.release(pages)
            assert freed == len(pages), "the index evicted a page that a sequence uses"
            self.marks.forget(pages)
            if self.watch is not None:
                self.watch.forget(pages)
            self.counters.evictions += 1
            self.counters.evicted_pages += len(pages)
            if self.hooks:
                self.emit(Evicted(frozen(pages), reason))

    # --- claims ------------------------------------------------------------------------------

    def claim(self, copy: PageCopy, hold: Any, sequence: Sequence) -> Claim:
        """Keep the source of ``copy`` as it is; the caller's reference and hold go into this."""
        claim = Claim(copy, hold, {sequence: None})
        on_page = self._claimed.get(copy.src)
        if on_page is None:
            on_page = self._claimed[copy.src] = _PageClaims()
        on_page.add(claim)
        self.counters.copies += 1
        return claim

    def unclaim(self, claims: list[Claim], sequence: Sequence) -> None:
        """The copies were made, or ``sequence``, one of their sharers, wants them no more."""
        for claim in claims:
            del claim.sharers[sequence]
            if claim.sharers:
                continue
            on_page = self._claimed[claim.copy.src]
            on_page.remove(claim)
            if not on_page.claims:
                del self._claimed[claim.copy.src]
            if claim.hold is not None:
                # No use of the source: what it has in common with the copy is the copy's from here.
                self.index.release(claim.hold, used=False)
            self.pool.release([claim.copy.src])

    def now_stored(self, pages: PageArray, hold: Any, start: int) -> None:
        """The index stores ``pages`` now, from place ``start`` on: claims on them need holds."""
        if self._claimed:
            for at, page in enumerate(pages.tolist()):
                on_page = self._claimed.get(page)
                for claim in () if on_page is None else on_page.claims:
                    assert claim.hold is None
                    claim.hold = self.index.move(self.index.again(hold), hold, start + at + 1)

    def may_write(self, page: int, offset: int) -> bool:
        """Nobody else needs what ``page`` holds from ``offset`` on, and the caller holds it.

        A claim on the page reads only its first tokens: writing behind those is no harm to it.
        """
        references = int(self.pool.references[page])
        if references == 1:
            return True
        on_page = self._claimed.get(page)
        if on_page is None or references > 1 + len(on_page.claims):
            return False
        return max(on_page.tokens) <= offset

    def claims(self) -> list[Claim]:
        """All claims of all sequences, each once."""
        claims = [claim for sequence in self.sequences.values() for claim in sequence.claims()]
        return list(dict.fromkeys(claims))
