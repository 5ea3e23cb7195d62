"""`SequenceGroups`: the rows, the running state and the checkpoints of one sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvkeep.core.errors import IllegalStep, InvalidValue, whole
from kvkeep.core.groups.rows import RowCopy, RowTables, StateCopy, live_pages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sized
    from typing import Self

    from kvkeep.core.groups.checkpoints import Checkpoint, CheckpointKind, GroupBoard
    from kvkeep.core.groups.plan import GroupLayout
    from kvkeep.core.groups.rows import Rows, TreeRows
    from kvkeep.core.pages.tables import PageArray

__all__ = ["SequenceGroups"]


class CheckpointPlan:
    """Pages of planned checkpoints, all on the grid.

    A prompt gets one where it leaves what is cached (a branch), one at its end, and one in its
    tail, for a next prompt that repeats all but the end. An answer gets one every
    `GroupLayout.answer_tokens`.

    The next turn of a conversation leaves the cached prefix where the last turn ended. This place
    is kept as a branch, too: evicting it first costs 0.05 points of the hit rate on agent sessions
    (`benchmarks/groups.py`).

    Thread safety: none.
    """

    __slots__ = ("_kinds", "_last", "_layout")

    def __init__(self, layout: GroupLayout) -> None:
        self._layout = layout
        self._kinds: dict[int, CheckpointKind] = {}
        self._last = 0  # the last page that was planned

    def prompt(self, start: int, cached: int, tokens: int) -> None:
        """Plan for a prompt that begins at page ``start``, of which ``cached`` pages are cached."""
        floor, size = self._layout.floor, self._layout.page_size
        end = floor((tokens - 1) // size)
        tail = floor(max(0, tokens - 1 - self._layout.tail_tokens) // size)
        kinds: dict[int, CheckpointKind] = {}
        if self._layout.state is not None and tail > cached:
            kinds[tail] = "tail"
        kinds[end] = "end"
        kinds[floor(cached)] = "branch"
        self._kinds = {page: kind for page, kind in kinds.items() if page > start}
        self._last = max(start, end)

    def stops(self, position: int) -> list[int]:
        """Return the positions planned behind token ``position``, rising; one of the answer."""
        size, grid = self._layout.page_size, self._layout.grid
        planned = sorted(page * size for page in self._kinds if page * size > position)
        step = -(-self._layout.answer_tokens // (size * grid)) * grid * size
        passed = max(0, position - self._last * size) // step + 1
        return [*planned, self._last * size + passed * step]

    def branch(self, page: int, position: int) -> None:
        """Plan a branch at ``page``, if it lies behind token ``position`` in the prompt."""
        if position < page * self._layout.page_size and page <= self._last:
            self._kinds[page] = "branch"

    def is_tail(self, page: int) -> bool:
        """Whether a checkpoint is planned at ``page`` as that of the tail."""
        return self._kinds.get(page) == "tail"

    def reached(self, page: int) -> bool:
        """Plan nothing at ``page`` any longer; return whether it was a branch."""
        return self._kinds.pop(page, None) == "branch"

    def passed(self, page: int) -> list[tuple[int, bool]]:
        """Return the planned pages up to ``page``, rising, which end with it, as `reached`."""
        return [(at, self.reached(at)) for at in sorted(self._kinds) if at <= page]

    def cut(self, tokens: int) -> None:
        """Forget what is planned behind token ``tokens``."""
        pages = tokens // self._layout.page_size
        self._kinds = {page: kind for page, kind in self._kinds.items() if page <= pages}
        self._last = min(self._last, self._layout.floor(pages))

    def fork(self) -> Self:
        """Return a plan for a fork."""
        other = type(self)(self._layout)
        other._kinds, other._last = self._kinds.copy(), self._last
        return other


@dataclass(slots=True, eq=False)
class _Waiting:
    """A copy that was not handed out yet; its source has a reference until it is made.

    The copy writes memory of ``owner``. It must be made before a pass of ``other``, which
    overwrites the source.
    """

    copy: RowCopy | StateCopy
    owner: WaitingCopies
    other: WaitingCopies | None


class WaitingCopies:
    """The copies to make before the next pass of one sequence, in order.

    A fork copies the running state of the sequence that it was made from: both wait for that, and
    the first that is asked hands it out. Thread safety: none; under the cache's lock.
    """

    __slots__ = ("_made", "_rows", "_waiting")

    def __init__(self, rows: TreeRows) -> None:
        self._rows = rows
        self._waiting: list[_Waiting] = []
        self._made: list[PageArray] = []  # sources of copies that were handed out

    def __bool__(self) -> bool:
        """Whether copies were not handed out yet."""
        return bool(self._waiting)

    def add(self, copy: RowCopy | StateCopy, other: WaitingCopies | None = None) -> None:
        """Add a copy, for which ``other`` waits too. Takes over a reference to the source."""
        waiting = _Waiting(copy, self, other)
        self._insert(waiting)
        if other is not None:
            other._insert(waiting)

    def _insert(self, waiting: _Waiting) -> None:
        """Add a copy at the end, but before one that overwrites its source."""
        first = waiting.copy.src[0]
        for at, before in enumerate(self._waiting):
            if before.copy.dst[0] == first:
                self._waiting.insert(at, waiting)
                return
        self._waiting.append(waiting)

    def add_to(self, fork: WaitingCopies, state: PageArray, into: PageArray) -> None:
        """Let a fork copy the running ``state`` to ``into``.

        If ``state`` itself waits for a copy, the fork gets one from the same source.
        """
        src: PageArray = state
        other: WaitingCopies | None = self
        for waiting in self._waiting:
            if isinstance(waiting.copy, StateCopy) and waiting.owner is self:
                src, other = waiting.copy.src, waiting.other
        self._rows.retain(src)
        fork.add(StateCopy(src, into), other)

    def hand_out(self) -> list[RowCopy | StateCopy]:
        """Return the waiting copies; those handed out before are made."""
        self.finish()
        copies = self._waiting.copy()
        for waiting in copies:
            self._remove(waiting)
            self._made.append(waiting.copy.src)
        return [waiting.copy for waiting in copies]

    @staticmethod
    def _remove(waiting: _Waiting) -> None:
        waiting.owner._waiting.remove(waiting)
        if waiting.other is not None:
            waiting.other._waiting.remove(waiting)

    @property
    def rows_wait(self) -> bool:
        """Whether copies of rows wait: a pass was prepared and is not computed."""
        return any(isinstance(waiting.copy, RowCopy) for waiting in self._waiting)

    @property
    def forks_wait(self) -> bool:
        """Whether forks wait for copies of this sequence's state."""
        return any(waiting.owner is not self for waiting in self._waiting)

    def drop(self, needless: Callable[[RowCopy | StateCopy], bool] = lambda _copy: True) -> None:
        """Drop the waiting copies into memory of this sequence that are ``needless``."""
        for waiting in self._waiting.copy():
            if waiting.owner is self and needless(waiting.copy):
                self._remove(waiting)
                self._rows.release(waiting.copy.src)

    def close(self) -> None:
        """Drop all copies, and no longer wait for those of forks: there is no further pass."""
        self.finish()
        self.drop()
        for waiting in self._waiting:
            waiting.other = None
        self._waiting = []

    def finish(self) -> None:
        """Release the sources of all copies handed out so far; the caller has made them."""
        for source in self._made:
            self._rows.release(source)
        self._made = []

    def sources(self) -> list[PageArray]:
        """Return the sources that this sequence has references to, for `check`."""
        return [*self._made, *(each.copy.src for each in self._waiting if each.owner is self)]


@dataclass(slots=True, eq=False)
class _Unpublished:
    """A checkpoint that the tree does not have yet, with references to all that it needs.

    The rows may leave the windows of the sequence before it is published.
    """

    page: int
    branch: bool
    state: PageArray
    rows: list[Rows]  # of each window, up to `page`

    def references(self) -> list[PageArray]:
        return [self.state, *map(live_pages, self.rows)]


class SequenceGroups:
    """What one sequence keeps besides its base pages: `Sequence.groups`.

    An engine works in passes:

    1. `reach` (stop): rows for the tokens up to ``stop``. A pass ends at each of `stops`.
    2. `copies`: make them, in this order. A sequence that computes from token 0 on begins with an
       empty state, which the engine clears.
    3. Compute the tokens up to ``stop``. The KV of token ``i`` in window ``w`` goes to the row
       ``tables[w][i // page_size]``; the running state is updated in place.
    4. At a stop: `checkpoint`, and make the copy that it returns, if any, before the next pass.
    5. `Sequence.publish`.

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
        "_board", "_closed", "_copies", "_last", "_mark", "_marked", "_offered", "_plan", "_rows",
        "_size", "_unpublished", "position", "state", "tokens",
    )  # fmt: skip

    def __init__(self, board: GroupBoard) -> None:
        self._board = board
        self._size = board.layout.page_size
        self.position = 0
        self.tokens: Sized = ()
        self.state: PageArray | None = None
        self._rows = RowTables(board.layout, board.rows)
        self._copies = WaitingCopies(board.rows)
        self._plan = CheckpointPlan(board.layout)
        self._unpublished: list[_Unpublished] = []
        self._last: Checkpoint | None = None  # that it used or stored
        self._offered = 0  # leading pages whose rows the tree was offered
        self._mark: int | None = None  # the position of the mark, and the state there
        self._marked: PageArray | None = None
        self._closed = False

    # --- views -----------------------------------------------------------------------------------

    @property
    def tables(self) -> tuple[Rows, ...]:
        """For each window, int32 [pages, pool pages of a row], read-only; -1: no longer kept."""
        return self._rows.views()

    @property
    def begins(self) -> list[int]:
        """For each window, the first token of which the rows hold KV from there on."""
        return self._rows.begins()

    @property
    def stops(self) -> list[int]:
        """Positions, in tokens, at which passes should end for a `checkpoint`; rising.

        Empty for a model without states, whose checkpoints need no stop, and in a cache without
        reuse.
        """
        keeps = self.state is not None and self._board.reuse
        return self._plan.stops(self.position) if keeps else []

    def is_tail(self, position: int) -> bool:
        """Whether the stop at ``position`` is `GroupLayout.tail_tokens` before a prompt's end."""
        position = whole("the position of a stop, in tokens,", position)
        return self._plan.is_tail(position // self._size)

    def expect(self, position: int) -> None:
        """Plan a checkpoint where another prompt will leave this one, as it is known beforehand.

        It is planned at the last position, up to token ``position``, at which one can be. Does
        nothing for a position that is computed already, or that is not in the prompt.
        """
        with self._board.lock:
            self._check_open("plan for")
            position = whole("the position to expect, in tokens,", position, 0)
            self._plan.branch(self._board.layout.floor(position // self._size), self.position)

    # --- passes ----------------------------------------------------------------------------------

    def copies(self) -> list[RowCopy | StateCopy]:
        """Return the copies to make, in this order, before the next pass; each is returned once."""
        with self._board.lock:
            self._check_open("take the copies of")
            return self._copies.hand_out()

    def reach(self, stop: int) -> None:
        """Prepare the pass that computes the tokens from `position` to ``stop``.

        Frees rows that no token from `position` on attends to, then allocates rows up to ``stop``.
        Call `copies` afterwards. Raises `InvalidValue` unless ``stop`` is from `position` to the
        sequence's tokens, and `OutOfPages`; the freed rows stay free.
        """
        with self._board.lock:
            self._check_open("prepare a pass of")
            stop = whole("the end of the pass, in tokens,", stop, self.position, len(self.tokens))
            self._check_made()
            self._copies.finish()
            self._rows.free(self.position if self._mark is None else min(self.position, self._mark))
            for copy in self._rows.reach(self.position, stop, self._board.pool.take):
                self._copies.add(copy)
            self.position = stop

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
            if self._copies.forks_wait:
                raise IllegalStep("a fork waits for the state; call copies() and make them first")
            self._copies.finish()
            self._rows.replace(position, self._board.pool.take)
            self._copies.drop()
            self._unmark()  # what its windows need is gone
            self.position = position

    def checkpoint(self, position: int) -> StateCopy | None:
        """Keep the state at ``position``, where the last pass ended, for later requests.

        Returns the copy to make before the next pass. None if there is nothing to copy: the model
        has no states, or the pool has no room. Others can resume there after `Sequence.publish`.

        Raises:
            IllegalStep: the last pass ended elsewhere.
            InvalidValue: ``position`` is not a multiple of a page and of the state's grid.
        """
        board = self._board
        with board.lock:
            self._check_open("keep a checkpoint of")
            self._check_made()
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
            branch = self._plan.reached(page)
            if any(each.page == page for each in self._unpublished):
                return None
            if len(self.state) > board.available:
                board.counters.checkpoints_without_room += 1
                return None
            state = board.pool.take(len(self.state))
            rows = [
                self._rows.between(window, first, page).copy()
                for window, first in board.layout.needed(page)
            ]
            for part in rows:
                board.rows.retain(live_pages(part))
            self._unpublished.append(_Unpublished(page, branch, state, rows))
            return StateCopy(self.state, state)

    def mark(self) -> StateCopy | None:
        """Remember `position`, so that `Sequence.truncate` can go back to it.

        For drafts that may be rejected: windows keep what the position needs until the next `mark`
        or `unmark`. Returns the copy of the state to make before the next pass; None without
        states. Raises `OutOfPages`.
        """
        with self._board.lock:
            self._check_open("mark a position of")
            self._check_made()
            state = self.state
            if state is None:
                self._mark = self.position
                return None
            if self._marked is None or not self._board.rows.is_sole(self._marked):
                pages = self._board.pool.take(len(state))  # a fork copies from the old ones
                self._unmark()
                self._marked = pages
            self._mark = self.position
            return StateCopy(state, self._marked)

    def unmark(self) -> None:
        """Forget the position of `mark`; does nothing without one."""
        with self._board.lock:
            self._check_open("unmark a position of")
            self._unmark()

    def _unmark(self) -> None:
        if self._marked is not None:
            self._board.rows.release(self._marked)
        self._mark = self._marked = None

    def _check_made(self) -> None:
        if self._copies:
            raise IllegalStep("copies wait; call copies() and make them first")

    def _check_open(self, step: str) -> None:
        if self._closed:
            raise IllegalStep(f"cannot {step} this sequence: it is closed")

    # --- called by the cache and the sequence, under the lock ------------------------------------

    def hold(self, path: PageArray, checkpoint: Checkpoint | None) -> None:
        """Begin at the end of ``path``, of base pages: take references to what resuming reads."""
        self.position = len(path) * self._size
        self._rows.hold(path)
        if checkpoint is not None:
            self._last = checkpoint
            if checkpoint.state is not None:
                self._board.rows.retain(checkpoint.state)

    def begin(self, state: PageArray | None, prompt: Sized, *, cached: int) -> None:
        """After `hold`: take ``state`` as the running one, and plan checkpoints.

        ``cached`` pages of the ``prompt`` are cached in the layers that keep every token.
        """
        self.state = state
        self.tokens = prompt
        self._offered = self._rows.length
        checkpoint = self._last
        if checkpoint is not None:
            self._copy_from(checkpoint)
            self._board.resumed(checkpoint)
        self._plan.prompt(self._rows.length, cached, len(prompt))

    def _copy_from(self, checkpoint: Checkpoint | None) -> None:
        if self.state is not None and checkpoint is not None:
            assert checkpoint.state is not None
            self._copies.add(StateCopy(checkpoint.state, self.state))

    def fork(self) -> SequenceGroups:
        """Return those of a fork, which goes on from here. Raises `OutOfPages`."""
        if self._copies.rows_wait:
            raise IllegalStep(
                "cannot fork this sequence: copies for the next pass wait; make them and compute "
                "the pass first"
            )
        state = None if self.state is None else self._board.pool.take(len(self.state))
        other = SequenceGroups(self._board)
        other.position, other._offered = self.position, self._offered
        other._rows = self._rows.fork(self.position)
        other._plan = self._plan.fork()
        other.state = state
        if state is not None and self.position:
            assert self.state is not None
            self._copies.add_to(other._copies, self.state, state)
        return other

    def published(self, path: PageArray, sequence: int) -> None:
        """Offer the tree what belongs to ``path``, of published base pages."""
        board = self._board
        self._copies.finish()
        path = path[: self.position // self._size]
        if self.state is None:
            self._offer(path)
        for each in [each for each in self._unpublished if each.page <= len(path)]:
            for rows, (window, first) in zip(
                each.rows, board.layout.needed(each.page), strict=True
            ):
                board.store(window, path[first : each.page], rows)
            self._go_on_from(board.add(path[: each.page], each.state, branch=each.branch))
            self._drop(each)
        board.report(sequence)

    def _offer(self, path: PageArray) -> None:
        """Offer rows, and add checkpoints that need no state: where planned, and at the end."""
        board, start = self._board, self._offered
        if start < len(path):
            for window in range(len(board.layout.windows)):
                rows = self._rows.between(window, start, len(path))
                board.store(window, path[start : start + len(rows)], rows)
            self._offered = len(path)
        for page, branch in self._plan.passed(len(path)):
            self._go_on_from(board.add(path[:page], None, branch=branch))
        if len(path) and (self._last is None or self._last.page < len(path)):
            self._go_on_from(board.add(path, None))

    def _go_on_from(self, checkpoint: Checkpoint | None) -> None:
        """Note a checkpoint that was stored."""
        before = self._last
        if checkpoint is None or (before is not None and before.page >= checkpoint.page):
            return
        self._last = checkpoint
        if before is not None:
            self._board.extended(before, checkpoint)

    def _drop(self, checkpoint: _Unpublished) -> None:
        self._unpublished.remove(checkpoint)
        for pages in checkpoint.references():
            self._board.rows.release(pages)

    def rewind(self, length: int, path: PageArray) -> None:
        """Go back so that nothing behind token ``length`` is computed; `position` tells how far.

        ``path`` has its published base pages. Goes on from this position if it can, else
        from the mark or the last position where all groups agree, at worst from 0.
        """
        self._plan.cut(length)
        for each in [each for each in self._unpublished if each.page > length // self._size]:
            self._drop(each)
        if self._mark is not None and self._mark > length:
            self._unmark()
        if self.position <= length:
            return
        if self.state is None and self._rows.covers(length):
            self._cut(length)
            return
        page, checkpoint = self._board.resume(path[: length // self._size])
        if self._mark is None or self._marked is None or self._mark < page * self._size:
            self._copies.finish()
            self._copies.drop()
            self.hold(path[:page], checkpoint)
            self._copy_from(checkpoint)
            self._offered = min(self._offered, page)
            return
        assert self.state is not None
        self._board.rows.retain(self._marked)
        self._copies.drop(lambda copy: isinstance(copy, StateCopy))
        self._copies.add(StateCopy(self._marked, self.state))
        self._cut(self._mark)

    def _cut(self, position: int) -> None:
        self._rows.cut(position)
        self._copies.drop(
            lambda copy: isinstance(copy, RowCopy) and not self._rows.has(copy.window, copy.dst)
        )
        self._offered = min(self._offered, position // self._size)
        self.position = position

    def close(self) -> None:
        """Drop all references."""
        self._closed = True
        self._copies.close()
        self._rows.close()
        for each in self._unpublished.copy():
            self._drop(each)
        if self.state is not None:
            self._board.rows.release(self.state)
            self.state = None
        self._unmark()

    def references(self) -> Iterator[PageArray]:
        """Yield the pages of all references of this sequence, for `check`."""
        yield from self._rows.live()
        for each in self._unpublished:
            yield from each.references()
        yield from (pages for pages in (self.state, self._marked) if pages is not None)
        yield from self._copies.sources()
