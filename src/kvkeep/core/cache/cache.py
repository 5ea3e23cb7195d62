"""`PagedCache`: the KV pages of one device, shared between requests by prefix."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvkeep.core.cache.parts import CacheParts
from kvkeep.core.cache.pins import Pin
from kvkeep.core.cache.sequence import Query, Sequence
from kvkeep.core.cache.sessions import Session, check_name
from kvkeep.core.cache.stats import CacheStats
from kvkeep.core.errors import (
    IllegalStep,
    InvalidValue,
    NotCached,
    check_type,
    listed,
    number,
    switch,
    told,
    whole,
)
from kvkeep.core.events import (
    Opened,
    PrefixMiss,
    Returned,
)
from kvkeep.core.eviction import EvictionPolicy, policy
from kvkeep.core.eviction.shares import Shares
from kvkeep.core.extras import as_extras, signed
from kvkeep.core.keys import Namespace, as_namespace
from kvkeep.core.pages import PageCopy, PagePool
from kvkeep.core.pages.pool import EMPTY_PAGES
from kvkeep.core.prefix import index as make_index
from kvkeep.core.prefix.node import descend
from kvkeep.core.public import PublicPrefixes
from kvkeep.core.tokens import (
    as_row,
    check_range,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kvkeep.core.cache.inspector import CacheMap, Inspector, NodeView
    from kvkeep.core.events import Hook
    from kvkeep.core.extras import ExtraLike
    from kvkeep.core.groups import GroupLayout
    from kvkeep.core.keys import NamespaceLike
    from kvkeep.core.miss_ratio import MissRatioCurve, MissRatioPoint
    from kvkeep.core.pages.pool import PageArray
    from kvkeep.core.prefix import PrefixMatch
    from kvkeep.core.prefix.render import PrefixRun
    from kvkeep.core.tokens import TokensLike

__all__ = ["CachedPrefix", "PagedCache", "RemovedPages"]

_MAX_PAGE_SIZE = 65_536


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


class PagedCache(CacheParts):
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
        size = whole("page_size", tokens, 1, _MAX_PAGE_SIZE)
        check_type("clock", clock, Callable, "a function that returns seconds")
        pool = PagePool(num_pages, self._make_room)
        if hard_pin_pages is None:
            hard_pin_pages = pool.num_pages // 2
        # Never all of them: pins must leave room for requests.
        hard_pin_pages = whole("hard_pin_pages", hard_pin_pages, 0, pool.num_pages - 1)
        eviction = policy(eviction)
        if isinstance(eviction, Shares):
            eviction.fit(pool.num_pages)
        tree = make_index(prefix, size, eviction, clock)
        reuse = switch("reuse", reuse)
        super().__init__(pool, tree, self.groups, hard_pin_pages, clock, reuse=reuse)
        self.sequences: dict[int, Sequence] = {}
        self.public = PublicPrefixes()
        if what_if is not None:
            from kvkeep.core.miss_ratio import PromptWatch  # noqa: PLC0415 - only where needed

            kv_only = self.groups is not None
            self.watch = PromptWatch(what_if, size, pool.num_pages, kv_only=kv_only, measured=reuse)
        self._memory: weakref.ref[object] | None = None  # see `bind`
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

        ``extra`` as in `open`. With ``everywhere``, `CachedPrefix.miss` also says that
        another namespace has the next page: for operators, as it shows what others have sent.
        """
        query = self._query(tokens, namespace, extra)
        if everywhere is not False:
            everywhere = switch("everywhere", everywhere)
        with self.lock:
            match = self._find(query)
            return self._cached(query, match, everywhere=everywhere)

    def _query(
        self, tokens: TokensLike, namespace: NamespaceLike, extra: ExtraLike | None
    ) -> Query:
        """Convert and check arguments; token ids are checked later, against the match."""
        row = as_row(tokens)
        space = as_namespace(namespace)
        extras = () if extra is None else as_extras(extra, len(row))
        if space.scope:
            raise InvalidValue(
                f"{space} is for declared public prefixes; a prompt has a namespace without scope"
            )
        if not self.public.rows:
            return Query(row, space, space, extras)
        placed = self.public.place(row, space, self.page_size, extras)
        return Query(row, space, placed.space, placed.extras, placed.tokens)

    def _find(self, query: Query, stop: int | None = None) -> PrefixMatch | None:
        """Return the longest match of the first ``stop`` tokens of a prompt, default: of all.

        Raises:
            InvalidValue: a negative token id.
        """
        tokens, marks, match = query.tokens, self.tree.marks, None
        if self.reuse:
            row, query.stop = tokens[:stop], stop
            if query.extras:
                row = marks.lookup(row, query.extras)
            query.encoder = self.tree.encoder(query.space)
            query.symbols = query.encoder.lookup(row)
            match = self.tree.match(query.symbols, query.space)
        # Tokens that equal stored ones are not negative, unless marks are stored.
        check_range(tokens, 0 if marks.living else self._matched(match))
        return match

    def _matched(self, match: PrefixMatch | None) -> int:
        """Return how many leading tokens a match covers."""
        return 0 if match is None else len(match.pages) * self.page_size + match.partial_tokens

    def _cached(self, query: Query, match: PrefixMatch | None, *, everywhere: bool) -> CachedPrefix:
        """Return the part of a match that a request would reuse."""
        stored = self._matched(match)
        board, size = self.board, self.page_size
        resumed = stored
        if match is not None and board is not None:
            resumed = board.resume(match.pages)[0] * size
        miss = None
        if resumed < len(query.tokens):
            miss = self._why(query, match, resumed)
            if everywhere and miss.cause in {"unseen", "differs", "evicted"}:
                other = self.misses.elsewhere(match, query)
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

    def _why(self, query: Query, match: PrefixMatch | None, cached: int) -> PrefixMiss:
        """Return why a prompt is computed from its ``cached`` tokens on."""
        last = len(query.tokens) - 1
        if cached >= last:
            return PrefixMiss("last token", cached)
        stored = 0 if match is None else len(match.pages) * self.page_size
        if self.board is not None and cached < stored:
            return PrefixMiss("no state", cached, until=self._matched(match))
        full_only = self.board is not None or not self.tree.exact
        if full_only and stored + self.page_size > len(query.tokens[: query.stop]):
            return PrefixMiss("part of a page", cached)
        return self.misses.why(match, query, cached, self.sequences)

    def _open(  # noqa: PLR0915 - one path, in order
        self, query: Query, priority: int, reserve: int, session: str | None
    ) -> Sequence:
        tokens, space = query.tokens, query.space
        if not len(tokens):
            raise InvalidValue("a prompt has at least one token, got none")
        tree = self.tree
        # The last token is never looked up: its logits are needed, so it is computed in any case.
        longest = match = self._find(query, -1)
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
            miss = self._why(query, longest, cached)  # before `hold` cuts runs
        else:
            miss = PrefixMiss("last token", cached)
        owner = None
        if session is not None:
            owner = self.sessions.enter((query.namespace, session))
        hold, source = tree.hold(match, space, owner=owner)
        sequence = Sequence(self, query, hold, owner, priority)
        shared = EMPTY_PAGES if match is None else match.pages
        sequence.num_cached, sequence.miss = cached, miss
        if self.reports_requests or self.watch is not None:
            # Before `take` evicts: they order eviction.
            self._report_opened(sequence, query, len(shared))
        table = self.pool.take(needed)
        if groups is not None:
            assert self.board is not None
            beside = self.board.layout.state_pages
            matched = 0 if longest is None else len(longest.pages)
            sequence.begin_groups(groups, table[:beside] if beside else None, matched)
            table = table[beside:]
            self.board.counters.unresumed_tokens += matched * self.page_size - cached
        if len(shared):
            table = np.concatenate((shared, table))
        copy = None
        if match is not None and source is not None:
            copy = PageCopy(match.partial_page, int(table[len(shared)]), match.partial_tokens)
            self.pool.retain_page(copy.src)
            self.counters.partial_hits += 1
        sequence.adopt(table, len(shared), copy, source)
        if self.reuse and miss.cause != "last token":
            self.misses.computes(query, hold, sequence.id, self.sequences)
        counters = self.counters
        counters.opened += 1
        counters.prompt_tokens += len(tokens)
        counters.hit_tokens += cached
        if self.lock.hooks:
            stored = None if groups is None else self._matched(longest)
            self.lock.emit(
                Opened(
                    sequence.id, sequence.namespace, len(tokens), cached,
                    stored_tokens=stored, returned=sequence.returned, miss=sequence.miss,
                )
            )  # fmt: skip
        return sequence

    def _report_opened(self, sequence: Sequence, query: Query, page: int) -> None:
        """Report a request that begins to the policy and the miss-ratio curve."""
        if self.reports_requests:

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

    def evict(self, num_pages: int) -> int:
        """Evict up to ``num_pages`` cached pages that are not in use; return how many."""
        num_pages = whole("num_pages", num_pages, 0)
        with self.lock:
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
            self.sessions.expire()
            match = self._find(query)
            public = query.public // self.page_size
            if match is None or len(match.pages) <= public:
                return RemovedPages(0, 0)
            top = match.node_at(public + 1)
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
            self.pins.allow(match, hard=hard)  # before a hold, which may cut a run
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
            self.sessions.expire()
            pool, tree, sequences = self.pool, self.tree, self.sequences.values()
            tables = [sequence.pages for sequence in sequences]
            # A hold stands for a reference to each of these.
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
                **asdict(self.counters),
            )

    def what_if(
        self, pages: Iterable[int] | None = None, namespace: NamespaceLike | None = None
    ) -> tuple[MissRatioPoint, ...]:
        """Estimate the hit rates that caches of ``pages`` pages would have had so far.

        Default sizes: ¼, ½, 1, 2, 4 and 8 times this cache; 16 times is the most. Sizes of which
        the prompts say nothing are left out. With ``namespace``, for its prompts alone, in memory
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
            groups: dict[int, list[Sequence]] = {}  # by first unpublished page
            for sequence in sequences:
                sequence.check(stored)
                expected[sequence.unpublished] += 1
                for page in sequence.unpublished[:1]:
                    groups.setdefault(page, []).append(sequence)
            firsts: dict[int, int] = {}  # of each unpublished page
            for first, group in groups.items():
                for sequence in group:
                    assert set(sequence.sharers or [sequence]) == set(group)
                    for page in sequence.unpublished:
                        assert firsts.setdefault(page, first) == first, "a page in two groups"
            nodes = [
                node
                for root in self.tree.roots.values()
                for node, _ in descend(root)
                if node is not root
            ]
            if self.board is not None:
                beside = [pin.beside for pin in self.pins.active]
                for sequence in sequences:
                    assert sequence.groups is not None
                    beside += sequence.groups.references()
                self.board.check(nodes, beside, expected)
            for claim in claims:
                expected[claim.copy.src] += 1
            wrong = np.flatnonzero(expected != self.pool.references)
            assert not len(wrong), f"reference counts of pages {wrong[:8]} are wrong"
            self.pool.check()
            self.tree.marks.check(stored, [sequence.row for sequence in sequences])
            self.pins.check(nodes)
            self.sessions.check(nodes)
            if self.watch is not None:
                self.watch.check()

    def __repr__(self) -> str:
        return (
            f"<PagedCache {self.num_pages} pages of {self.page_size} tokens, {self.tree.name}, "
            f"{self.policy}: {self.pool.num_free} free, {self.tree.num_evictable} evictable>"
        )
