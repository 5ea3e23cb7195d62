"""`PagedCache`: the KV pages of one device, shared between requests by prefix."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvkeep.core.cache.core import Core
from kvkeep.core.cache.sequence import Sequence
from kvkeep.core.cache.sessions import Session, check_name, check_session
from kvkeep.core.cache.stats import CacheStats
from kvkeep.core.errors import IllegalStep, InvalidValue, NotCached, whole
from kvkeep.core.events import Opened
from kvkeep.core.eviction import EvictionPolicy, policy
from kvkeep.core.extras import as_extras, signed
from kvkeep.core.keys import Namespace, as_namespace, chain_keys, root_key
from kvkeep.core.pages import PageCopy, PagePool
from kvkeep.core.prefix import index as make_index
from kvkeep.core.prefix.results import EMPTY_PAGES
from kvkeep.core.tokens import TOKEN_BYTES, as_row, as_tokens, check_range

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from kvkeep.core.cache.blocks import BlockNames
    from kvkeep.core.cache.looking import Looking
    from kvkeep.core.cache.pins import Pin
    from kvkeep.core.cache.views import CacheMap, Found, NodeView
    from kvkeep.core.events import Hook
    from kvkeep.core.extras import ExtraLike, Extras
    from kvkeep.core.keys import NamespaceLike
    from kvkeep.core.miss_ratio import MissRatioCurve, MissRatioPoint
    from kvkeep.core.pages.table import PageArray
    from kvkeep.core.prefix import PrefixMatch, PrefixRun
    from kvkeep.core.tokens import TokenArray, TokensLike

__all__ = ["CachedPrefix", "PagedCache", "RemovedPages"]

_MAX_PAGE_SIZE = 65_536
BLOCK_TOKENS = 512
"""What policies that remember tell apart, if nothing else is said."""


@dataclass(frozen=True, slots=True, eq=False)
class CachedPrefix:
    """What is cached of a prompt: full ``pages``, then the first tokens of one page more.

    ``partial_page`` is -1 where there is none. The pages may be evicted at any time after.
    """

    num_tokens: int
    pages: PageArray
    partial_page: int = -1
    partial_tokens: int = 0


class RemovedPages(NamedTuple):
    """What `PagedCache.remove` did: ``pages`` that are free now, and pages still ``in_use``."""

    pages: int
    in_use: int


class PagedCache:
    """Gives requests the pages that hold their KV, and finds again what others computed.

    It decides; the memory is `kvkeep.core.pages.tensors.PagedTensors` or the engine's own. Tokens
    come as a list, a tuple or an integer array. Namespaces (text, or a `Namespace`) share nothing.

    ``num_pages`` and ``page_size`` (tokens) make the pool. ``prefix`` is "radix" (exact to the
    token) or "chain" (block keys over full pages); ``eviction`` the name of a policy or an
    `EvictionPolicy`; ``hard_pin_pages`` what hard pins may hold at most (default: half the pool);
    ``clock`` gives seconds, for pins that end. ``block_pages`` pages are what eviction policies
    that remember tell apart (default: as many as hold 512 tokens). ``what_if`` is the share of
    prompts' blocks that is watched (0.1 is a good one), or a `MissRatioCurve`, to know what more or
    less memory would do (`what_if`). With ``reuse=False`` nothing is found and nothing is kept:
    every prompt is computed, `Sequence.publish` is legal and changes nothing, and all pages of a
    sequence are free when it and its forks, which share them, are closed.

    Thread safety: every method takes the cache's one lock. Hooks run under it.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int = 16,
        *,
        prefix: str = "radix",
        eviction: str | EvictionPolicy = "lru",
        hard_pin_pages: int | None = None,
        block_pages: int | None = None,
        what_if: float | MissRatioCurve | None = None,
        clock: Callable[[], float] = time.monotonic,
        reuse: bool = True,
    ) -> None:
        self.page_size = whole("page_size", page_size, 1, _MAX_PAGE_SIZE)
        pool = PagePool(num_pages)
        self.num_pages = pool.num_pages
        if hard_pin_pages is None:
            hard_pin_pages = pool.num_pages // 2
        # Never all of them: pins must leave room for requests.
        hard_pin_pages = whole("hard_pin_pages", hard_pin_pages, 0, pool.num_pages - 1)
        orders = policy(eviction)
        block = max(1, -(-BLOCK_TOKENS // self.page_size)) if block_pages is None else block_pages
        self._block_tokens = whole("block_pages", block, 1) * self.page_size
        orders.fit(pool.num_pages, block)
        index = make_index(prefix, self.page_size, orders)
        self.reuse = _switch("reuse", reuse)
        self._core = Core(pool, index, hard_pin_pages, clock, reuse=self.reuse)
        self._looks: Looking | None = None
        if what_if is not None:
            from kvkeep.core.miss_ratio import PromptWatch  # noqa: PLC0415 - only where it is asked for

            self._core.watch = PromptWatch.of(
                what_if, self.page_size, pool.num_pages, self._block_tokens
            )

    def bind(self, memory: object) -> None:
        """Bind the cache to the memory that holds the KV of its pages.

        ``memory`` is the object that owns it, such as a `PagedTensors`; engines call this before
        they open a sequence. The same memory may be bound again at any time, by whichever engine
        works on it then. Another one would be read for pages that were written elsewhere: it is
        refused while the first is in use, and afterwards until `clear` has emptied the cache. The
        cache keeps no memory alive: it holds a weak reference.

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
        turn: int | None = None,
        extra: ExtraLike | None = None,
    ) -> Sequence:
        """Begin a request: find its longest cached prefix and give it pages for all its tokens.

        ``num_cached`` of the result says how many tokens need no computing; the last prompt token
        is always left, since its logits are wanted. ``priority`` is for policies that ask.
        ``reserve`` pages have to remain that others can get: room for running sequences to grow.
        ``session`` names the conversation that this is a turn of (see `session`): what earlier
        turns alone used, and this one does not continue, goes first from now on. Requests of the
        same ``turn`` stand side by side; None is the next one.
        ``extra`` are bytes that belong to tokens, as those of an image to its placeholder:
        ``[(position, bytes)]``. KV from there on is shared with prompts that have the same bytes
        there, what lies before with all; the bytes are hashed and not kept (`kvkeep.core.extras`).
        Raises `InvalidValue` for tokens that are none, `OutOfPages` with nothing changed.
        Cost: O(tokens) at memory speed; see `benchmarks/core.py`.
        """
        prompt = _prompt(tokens)
        space = as_namespace(namespace)
        priority = whole("priority", priority)
        reserve = whole("reserve", reserve, 0)
        if session is not None or turn is not None:
            session, turn = check_session(session, turn)
        extras = () if extra is None else as_extras(extra, len(prompt))
        core = self._core
        with core:
            encoder = core.index.encoder(space)
            wanted = core.marks.known(prompt[:-1], extras) if extras else prompt[:-1]
            symbols = encoder.lookup(wanted)
            match = core.index.match(symbols, space) if self.reuse else None
            self._check_range(prompt, match)
            match, needed = self._affordable(match, -(-len(prompt) // self.page_size), reserve)
            hold, source = core.hold(match, space)
            line = None
            if session is not None:
                line, turn = core.sessions.enter((space, session), hold, turn)
            elif core.index.owners is not None:
                core.index.owners.used(hold, None)
            shared = EMPTY_PAGES if match is None else match.pages
            table = core.take(needed)
            if len(shared):
                core.pool.retain(shared)
                table = np.concatenate((shared, table))
            sequence = Sequence(core, space, encoder, prompt, extras, table=table, hold=hold)
            sequence.priority = priority
            if line is not None:
                sequence.belong(line, turn)
            if match is not None and source is not None:
                copy = PageCopy(match.partial_page, int(table[len(shared)]), match.partial_tokens)
                core.pool.retain([copy.src])
                core.counters.partial_hits += 1
                sequence.adopt(len(shared), copy=copy, source=source)
            else:
                sequence.adopt(len(shared))
            if core.watch is not None:
                # Tokens are what the radix index looks for; the bytes are there already.
                if extras or not core.index.exact:
                    symbols = signed(prompt, extras)[:-1].tobytes()
                sequence.told_pages = core.watch.opened(symbols, shared, space)
            if core.index.policy.remembers and self.reuse:
                sequence.known_pages = self._remembered(prompt, space, extras)
            core.counters.opened += 1
            core.counters.prompt_tokens += len(prompt)
            core.counters.hit_tokens += sequence.num_cached
            if core.hooks:
                core.emit(Opened(sequence.id, space, len(prompt), sequence.num_cached))
            return sequence

    def _remembered(self, prompt: TokenArray, space: Namespace, extras: Extras) -> int:
        """Tell the policy what is asked for; leading pages that were asked for before."""
        size = self._block_tokens * TOKEN_BYTES
        keys = chain_keys(root_key(space), prompt.tobytes(), size, extras)
        return self._core.index.policy.requested(keys) * self._block_tokens // self.page_size

    def _affordable(
        self, match: PrefixMatch | None, total: int, reserve: int
    ) -> tuple[PrefixMatch | None, int]:
        """The match to hold and the pages it then needs, or `OutOfPages` before anything changed.

        Holding a match takes its pages out of what can be evicted. A page that matches only in
        part is given up when the request could not be opened with it.
        """
        core = self._core
        needed = total - (0 if match is None else len(match.pages))
        if needed + reserve <= core.pool.num_free:
            return match, needed
        core.pins.expire()
        available = core.available() - core.index.protects(match)
        if needed + reserve > available and match is not None and match.source is not None:
            match = match.without_partial()
            available = core.available() - core.index.protects(match)
            if needed + reserve <= available:
                core.counters.partial_hits_given_up += 1
        if needed + reserve > available:
            raise core.short_of(needed + reserve, available)
        return match, needed

    def match(
        self,
        tokens: TokensLike,
        namespace: NamespaceLike = "",
        *,
        extra: ExtraLike | None = None,
    ) -> CachedPrefix:
        """The longest cached prefix of a prompt. Changes nothing: no recency, no statistics.

        ``extra`` as in `open`.
        """
        prompt = as_row(tokens)
        space = as_namespace(namespace)
        extras = () if extra is None else as_extras(extra, len(prompt))
        core = self._core
        with core:
            match = self._find(prompt, space, extras)
            found = self._check_range(prompt, match)
            if match is None:
                return CachedPrefix(0, EMPTY_PAGES)
            return CachedPrefix(found, match.pages.copy(), match.partial_page, match.partial_tokens)

    def _find(self, prompt: TokenArray, space: Namespace, extras: Extras) -> PrefixMatch | None:
        """The longest match of a prompt in the index; `open` does it itself, for speed."""
        if not self.reuse:
            return None
        index = self._core.index
        row = index.marks.known(prompt, extras) if extras else prompt
        return index.match(index.encoder(space).lookup(row), space)

    def _check_range(self, prompt: TokenArray, match: PrefixMatch | None) -> int:
        """Refuse negative ids, and return how many tokens the match covers.

        Tokens that equal stored ones are not negative, unless marks are stored: then all of the
        prompt is checked.
        """
        found = 0 if match is None else len(match.pages) * self.page_size + match.partial_tokens
        check_range(prompt, 0 if len(self._core.marks) else found)
        return found

    # --- memory ------------------------------------------------------------------------------

    def evict(self, num_pages: int) -> int:
        """Free up to ``num_pages`` cached pages that nobody uses; returns how many."""
        num_pages = whole("num_pages", num_pages, 0)
        with self._core:
            self._core.pins.expire()
            return self._core.evict(num_pages, "asked")

    def clear(self, namespace: NamespaceLike | None = None) -> int:
        """Forget everything that no running sequence uses, in one namespace or in all.

        Soft pins of what goes end, hard pins stay. Returns the pages freed.
        """
        space = None if namespace is None else as_namespace(namespace)
        with self._core:
            self._core.pins.expire()
            pages = self._core.index.clear(space)
            self._core.forget(pages, "cleared")
            self._core.pins.expire()  # soft pins of what has gone
            return len(pages)

    def remove(
        self,
        tokens: TokensLike,
        namespace: NamespaceLike = "",
        *,
        extra: ExtraLike | None = None,
    ) -> RemovedPages:
        """Forget a prompt: every cached page that begins as it does, and all behind, pinned or not.

        Pages that running sequences or hard pins hold stay, and so do the pages before them:
        `RemovedPages.in_use` counts them. Other prompts that share the first page go, too, since
        their pages stand behind it. What a running sequence publishes later is cached again. Of a
        prompt that is shorter than a page nothing is cached. ``extra`` as in `open`.

        Cost: that of `match`, and all runs behind the first page.
        """
        prompt = as_row(tokens)
        space = as_namespace(namespace)
        extras = as_extras(extra, len(prompt))
        core = self._core
        with core:
            core.pins.expire()
            core.sessions.settle()
            match = self._find(prompt, space, extras)
            self._check_range(prompt, match)
            top = None if match is None else match.first_node()
            if top is None:
                return RemovedPages(0, 0)
            return RemovedPages(*self._looking.evict_family(top))

    def pin(
        self,
        tokens: TokensLike,
        namespace: NamespaceLike = "",
        *,
        ttl: float | None = None,
        hard: bool = False,
        extra: ExtraLike | None = None,
    ) -> Pin:
        """Keep what is cached of this prefix (full pages), for ``ttl`` seconds or until `unpin`.

        A soft pin keeps it until nothing else is left to evict; it never stands in the way of a
        request. A hard pin always keeps it, within the cache's budget for hard pins. Each call
        makes a pin of its own, also of the same prefix; there are as many at a time as the cache
        has pages, or 1,024 if it has fewer. ``extra`` as in `open`.
        Raises `NotCached` when not one full page is cached, `InvalidValue` beyond the budget or
        with so many pins set. Cost: that of `match`, and O(runs on the path).
        """
        prompt = as_tokens(tokens)
        space = as_namespace(namespace)
        extras = as_extras(extra, len(prompt))
        if ttl is not None and not ttl > 0:
            raise InvalidValue(f"a pin lasts some seconds, got ttl={ttl}")
        core = self._core
        with core:
            core.pins.expire()
            match = self._find(prompt, space, extras)
            if match is None or not len(match.pages):
                raise NotCached(
                    f"not one full page of these {len(prompt)} tokens is cached in {space}; "
                    "publish them first"
                )
            hold, _ = core.index.hold(match.without_partial(), space, used=False)
            try:
                pin = core.pins.add(hold, ttl, hard=hard)
            except InvalidValue:
                core.index.release(hold, used=False)
                raise
            if not hard:
                core.index.release(hold, used=False)
            return pin

    def unpin(self, pin: Pin) -> None:
        """End a pin; `NotCached` when it is not one of this cache, or has ended already."""
        with self._core:
            self._core.pins.expire()
            if pin not in self._core.pins.pins:
                raise NotCached(f"{pin!r} is not a running pin of this cache")
            self._core.pins.end(pin)

    def evict_below(self, node: int) -> int:
        """Forget a run of the `map` and all behind it, so far as nobody uses it.

        Soft pins that end in what goes end with it. For a namespace's id, all that is in it.
        Returns the pages freed, 0 when all of it is in use. Raises `NotCached` for an id that is
        not there (any more). Cost: as `clear`.
        """
        return self._looking.evict_below(node)

    def pin_node(self, node: int, *, ttl: float | None = None) -> Pin:
        """A soft pin, as by `pin`, on the path to the end of a run of the `map`.

        Raises `NotCached` for an id that is not there (any more), `InvalidValue` for a namespace's.
        """
        return self._looking.pin(node, ttl)

    def unpin_node(self, node: int) -> int:
        """End all soft pins that end with a run of the `map`, however they were made; how many.

        Raises `NotCached` for an id that is not there (any more).
        """
        return self._looking.unpin(node)

    def session(self, session: str, namespace: NamespaceLike = "") -> Session:
        """Give hints about a session in ``namespace``: that it is away, over, or begins anew.

        Hints decide what is evicted first, and nothing else. Raises `InvalidValue` for a name that
        is none (1 … 256 characters).
        """
        return Session(self._core, as_namespace(namespace), check_name(session))

    # --- looking -----------------------------------------------------------------------------

    @property
    def _looking(self) -> Looking:
        """Made, and imported, when somebody looks."""
        with self._core:
            if self._looks is None:
                from kvkeep.core.cache.looking import Looking  # noqa: PLC0415

                self._looks = Looking(self._core)
            return self._looks

    @property
    def policy(self) -> str:
        """The name of the eviction policy."""
        return self._core.index.policy.name

    @property
    def num_available(self) -> int:
        """Pages that a request could get now: free, or cached and evictable. Cost: two adds."""
        with self._core:
            return self._core.available()

    def what_if(
        self, pages: Iterable[int] | None = None, namespace: NamespaceLike | None = None
    ) -> tuple[MissRatioPoint, ...]:
        """What a cache of so many ``pages`` would do for the prompts there were.

        By default ¼, ½, 1, 2, 4 and 8 times as many as this one has; 16 times is the most. With
        ``namespace`` for its prompts alone, in memory that all share. `IllegalStep` when the cache
        was made without ``what_if``. Cost: below 2 ms.
        """
        watch = self._core.watch
        if watch is None:
            raise IllegalStep("nobody watches what is asked for; make the cache with what_if=0.1")
        with self._core:
            return watch.points(None if pages is None else list(pages), namespace)

    def stats(self) -> CacheStats:
        """What the cache holds and has done. Cost: one pass over the reference counts."""
        core = self._core
        with core:
            pool, index, board, did = core.pool, core.index, core.pins, core.counters
            board.expire()
            core.sessions.settle()
            references = int(pool.references.sum())
            tables = [sequence.pages for sequence in core.sequences.values()]
            users = np.bincount(np.concatenate(tables), minlength=1) if tables else np.zeros(1, int)
            return CacheStats(
                sequences=len(core.sequences),
                pages_total=pool.num_pages,
                pages_used=pool.num_used,
                pages_free=pool.num_free,
                pages_cached=index.num_pages,
                pages_evictable=index.num_evictable,
                pages_protected=index.num_pages - index.num_evictable,
                pages_dead=core.sessions.num_dead,
                pages_awaited=core.sessions.num_awaited,
                pages_shared=int((users > 1).sum()),
                shares=int((users[users > 1] - 1).sum()),
                references=references,
                namespaces=index.num_namespaces,
                sessions=len(core.sessions.lines),
                pins=len(board.pins),
                pinned_pages=board.num_pages,
                hard_pinned_pages=board.num_hard_pages,
                pins_broken=index.pins.num_broken,
                pins_expired=board.expired,
                opened=did.opened,
                forked=did.forked,
                closed=did.closed,
                prompt_tokens=did.prompt_tokens,
                hit_tokens=did.hit_tokens,
                partial_hits=did.partial_hits,
                partial_hits_given_up=did.partial_hits_given_up,
                stored_pages=did.stored_pages,
                duplicate_pages=did.duplicate_pages,
                evictions=did.evictions,
                evicted_pages=did.evicted_pages,
                copies=did.copies,
                out_of_pages=did.out_of_pages,
                hook_errors=did.hook_errors,
                what_if=() if core.watch is None else core.watch.points(),
            )

    def map(
        self,
        namespace: NamespaceLike | None = None,
        *,
        root: int | None = None,
        nodes: int = 400,
        blocks: BlockNames | None = None,
    ) -> CacheMap:
        """What is stored, for a picture: the ``nodes`` largest subtrees, all others summed up.

        Of one namespace, of all (each then is a node on top), or of the run ``root`` and what is
        behind it. Siblings that are not among the largest stand together in one hidden node under
        their parent. `kvkeep.core.cache.MapNode` says what is known of each; with ``blocks`` also
        which blocks of a store end in it, if the index is ``radix``. The same answer is given
        for a second, and longer where it took long to make: however often it is asked for, it
        costs 3 % of a core at most. Raises `NotCached` for a ``root`` that is not there (any more).
        Cost: about 2 µs a run, for half of which the lock is held, for a millisecond at a time;
        ``blocks`` cost 1 µs each.
        """
        return self._looking.map(namespace, root, nodes, blocks)

    def node(self, node: int) -> NodeView:
        """One run of the `map` by its id; `NotCached` when it is not there (any more)."""
        return self._looking.node(node)

    def search(
        self,
        needles: Iterable[TokensLike],
        namespace: NamespaceLike | None = None,
        *,
        most: int = 50,
    ) -> list[Found]:
        """Where any of these rows of tokens is stored, wherever it begins, in one namespace or all.

        One place for each run in which one ends, the first; shallow runs first, ``most`` at most.
        Raises `InvalidValue` for an empty row, and for the chain index, which keeps no tokens.
        Cost: about 2 µs a run and 5 ns a token and row; the lock is held as by `map`.
        """
        return self._looking.search(list(needles), namespace, most)

    def runs(self, namespace: NamespaceLike = "") -> Iterator[PrefixRun]:
        """The runs stored in a namespace, depth first; `kvkeep.core.prefix.render` draws them."""
        with self._core:
            return iter(list(self._core.index.runs(as_namespace(namespace))))

    def namespaces(self) -> dict[Namespace, int]:
        """The namespaces that hold anything, and how many pages."""
        with self._core:
            return self._core.index.namespaces()

    def subscribe(self, hook: Hook) -> Callable[[], None]:
        """Call ``hook(event)`` for everything that happens from now on; call the result to end it.

        Hooks run in order, under the cache's lock, when the operation they tell of is complete: be
        quick. A hook may call every method of the cache and of its sequences; what that emits is
        told to the hooks in turn. It must not wait for another thread that uses the cache. One that
        raises is logged and counted, and stays.
        """
        if not callable(hook):
            raise InvalidValue(f"a hook is called with each event, got {hook!r}")
        core = self._core
        own = partial(hook)  # told apart from the same hook subscribed elsewhere
        with core:
            core.hooks = (*core.hooks, own)

        def end() -> None:
            with core:
                core.hooks = tuple(other for other in core.hooks if other is not own)

        return end

    def check(self) -> None:
        """Recount everything from scratch and assert that it agrees. Cost: all of it."""
        core = self._core
        with core:
            holds = [sequence.hold for sequence in core.sequences.values()]
            holds += [claim.hold for claim in core.claims() if claim.hold is not None]
            holds += core.pins.hard_holds()
            stored = core.index.check(holds)
            assert len(np.unique(stored)) == len(stored), "the index stores a page twice"
            expected = np.zeros(self.num_pages, np.int64)
            expected[stored] += 1
            for sequence in core.sequences.values():
                sequence.check(stored)
                expected[sequence.pages] += 1
            for claim in core.claims():
                expected[claim.copy.src] += 1
            core.forks.check(core.sequences.values())
            wrong = np.flatnonzero(expected != core.pool.references)
            assert not len(wrong), f"reference counts of pages {wrong[:8]} are wrong"
            core.pool.check()
            core.marks.check(stored, [sequence.row for sequence in core.sequences.values()])
            core.sessions.check()
            if core.watch is not None:
                core.watch.check(stored)

    def __repr__(self) -> str:
        core = self._core
        return (
            f"<PagedCache {self.num_pages} pages of {self.page_size} tokens, {core.index.name}, "
            f"{core.index.policy.name}: {core.pool.num_free} free, "
            f"{core.index.num_evictable} evictable>"
        )


def _prompt(tokens: TokensLike) -> TokenArray:
    prompt = as_row(tokens)
    if not len(prompt):
        raise InvalidValue("a prompt has at least one token, got none")
    return prompt


def _switch(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise InvalidValue(f"{name} is {value!r}; True or False is needed")
    return value
