"""`Sequence`: the pages of one request, from its prompt to its last token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvkeep.core.cache.copies import CLOSED, COPYING, READY, permit
from kvkeep.core.errors import check_type, switch, whole
from kvkeep.core.events import Closed, Opened, PrefixMiss, Returned, Stored, frozen
from kvkeep.core.extras import Extra, as_extras, signed
from kvkeep.core.pages import GrowingArray, PageCopy
from kvkeep.core.prefix.marks import TokenRow
from kvkeep.core.public import salt_of
from kvkeep.core.returns import Ended
from kvkeep.core.tokens import TOKEN_DTYPE, as_tokens, common_length, single_token

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from kvkeep.core.cache.copies import Claim, SequenceState
    from kvkeep.core.cache.parts import CacheParts
    from kvkeep.core.cache.sessions import Owner
    from kvkeep.core.extras import ExtraLike, Extras
    from kvkeep.core.groups import SequenceGroups
    from kvkeep.core.keys import Namespace
    from kvkeep.core.pages.pool import PageArray
    from kvkeep.core.prefix.node import Node
    from kvkeep.core.prefix.tree import Encoder
    from kvkeep.core.tokens import TokenArray, TokensLike

__all__ = ["Query", "Sequence"]

_SCALARS = (int, np.generic)


@dataclass(slots=True)
class Query:
    """A prompt to look up or to open, in canonical form.

    ``namespace`` is that of the caller, ``space`` that of the prompt's first page: the public one
    if its first ``public`` tokens are public (`kvkeep.core.public`). ``extras`` include the salt.
    """

    tokens: TokenArray
    namespace: Namespace
    space: Namespace
    extras: Extras = ()
    public: int = 0
    encoder: Encoder | None = None
    """That of a sequence with these tokens, once they were looked up."""
    symbols: bytes | memoryview = b""
    """The symbols that were looked up."""
    stop: int | None = None
    """Where the lookup ended."""


class Sequence:
    """The pages of one request, from `PagedCache.open` to `close`.

    An engine makes the page copies (`copies`), computes ``tokens[num_cached:]``, and writes the KV
    of token position ``i`` to page ``pages[i // page_size]`` at offset ``i % page_size``. Once it
    calls `publish`, later prompts reuse the computed pages while this sequence still runs.

    A step that the state does not allow raises `IllegalStep` (see `kvkeep.core.cache.copies`), and
    `OutOfPages` if all pages of the pool are in use; in both cases nothing has changed. Returned
    arrays are read-only views, valid until the next step. As a context manager, it closes itself.

    Thread safety: every step takes the cache's lock. The steps of one sequence have an order, so
    one thread at a time calls them.

    Attributes:
        id: the number of the sequence: 1, 2, 3 …
        num_cached: leading tokens that needed no computing when it was opened or forked.
        miss: why the rest of the prompt is computed; None for a fork.
        closed: whether the sequence was closed.
        groups: rows and states, of a cache that has groups of layers; else None.
        hold: the hold on its published pages in the prefix index.
    """

    __slots__ = (
        "_cache", "_opened_pages", "_shared", "_table", "_taken", "_tokens", "_waiting", "closed",
        "encoder", "groups", "hold", "id", "miss", "namespace", "num_cached", "owner", "priority",
        "public_pages", "returned", "sharers", "space", "watched",
    )  # fmt: skip

    def __init__(
        self,
        cache: CacheParts,
        query: Query | Sequence,
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
        self.hold = hold
        self.namespace: Namespace = query.namespace
        self.space: Namespace = query.space  # that of its first page
        self.owner = owner  # the session that owns the pages it publishes
        self.priority = priority
        self.num_cached = 0
        self.miss: PrefixMiss | None = None
        self.groups: SequenceGroups | None = None
        self.returned: Returned | None = None  # the conversation that it continues, if known
        self.watched = 0  # pages that the miss-ratio curve has counted
        self.encoder: Encoder
        self._tokens: TokenRow
        # Leading pages that are public; the first token behind them has the salt of the namespace.
        # None: its prompt has no public prefix.
        self.public_pages: int | None = None
        if isinstance(query, Sequence):
            self.encoder, self._tokens = query.encoder.fork(), query._tokens.fork()
            self.public_pages, self.watched = query.public_pages, query.watched
        else:
            self.encoder = query.encoder or cache.tree.encoder(query.space)
            self._tokens = TokenRow(cache.tree.marks, query.tokens, query.extras)
            if query.public:
                self.public_pages = query.public // cache.page_size
        self._table: GrowingArray
        # Region map of the page table:
        #   0 … _shared      pages that the index stores; the hold protects exactly these
        #   _shared … end    pages that the index does not store; it has a reference to each, as
        #                    has each fork that has not written to the page
        self._shared = 0
        self._opened_pages = 0  # leading pages that other sequences computed
        self.sharers: dict[Sequence, None] = {}
        """The forks that have the same first unpublished page, this one included; may be empty."""
        # Copies to make: those to be taken, in order, and those that the engine makes at present.
        self._waiting: list[Claim] = []
        self._taken: list[Claim] = []
        self.closed = False

    def adopt(
        self, table: PageArray, shared: int, copy: PageCopy | None = None, source: Any = None
    ) -> None:
        """Start with this page table: ``shared`` cached pages, and maybe a page copy to make."""
        self._table = GrowingArray(table)
        self._shared = self._opened_pages = shared
        if copy is not None:
            self._waiting.append(self._cache.claims.add(copy, source, self))
        self._cache.sequences[self.id] = self

    def begin_groups(self, groups: SequenceGroups, state: PageArray | None, cached: int) -> None:
        """Start with these rows, and ``state`` as the running one; ``cached`` pages are cached."""
        groups.begin(state, self._tokens, cached=cached)
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
    def state(self) -> SequenceState:
        """The state, which decides what steps are legal."""
        if self.closed:
            return CLOSED
        return COPYING if self._waiting else READY

    def claims(self) -> list[Claim]:
        """Return the claims on pages that must still be copied for this sequence."""
        return self._waiting + self._taken

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
            permit(self.state, "copies")
            self._finish_copies()
            self._taken, self._waiting = self._waiting, []
            for claim in self._taken:
                for other in claim.sharers:
                    # A second copy could overwrite what was computed on the page after the first.
                    if other is not self:
                        other._waiting.remove(claim)
                claim.sharers = {self}
            return [claim.copy for claim in self._taken]

    def _finish_copies(self) -> None:
        """Release the source pages of all copies taken so far; the caller has made them."""
        if self._taken:
            self._cache.claims.remove(self._taken, self)
            self._taken = []

    def _drop_copies(self) -> None:
        """Drop waiting claims whose target is not unpublished any more.

        Such a target left the table, or was published and is complete.
        """
        if not self._waiting:
            return
        wanted = set(self.unpublished)
        needed: list[Claim] = []
        needless: list[Claim] = []
        for claim in reversed(self._waiting):
            if claim.copy.dst in wanted:
                wanted.add(claim.copy.src)
                needed.append(claim)
            else:
                needless.append(claim)
        self._cache.claims.remove(needless, self)
        self._waiting = needed[::-1]

    def append(self, tokens: TokensLike | int, extra: ExtraLike | None = None) -> None:
        """Add tokens at the end and allocate the pages they need; all or nothing.

        ``extra`` as in `PagedCache.open`; positions count from the first of ``tokens``. A shared
        page is replaced by a copy before tokens are added to it (see `copies`). Raises
        `OutOfPages`. Cost: about 1 µs, plus allocation once a page.
        """
        token = single_token(tokens)
        if token is None:
            array = as_tokens(np.array([tokens]) if isinstance(tokens, _SCALARS) else tokens)
            count = len(array)
        else:
            count = 1
        extras = () if extra is None else as_extras(extra, count)
        cache = self._cache
        with cache.lock:
            permit(self.state, "append")
            at, offset = divmod(len(self._tokens), cache.page_size)
            needed = at - (-(offset + count) // cache.page_size) - len(self._table)
            copy = offset and count and not self._may_write(at, offset)
            if needed or copy:
                fresh = cache.pool.take(needed + 1 if copy else needed)
                if copy:
                    self._copy_on_write(at, offset, int(fresh[0]))
                    fresh = fresh[1:]
                self._table.extend(fresh)
            if at == self.public_pages and count and not offset:  # the first private token
                extras = (Extra(0, salt_of(self.namespace)), *extras)
            if extras:
                added = np.array([token], TOKEN_DTYPE) if token is not None else array
                self._tokens.extend_with(added, extras)
            elif token is None:
                self._tokens.extend(array)
            else:
                self._tokens.append(token)

    def _may_write(self, at: int, offset: int) -> bool:
        """Whether the page at index ``at`` may be written from ``offset`` on."""
        return at >= self._shared and self._cache.claims.may_write(self._table[at], offset)

    def _copy_on_write(self, at: int, tokens: int, dst: int) -> None:
        """Replace the shared page at index ``at`` by page ``dst``, and claim it for the copy."""
        cache = self._cache
        hold = None
        if at < self._shared:  # the index stores the page: its claim takes over the hold
            cache.pool.retain_page(self._table[at])  # for the claim
            hold = self.hold
            self.hold = cache.tree.move(cache.tree.retain(hold), hold, at)
            self._shared = at
            self._opened_pages = min(self._opened_pages, at)
        elif at == self._shared:
            self._part()
        copy = PageCopy(int(self._table.values[at]), dst, tokens)
        self._waiting.append(cache.claims.add(copy, hold, self))
        self._table.values[at] = dst

    def truncate(self, length: int) -> None:
        """Keep the first ``length`` tokens, for instance to drop rejected drafts.

        Published pages behind them stay in the cache. Raises `InvalidValue` outside 0 … num_tokens.
        With groups of layers, see `kvkeep.core.groups.SequenceGroups`.
        """
        cache = self._cache
        with cache.lock:
            permit(self.state, "truncate")
            length = whole("the length to keep, in tokens,", length, 0, len(self._tokens))
            size = cache.page_size
            pages = -(-length // size)
            if pages <= self._shared:
                self._part()
            freed = self._table.values[max(pages, self._shared) :].copy()
            if pages < self._shared:
                self.hold = cache.tree.move(self.hold, self.hold, pages)
                self._shared = pages
            self._table.cut(pages)
            self._tokens.cut(length)
            if self.public_pages is not None and self.public_pages > length // size:
                # A page that loses some of its public tokens is private, from its first token on.
                self.public_pages = length // size
                self._tokens.mark(self.public_pages * size, salt_of(self.namespace))
            self.encoder.cut(length // size)
            self._drop_copies()
            cache.pool.release(freed)
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
            permit(self.state, "fork")
            groups = None if self.groups is None else self.groups.fork()
            hold = cache.tree.retain(self.hold)
            table = self._table.values
            cache.pool.retain(table[self._shared :])
            other = Sequence(cache, self, hold, self.owner, self.priority)
            other.num_cached = max(self.num_cached, self.num_published)
            other.adopt(table, self._shared)
            other._waiting = self._waiting.copy()
            for claim in self._waiting:
                claim.sharers.add(other)
            if groups is not None:
                groups.tokens, other.groups = other._tokens, groups
            if len(table) > self._shared:
                self.sharers[self] = self.sharers[other] = None
                other.sharers = self.sharers
            if cache.reports_requests:
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
        freed. The page table changes then, but not its length; so do those of forks that share the
        pages.
        Returns the tokens published so far, 0 in a cache made with ``reuse=False``. Cost: O(new
        tokens), and as much for each fork that shares one of the pages.
        """
        cache = self._cache
        with cache.lock:
            permit(self.state, "publish")
            length = len(self._tokens)
            if computed is None:
                computed = length
            else:
                computed = whole("the number of computed tokens", computed, 0, length)
            self._finish_copies()
            if not cache.reuse:
                return 0
            stop = computed // cache.page_size
            public = self.public_pages
            if public is not None and self._shared < public < stop:
                self._publish(self._shared, public)  # no run has public and private pages
            if self._shared < stop:
                self._publish(self._shared, stop)
                if length >= (stop + 1) * cache.page_size:  # a chunk of its prompt
                    cache.misses.computes(self, self.hold, self.id, cache.sequences)
            if self.groups is not None and stop:
                self.groups.published(self._table.values[: min(stop, self._shared)], self.id)
            return min(self._shared * cache.page_size, length)

    def _publish(self, start: int, stop: int) -> None:
        cache = self._cache
        space, owner = None, self.owner
        if self.public_pages is not None:  # no session owns public pages
            private = start >= self.public_pages
            space, owner = (self.namespace, owner) if private else (self.space, None)
        pages = self._table.values[start:stop].copy()
        symbols = self.encoder.pages(self._tokens.values, start, stop)
        self.hold, existing = cache.tree.insert(
            self.hold, symbols, pages, self.priority, owner=owner, namespace=space
        )
        self._shared = stop
        new = pages[len(existing) :]
        if len(new):
            size = cache.page_size
            row = self._tokens.values[(stop - len(new)) * size : stop * size]
            if cache.tree.marks.living:
                cache.tree.marks.stored(new, row)
            cache.claims.now_stored(new, self.hold, stop - len(new))
            cache.counters.stored_pages += len(new)
        if len(existing):
            # Another sequence computed these: `close` must not drop them.
            self._opened_pages = start + len(existing)
            cache.counters.duplicate_pages += len(existing)
            self._exchange(start, pages[: len(existing)], existing)
        groups: dict[int, dict[Sequence, None]] = {}  # of sharers, by first unpublished page
        sharers, self.sharers = self.sharers, {}
        for other in sharers:
            if other is not self:
                assert other._shared == start
                sharing = common_length(other._table.values[start : start + len(pages)], pages)
                assert sharing, "forks in one group share their first unpublished page"
                other.hold = cache.tree.move(other.hold, self.hold, start + sharing)
                other._shared = other._opened_pages = start + sharing
                other._exchange(start, pages[:sharing], existing[:sharing])
                other._drop_copies()
            first = other._table.values[other._shared :][:1].tolist()
            other.sharers = groups.setdefault(first[0], {}) if first else {}
            other.sharers[other] = None
        if cache.lock.hooks and len(new):
            at = stop - len(new)
            parent = int(self._table.values[at - 1]) if at else -1
            tokens, extras = self._tokens.plain(row)
            cache.lock.emit(
                Stored(
                    self.id, space or self.namespace, parent, frozen(new), frozen(tokens), extras
                )
            )

    def _part(self) -> None:
        """Leave the sharers of the first unpublished page, before it leaves the table."""
        if self.sharers:
            del self.sharers[self]
            self.sharers = {}

    def _exchange(self, start: int, published: PageArray, existing: PageArray) -> None:
        """Drop the references to ``published`` pages; ``existing`` ones replace the first ones."""
        self._table.values[start : start + len(existing)] = existing
        self._cache.pool.release(published)

    def close(self, *, keep: bool = True, ended: Ended | None = None) -> None:
        """End the sequence: published pages stay in the cache, all others are freed.

        ``keep=False`` also drops the pages that this sequence published first, unless others use
        them. ``ended`` says how the request ended, for policies that predict its conversation.
        """
        cache = self._cache
        if not isinstance(keep, bool):
            keep = switch("keep", keep)  # type: ignore[unreachable]
        if ended is not None:
            check_type("ended", ended, Ended, "an Ended(…)")
        with cache.lock:
            permit(self.state, "close")
            self.closed = True
            del cache.sequences[self.id]
            self._part()
            if cache.reports_requests:
                if keep:
                    cache.tree.policy.closed(self.id, self.hold, self.row, ended)
                else:
                    cache.tree.policy.dropped(self.id)
            if cache.watch is not None and keep and self._shared > self.watched:
                # Later prompts find these pages, like those of a prompt.
                row = signed(self.tokens, self.extras)[: self.num_published]
                cache.watch.stored(row, self.space)
            stored = self._shared
            if len(self._table) > stored:
                cache.pool.release(self._table.values[stored:])
            if keep:
                cache.tree.release(self.hold)
            else:
                stored -= cache.drop(self.hold, self._opened_pages)
            if self._waiting or self._taken:
                cache.claims.remove(self.claims(), self)
                self._waiting, self._taken = [], []
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
        assert self.hold.end == self._shared or not self._shared
        assert all(self in claim.sharers for claim in self.claims())

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
            f"<Sequence {self.id}, {self.state}, {self.num_tokens} tokens, "
            f"{len(self._table)} pages, {self._shared} of them published>"
        )
