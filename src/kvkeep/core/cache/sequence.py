"""`Sequence`: one running request's hold on the cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvkeep.core.cache.copies import PendingCopies, SequenceState, permit
from kvkeep.core.errors import check_type, switch, whole
from kvkeep.core.events import Closed, Opened, Stored, frozen
from kvkeep.core.extras import Extra, as_extras
from kvkeep.core.pages import GrowingArray, PageCopy
from kvkeep.core.returns import Ended
from kvkeep.core.tokens import TOKEN_DTYPE, as_tokens, common_length, single_token

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from kvkeep.core.cache.core import Claim, Core
    from kvkeep.core.extras import ExtraLike, Extras
    from kvkeep.core.groups import SequenceGroups
    from kvkeep.core.keys import Namespace
    from kvkeep.core.pages.tables import PageArray
    from kvkeep.core.prefix.base import Encoder
    from kvkeep.core.prefix.marks import Marks
    from kvkeep.core.prefix.owners import Owner
    from kvkeep.core.tokens import TokenArray, TokensLike

__all__ = ["Border", "SaltedRow", "Sequence", "TokenRow"]

_SCALARS = (int, np.generic)


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
    """

    __slots__ = (
        "_core", "_hold", "_opened_pages", "_pending", "_shared", "_table", "_tokens", "encoder",
        "groups", "id", "namespace", "num_cached", "owner", "priority",
        "public_pages", "space",
    )  # fmt: skip

    def __init__(
        self,
        core: Core,
        namespace: Namespace,
        encoder: Encoder,
        tokens: TokenRow,
        *,
        hold: Any,
        priority: int,
    ) -> None:
        """Called by `PagedCache.open` and `fork`, which call `adopt` next.

        The sequence takes over all arguments.
        """
        core.opened += 1
        self.id = core.opened
        self.namespace = namespace
        self.priority = priority
        self.num_cached = 0
        """Leading tokens that needed no computing when the sequence was opened or forked."""
        self.owner: Owner | None = None
        """The session that owns what this sequence publishes."""
        self.space = namespace  # that of its first page
        self.public_pages: int | None = None  # None: its prompt has no public prefix
        self.groups: SequenceGroups | None = None
        """Rows and states, of a cache that has groups of layers; else None."""
        self._core = core
        self.encoder = encoder
        self._tokens = tokens
        self._table: GrowingArray
        self._hold = hold
        # Region map of the page table:
        #   0 … _shared      pages that the index stores; the hold protects exactly these
        #   _shared … end    pages that it (and forks that have not written them) refers to
        self._shared = 0
        self._opened_pages = 0  # leading shared pages that other sequences computed
        self._pending = PendingCopies(core)

    def adopt(
        self, table: PageArray, shared: int, *, copy: PageCopy | None = None, source: Any = None
    ) -> None:
        """Start with this page table: ``shared`` cached pages, and maybe a page copy to make."""
        core = self._core
        self._table = GrowingArray(table)
        self._shared = self._opened_pages = shared
        self.num_cached = shared * core.page_size
        if copy is not None:
            self.num_cached += copy.tokens
            self._pending.add(copy, source)
        core.sequences[self.id] = self

    # --- views -------------------------------------------------------------------------------

    @property
    def num_tokens(self) -> int:
        """Number of tokens: those of the prompt and those appended."""
        return len(self._tokens)

    @property
    def num_published(self) -> int:
        """Leading tokens in full pages that later prompts can reuse."""
        return min(self._shared * self._core.page_size, len(self._tokens))

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
    def hold(self) -> Any:
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

    # --- steps -------------------------------------------------------------------------------

    def copies(self) -> list[PageCopy]:
        """Return the page copies to make, in this order, before the sequence is computed.

        Each copy is returned once: among forks that wait for the same copy, to the first caller.
        Make the copies before this sequence or a fork of it is computed, and before the next
        `copies`, `publish`, `truncate` or `close` of this one: until then their sources are kept
        unchanged.
        """
        with self._core:
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
        core = self._core
        with core:
            permit(self._pending.state, "append")
            at, offset = divmod(len(self._tokens), core.page_size)
            needed = at - (-(offset + count) // core.page_size) - len(self._table)
            copy = offset and count and not self._may_write(at, offset)
            if needed or copy:
                fresh = core.take(needed + 1 if copy else needed)
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
        return at >= self._shared and self._core.may_write(self._table[at], offset)

    def _copy_on_write(self, at: int, tokens: int, dst: int) -> None:
        """Replace the shared page at index ``at`` by page ``dst``, and claim it to copy from."""
        core = self._core
        hold = None
        if at < self._shared:  # the index stores the page: the old hold now protects the source
            core.pool.retain_page(self._table[at])  # for the claim
            hold = self._hold
            self._hold = core.index.shorten(core.index.again(hold), at)
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
        core = self._core
        with core:
            permit(self._pending.state, "truncate")
            length = whole("the length to keep, in tokens,", length, 0, len(self._tokens))
            size = core.page_size
            pages = -(-length // size)
            if pages <= self._shared:
                self._leave_forks()
            gone = self._table.values[max(pages, self._shared) :].copy()
            if pages < self._shared:
                self._hold = core.index.shorten(self._hold, pages)
                self._shared = pages
            self._table.cut(pages)
            self._tokens.cut(length)
            if self.public_pages is not None:
                self.public_pages = min(self.public_pages, length // size)
            self.encoder.cut(length // size)
            self._pending.drop_needless(self._table.values[self._shared :])
            core.pool.release_known(gone)
            if self.groups is not None:
                self.groups.rewind(length, self._table.values[: self._shared])
            self.num_cached = min(self.num_cached, length)
            self._opened_pages = min(self._opened_pages, pages)

    def fork(self) -> Sequence:
        """Return a second sequence with the same tokens; a page is shared until either writes it.

        Both wait for copies that were not taken yet. Cost: one pass over the page table.
        """
        core = self._core
        with core:
            permit(self._pending.state, "fork")
            groups = None if self.groups is None else self.groups.fork()
            hold = core.index.again(self._hold)
            table = self._table.values
            core.pool.retain_known(table[self._shared :])
            other = Sequence(
                core, self.namespace, self.encoder.fork(), self._tokens.fork(),
                hold=hold, priority=self.priority,
            )  # fmt: skip
            other.adopt(table, self._shared)
            other.space, other.public_pages = self.space, self.public_pages
            other.num_cached = max(self.num_cached, self.num_published)
            self._pending.share_with(other._pending)
            other.groups = None if groups is None else groups.of(other._tokens)
            page = self.first_unpublished
            if page is not None:
                core.forks.join(page, self, other)
            for observer in core.observers:
                observer.forked(self, other)
            core.counters.forked += 1
            if core.hooks:
                core.emit(
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
        core = self._core
        with core:
            permit(self._pending.state, "publish")
            if computed is None:
                computed = len(self._tokens)
            computed = whole("the number of computed tokens", computed, 0, len(self._tokens))
            self._pending.finish()
            if not core.reuse:
                return 0
            stop = computed // core.page_size
            for end in (self.public_pages or 0, stop):  # no run has public and private pages
                if self._shared < end <= stop:
                    self._publish(self._shared, end)
            if self.groups is not None and stop:
                self.groups.published(self._table.values[: min(stop, self._shared)], self.id)
            return self.num_published

    def _publish(self, start: int, stop: int) -> None:
        core = self._core
        space, owner = _whose(self, start)
        own = self._table.values[start:stop].copy()
        symbols = self.encoder.pages(self._tokens.values, start, stop)
        inserted = core.index.insert(
            self._hold, symbols, own, self.priority, owner=owner, namespace=space
        )
        existing = inserted.existing
        forks = core.forks.take(int(own[0])) if core.forks else ()
        self._hold = inserted.hold
        self._shared = stop
        new = own[len(existing) :]
        if len(new):
            size = core.page_size
            row = self._tokens.values[(stop - len(new)) * size : stop * size]
            core.marks.stored(new, row)
            core.now_stored(new, self._hold, stop - len(new))
            core.counters.stored_pages += len(new)
        if len(existing):
            # Another sequence computed these: `close` must not drop them.
            self._opened_pages = start + len(existing)
            core.counters.duplicate_pages += len(existing)
            self._exchange(start, own[: len(existing)], existing)
        for other in forks:
            if other is not self:
                assert other._shared == start
                sharing = _sharing(other._table.values[start : start + len(own)], own)
                other._hold = core.index.move(other._hold, self._hold, start + sharing)
                other._shared = other._opened_pages = start + sharing
                other._exchange(start, own[:sharing], existing[:sharing])
                other._pending.drop_needless(other._table.values[other._shared :])
        if forks:
            core.forks.regroup(forks)
        if core.hooks and len(new):
            at = stop - len(new)
            parent = int(self._table.values[at - 1]) if at else -1
            plain = self._tokens.plain(row)
            core.emit(_stored(self.id, space or self.namespace, parent, new, plain))

    def _leave_forks(self) -> None:
        """Leave the group of forks before the first unpublished page leaves the table."""
        forks = self._core.forks
        page = self.first_unpublished if forks else None
        if page is not None:
            forks.leave(page, self)

    def _exchange(self, start: int, own: PageArray, existing: PageArray) -> None:
        """Drop the references to ``own`` pages; ``existing`` ones replace the first of them."""
        self._table.values[start : start + len(existing)] = existing
        self._core.pool.release_known(own)

    def close(self, *, keep: bool = True, ended: Ended | None = None) -> None:
        """End the sequence: published pages stay in the cache, all others are freed.

        ``keep=False`` also drops the pages that this sequence published first, unless others use
        them. ``ended`` says how the request ended, for policies that predict its conversation.
        """
        core = self._core
        if not isinstance(keep, bool):  # callers pass anything
            keep = switch("keep", keep)  # type: ignore[unreachable]
        if ended is not None:
            check_type("ended", ended, Ended, "an Ended(…)")
        with core:
            permit(self._pending.state, "close")
            self._pending.state = SequenceState.CLOSED
            del core.sequences[self.id]
            self._leave_forks()
            for observer in core.observers:
                observer.closed(self, keep=keep, ended=ended)
            stored = self._shared
            core.pool.release_known(self._table.values[stored:])
            if keep:
                core.index.release(self._hold)
            else:
                core.pins.expire()
                dropped = core.index.drop(self._hold, self._opened_pages)
                core.forget(dropped, "dropped")
                stored -= len(dropped)
            self._pending.end()
            if self.groups is not None:
                self.groups.close()
            self._tokens.release_marks()
            core.counters.closed += 1
            if core.hooks:
                core.emit(Closed(self.id, len(self._tokens), stored))
            self._table.cut(0)

    def check(self, stored: PageArray) -> None:
        """Assert that the regions of the page table are right."""
        core = self._core
        check_table(self._table.values, self._shared, stored)
        assert len(self._table) == -(-len(self._tokens) // core.page_size)
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


def _whose(sequence: Sequence, start: int) -> tuple[Namespace | None, Owner | None]:
    """Return namespace and owner of pages from ``start`` on; no session owns public ones."""
    public = sequence.public_pages
    if public is None:
        return None, sequence.owner
    return (sequence.namespace, sequence.owner) if start >= public else (sequence.space, None)


def _sharing(mine: PageArray, own: PageArray) -> int:
    """Return how many of the pages ``own`` a fork has at the same index; at least one."""
    sharing = common_length(mine, own)
    assert sharing
    return sharing


def _stored(
    sequence: int,
    space: Namespace,
    parent: int,
    pages: PageArray,
    plain: tuple[TokenArray, Extras],
) -> Stored:
    tokens, extras = plain
    return Stored(sequence, space, parent, frozen(pages), frozen(tokens), extras)


def check_table(table: PageArray, shared: int, stored: PageArray) -> None:
    """Assert that the index stores the first ``shared`` pages of a table, and no others."""
    assert len(np.unique(table)) == len(table), "a page stands twice in a page table"
    published = np.isin(table, stored)
    assert published[:shared].all(), "a shared page is not in the index"
    assert not published[shared:].any(), "the index stores a page that is not held"


class TokenRow(GrowingArray):
    """Tokens in which marks stand for those with extras; it counts the uses of its marks.

    ``values`` is what the index compares. Thread safety: none; under the cache's lock.
    """

    __slots__ = ("_extras", "_marked", "_marks")

    def __init__(self, marks: Marks, tokens: TokenArray, extras: Extras = ()) -> None:
        super().__init__(marks.marked(tokens, extras) if extras else tokens)
        self._marks = marks
        self._marked = bool(extras)
        self._extras: Extras = ()  # of a row whose marks were released

    @property
    def tokens(self) -> TokenArray:
        """The tokens: int32, read-only; a copy where some have extras."""
        return frozen(self.plain(self.values)[0]) if self._marked else self.view()

    @property
    def extras(self) -> Extras:
        """The digests of the bytes that belong to the tokens, by position."""
        return self.plain(self.values)[1] if self._marked else self._extras

    def plain(self, part: TokenArray) -> tuple[TokenArray, Extras]:
        """Return the tokens and extras of a part of ``values``."""
        return self._marks.plain(part) if self._marked else (part, ())

    def extend_with(self, tokens: TokenArray, extras: Extras) -> None:
        """Add tokens at the end; positions of ``extras`` count from the first of ``tokens``."""
        self.extend(self._marks.marked(tokens, extras))
        self._marked = True

    def cut(self, length: int) -> None:
        """Keep the first ``length`` tokens, and release the marks behind them."""
        if self._marked:
            self._marks.release(self.values[length:])
        super().cut(length)

    def fork(self) -> Self:
        """Return a second row with the same tokens and marks."""
        other = type(self)(self._marks, self.values)
        if self._marked:
            self._marks.again(self.values)
            other._marked = True
        return other

    def release_marks(self) -> None:
        """Replace the marks by plain tokens, so that the row can be read after they end."""
        if self._marked:
            tokens, extras = self.plain(self.values)
            self._marks.release(self.values)
            GrowingArray.__init__(self, tokens)
            self._extras, self._marked = extras, False


class Border(NamedTuple):
    """The end of a row's public part, in tokens; the ``salt`` of the private tokens behind."""

    public: int
    page_size: int
    salt: bytes


class SaltedRow(TokenRow):
    """A row with a public prefix: the first token of its first private page has a salt.

    The public part ends at its border, and wherever the row is cut within it; tokens added
    from there on are private. So whatever is added, no private token is in a page without salt.
    """

    __slots__ = ("_border", "_private")

    def __init__(self, marks: Marks, tokens: TokenArray, extras: Extras, border: Border) -> None:
        """``extras`` have the salt at the border already, if there is a token."""
        super().__init__(marks, tokens, extras)
        self._border = border
        self._private = border.public

    def append(self, value: int) -> None:
        """Append one token, with the salt if it is the first private one."""
        if self._length == self._private:
            self.extend_with(np.array([value], np.int32), ())
        else:
            super().append(value)

    def extend(self, values: TokenArray) -> None:
        """Append tokens, the first private one of them with the salt."""
        if self._length == self._private:
            self.extend_with(values, ())
        else:
            super().extend(values)

    def extend_with(self, tokens: TokenArray, extras: Extras) -> None:
        """Add tokens at the end; positions of ``extras`` count from the first of ``tokens``."""
        if self._length == self._private and len(tokens):
            extras = (Extra(0, self._border.salt), *extras)
        GrowingArray.extend(self, self._marks.marked(tokens, extras))
        self._marked = self._marked or bool(extras)

    def cut(self, length: int) -> None:
        """Keep the first ``length`` tokens; a page that keeps only some of them is private now."""
        super().cut(length)
        if length < self._private:
            at = self._private = length // self._border.page_size * self._border.page_size
            if at < length:
                token = self._array[at : at + 1]
                token[:] = self._marks.marked(token, (Extra(0, self._border.salt),))
                self._marked = True

    def fork(self) -> Self:
        """Return a second row with the same tokens and marks."""
        border = self._border._replace(public=self._private)
        other = type(self)(self._marks, self.values, (), border)
        if self._marked:
            self._marks.again(self.values)
            other._marked = True
        return other
