"""`SequenceGroups`: the rows, the running state and the checkpoints of one sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from kvkeep.core.errors import IllegalStep, InvalidValue, whole
from kvkeep.core.pages import GrowingArray
from kvkeep.core.pages.pool import EMPTY_PAGES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sized
    from typing import Self

    from kvkeep.core.groups.checkpoints import Checkpoint, GroupBoard, Rows
    from kvkeep.core.groups.plan import WindowSpec
    from kvkeep.core.pages.pool import PageArray

    CheckpointKind = Literal["branch", "end", "tail"]

__all__ = ["RowCopy", "SequenceGroups", "StateCopy"]


class RowCopy(NamedTuple):
    """Copy the first ``tokens`` tokens of a row: pool pages ``src`` to ``dst``, in all layers.

    ``window`` is the number of the window group.
    """

    window: int
    src: PageArray
    dst: PageArray
    tokens: int


class StateCopy(NamedTuple):
    """Copy a whole state: pool pages ``src`` to ``dst``."""

    src: PageArray
    dst: PageArray


class _WindowRows:
    """The rows of one window in a sequence, with a reference to each.

    Region map of the table, in pages of tokens:

        0 … first     freed: no token that is still to be computed attends to these
        first … end   rows of this sequence, some of them shared with the tree or with forks

    Thread safety: none; under the cache's lock.
    """

    __slots__ = ("_board", "first", "number", "spec", "table")

    def __init__(self, board: GroupBoard, number: int, spec: WindowSpec) -> None:
        self._board = board
        self.number = number
        self.spec = spec
        self.first = 0
        self.table = GrowingArray(EMPTY_PAGES)

    @property
    def end(self) -> int:
        """Pages of tokens in the table."""
        return len(self.table) // self.spec.pages

    @property
    def rows(self) -> Rows:
        """One row a page of tokens, as a view to change; -1 where freed."""
        return self.table.values.reshape(-1, self.spec.pages)

    @property
    def pages(self) -> PageArray:
        """The pool pages of all rows."""
        return self.table.values[self.first * self.spec.pages :]

    @property
    def begin(self) -> int:
        """The first token of which there is KV from there on."""
        lacking = self._board.lacking[self.pages[:1]].sum()
        return self.first * self._board.layout.page_size + int(lacking)

    def needed(self, position: int) -> int:
        """Return the first page whose row is read when computing goes on at ``position``."""
        return self.spec.first_needed(position, self._board.layout.page_size)

    def replace(self, first: int, pages: PageArray) -> None:
        """Release all rows, and take over those in ``pages``: of page ``first`` and the next."""
        before = self.pages
        freed = np.full(first * self.spec.pages, -1, np.int32)
        self.table, self.first = GrowingArray(np.concatenate((freed, pages))), first
        self._board.release(before)

    def exchange(self, at: int, row: PageArray) -> PageArray:
        """Put a new row at page ``at``; return the one before, with its reference."""
        before: PageArray = self.rows[at].copy()
        self._board.lacking[row[0]] = self._board.lacking[before[0]]
        self.rows[at] = row
        return before

    def free(self, position: int) -> None:
        """Free the rows that no token from ``position`` on attends to."""
        first = min(self.needed(position), self.end)
        if first > self.first:
            gone = self.rows[self.first : first]
            self._board.release(gone.ravel())
            gone[:] = -1
            self.first = first

    def cut(self, pages: int) -> None:
        """Release the rows behind the first ``pages`` pages of tokens."""
        pages = min(pages, self.end)
        self._board.release(self.rows[max(self.first, pages) :].ravel())
        self.table.cut(pages * self.spec.pages)
        self.first = min(self.first, pages)

    def fork(self, position: int) -> Self:
        """Return the same rows, for a fork that goes on at ``position``."""
        other = type(self)(self._board, self.number, self.spec)
        first = min(max(self.first, self.needed(position)), self.end)
        pages = self.rows[first:].ravel()
        self._board.retain(pages)
        other.replace(first, pages)
        return other


class SequenceGroups:
    """What one sequence keeps besides its base pages: `Sequence.groups`.

    An engine works in passes:

    1. `copies`: make them, in this order. A sequence that computes from token 0 on begins with an
       empty state, which the engine clears.
    2. `reach` (stop): rows for the tokens up to ``stop``; make the copies that it returns. A pass
       ends at each of `stops`.
    3. Compute the tokens up to ``stop``. The KV of token ``i`` in window ``w`` goes to the row
       ``tables[w][i // page_size]``; the running state is updated in place.
    4. At a stop: `checkpoint`, and make the copy that it returns, if any, before the next pass.
    5. `Sequence.publish`.

    A prompt gets a checkpoint where it leaves what is cached (a branch), one at its end, and one in
    its tail, for a next prompt that repeats all but the end. An answer gets one every
    `GroupLayout.answer_tokens`. The next turn of a conversation leaves the cached prefix where the
    last turn ended. This place counts as a branch, too: evicting it first costs 0.05 points of the
    hit rate on agent sessions (`benchmarks/groups.py`).

    A step that raises changes nothing but that rows which nothing needs may be freed. `IllegalStep`
    means that it does not fit the state.

    After `Sequence.truncate`, `position` may lie before tokens that are published: these are
    computed again for states and rows. Others read their base pages, so write no KV there.

    Thread safety: as the sequence.

    Attributes:
        position: tokens that are computed, or that the pass under way computes.
        state: int32 pool pages of the running state; None for a model without states.
        tokens: those of the sequence, which bound `reach`. Set by the cache.
    """

    __slots__ = (
        "_board", "_closed", "_end", "_last", "_made", "_mark", "_marked", "_offered", "_planned",
        "_size", "_source", "_source_of", "_unpublished", "_waiting_forks", "_windows", "position",
        "state", "tokens",
    )  # fmt: skip

    def __init__(self, board: GroupBoard) -> None:
        self._board = board
        self._size = board.layout.page_size
        self.position = 0
        self.tokens: Sized = ()
        self.state: PageArray | None = None
        self._windows = [_WindowRows(board, *each) for each in enumerate(board.layout.windows)]
        self._planned: dict[int, CheckpointKind] = {}  # pages, on the grid
        self._end = 0  # the last page of the prompt at which a checkpoint can be
        # Checkpoints that the tree lacks, by page: the state, and whether it is a branch.
        # Their rows stay in the tables.
        self._unpublished: dict[int, tuple[PageArray, bool]] = {}
        self._last: Checkpoint | None = None  # that it used or stored
        self._offered = 0  # leading pages whose rows the tree was offered
        self._mark: int | None = None  # the position of the mark, and the state there
        self._marked: PageArray | None = None
        # The state that waits to be copied to the running one. A fork copies the running state of
        # another sequence; the first of them that is asked for its copies hands this one out.
        self._source: PageArray | None = None
        self._source_of: SequenceGroups | None = None
        self._waiting_forks: list[SequenceGroups] = []
        self._made: list[PageArray] = []  # sources of copies that were handed out
        self._closed = False

    # --- views -----------------------------------------------------------------------------------

    @property
    def tables(self) -> tuple[Rows, ...]:
        """For each window, int32 [pages, pool pages of a row], read-only; -1: no longer kept.

        Valid until the next step.
        """
        return tuple(window.table.view().reshape(-1, window.spec.pages) for window in self._windows)

    @property
    def begins(self) -> list[int]:
        """For each window, the first token of which the rows hold KV from there on."""
        return [window.begin for window in self._windows]

    @property
    def stops(self) -> list[int]:
        """Positions, in tokens, at which passes should end for a `checkpoint`; rising.

        Empty for a model without states, whose checkpoints need no stop, and in a cache without
        reuse.
        """
        if self.state is None or not self._board.reuse:
            return []
        layout, end = self._board.layout, self._end * self._size
        planned = sorted(page * self._size for page in self._planned)
        grid = layout.grid * self._size
        step = -(-layout.answer_tokens // grid) * grid
        passed = max(0, self.position - end) // step + 1
        return [*(stop for stop in planned if stop > self.position), end + passed * step]

    def is_tail(self, position: int) -> bool:
        """Whether the stop at ``position`` is `GroupLayout.tail_tokens` before a prompt's end."""
        position = whole("the position of a stop, in tokens,", position)
        return self._planned.get(position // self._size) == "tail"

    def expect(self, position: int) -> None:
        """Plan a checkpoint where another prompt will leave this one, as it is known beforehand.

        It is planned at the last position, up to token ``position``, at which one can be. Does
        nothing for a position that is computed already, or that is not in the prompt.
        """
        with self._board.lock:
            self._check_open("plan for")
            position = whole("the position to expect, in tokens,", position, 0)
            page = self._board.layout.floor(position // self._size)
            if self.position < page * self._size and page <= self._end:
                self._planned[page] = "branch"

    # --- passes ----------------------------------------------------------------------------------

    def copies(self) -> list[StateCopy]:
        """Return the copies of states that wait, to make in this order before the next pass.

        They wait since the sequence was opened, forked or truncated. Each is returned once.
        """
        with self._board.lock:
            self._check_open("take the copies of")
            self._finish()
            copies = []
            for each in [*self._waiting_forks, self]:  # its own overwrites what forks copy
                source = each._source
                if source is not None:
                    assert each.state is not None
                    copies.append(StateCopy(source, each.state))
                    self._made.append(source)
                    each._wait_for(None)
            return copies

    def reach(self, stop: int) -> list[RowCopy]:
        """Prepare the pass that computes the tokens from `position` to ``stop``.

        Frees rows that no token from `position` on attends to, then allocates rows up to ``stop``.
        Where a fork or the tree uses the row that `position` is in, another takes its place.
        Returns the copies to make, in this order, before the pass and any other step.

        Raises `InvalidValue` unless ``stop`` is from `position` to the sequence's tokens,
        `IllegalStep` if `copies` wait, and `OutOfPages`; the freed rows stay free.
        """
        board = self._board
        with board.lock:
            self._check_open("prepare a pass of")
            stop = whole("the end of the pass, in tokens,", stop, self.position, len(self.tokens))
            self._check_copied()
            self._finish()
            needed = [self.position, *(page * self._size for page in self._unpublished)]
            if self._mark is not None:
                needed.append(self._mark)
            for window in self._windows:
                window.free(min(needed))
            at, offset = divmod(self.position, self._size)
            partial = self._windows if offset and stop > self.position else ()
            shared = [window for window in partial if board.is_shared(window.rows[at])]
            fresh = [
                max(0, -(-stop // self._size) - window.end) * window.spec.pages
                for window in self._windows
            ]
            copies: list[RowCopy] = []
            count = sum(fresh) + sum(window.spec.pages for window in shared)
            pages = board.take(count) if count else EMPTY_PAGES
            for window in shared:
                row, pages = pages[: window.spec.pages], pages[window.spec.pages :]
                copies.append(RowCopy(window.number, window.exchange(at, row), row, offset))
            for window, count in zip(self._windows, fresh, strict=True):
                if count:
                    window.table.extend(pages[:count])
                    pages = pages[count:]
            self._made += [copy.src for copy in copies]
            self.position = stop
            return copies

    def load(self, position: int) -> None:
        """Go on at ``position``, whose KV and state the engine reads from elsewhere.

        Allocates the rows that are attended to from there on. The engine fills these, the base
        pages up to ``position``, and the running state; then it may leave a `checkpoint` there.
        Forgets the position of `mark`.

        Raises `OutOfPages`; `InvalidValue` for a position that is computed already, or behind the
        sequence's tokens; and `IllegalStep` while a fork waits for a copy of the running state.
        """
        with self._board.lock:
            self._check_open("load KV for")
            name, last = "the position to load, in tokens,", len(self.tokens)
            position = whole(name, position, min(self.position + 1, last), last)
            if position == self.position:
                raise InvalidValue(f"{name} is {position}, and all {last} tokens are computed")
            if self._waiting_forks:
                raise IllegalStep("a fork waits for the state; call copies() and make them first")
            self._finish()
            end = -(-position // self._size)
            counts = [(end - each.needed(position)) * each.spec.pages for each in self._windows]
            pages = self._board.take(sum(counts))
            for window, count in zip(self._windows, counts, strict=True):
                first = window.needed(position)
                window.replace(first, pages[:count])
                begin = window.spec.first_token(position)
                self._board.lacking[window.pages[:1]] = begin - first * self._size
                pages = pages[count:]
            self._drop_source()
            self._unmark()  # what its windows need is gone, and what checkpoints need
            self._drop_unpublished()
            self.position = position

    def checkpoint(self, position: int) -> StateCopy | None:
        """Keep the state at ``position``, where the last pass ended, for later requests.

        Returns the copy to make before the next pass. None if there is nothing to copy: the model
        has no states, or the pool has no room. Others can resume there after `Sequence.publish`;
        until then the sequence keeps the rows that they need.

        Raises:
            IllegalStep: the last pass ended elsewhere.
            InvalidValue: ``position`` is not a multiple of a page and of the state's grid.
        """
        board = self._board
        with board.lock:
            self._check_open("keep a checkpoint of")
            self._check_copied()
            position = whole("the position of a checkpoint, in tokens,", position, 1)
            if position != self.position:
                raise IllegalStep(
                    f"a checkpoint at token {position} needs a pass that ends there; the last one "
                    f"ended at {self.position}"
                )
            step = board.layout.grid * self._size
            if position % step:
                raise InvalidValue(
                    f"a checkpoint at token {position}: it must be a multiple of {step}"
                )
            if self.state is None or not board.reuse:
                return None
            page = position // self._size
            branch = self._planned.pop(page, None) == "branch"
            if page in self._unpublished:
                return None
            if len(self.state) > board.available:
                board.counters.checkpoints_without_room += 1
                return None
            state = board.take(len(self.state))
            self._unpublished[page] = state, branch
            return StateCopy(self.state, state)

    def mark(self) -> StateCopy | None:
        """Remember `position`, so that `Sequence.truncate` can go back to it.

        For drafts that may be rejected: windows keep what the position needs until the next `mark`
        or `unmark`, or until `Sequence.truncate` goes back to a checkpoint behind it. Returns the
        copy of the state to make before the next pass; None without states. Raises `OutOfPages`.
        """
        with self._board.lock:
            self._check_open("mark a position of")
            self._check_copied()
            state = self.state
            if state is not None and (self._marked is None or self._board.is_shared(self._marked)):
                pages = self._board.take(len(state))  # a fork copies from the old ones
                self._unmark()
                self._marked = pages
            self._mark = self.position
            return None if state is None or self._marked is None else StateCopy(state, self._marked)

    def unmark(self) -> None:
        """Forget the position of `mark`; does nothing without one."""
        with self._board.lock:
            self._check_open("unmark a position of")
            self._unmark()

    def _unmark(self) -> None:
        if self._marked is not None:
            self._board.release(self._marked)
        self._mark = self._marked = None

    def _check_open(self, step: str) -> None:
        if self._closed:
            raise IllegalStep(f"cannot {step} this sequence: it is closed")

    def _check_copied(self) -> None:
        if self._source is not None or self._waiting_forks:
            raise IllegalStep("copies wait; call copies() and make them first")

    def _finish(self) -> None:
        """Release the sources of all copies handed out so far; the caller has made them."""
        for source in self._made:
            self._board.release(source)
        self._made = []

    def _wait_for(self, source: PageArray | None, of: SequenceGroups | None = None) -> None:
        """Wait for a copy of ``source``, the running state ``of`` a sequence; None: for none.

        Takes over a reference to it.
        """
        if self._source_of is not None:
            self._source_of._waiting_forks.remove(self)
        self._source, self._source_of = source, of
        if of is not None:
            of._waiting_forks.append(self)

    def _drop_source(self) -> None:
        if self._source is not None:
            self._board.release(self._source)
            self._wait_for(None)

    # --- called by the cache and the sequence, under the lock ------------------------------------

    def hold(self, path: PageArray, checkpoint: Checkpoint | None) -> None:
        """Go on at the end of ``path``, of base pages: take references to what resuming reads."""
        self.position = len(path) * self._size
        for window in self._windows:
            first = window.needed(self.position)
            pages = self._board.rows[window.number][path[first:]].ravel()
            self._board.retain(pages)
            window.replace(first, pages)
        self._drop_source()
        self._drop_unpublished()
        self._offered = min(self._offered, len(path))
        if checkpoint is not None:
            self._last = checkpoint
            if checkpoint.state is not None:
                self._board.retain(checkpoint.state)
                self._wait_for(checkpoint.state)

    def begin(self, state: PageArray | None, prompt: Sized, *, cached: int) -> None:
        """After `hold`: take ``state`` as the running one, and plan checkpoints.

        ``cached`` pages of the ``prompt`` are cached in the layers that keep every token.
        """
        layout, size, last = self._board.layout, self._size, len(prompt) - 1
        self.state, self.tokens = state, prompt
        start = self._offered = self.position // size
        if self._last is not None:
            self._board.resumed(self._last)
        end, tail = layout.floor(last // size), layout.floor((last - layout.tail_tokens) // size)
        planned: dict[int, CheckpointKind] = {}
        if layout.state is not None and tail > cached:
            planned[tail] = "tail"
        planned[end] = "end"
        planned[layout.floor(cached)] = "branch"
        self._planned = {page: kind for page, kind in planned.items() if page > start}
        self._end = max(start, end)

    def fork(self) -> SequenceGroups:
        """Return those of a fork, which goes on from here. Raises `OutOfPages`."""
        state = None if self.state is None else self._board.take(len(self.state))
        other = SequenceGroups(self._board)
        other.position, other.state, other._offered = self.position, state, self._offered
        other._planned, other._end = self._planned.copy(), self._end
        other._windows = [window.fork(self.position) for window in self._windows]
        if self.state is not None and self.position:
            source, of = self._source, self._source_of
            if source is None:
                source, of = self.state, self
            self._board.retain(source)
            other._wait_for(source, of)
        return other

    def published(self, path: PageArray, sequence: int) -> None:
        """Offer the tree what belongs to ``path``, of published base pages."""
        board = self._board
        self._finish()
        path = path[: self.position // self._size]
        if self.state is None:
            self._offer(path)
        for page in [page for page in self._unpublished if page <= len(path)]:
            state, branch = self._unpublished.pop(page)
            for window in self._windows:
                first = window.needed(page * self._size)
                board.store(window.number, path[first:page], window.rows[first:page])
            self._go_on_from(board.add(path[:page], state, branch=branch))
            board.release(state)
        board.report(sequence)

    def _offer(self, path: PageArray) -> None:
        """Offer rows, and add checkpoints that need no state: where planned, and at the end."""
        board, start, end = self._board, self._offered, len(path)
        if start < end:
            for window in self._windows:
                board.store(window.number, path[start:], window.rows[start:end])
            self._offered = end
        for page in sorted(page for page in self._planned if page <= end):
            branch = self._planned.pop(page) == "branch"
            self._go_on_from(board.add(path[:page], None, branch=branch))
        if end and (self._last is None or self._last.page < end):
            self._go_on_from(board.add(path, None))

    def _go_on_from(self, checkpoint: Checkpoint | None) -> None:
        """Note a checkpoint that was stored."""
        before = self._last
        if checkpoint is None or (before is not None and before.page >= checkpoint.page):
            return
        self._last = checkpoint
        if before is not None:
            self._board.extended(before, checkpoint)

    def _drop_unpublished(self, position: int = 0) -> None:
        """Drop the checkpoints behind ``position`` that the tree does not have."""
        for page in [page for page in self._unpublished if page * self._size > position]:
            self._board.release(self._unpublished.pop(page)[0])

    def rewind(self, length: int, path: PageArray) -> None:
        """Go back so that nothing behind token ``length`` is computed; `position` tells how far.

        ``path`` has its published base pages. Goes on from this position if it can, else
        from the mark or the last position where all groups agree, at worst from 0.
        """
        pages = length // self._size
        self._planned = {page: kind for page, kind in self._planned.items() if page <= pages}
        self._end = min(self._end, self._board.layout.floor(pages))
        if self._mark is not None and self._mark > length:
            self._unmark()
        if self.position <= length:
            return
        self._finish()
        if self.state is None and all(
            window.begin <= window.spec.first_token(length) for window in self._windows
        ):
            self._cut(length)
            return
        page, checkpoint = self._board.resume(path[:pages])
        if self._mark is None or self._marked is None or self._mark < page * self._size:
            self.hold(path[:page], checkpoint)
            self.unmark()  # the rows that its windows need are gone
        else:
            self._board.retain(self._marked)
            self._drop_source()
            self._wait_for(self._marked)
            self._cut(self._mark)

    def _cut(self, position: int) -> None:
        self._drop_unpublished(position)
        for window in self._windows:
            window.cut(-(-position // self._size))
        self._offered = min(self._offered, position // self._size)
        self.position = position

    def close(self) -> None:
        """Drop all references."""
        self._closed = True
        for pages in self.references():
            self._board.release(pages)
        self._wait_for(None)
        for fork in self._waiting_forks:
            fork._source_of = None  # there is no further pass
        self._windows, self.state = [], None

    def references(self) -> Iterator[PageArray]:
        """Yield the pages of all references of this sequence."""
        yield from (window.pages for window in self._windows)
        yield from (state for state, _ in self._unpublished.values())
        held = (self.state, self._marked, self._source)
        yield from (pages for pages in held if pages is not None)
        yield from self._made
