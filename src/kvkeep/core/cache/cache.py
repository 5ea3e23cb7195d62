"""`PagedCache`: the KV pages of one device, shared between requests by prefix; `Sequence`."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvkeep.core.cache.copies import Claims, Forks, PendingCopies, SequenceState, permit
from kvkeep.core.cache.misses import Misses
from kvkeep.core.cache.pins import Pin, Pins
from kvkeep.core.cache.rows import Border, SaltedRow, TokenRow
from kvkeep.core.cache.sessions import Session, Sessions, check_name
from kvkeep.core.cache.stats import CacheCounters, CacheStats
from kvkeep.core.errors import (
    IllegalStep,
    InvalidValue,
    NotCached,
    OutOfPages,
    check_type,
    listed,
    number,
    switch,
    told,
    whole,
)
from kvkeep.core.events import (
    CacheLock,
    Closed,
    Evicted,
    Opened,
    PrefixMiss,
    Returned,
    Stored,
    frozen,
)
from kvkeep.core.eviction import EvictionPolicy, policy
from kvkeep.core.eviction.shares import Shares
from kvkeep.core.extras import as_extras, signed
from kvkeep.core.keys import Namespace, as_namespace
from kvkeep.core.pages import GrowingArray, PageCopy, PagePool
from kvkeep.core.pages.tables import EMPTY_PAGES, joined
from kvkeep.core.prefix import index as make_index
from kvkeep.core.prefix.node import descend
from kvkeep.core.public import PublicPrefixes, salt_of
from kvkeep.core.returns import Ended
from kvkeep.core.tokens import (
    TOKEN_DTYPE,
    as_row,
    as_tokens,
    check_range,
    common_length,
    single_token,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from types import TracebackType
    from typing import Self

    from kvkeep.core.cache.copies import Claim
    from kvkeep.core.cache.inspector import Inspector
    from kvkeep.core.cache.sessions import Owner
    from kvkeep.core.cache.views import CacheMap, NodeView
    from kvkeep.core.events import Hook
    from kvkeep.core.extras import ExtraLike, Extras
    from kvkeep.core.groups import GroupBoard, GroupLayout, SequenceGroups
    from kvkeep.core.keys import NamespaceLike
    from kvkeep.core.miss_ratio import MissRatioCurve, MissRatioPoint, PromptWatch
    from kvkeep.core.pages.tables import PageArray
    from kvkeep.core.prefix import PrefixMatch
    from kvkeep.core.prefix.node import Node
    from kvkeep.core.prefix.render import PrefixRun
    from kvkeep.core.prefix.tree import Encoder
    from kvkeep.core.tokens import TokenArray, TokensLike

__all__ = ["CachedPrefix", "PagedCache", "RemovedPages", "Sequence"]

_MAX_PAGE_SIZE = 65_536
_SCALARS = (int, np.generic)


@dataclass(frozen=True, slots=True, eq=False)
class CachedPrefix:
    """The cached part of a prompt: full ``pages``, then the first tokens of one page more.

    ``partial_page`` is -1 if there is none. The pages may be evicted at any time afterwards.
    ``stored_tokens`` are cached in the layers that keep every token; in a cache with groups of
    layers, a request can resume at ``num_tokens``, which may be less. ``miss`` says why the rest
    would be computed; None if nothing would.
    """

    num_tokens: int
    pages: PageArray
    partial_page: int = -1
    partial_tokens: int = 0
    stored_tokens: int = 0
    miss: PrefixMiss | None = None


class RemovedPages(NamedTuple):
    """Result of `PagedCache.remove`: ``pages`` that were freed, and pages still ``in_use``."""

    pages: int
    in_use: int


@dataclass(slots=True)
class _Query:
    """A prompt to look up or to open, in canonical form.

    ``namespace`` is whose prompt it is, ``space`` the one in whose tree it lies: the public one if
    its first ``public`` tokens are public (`kvkeep.core.public`). ``extras`` include the salt.
    """

    tokens: TokenArray
    namespace: Namespace
    space: Namespace
    extras: Extras = ()
    public: int = 0
    encoder: Encoder | None = None
    """Of its tokens, for what it publishes."""
    symbols: bytes | memoryview = b""
    """What the index compares, once it was looked up."""


class PagedCache:
    """Allocates the pages that hold the KV of requests, and reuses those of equal prefixes.

    The cache decides; the memory is `kvkeep.core.pages.tensors.PagedTensors` or the engine's own.
    Tokens are a list, a tuple or an integer array; an int32 array is read where it lies, and a list
    of 32,768 costs five times as much (0.3 ms). Namespaces (text, or a `Namespace`) share nothing
    but the prefixes that were declared: ``cache.public.declare(tokens)``.

    Thread safety: every method takes the cache's one lock. Hooks run under it.

    Args:
        num_pages: pages of the pool.
        page_size: tokens of a page, or a `GroupLayout` for a model that keeps more than pages.
        prefix: the index: "radix" (exact to the token) or "chain" (block keys over full pages).
        eviction: the name of a policy, or an `EvictionPolicy`.
        hard_pin_pages: pages that hard pins may hold at most; default: half of the pool.
        what_if: share of prompt blocks to sample (0.1 works well), or a `MissRatioCurve`, for
            `what_if`.
        clock: gives seconds, for pins and sessions that end.
        reuse: False: nothing is matched and nothing is kept. Every prompt is computed,
            `Sequence.publish` is legal and changes nothing, and the pages of a sequence are free
            when it and its forks, which share them, are closed.

    Attributes:
        public: the prefixes that all namespaces share.
        groups: the layout, of a model that keeps more than pages; else None.
        pool, tree, sequences, lock: the parts of the cache, to look at under the lock.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int | GroupLayout = 16,
        *,
        prefix: str = "radix",
        eviction: str | EvictionPolicy = "lru",
        hard_pin_pages: int | None = None,
        what_if: float | MissRatioCurve | None = None,
        clock: Callable[[], float] = time.monotonic,
        reuse: bool = True,
    ) -> None:
        tokens: object = page_size
        self.groups: GroupLayout | None = None
        if not isinstance(page_size, int):  # a plain model loads nothing of groups
            from kvkeep.core.groups import GroupLayout  # noqa: PLC0415 - as above

            if isinstance(page_size, GroupLayout):
                self.groups, tokens = page_size, page_size.page_size
        self.page_size = whole("page_size", tokens, 1, _MAX_PAGE_SIZE)
        check_type("clock", clock, Callable, "a function that returns seconds")
        self.pool = PagePool(num_pages, self._make_room)
        self.num_pages = self.pool.num_pages
        if hard_pin_pages is None:
            hard_pin_pages = self.num_pages // 2
        # Never all of them: pins must leave room for requests.
        hard_pin_pages = whole("hard_pin_pages", hard_pin_pages, 0, self.num_pages - 1)
        orders = policy(eviction)
        if isinstance(orders, Shares):
            orders.fit(self.num_pages)
        self.tree = make_index(prefix, self.page_size, orders, clock)
        self.reuse = switch("reuse", reuse)
        self.lock = CacheLock()
        self.public = PublicPrefixes()
        self.counters = CacheCounters()
        self.claims = Claims(self.pool, self.tree)
        self.forks = Forks()
        self.sequences: dict[int, Sequence] = {}
        self.pins = Pins(self.tree, self.num_pages, hard_pin_pages, clock)
        self.sessions = Sessions(self.tree, self.num_pages, clock)
        self.misses = Misses(self.tree, self.num_pages, clock)
        # Whether the policy is told of requests.
        self.told = self.reuse and type(orders).opened is not EvictionPolicy.opened
        self.board: GroupBoard | None = None
        """Rows and states beside the pages; None for a plain model."""
        if self.groups is not None:
            from kvkeep.core.groups import GroupBoard  # noqa: PLC0415 - as above

            self.board = self.pins.groups = GroupBoard(
                self.groups, self.pool, self.tree, self.lock, self.pins.covered, reuse=self.reuse
            )
        self.watch: PromptWatch | None = None
        """The miss-ratio curve, of a cache made with ``what_if``."""
        if what_if is not None:
            from kvkeep.core.miss_ratio import PromptWatch  # noqa: PLC0415 - only where needed

            sizes, kv_only = (self.page_size, self.num_pages), self.groups is not None
            self.watch = PromptWatch(what_if, *sizes, kv_only=kv_only, measured=self.reuse)
        self._memory: weakref.ref[object] | None = None  # what the pages are bound to
        self._inspector_made: Inspector | None = None

    def bind(self, memory: object) -> None:
        """Bind the cache to the memory that holds the KV of its pages.

        ``memory`` is the object that owns the memory, such as a `PagedTensors`; engines call this
        before they open a sequence. Binding the same memory again is fine, also by another engine.
        Another memory is refused while the first exists, and afterwards until `clear` has emptied
        the cache: its pages would be read as KV that was written elsewhere. The cache holds a weak
        reference and keeps no memory alive.

        Raises:
            InvalidValue: the cache is bound to another memory, holds pages of one that is gone, or
                ``memory`` cannot be referred to weakly.
        """
        with self.lock:
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

    # --- requests --------------------------------------------------------------------------------

    def open(
        self,
        tokens: TokensLike,
        namespace: NamespaceLike = "",
        *,
        priority: int = 0,
        reserve: int = 0,
        session: str | None = None,
        extra: ExtraLike | None = None,
    ) -> Sequence:
        """Begin a request: match its longest cached prefix and allocate pages for the rest.

        ``num_cached`` of the result is the number of tokens that need no computing, and ``miss``
        says why the rest does; the last prompt token is always computed, since its logits are
        needed.

        Args:
            tokens: the prompt.
            namespace: where to look and to publish.
            priority: for eviction policies that use one.
            reserve: pages that must remain available: room for running sequences to grow.
            session: the conversation that this is a request of (see `session`).
            extra: bytes that belong to tokens, as those of an image to its placeholder:
                ``[(position, bytes)]``. KV from the position on is shared with prompts that have
                equal bytes there; the bytes are hashed and not kept (`kvkeep.core.extras`).

        Raises `InvalidValue` for invalid tokens, `OutOfPages` with nothing changed.
        Cost: O(tokens) at memory speed; see `benchmarks/core.py`.
        """
        query = self._query(tokens, namespace, extra)
        if session is not None:
            session = check_name(session)
        if type(priority) is not int:
            priority = whole("priority", priority)
        if type(reserve) is not int or reserve < 0:
            reserve = whole("reserve", reserve, 0)
        with self.lock:
            return self._open(query, priority, reserve, session)

    def match(
        self,
        tokens: TokensLike,
        namespace: NamespaceLike = "",
        *,
        extra: ExtraLike | None = None,
        everywhere: bool = False,
    ) -> CachedPrefix:
        """Return the longest cached prefix of a prompt. Changes nothing, not even recency.

        ``extra`` as in `open`. With ``everywhere``, `CachedPrefix.miss` also tells that another
        namespace has the next page: for operators, as it says what others have sent.
        """
        query = self._query(tokens, namespace, extra)
        with self.lock:
            match = self._find(query)
            return self._cached(query, match, everywhere=everywhere)

    def _query(
        self, tokens: TokensLike, namespace: NamespaceLike, extra: ExtraLike | None
    ) -> _Query:
        """Convert and check arguments; token ids are checked later, against the match."""
        row = as_row(tokens)
        space = as_namespace(namespace)
        extras = () if extra is None else as_extras(extra, len(row))
        if space.scope:
            raise InvalidValue(
                f"{space} is for declared public prefixes; a prompt has a namespace without scope"
            )
        if not len(self.public):
            return _Query(row, space, space, extras)
        placed = self.public.place(row, space, self.page_size, extras)
        return _Query(row, space, placed.space, placed.extras, placed.tokens)

    def _find(self, query: _Query, stop: int | None = None) -> PrefixMatch | None:
        """Return the longest match of the first ``stop`` tokens of a prompt, default: of all.

        Raises:
            InvalidValue: a negative token id.
        """
        tokens, marks, match = query.tokens, self.tree.marks, None
        if self.reuse:
            row = tokens[:stop]
            if query.extras:
                row = marks.known(row, query.extras)
            query.encoder = self.tree.encoder(query.space)
            query.symbols = query.encoder.lookup(row)
            match = self.tree.match(query.symbols, query.space)
        # Tokens that equal stored ones are not negative, unless marks are stored.
        check_range(tokens, 0 if len(marks) else self._matched(match))
        return match

    def _matched(self, match: PrefixMatch | None) -> int:
        """Return how many leading tokens a match covers."""
        return 0 if match is None else len(match.pages) * self.page_size + match.partial_tokens

    def _cached(
        self, query: _Query, match: PrefixMatch | None, *, everywhere: bool
    ) -> CachedPrefix:
        """Return a match as what a request would reuse of it."""
        stored = self._matched(match)
        board, size = self.board, self.page_size
        resumed = stored
        if match is not None and board is not None:
            resumed = board.resume(match.pages)[0] * size
        miss = None
        if resumed < len(query.tokens):
            miss = self._why(query, match, resumed)
            if everywhere and miss.cause in {"unseen", "differs", "evicted"}:
                other = self.misses.elsewhere(match, query.tokens, query.space)
                miss = (
                    miss if other is None else PrefixMiss("elsewhere", miss.token, namespace=other)
                )
        if match is None:
            return CachedPrefix(0, EMPTY_PAGES, miss=miss)
        if board is None:
            partial = match.partial_page, match.partial_tokens
            return CachedPrefix(stored, match.pages.copy(), *partial, stored, miss)
        pages = match.pages[: resumed // size].copy()
        return CachedPrefix(resumed, pages, stored_tokens=stored, miss=miss)

    def _why(self, query: _Query, match: PrefixMatch | None, cached: int) -> PrefixMiss:
        """Return why a prompt, of which ``cached`` tokens need no computing, is computed."""
        last = len(query.tokens) - 1
        if cached >= last:
            return PrefixMiss("last token", cached)
        stored = 0 if match is None else len(match.pages) * self.page_size
        if self.board is not None and cached < stored:
            return PrefixMiss("no state", cached, until=self._matched(match))
        return self.misses.why(match, query.symbols, query.space, self.sequences)

    def _open(  # noqa: PLR0915 - one path, in order
        self, query: _Query, priority: int, reserve: int, session: str | None
    ) -> Sequence:
        tokens, space = query.tokens, query.space
        if not len(tokens):
            raise InvalidValue("a prompt has at least one token, got none")
        tree = self.tree
        # The last token is never looked up: its logits are needed, so it is computed in any case.
        found = match = self._find(query, -1)
        total = -(-len(tokens) // self.page_size)
        groups = None
        if self.board is None:
            match, needed = self._affordable(match, total, reserve)
        else:
            beside = self.board.layout.state_pages
            groups, match = self._resume(self.board, match, total + beside + reserve)
            needed = total + beside - (0 if match is None else len(match.pages))
        cached = self._matched(match)
        if cached < len(tokens) - 1:
            miss = self._why(query, found, cached)  # before `hold` cuts runs
        else:
            miss = PrefixMiss("last token", cached)
        owner = None
        if session is not None:
            owner = self.sessions.enter((query.namespace, session))
        hold, source = tree.hold(match, space, owner=owner)
        sequence = Sequence(self, query, hold, owner, priority)
        shared = EMPTY_PAGES if match is None else match.pages
        sequence.num_cached, sequence.miss = cached, miss
        key = query.symbols[hold.end * tree.unit : (hold.end + 1) * tree.unit]
        if len(key) == tree.unit:
            self.misses.computes(hold, bytes(key), sequence.id, self.sequences)
        if self.told or self.watch is not None:  # before `take` evicts: they order eviction
            self._tell_opened(sequence, query, len(shared))
        table = self.pool.take(needed)
        if groups is not None:
            assert self.board is not None
            beside = self.board.layout.state_pages
            pages_found = 0 if found is None else len(found.pages)
            sequence.begin_groups(groups, table[:beside] if beside else None, pages_found)
            table = table[beside:]
            self.board.counters.unresumed_tokens += pages_found * self.page_size - cached
        if len(shared):
            table = np.concatenate((shared, table))
        copy = None
        if match is not None and source is not None:
            copy = PageCopy(match.partial_page, int(table[len(shared)]), match.partial_tokens)
            self.pool.retain_page(copy.src)
            self.counters.partial_hits += 1
        sequence.adopt(table, len(shared), copy, source)
        counters = self.counters
        counters.opened += 1
        counters.prompt_tokens += len(tokens)
        counters.hit_tokens += cached
        if self.lock.hooks:
            stored = None if groups is None else self._matched(found)
            self.lock.emit(
                Opened(
                    sequence.id, sequence.namespace, len(tokens), cached,
                    stored_tokens=stored, returned=sequence.returned, miss=sequence.miss,
                )
            )  # fmt: skip
        return sequence

    def _affordable(
        self, match: PrefixMatch | None, total: int, reserve: int
    ) -> tuple[PrefixMatch | None, int]:
        """Return the match to hold and the pages needed besides; `OutOfPages` before any change.

        Holding a match takes its pages out of what can be evicted. A page that matches only in part
        is left out of the match if the request could not be opened with that page held.
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
        """Shorten a match to where all groups agree; take references to what resuming reads there.

        A request takes ``total`` pages in all, less those that match. If it does not fit beside
        what resuming reads, it resumes earlier. `OutOfPages` before any change.
        """
        self.pins.expire()
        page = 0 if match is None else len(match.pages)
        given_up = 0
        while True:
            path = EMPTY_PAGES if match is None else match.pages[:page]
            page, checkpoint = board.resume(path)
            taken = None if match is None or not page else match.first(page)
            needed, available = total - page, self.pool.num_free
            if needed > available:
                beside = board.count_idle(board.used_pages(path[:page], checkpoint))
                available = self._available() - self.tree.protects(taken) - beside
            if needed <= available:
                board.counters.resumes_given_up += given_up
                from kvkeep.core.groups import SequenceGroups  # noqa: PLC0415 - only where needed

                groups = SequenceGroups(board)
                groups.hold(path[:page], checkpoint)
                return groups, taken
            if not page:
                raise self._refused(total, available)
            given_up = 1
            # Without states, an earlier position holds about as many pages.
            page = 0 if board.layout.state is None else page - 1

    def _tell_opened(self, sequence: Sequence, query: _Query, page: int) -> None:
        """Tell the policy and the miss-ratio curve of a request that begins."""
        if self.told:

            def following() -> bytes:
                return sequence.encoder.pages(sequence.row, page, page + 1)

            returned = self.tree.policy.opened(
                sequence.id, sequence.hold, query.namespace, len(query.tokens), following
            )
            sequence.returned = None if returned is None else Returned(*returned)
        if self.watch is not None:
            # Without the last token, which is never looked up.
            tokens = signed(query.tokens, query.extras)[:-1]
            sequence.watched = self.watch.opened(tokens, query.space, sequence.num_cached)

    # --- pages -----------------------------------------------------------------------------------

    def _available(self) -> int:
        """Return how many pages are free or evictable."""
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
        if self.sessions.follows:
            self.sessions.evicting()
        self.misses.removing(reason)
        if self.board is None:
            pages = self.tree.evict(count)
            self._forget(pages, reason)
            return len(pages)
        gone: list[PageArray] = []

        def let_go(pages: PageArray) -> None:
            self._let_go(pages)
            gone.append(pages)

        freed = self.board.make_room(count, let_go)
        self.counters.evictions += bool(gone)
        if self.lock.hooks:
            self._report(joined(gone), reason)
        return freed

    def drop(self, hold: Node, keep: int) -> int:
        """End a hold and remove its path beyond ``keep`` pages, as far as nothing else needs it.

        For `Sequence.close`. Returns the pages removed.
        """
        self.pins.expire()
        self.misses.removing("dropped")
        pages = self.tree.drop(hold, keep)
        self._forget(pages, "dropped")
        return len(pages)

    def _forget(self, pages: PageArray, reason: str) -> None:
        """Release the references to ``pages`` that the tree no longer stores, and report it."""
        if len(pages):
            self._let_go(pages)
            self.counters.evictions += 1
        if self.lock.hooks:
            self._report(pages, reason)

    def _let_go(self, pages: PageArray) -> None:
        freed = self.pool.release_known(pages)
        assert freed == len(pages), "the index evicted a page that a sequence uses"
        if len(self.tree.marks):
            self.tree.marks.forget(pages)
        self.counters.evicted_pages += freed

    def _report(self, pages: PageArray, reason: str) -> None:
        """Report evicted pages, and what was lost of groups of layers since the last report."""
        lost = None if self.board is None else self.board.take_lost()
        if len(pages) or lost is not None:
            self.lock.emit(Evicted(frozen(pages), reason, lost))

    def evict(self, num_pages: int) -> int:
        """Evict up to ``num_pages`` cached pages that are not in use; return how many."""
        num_pages = whole("num_pages", num_pages, 0)
        with self.lock:
            if self.pins.active:
                self.pins.expire()
            return self._evict(num_pages, "asked")

    def clear(self, namespace: NamespaceLike | None = None) -> int:
        """Drop all cached pages that are not in use, in one namespace or in all.

        Soft pins of dropped pages end, hard pins stay. Returns the pages freed, of all groups.
        """
        space = None if namespace is None else as_namespace(namespace)
        with self.lock:
            self.pins.expire()
            before = self.pool.num_free
            if self.board is not None:
                for top in self.tree.roots.values() if space is None else self.tree.tops(space):
                    self.board.drop_idle(top)
            self.misses.removing("cleared")
            self._forget(self.tree.clear(space), "cleared")
            return self.pool.num_free - before

    def remove(
        self,
        tokens: TokensLike,
        namespace: NamespaceLike = "",
        *,
        extra: ExtraLike | None = None,
    ) -> RemovedPages:
        """Drop a prompt: the cached page that it begins with and all pages behind, even if pinned.

        Pages that running sequences or hard pins hold stay, and so do the pages before them:
        `RemovedPages.in_use` counts them. Other prompts that share the first page are dropped,
        too, since their pages are behind it. What a running sequence publishes later is cached
        again. A prompt shorter than a page has no cached pages. ``extra`` as in `open`.

        Cost: that of `match`, and all runs behind the first page. Public pages stay.
        """
        query = self._query(tokens, namespace, extra)
        with self.lock:
            self.pins.expire()
            self.sessions.evicting()
            match = self._find(query)
            top = None if match is None else match.first_node(query.public // self.page_size)
            if top is None:
                return RemovedPages(0, 0)
            before = self.pool.num_free
            for pin in self.pins.soft_below(top):
                self.pins.end(pin)
            if self.board is not None:
                self.board.drop_idle(top)
            self.misses.removing("asked")
            self._forget(self.tree.evict_below(top), "asked")
            rest = [node.weight for node, _ in descend(top)] if top.in_tree else []
            return RemovedPages(self.pool.num_free - before, sum(rest))

    def pin(
        self,
        tokens: TokensLike,
        namespace: NamespaceLike = "",
        *,
        ttl: float | None = None,
        hard: bool = False,
        extra: ExtraLike | None = None,
    ) -> Pin:
        """Keep the cached full pages of a prefix, for ``ttl`` seconds or until `unpin`.

        Pages under a soft pin are evicted only when nothing else is left; a soft pin never blocks
        a request. Pages under a hard pin are never evicted; the cache has a budget for them. Each
        call makes a pin of its own, also of the same prefix; at a time there are at most as many
        pins as pages, or 1,024 in a cache with fewer pages. ``extra`` as in `open`.
        Raises `NotCached` if not one full page is cached, `InvalidValue` beyond the budget or the
        number of pins. Cost: that of `match`, and O(runs on the path).
        """
        query = self._query(tokens, namespace, extra)
        ttl = None if ttl is None else number("ttl", ttl, "a number of seconds above 0", above=0)
        hard = switch("hard", hard)
        with self.lock:
            self.pins.expire()
            match = self._find(query)
            if match is None or not len(match.pages):
                raise NotCached(
                    f"not one full page of these {len(query.tokens)} tokens is cached in "
                    f"{query.namespace}; publish them first"
                )
            hold, _ = self.tree.hold(match.without_partial(), query.space, used=False)
            try:
                pin = self.pins.add(hold, ttl, hard=hard)
            except InvalidValue:
                self.tree.release(hold, used=False)
                raise
            if not hard:
                self.tree.release(hold, used=False)
            if self.board is not None:
                self.board.report(None)
            return pin

    def unpin(self, pin: Pin) -> None:
        """End a pin; `NotCached` if it belongs to another cache or has ended."""
        with self.lock:
            self.pins.expire()
            check_type("pin", pin, Pin, "a pin of PagedCache.pin")
            if pin not in self.pins.active:
                raise NotCached(f"{pin!r} is not a running pin of this cache")
            self.pins.end(pin)

    def session(self, session: str, namespace: NamespaceLike = "") -> Session:
        """Return an object to give hints about a session: it is suspended, or over.

        Hints order eviction and change nothing else. Raises `InvalidValue` for an invalid name
        (1 … 256 characters).
        """
        return Session(self.lock, self.sessions, as_namespace(namespace), check_name(session))

    # --- figures ---------------------------------------------------------------------------------

    @property
    def policy(self) -> str:
        """The name of the eviction policy."""
        return self.tree.policy.name

    @property
    def num_available(self) -> int:
        """Pages that a request could get now: free, or cached and evictable. Cost: two adds."""
        with self.lock:
            return self._available()

    def stats(self) -> CacheStats:
        """Return what the cache holds and has done. Cost: one pass over the reference counts."""
        with self.lock:
            self.pins.expire()
            self.sessions.evicting()
            pool, tree, sequences = self.pool, self.tree, self.sequences.values()
            tables = [sequence.pages for sequence in sequences]
            # To these a hold stands for references.
            published = sum(len(sequence.published_pages) for sequence in sequences)
            users = np.bincount(np.concatenate(tables), minlength=1) if tables else np.zeros(1, int)
            return CacheStats(
                sequences=len(tables),
                pages_total=pool.num_pages,
                pages_used=pool.num_used,
                pages_free=pool.num_free,
                pages_cached=tree.num_pages,
                pages_evictable=tree.num_evictable,
                pages_protected=tree.num_pages - tree.num_evictable,
                pages_dead=self.sessions.num_dead,
                pages_awaited=self.sessions.awaited.num_pages,
                pages_shared=int((users > 1).sum()),
                shares=int((users[users > 1] - 1).sum()),
                references=int(pool.references.sum()) + published,
                namespaces=len(tree.roots),
                sessions=len(self.sessions.owners),
                pins=len(self.pins.active),
                pinned_pages=self.pins.covered.num_pages,
                hard_pinned_pages=self.pins.num_hard_pages,
                pins_broken=self.pins.broken,
                pins_expired=self.pins.expired,
                copies=self.claims.made,
                hook_errors=self.lock.errors,
                groups=None if self.board is None else self.board.stats(),
                what_if=() if self.watch is None else self.watch.points(),
                **self.counters.as_dict(),
            )

    def what_if(
        self, pages: Iterable[int] | None = None, namespace: NamespaceLike | None = None
    ) -> tuple[MissRatioPoint, ...]:
        """Estimate the hit rates that caches of ``pages`` pages would have had so far.

        Default sizes: ¼, ½, 1, 2, 4 and 8 times this cache; 16 times is the most. Sizes of which
        the prompts tell nothing are left out. With ``namespace``, for its prompts alone, in memory
        that all share. See `MissRatioPoint`. `IllegalStep` without ``what_if``. Cost: below 2 ms.
        """
        if self.watch is None:
            raise IllegalStep("this cache keeps no miss-ratio curve; make it with what_if=0.1")
        with self.lock:
            sizes = None if pages is None else listed("pages", pages, "numbers of pages")
            return self.watch.points(sizes, namespace)

    # --- inspection ------------------------------------------------------------------------------

    @property
    def _inspector(self) -> Inspector:
        """Made, and imported, at first use."""
        with self.lock:
            if self._inspector_made is None:
                from kvkeep.core.cache.inspector import Inspector  # noqa: PLC0415

                grouped = self.board is not None
                self._inspector_made = Inspector(self.tree, self.lock, grouped=grouped)
            self.pins.expire()
            return self._inspector_made

    def map(
        self, namespace: NamespaceLike | None = None, *, root: int | None = None, nodes: int = 400,
    ) -> CacheMap:  # fmt: skip
        """Return the ``nodes`` largest subtrees of the index one by one, all others summed up.

        Of one namespace, of all (each namespace then is a top node), or of the run ``root`` and
        everything behind it. Siblings that are not among the largest are summed up in one hidden
        node under their parent. See `kvkeep.core.cache.MapNode` for the figures of a node. Raises
        `NotCached` for a ``root`` that is not cached (any more). Cost: about 2 µs a run; the lock
        is held for a millisecond at a time.
        """
        return self._inspector.map(namespace, root, nodes)

    def node(self, node: int) -> NodeView:
        """Return one run of the `map` by its id; `NotCached` if it is not cached (any more)."""
        return self._inspector.node(node)

    def runs(self, namespace: NamespaceLike = "") -> Iterator[PrefixRun]:
        """Return the runs of a namespace, depth first; `kvkeep.core.prefix.render` draws them."""
        from kvkeep.core.cache.inspector import runs_of  # noqa: PLC0415 - only where needed

        with self.lock:
            return iter(list(runs_of(self.tree, as_namespace(namespace))))

    def namespaces(self) -> dict[Namespace, int]:
        """Return the namespaces that have cached pages, and how many."""
        with self.lock:
            return self.tree.namespaces()

    def subscribe(self, hook: Hook) -> Callable[[], None]:
        """Call ``hook(event)`` for every event from now on; call the result to end that.

        Hooks are called in order, under the cache's lock, when an operation is complete: they must
        be quick. A hook may call every method of the cache and of its sequences; the events of
        that are delivered in turn. It must not wait for another thread that uses the cache. A hook
        that raises is logged and counted, and stays subscribed.
        """
        if not callable(hook):
            raise InvalidValue(f"a hook is called with each event, got {told(hook)}")
        return self.lock.subscribe(hook)

    def check(self) -> None:
        """Recount everything from scratch and assert that it agrees. Cost: all of it."""
        with self.lock:
            sequences = list(self.sequences.values())
            claims = dict.fromkeys(claim for each in sequences for claim in each.claims())
            holds = [sequence.hold for sequence in sequences]
            holds += [claim.hold for claim in claims if claim.hold is not None]
            stored = self.tree.check(holds + self.pins.holds())
            assert len(np.unique(stored)) == len(stored), "the index stores a page twice"
            expected = np.zeros(self.num_pages, np.int64)
            expected[stored] += 1
            for sequence in sequences:
                sequence.check(stored)
                expected[sequence.unpublished] += 1
            nodes = [
                node
                for root in self.tree.roots.values()
                for node, _ in descend(root)
                if node is not root
            ]
            if self.board is not None:
                beside = [pin.groups for pin in self.pins.active if pin.groups is not None]
                for sequence in sequences:
                    assert sequence.groups is not None
                    beside += sequence.groups.references()
                self.board.check(nodes, beside, expected)
            for claim in claims:
                expected[claim.copy.src] += 1
            self.forks.check(sequences)
            wrong = np.flatnonzero(expected != self.pool.references)
            assert not len(wrong), f"reference counts of pages {wrong[:8]} are wrong"
            self.pool.check()
            self.tree.marks.check(stored, [sequence.row for sequence in sequences])
            self.pins.check(nodes)
            if self.sessions.follows:
                self.sessions.check(nodes)
            if self.watch is not None:
                self.watch.check()

    def __repr__(self) -> str:
        return (
            f"<PagedCache {self.num_pages} pages of {self.page_size} tokens, {self.tree.name}, "
            f"{self.policy}: {self.pool.num_free} free, {self.tree.num_evictable} evictable>"
        )


class Sequence:
    """The pages of one request, from `PagedCache.open` to `close`.

    An engine makes the page copies (`copies`), computes ``tokens[num_cached:]``, and writes the KV
    of token position ``i`` to page ``pages[i // page_size]`` at offset ``i % page_size``. Once it
    calls `publish`, later prompts reuse the computed pages while this sequence still runs.

    `IllegalStep` means that a step does not fit the state (see `kvkeep.core.cache.copies`),
    `OutOfPages` that all pages of the pool are in use; in both cases nothing has changed. Returned
    arrays are read-only views, valid until the next step. A sequence is a context manager that
    closes itself.

    Thread safety: every step takes the cache's lock. The steps of one sequence have an order, so
    one thread at a time calls them.

    Attributes:
        id: the number of the sequence: 1, 2, 3 …
        num_cached: leading tokens that needed no computing when it was opened or forked.
        miss: why the rest of the prompt is computed; None for a fork.
        groups: rows and states, of a cache that has groups of layers; else None.
    """

    __slots__ = (
        "_cache", "_hold", "_opened_pages", "_pending", "_shared", "_table", "_tokens", "encoder",
        "groups", "id", "miss", "namespace", "num_cached", "owner", "priority", "public_pages",
        "returned", "space", "watched",
    )  # fmt: skip

    def __init__(
        self,
        cache: PagedCache,
        query: _Query | Sequence,
        hold: Node,
        owner: Owner | None,
        priority: int,
    ) -> None:
        """Made by `PagedCache.open`, and by `fork` from another sequence; they call `adopt` next.

        The sequence takes over the hold.
        """
        counters = cache.counters
        self.id = counters.opened + counters.forked + 1
        self._cache = cache
        self._hold = hold
        self.namespace: Namespace = query.namespace
        self.space: Namespace = query.space  # that of its first page
        self.owner = owner  # the session that owns what this sequence publishes
        self.priority = priority
        self.num_cached = 0
        self.miss: PrefixMiss | None = None
        self.groups: SequenceGroups | None = None
        self.returned: Returned | None = None  # what the prompt continues, as far as is known
        self.watched = 0  # pages that the miss-ratio curve has seen
        self.encoder: Encoder
        self._tokens: TokenRow
        self.public_pages: int | None = None  # None: its prompt has no public prefix
        if isinstance(query, Sequence):
            self.encoder, self._tokens = query.encoder.fork(), query._tokens.fork()
            self.public_pages, self.watched = query.public_pages, query.watched
        else:
            marks = cache.tree.marks
            self.encoder = query.encoder or cache.tree.encoder(query.space)
            if query.public:
                border = Border(query.public, cache.page_size, salt_of(query.namespace))
                self._tokens = SaltedRow(marks, query.tokens, query.extras, border)
                self.public_pages = query.public // cache.page_size
            else:
                self._tokens = TokenRow(marks, query.tokens, query.extras)
        self._table: GrowingArray
        # Region map of the page table:
        #   0 … _shared      pages that the index stores; the hold protects exactly these
        #   _shared … end    pages that it (and forks that have not written them) refers to
        self._shared = 0
        self._opened_pages = 0  # leading shared pages that other sequences computed
        self._pending = PendingCopies(cache.claims)

    def adopt(
        self, table: PageArray, shared: int, copy: PageCopy | None = None, source: Any = None
    ) -> None:
        """Start with this page table: ``shared`` cached pages, and maybe a page copy to make."""
        self._table = GrowingArray(table)
        self._shared = self._opened_pages = shared
        if copy is not None:
            self._pending.add(copy, source)
        self._cache.sequences[self.id] = self

    def begin_groups(self, groups: SequenceGroups, state: PageArray | None, found: int) -> None:
        """Start with these rows, and ``state`` as the running one; ``found`` pages are cached."""
        groups.begin(state, self._tokens, cached=found)
        self.groups = groups

    # --- views -----------------------------------------------------------------------------------

    @property
    def num_tokens(self) -> int:
        """Number of tokens: those of the prompt and those appended."""
        return len(self._tokens)

    @property
    def num_published(self) -> int:
        """Leading tokens in full pages that later prompts can reuse."""
        return min(self._shared * self._cache.page_size, len(self._tokens))

    @property
    def pages(self) -> PageArray:
        """The page table: int32 page ids in order, read-only. `publish` may exchange pages."""
        return self._table.view()

    @property
    def published_pages(self) -> PageArray:
        """The leading pages of the table that the index stores."""
        return self._table.values[: self._shared]

    @property
    def tokens(self) -> TokenArray:
        """The tokens: int32, read-only. Where some have extras, a copy."""
        return self._tokens.tokens

    @property
    def extras(self) -> Extras:
        """The digests of the bytes that belong to its tokens, by position."""
        return self._tokens.extras

    @property
    def row(self) -> TokenArray:
        """The tokens as the index compares them: marks in place of those with extras."""
        return self._tokens.values

    @property
    def closed(self) -> bool:
        """Whether the sequence was closed."""
        return self._pending.state is SequenceState.CLOSED

    @property
    def hold(self) -> Node:
        """The hold that protects its published pages in the prefix index."""
        return self._hold

    def claims(self) -> list[Claim]:
        """Return the claims on pages that this sequence has still to copy from."""
        return self._pending.claims()

    @property
    def first_unpublished(self) -> int | None:
        """The first page of the table that the index does not store; None if it stores all."""
        table = self._table
        return int(table.values[self._shared]) if len(table) > self._shared else None

    @property
    def unpublished(self) -> list[int]:
        """The pages of the table that the index does not store."""
        pages: list[int] = self._table.values[self._shared :].tolist()
        return pages

    # --- steps -----------------------------------------------------------------------------------

    def copies(self) -> list[PageCopy]:
        """Return the page copies to make, in this order, before the sequence is computed.

        Each copy is returned once: among forks that wait for the same copy, to the first caller.
        Make the copies before this sequence or a fork of it is computed, and before the next
        `copies`, `publish`, `truncate` or `close` of this one: until then their sources are kept
        unchanged.
        """
        with self._cache.lock:
            permit(self._pending.state, "copies")
            return self._pending.take()

    def append(self, tokens: TokensLike | int, extra: ExtraLike | None = None) -> None:
        """Add tokens at the end and allocate the pages they need; all or nothing.

        ``extra`` as in `PagedCache.open`; positions count from the first of ``tokens``. A shared
        page is replaced by a copy before tokens are added to it (see `copies`). Raises
        `OutOfPages`. Cost: about 1 µs, plus allocation once a page.
        """
        one = single_token(tokens)
        if one is None:
            array = as_tokens(np.array([tokens]) if isinstance(tokens, _SCALARS) else tokens)
            count = len(array)
        else:
            count = 1
        extras = () if extra is None else as_extras(extra, count)
        cache = self._cache
        with cache.lock:
            permit(self._pending.state, "append")
            at, offset = divmod(len(self._tokens), cache.page_size)
            needed = at - (-(offset + count) // cache.page_size) - len(self._table)
            copy = offset and count and not self._may_write(at, offset)
            if needed or copy:
                fresh = cache.pool.take(needed + 1 if copy else needed)
                if copy:
                    self._copy_on_write(at, offset, int(fresh[0]))
                    fresh = fresh[1:]
                self._table.extend(fresh)
            if extras:
                row = np.array([one], TOKEN_DTYPE) if one is not None else array
                self._tokens.extend_with(row, extras)
            elif one is None:
                self._tokens.extend(array)
            else:
                self._tokens.append(one)

    def _may_write(self, at: int, offset: int) -> bool:
        """Whether the page at index ``at`` may be written from ``offset`` on."""
        return at >= self._shared and self._cache.claims.may_write(self._table[at], offset)

    def _copy_on_write(self, at: int, tokens: int, dst: int) -> None:
        """Replace the shared page at index ``at`` by page ``dst``, and claim it to copy from."""
        cache = self._cache
        hold = None
        if at < self._shared:  # the index stores the page: the old hold now protects the source
            cache.pool.retain_page(self._table[at])  # for the claim
            hold = self._hold
            self._hold = cache.tree.move(cache.tree.again(hold), hold, at)
            self._shared = at
            self._opened_pages = min(self._opened_pages, at)
        elif at == self._shared:
            self._leave_forks()
        copy = PageCopy(int(self._table.values[at]), dst, tokens)
        self._pending.add(copy, hold)
        self._table.values[at] = dst

    def truncate(self, length: int) -> None:
        """Keep the first ``length`` tokens, for instance to drop rejected drafts.

        Pages published beyond stay in the cache. Raises `InvalidValue` outside 0 … num_tokens.
        With groups of layers, see `kvkeep.core.groups.SequenceGroups`.
        """
        cache = self._cache
        with cache.lock:
            permit(self._pending.state, "truncate")
            length = whole("the length to keep, in tokens,", length, 0, len(self._tokens))
            size = cache.page_size
            pages = -(-length // size)
            if pages <= self._shared:
                self._leave_forks()
            gone = self._table.values[max(pages, self._shared) :].copy()
            if pages < self._shared:
                self._hold = cache.tree.move(self._hold, self._hold, pages)
                self._shared = pages
            self._table.cut(pages)
            self._tokens.cut(length)
            if self.public_pages is not None:
                self.public_pages = min(self.public_pages, length // size)
            self.encoder.cut(length // size)
            self._pending.drop_needless(self._table.values[self._shared :])
            cache.pool.release_known(gone)
            if self.groups is not None:
                self.groups.rewind(length, self._table.values[: self._shared])
            self.num_cached = min(self.num_cached, length)
            self._opened_pages = min(self._opened_pages, pages)

    def fork(self) -> Sequence:
        """Return a second sequence with the same tokens; a page is shared until either writes it.

        Both wait for copies that were not taken yet. Cost: one pass over the page table.
        """
        cache = self._cache
        with cache.lock:
            permit(self._pending.state, "fork")
            groups = None if self.groups is None else self.groups.fork()
            hold = cache.tree.again(self._hold)
            table = self._table.values
            cache.pool.retain_known(table[self._shared :])
            other = Sequence(cache, self, hold, self.owner, self.priority)
            other.num_cached = max(self.num_cached, self.num_published)
            other.adopt(table, self._shared)
            self._pending.share_with(other._pending)
            if groups is not None:
                groups.row, other.groups = other._tokens, groups
            page = self.first_unpublished
            if page is not None:
                cache.forks.join(page, self, other)
            if cache.told:
                cache.tree.policy.forked(self.id, other.id)
            cache.counters.forked += 1
            if cache.lock.hooks:
                cache.lock.emit(
                    Opened(other.id, self.namespace, other.num_tokens, other.num_cached, self.id)
                )
            return other

    def publish(self, computed: int | None = None) -> int:
        """Make the full pages of the first ``computed`` tokens (default: all) reusable.

        If another sequence published the same tokens before, its pages replace these, which are
        freed: the page table changes, its length does not; in forks that share the pages, too.
        Returns the tokens published so far, 0 in a cache made with ``reuse=False``. Cost: O(new
        tokens), and as much for each fork that shares one of the pages.
        """
        cache = self._cache
        with cache.lock:
            permit(self._pending.state, "publish")
            length = len(self._tokens)
            if computed is None:
                computed = length
            else:
                computed = whole("the number of computed tokens", computed, 0, length)
            self._pending.finish()
            if not cache.reuse:
                return 0
            stop = computed // cache.page_size
            public = self.public_pages
            if public is not None and self._shared < public < stop:
                self._publish(self._shared, public)  # no run has public and private pages
            if self._shared < stop:
                self._publish(self._shared, stop)
            if self.groups is not None and stop:
                self.groups.published(self._table.values[: min(stop, self._shared)], self.id)
            return min(self._shared * cache.page_size, length)

    def _publish(self, start: int, stop: int) -> None:
        cache = self._cache
        space, owner = None, self.owner
        if self.public_pages is not None:  # no session owns public pages
            private = start >= self.public_pages
            space, owner = (self.namespace, owner) if private else (self.space, None)
        own = self._table.values[start:stop].copy()
        symbols = self.encoder.pages(self._tokens.values, start, stop)
        self._hold, existing = cache.tree.insert(
            self._hold, symbols, own, self.priority, owner=owner, namespace=space
        )
        forks = cache.forks.take(int(own[0])) if cache.forks else ()
        self._shared = stop
        new = own[len(existing) :]
        if len(new):
            size = cache.page_size
            row = self._tokens.values[(stop - len(new)) * size : stop * size]
            if len(cache.tree.marks):
                cache.tree.marks.stored(new, row)
            cache.claims.now_stored(new, self._hold, stop - len(new))
            cache.counters.stored_pages += len(new)
        if len(existing):
            # Another sequence computed these: `close` must not drop them.
            self._opened_pages = start + len(existing)
            cache.counters.duplicate_pages += len(existing)
            self._exchange(start, own[: len(existing)], existing)
        for other in forks:
            if other is not self:
                assert other._shared == start
                sharing = _sharing(other._table.values[start : start + len(own)], own)
                other._hold = cache.tree.move(other._hold, self._hold, start + sharing)
                other._shared = other._opened_pages = start + sharing
                other._exchange(start, own[:sharing], existing[:sharing])
                other._pending.drop_needless(other._table.values[other._shared :])
        if forks:
            cache.forks.regroup(forks)
        if cache.lock.hooks and len(new):
            at = stop - len(new)
            parent = int(self._table.values[at - 1]) if at else -1
            tokens, extras = self._tokens.plain(row)
            cache.lock.emit(
                Stored(
                    self.id, space or self.namespace, parent, frozen(new), frozen(tokens), extras
                )
            )

    def _leave_forks(self) -> None:
        """Leave the group of forks before the first unpublished page leaves the table."""
        forks = self._cache.forks
        page = self.first_unpublished if forks else None
        if page is not None:
            forks.leave(page, self)

    def _exchange(self, start: int, own: PageArray, existing: PageArray) -> None:
        """Drop the references to ``own`` pages; ``existing`` ones replace the first of them."""
        self._table.values[start : start + len(existing)] = existing
        self._cache.pool.release_known(own)

    def close(self, *, keep: bool = True, ended: Ended | None = None) -> None:
        """End the sequence: published pages stay in the cache, all others are freed.

        ``keep=False`` also drops the pages that this sequence published first, unless others use
        them. ``ended`` says how the request ended, for policies that predict its conversation.
        """
        cache = self._cache
        if not isinstance(keep, bool):  # callers pass anything
            keep = switch("keep", keep)  # type: ignore[unreachable]
        if ended is not None:
            check_type("ended", ended, Ended, "an Ended(…)")
        with cache.lock:
            pending = self._pending
            permit(pending.state, "close")
            pending.state = SequenceState.CLOSED
            del cache.sequences[self.id]
            if cache.forks:
                self._leave_forks()
            if cache.told:
                if keep:
                    cache.tree.policy.closed(self.id, self._hold, self.row, ended)
                else:
                    cache.tree.policy.dropped(self.id)
            if cache.watch is not None and keep and self._shared > self.watched:
                # Later prompts find these pages, like those of a prompt.
                row = signed(self.tokens, self.extras)[: self.num_published]
                cache.watch.stored(row, self.space)
            stored = self._shared
            if len(self._table) > stored:
                cache.pool.release_known(self._table.values[stored:])
            if keep:
                cache.tree.release(self._hold)
            else:
                stored -= cache.drop(self._hold, self._opened_pages)
            pending.end()
            if self.groups is not None:
                self.groups.close()
            self._tokens.release_marks()
            cache.counters.closed += 1
            if cache.lock.hooks:
                cache.lock.emit(Closed(self.id, len(self._tokens), stored))
            self._table.cut(0)

    def check(self, stored: PageArray) -> None:
        """Assert that the index stores the first `published_pages` of the table, and no others."""
        table = self._table.values
        assert len(np.unique(table)) == len(table), "a page stands twice in a page table"
        published = np.isin(table, stored)
        assert published[: self._shared].all(), "a shared page is not in the index"
        assert not published[self._shared :].any(), "the index stores a page that is not held"
        assert len(table) == -(-len(self._tokens) // self._cache.page_size)
        assert self._hold.end == self._shared or not self._shared
        self._pending.check()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self.closed:
            self.close()

    def __repr__(self) -> str:
        return (
            f"<Sequence {self.id}, {self._pending.state.name.lower()}, {self.num_tokens} tokens, "
            f"{len(self._table)} pages, {self._shared} of them published>"
        )


def _sharing(mine: PageArray, own: PageArray) -> int:
    """Return how many of the pages ``own`` a fork has at the same index; at least one."""
    sharing = common_length(mine, own)
    assert sharing
    return sharing
