"""`PagedCache`: the KV pages of one device, shared between requests by prefix."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from kvkeep.core.cache.core import Core
from kvkeep.core.cache.opening import CacheQuery, find, matched_tokens, open_sequence
from kvkeep.core.cache.pins import Pin
from kvkeep.core.cache.sessions import Session, check_name
from kvkeep.core.cache.stats import CacheStats, snapshot
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
from kvkeep.core.eviction import EvictionPolicy, policy
from kvkeep.core.eviction.shares import Shares
from kvkeep.core.keys import as_namespace
from kvkeep.core.pages import PagePool
from kvkeep.core.pages.layout import GroupLayout
from kvkeep.core.prefix import index as make_index
from kvkeep.core.prefix.results import EMPTY_PAGES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kvkeep.core.cache.inspector import Inspector
    from kvkeep.core.cache.sequence import Sequence
    from kvkeep.core.cache.views import CacheMap, NodeView
    from kvkeep.core.events import Hook
    from kvkeep.core.extras import ExtraLike
    from kvkeep.core.keys import Namespace, NamespaceLike
    from kvkeep.core.miss_ratio import MissRatioCurve, MissRatioPoint, PromptWatch
    from kvkeep.core.pages.tables import PageArray
    from kvkeep.core.prefix import PrefixMatch, PrefixRun
    from kvkeep.core.tokens import TokensLike

__all__ = ["CachedPrefix", "PagedCache", "RemovedPages"]

_MAX_PAGE_SIZE = 65_536


@dataclass(frozen=True, slots=True, eq=False)
class CachedPrefix:
    """The cached part of a prompt: full ``pages``, then the first tokens of one page more.

    ``partial_page`` is -1 if there is none. The pages may be evicted at any time afterwards.
    ``stored_tokens`` are cached in the layers that keep every token; in a cache with groups of
    layers, a request can resume at ``num_tokens``, which may be less.
    """

    num_tokens: int
    pages: PageArray
    partial_page: int = -1
    partial_tokens: int = 0
    stored_tokens: int = 0


class RemovedPages(NamedTuple):
    """Result of `PagedCache.remove`: ``pages`` that were freed, and pages still ``in_use``."""

    pages: int
    in_use: int


class PagedCache:
    """Allocates the pages that hold the KV of requests, and reuses those of equal prefixes.

    The cache decides; the memory is `kvkeep.core.pages.tensors.PagedTensors` or the engine's own.
    Tokens are a list, a tuple or an integer array. Namespaces (text, or a `Namespace`) share
    nothing but the prefixes that were declared: ``cache.public.declare(tokens)``.

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
        self.groups = page_size if isinstance(page_size, GroupLayout) else None
        tokens = page_size.page_size if isinstance(page_size, GroupLayout) else page_size
        self.page_size = whole("page_size", tokens, 1, _MAX_PAGE_SIZE)
        check_type("clock", clock, Callable, "a function that returns seconds")
        pool = PagePool(num_pages)
        self.num_pages = pool.num_pages
        if hard_pin_pages is None:
            hard_pin_pages = pool.num_pages // 2
        # Never all of them: pins must leave room for requests.
        hard_pin_pages = whole("hard_pin_pages", hard_pin_pages, 0, pool.num_pages - 1)
        orders = policy(eviction)
        if isinstance(orders, Shares):
            orders.fit(pool.num_pages)
        index = make_index(prefix, self.page_size, orders)
        self.reuse = switch("reuse", reuse)
        self._core = Core(
            pool, index, hard_pin_pages, clock,
            reuse=self.reuse, groups=self.groups,
        )  # fmt: skip
        self.public = self._core.public
        self._inspector_made: Inspector | None = None
        self._watch: PromptWatch | None = None
        if what_if is not None:
            from kvkeep.core.cache.observers import MissRatioObserver  # noqa: PLC0415
            from kvkeep.core.miss_ratio import PromptWatch  # noqa: PLC0415 - only where needed

            sizes, groups = (self.page_size, pool.num_pages), self.groups is not None
            self._watch = PromptWatch(what_if, *sizes, kv_only=groups, measured=self.reuse)
            self._core.observe(MissRatioObserver(self._watch))

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
        with self._core:
            self._core.bind(memory)

    # --- requests ----------------------------------------------------------------------------

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

        ``num_cached`` of the result is the number of tokens that need no computing; the last
        prompt token is always computed, since its logits are needed.

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
        query = CacheQuery.of(self._core, tokens, namespace, extra, session=session)
        priority = whole("priority", priority)
        reserve = whole("reserve", reserve, 0)
        with self._core as core:
            return open_sequence(core, query, priority=priority, reserve=reserve)

    def match(
        self,
        tokens: TokensLike,
        namespace: NamespaceLike = "",
        *,
        extra: ExtraLike | None = None,
    ) -> CachedPrefix:
        """Return the longest cached prefix of a prompt. Changes nothing, not even recency.

        ``extra`` as in `open`."""
        query = CacheQuery.of(self._core, tokens, namespace, extra)
        with self._core as core:
            return _cached(core, find(core, query))

    # --- memory ------------------------------------------------------------------------------

    def evict(self, num_pages: int) -> int:
        """Evict up to ``num_pages`` cached pages that are not in use; return how many."""
        num_pages = whole("num_pages", num_pages, 0)
        with self._core as core:
            core.pins.expire()
            return core.evict(num_pages, "asked")

    def clear(self, namespace: NamespaceLike | None = None) -> int:
        """Drop all cached pages that are not in use, in one namespace or in all.

        Soft pins of dropped pages end, hard pins stay. Returns the pages freed, of all groups.
        """
        space = None if namespace is None else as_namespace(namespace)
        with self._core as core:
            core.pins.expire()
            freed = core.clear(space)
            core.pins.expire()  # soft pins of dropped pages
            return freed

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
        query = CacheQuery.of(self._core, tokens, namespace, extra)
        with self._core as core:
            core.pins.expire()
            core.before_eviction()
            match = find(core, query)
            top = None if match is None else match.first_node(query.public // self.page_size)
            if top is None:
                return RemovedPages(0, 0)
            return RemovedPages(*self._inspector.evict_family(top))

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
        query = CacheQuery.of(self._core, tokens, namespace, extra)
        ttl = None if ttl is None else number("ttl", ttl, "some seconds", above=0)
        hard = switch("hard", hard)
        with self._core as core:
            core.pins.expire()
            match = find(core, query)
            if match is None or not len(match.pages):
                raise NotCached(
                    f"not one full page of these {len(query.tokens)} tokens is cached in "
                    f"{query.namespace}; publish them first"
                )
            hold, _ = core.index.hold(match.without_partial(), query.space, used=False)
            try:
                pin = core.pins.add(hold, ttl, hard=hard)
            except InvalidValue:
                core.index.release(hold, used=False)
                raise
            if not hard:
                core.index.release(hold, used=False)
            core.report_groups(None)
            return pin

    def unpin(self, pin: Pin) -> None:
        """End a pin; `NotCached` if it belongs to another cache or has ended."""
        with self._core as core:
            core.pins.expire()
            check_type("pin", pin, Pin, "a pin of PagedCache.pin")
            if pin not in core.pins.pins:
                raise NotCached(f"{pin!r} is not a running pin of this cache")
            core.pins.end(pin)

    def session(self, session: str, namespace: NamespaceLike = "") -> Session:
        """Return an object to give hints about a session: it is suspended, or over.

        Hints order eviction and change nothing else. Raises `InvalidValue` for an invalid name
        (1 … 256 characters).
        """
        return Session(self._core, as_namespace(namespace), check_name(session))

    # --- figures -----------------------------------------------------------------------------

    @property
    def policy(self) -> str:
        """The name of the eviction policy."""
        return self._core.index.policy.name

    @property
    def num_available(self) -> int:
        """Pages that a request could get now: free, or cached and evictable. Cost: two adds."""
        with self._core as core:
            return core.available()

    def stats(self) -> CacheStats:
        """Return what the cache holds and has done. Cost: one pass over the reference counts."""
        with self._core as core:
            return snapshot(core)

    def what_if(
        self, pages: Iterable[int] | None = None, namespace: NamespaceLike | None = None
    ) -> tuple[MissRatioPoint, ...]:
        """Estimate the hit rates that caches of ``pages`` pages would have had so far.

        Default sizes: ¼, ½, 1, 2, 4 and 8 times this cache; 16 times is the most. Sizes of which
        the prompts tell nothing are left out. With ``namespace``, for its prompts alone, in memory
        that all share. See `MissRatioPoint`. `IllegalStep` without ``what_if``. Cost: below 2 ms.
        """
        if self._watch is None:
            raise IllegalStep("this cache keeps no miss-ratio curve; make it with what_if=0.1")
        with self._core:
            sizes = None if pages is None else listed("pages", pages, "numbers of pages")
            return self._watch.points(sizes, namespace)

    # --- inspection --------------------------------------------------------------------------

    @property
    def _inspector(self) -> Inspector:
        """Made, and imported, at first use."""
        with self._core as core:
            if self._inspector_made is None:
                from kvkeep.core.cache.inspector import Inspector  # noqa: PLC0415

                self._inspector_made = Inspector(core)
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

    def evict_below(self, node: int) -> int:
        """Drop a run of the `map` and all runs behind it that are not in use.

        Soft pins that end in dropped runs end. A namespace's id stands for all of the namespace.
        Returns the pages freed, 0 if all are in use. Raises `NotCached` for an id that is not
        cached (any more). Cost: as `clear`.
        """
        return self._inspector.evict_below(node)

    def runs(self, namespace: NamespaceLike = "") -> Iterator[PrefixRun]:
        """Return the runs of a namespace, depth first; `kvkeep.core.prefix.render` draws them."""
        with self._core as core:
            return iter(list(core.index.runs(as_namespace(namespace))))

    def namespaces(self) -> dict[Namespace, int]:
        """Return the namespaces that have cached pages, and how many."""
        with self._core as core:
            return core.index.namespaces()

    def subscribe(self, hook: Hook) -> Callable[[], None]:
        """Call ``hook(event)`` for every event from now on; call the result to end that.

        Hooks are called in order, under the cache's lock, when an operation is complete: they must
        be quick. A hook may call every method of the cache and of its sequences; the events of
        that are delivered in turn. It must not wait for another thread that uses the cache. A hook
        that raises is logged and counted, and stays subscribed.
        """
        if not callable(hook):
            raise InvalidValue(f"a hook is called with each event, got {told(hook)}")
        return self._core.subscribe(hook)

    def check(self) -> None:
        """Recount everything from scratch and assert that it agrees. Cost: all of it."""
        with self._core as core:
            core.check()

    def __repr__(self) -> str:
        core = self._core
        return (
            f"<PagedCache {self.num_pages} pages of {self.page_size} tokens, {core.index.name}, "
            f"{core.index.policy.name}: {core.pool.num_free} free, "
            f"{core.index.num_evictable} evictable>"
        )


def _cached(core: Core, match: PrefixMatch | None) -> CachedPrefix:
    """Return a match as what a request would reuse of it."""
    if match is None:
        return CachedPrefix(0, EMPTY_PAGES)
    found = matched_tokens(core, match)
    if core.groups is None:
        return CachedPrefix(
            found, match.pages.copy(), match.partial_page, match.partial_tokens, found
        )
    page = core.groups.resume(match.pages)[0]
    return CachedPrefix(page * core.page_size, match.pages[:page].copy(), stored_tokens=found)
