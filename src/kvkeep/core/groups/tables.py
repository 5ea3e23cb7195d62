"""`SequenceGroups`: the rows and the running state of one sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvkeep.core.errors import IllegalStep, InvalidValue, whole
from kvkeep.core.groups.copies import GroupCopies, RowCopy, StateCopy
from kvkeep.core.groups.rows import RowTables
from kvkeep.core.groups.stored import live_pages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sized
    from typing import Self

    from kvkeep.core.groups.board import GroupBoard
    from kvkeep.core.groups.stored import Checkpoint, CheckpointKind, Rows
    from kvkeep.core.groups.units import TreeUnits
    from kvkeep.core.pages.layout import GroupLayout
    from kvkeep.core.pages.tables import PageArray

__all__ = ["Mark", "SequenceGroups"]


class Mark:
    """The marked position of one sequence. Thread safety: none; under the cache's lock.

    Attributes:
        position: in tokens; None: there is no mark.
        state: pages with a copy of the state there; None without a mark or states.
    """

    __slots__ = ("_units", "position", "state")

    def __init__(self, units: TreeUnits) -> None:
        self._units = units
        self.position: int | None = None
        self.state: PageArray | None = None

    def set(self, position: int, pages: int, take: Callable[[int], PageArray]) -> None:
        """Mark ``position``, with a state of so many ``pages``; 0: no state.

        Raises what ``take`` raises; the old mark stays then.
        """
        if not pages:
            self.position = position
            return
        if self.state is None or not self._units.is_sole(self.state):
            state = take(pages)  # a fork copies from the old ones
            self.drop()
            self.state = state
        self.position = position

    def drop(self) -> None:
        """Forget the mark."""
        if self.state is not None:
            self._units.release(self.state)
        self.position = self.state = None


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
        row: the tokens of the sequence, which bound `reach`. Set by the cache.
    """

    __slots__ = (
        "_board", "_checkpoints", "_closed", "_copies", "_mark", "_offered", "_rows",
        "_size", "position", "row", "state",
    )  # fmt: skip

    def __init__(self, board: GroupBoard) -> None:
        layout = board.layout
        self._board = board
        self._size = layout.page_size
        self.position = 0
        self.row: Sized = ()
        self.state: PageArray | None = None
        self._rows = RowTables(board)
        self._copies = GroupCopies(board.units)
        self._checkpoints = SequenceCheckpoints(board)
        self._offered = 0  # leading pages whose rows the tree was offered
        self._mark = Mark(board.units)
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
        return self._checkpoints.plan.stops(self.position) if keeps else []

    def is_guess(self, position: int) -> bool:
        """Whether the stop at ``position`` is a mere guess at where prompts will branch."""
        position = whole("the position of a stop, in tokens,", position)
        return self._checkpoints.plan.is_guess(position // self._size)

    def expect(self, position: int) -> None:
        """Plan a checkpoint where another prompt will leave this one, as it is known beforehand.

        It is planned at the last position, up to token ``position``, at which one can be. Does
        nothing for a position that is computed already, or that is not in the prompt.
        """
        with self._board.lock:
            self._check_open("plan for")
            position = whole("the position to expect, in tokens,", position, 0)
            self._checkpoints.plan.branch(
                self._board.layout.floor(position // self._size), self.position
            )

    # --- passes ----------------------------------------------------------------------------------

    def copies(self) -> list[RowCopy | StateCopy]:
        """Return the copies to make, in this order, before the next pass; each is returned once."""
        with self._board.lock:
            self._check_open("take the copies of")
            return self._copies.take()

    def reach(self, stop: int) -> None:
        """Prepare the pass that computes the tokens from `position` to ``stop``.

        Frees rows that no token from `position` on attends to, then allocates rows up to ``stop``.
        Call `copies` afterwards. Raises `InvalidValue` unless ``stop`` is from `position` to the
        sequence's tokens, and `OutOfPages`; the freed rows stay free.
        """
        with self._board.lock:
            self._check_open("prepare a pass of")
            stop = whole("the end of the pass, in tokens,", stop, self.position, len(self.row))
            self._check_made()
            self._copies.finish()
            widths, rows = self._board.layout.widths, self._rows
            mark = self._mark.position
            rows.free(self.position if mark is None else min(self.position, mark))
            fresh = max(0, -(-stop // self._size) - rows.length)
            shared = rows.shared(self.position) if stop > self.position else []
            pages = self._board.pool.take(
                fresh * sum(widths) + sum(widths[window] for window in shared)
            )
            at, offset = divmod(self.position, self._size)
            for window in shared:
                row, pages = pages[: widths[window]], pages[widths[window] :]
                self._copies.add(RowCopy(window, rows.exchange(window, at, row), row, offset))
            rows.extend(pages, fresh)
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
            name, last = "the position to load, in tokens,", len(self.row)
            position = whole(name, position, min(self.position + 1, last), last)
            if position == self.position:
                raise InvalidValue(f"{name} is {position}, and all {last} tokens are computed")
            if self._copies.forks_wait:
                raise IllegalStep("a fork waits for the state; call copies() and make them first")
            self._copies.finish()
            self._rows.replace(position, self._board.pool.take)
            self._copies.drop()
            self._mark.drop()  # what its windows need is gone
            self.position = position

    def checkpoint(self, position: int) -> StateCopy | None:
        """Keep the state at ``position``, where the last pass ended, for later requests.

        Returns the copy to make before the next pass. None if there is nothing to copy: the model
        has no states, or the pool has no room; a checkpoint that is a mere guess takes only free
        pages. Others can resume there after `Sequence.publish`.

        Raises:
            IllegalStep: the last pass ended elsewhere.
            InvalidValue: ``position`` is not a multiple of a page and of the state's grid.
        """
        with self._board.lock:
            self._check_open("keep a checkpoint of")
            self._check_made()
            layout = self._board.layout
            position = whole("the position of a checkpoint, in tokens,", position, 1)
            if position != self.position:
                raise IllegalStep(
                    f"a checkpoint at token {position} needs a pass that ends there; the last one "
                    f"ended at {self.position}"
                )
            step = layout.grid * self._size
            if position % step:
                raise InvalidValue(
                    f"a checkpoint at token {position}: it must be a multiple of {step}"
                )
            if self.state is None or not self._board.reuse:
                return None
            page = position // self._size
            kind = self._checkpoints.plan.reached(page)
            if page in self._checkpoints.own:
                return None
            state = self._room(len(self.state), guess=kind == "guess")
            if state is None:
                self._board.counters.checkpoints_without_room += 1
                return None
            rows = [
                self._rows.between(window, first, page).copy()
                for window, first in self._board.needed(page)
            ]
            self._checkpoints.own.add(page, kind, state, rows)
            return StateCopy(self.state, state)

    def _room(self, count: int, *, guess: bool) -> PageArray | None:
        if count > self._board.pool.num_free and (guess or count > self._board.available()):
            return None
        return self._board.pool.take(count)

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
            self._mark.set(self.position, 0 if state is None else len(state), self._board.pool.take)
            if state is None or self._mark.state is None:
                return None
            return StateCopy(state, self._mark.state)

    def unmark(self) -> None:
        """Forget the position of `mark`; does nothing without one."""
        with self._board.lock:
            self._check_open("unmark a position of")
            self._mark.drop()

    def _check_made(self) -> None:
        if self._copies.waiting:
            raise IllegalStep("copies wait; call copies() and make them first")

    def _check_open(self, step: str) -> None:
        if self._closed:
            raise IllegalStep(f"cannot {step} this sequence: it is closed")

    # --- called by the cache and the sequence, under the lock ------------------------------------

    def hold(self, path: PageArray, checkpoint: Checkpoint | None) -> None:
        """Begin at the end of ``path``, of base pages: take references to what resuming reads."""
        self.position = len(path) * self._size
        self._offered = len(path)
        self._rows.hold(path)
        self._checkpoints.last = checkpoint
        if checkpoint is not None and checkpoint.state is not None:
            self._board.units.retain(checkpoint.state)

    def begin(self, state: PageArray | None, prompt: Sized, *, found: int) -> None:
        """Take ``state`` as the running one, and plan checkpoints.

        ``found`` pages of the ``prompt`` are cached.
        """
        self.state = state
        self.row = prompt
        checkpoint = self._checkpoints.last
        if checkpoint is not None:
            if state is not None:
                assert checkpoint.state is not None
                self._copies.add(StateCopy(checkpoint.state, state))
            self._board.order.used(checkpoint)
        self._checkpoints.plan.prompt(self._rows.length, found, len(prompt))

    def give_up(self) -> None:
        """Undo `hold`, as the sequence cannot be opened."""
        if self._checkpoints.last is not None and self._checkpoints.last.state is not None:
            self._board.units.release(self._checkpoints.last.state)
        self.close()

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
        other._checkpoints.plan = self._checkpoints.plan.fork()
        other.state = state
        if state is not None and self.position:
            assert self.state is not None
            self._copies.fork_state(other._copies, self.state, state)
        return other

    def of(self, row: Sized) -> Self:
        """Return these, for the tokens ``row`` of a fork."""
        self.row = row
        return self

    def published(self, path: PageArray, sequence: int) -> None:
        """Offer the tree what belongs to ``path``, of published base pages."""
        self._copies.finish()
        stop = min(len(path), self.position // self._size)
        start = self._offered
        if start < stop:
            for window in range(len(self._board.layout.windows)):
                rows = self._rows.between(window, start, stop)
                self._board.store(window, path[start : start + len(rows)], rows)
            self._offered = stop
        self._checkpoints.publish(path[:stop], states=self.state is not None)
        self._board.report(sequence)

    def rewind(self, length: int, path: PageArray) -> None:
        """Go back so that nothing behind token ``length`` is computed; `position` tells how far.

        ``path`` has its published base pages. Goes on from this position if it can, else
        from the mark or the last position where all groups agree, at worst from 0.
        """
        board, size = self._board, self._size
        self._checkpoints.plan.cut(length)
        self._checkpoints.own.cut(length // size)
        mark = self._mark
        if mark.position is not None and mark.position > length:
            mark.drop()
        if self.position <= length:
            return
        if self.state is None and self._rows.covers(length):
            self._cut(length)
            return
        page, checkpoint = board.resume(path[: length // size])
        if mark.position is None or mark.state is None or mark.position < page * size:
            self._resume(path[:page], checkpoint)
            return
        assert self.state is not None
        board.units.retain(mark.state)
        self._copies.drop(lambda copy: isinstance(copy, StateCopy))
        self._copies.add(StateCopy(mark.state, self.state))
        self._cut(mark.position)

    def _resume(self, path: PageArray, checkpoint: Checkpoint | None) -> None:
        self._copies.finish()
        self._copies.drop()
        last, offered = self._checkpoints.last, self._offered
        self.hold(path, checkpoint)
        if checkpoint is not None and self.state is not None:
            assert checkpoint.state is not None
            self._copies.add(StateCopy(checkpoint.state, self.state))
        self._offered = min(offered, len(path))
        self._checkpoints.last = checkpoint or last

    def _cut(self, position: int) -> None:
        self._rows.cut(position)
        self._copies.drop(self._left_the_table)
        self._offered = min(self._offered, position // self._size)
        self.position = position

    def _left_the_table(self, copy: RowCopy | StateCopy) -> bool:
        return isinstance(copy, RowCopy) and not self._rows.has(copy.window, copy.dst)

    def close(self) -> None:
        """Drop all references."""
        units = self._board.units
        self._closed = True
        self._copies.leave()
        self._rows.close()
        self._checkpoints.own.close()
        if self.state is not None:
            units.release(self.state)
            self.state = None
        self._mark.drop()

    def references(self) -> Iterator[PageArray]:
        """Yield the pages of all references of this sequence, for pins and `check`."""
        yield from self._rows.live()
        yield from self._checkpoints.own.references()
        if self.state is not None:
            yield self.state
        if self._mark.state is not None:
            yield self._mark.state
        yield from self._copies.sources()


class CheckpointPlan:
    """Pages of planned checkpoints, all on the grid.

    A prompt gets one where it leaves what is cached (a branch), and one at its end. In a long new
    part, guesses at its quarters serve prompts that will branch there. An answer gets one every
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

    def prompt(self, start: int, found: int, tokens: int) -> None:
        """Plan for a prompt that begins at page ``start``, of which ``found`` pages are cached."""
        floor, size = self._layout.floor, self._layout.page_size
        end = floor((tokens - 1) // size)
        new = max(start, found)
        kinds: dict[int, CheckpointKind] = {}
        if (end - new) * size >= self._layout.guess_tokens:
            for part in (1, 2, 3):
                kinds[floor(new + (end - new) * part // 4)] = "guess"
        kinds[end] = "end"
        kinds[floor(found)] = "branch"
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

    def is_guess(self, page: int) -> bool:
        """Whether a checkpoint that is planned at ``page`` is a mere guess."""
        return self._kinds.get(page) == "guess"

    def reached(self, page: int) -> CheckpointKind:
        """Return the kind of the checkpoint at ``page``, which is no longer planned."""
        return self._kinds.pop(page, "end")

    def passed(self, page: int) -> list[tuple[int, CheckpointKind]]:
        """Return the planned pages up to ``page``, rising, which end with it; no guesses."""
        done = sorted(at for at in self._kinds if at <= page)
        return [(at, kind) for at in done if (kind := self._kinds.pop(at)) != "guess"]

    def cut(self, tokens: int) -> None:
        """Forget what is planned behind token ``tokens``."""
        pages = tokens // self._layout.page_size
        self._kinds = {page: kind for page, kind in self._kinds.items() if page <= pages}
        self._last = min(self._last, self._layout.floor(pages))

    def fork(self) -> Self:
        """Return a plan of its own for a fork."""
        other = type(self)(self._layout)
        other._kinds, other._last = self._kinds.copy(), self._last
        return other


@dataclass(slots=True, eq=False)
class _Unpublished:
    page: int
    kind: CheckpointKind
    state: PageArray
    rows: list[Rows]  # of each window, up to `page`


class UnpublishedCheckpoints:
    """Checkpoints with references to their states and to the rows that they need.

    The rows may leave the windows of the sequence before the checkpoints are published.

    Thread safety: none; under the cache's lock.
    """

    __slots__ = ("_board", "_waiting")

    def __init__(self, board: GroupBoard) -> None:
        self._board = board
        self._waiting: list[_Unpublished] = []

    def __contains__(self, page: object) -> bool:
        return any(one.page == page for one in self._waiting)

    def add(self, page: int, kind: CheckpointKind, state: PageArray, rows: list[Rows]) -> None:
        """Add a checkpoint at ``page``; takes over the reference to ``state``."""
        for part in rows:
            self._board.units.retain(live_pages(part))
        self._waiting.append(_Unpublished(page, kind, state, rows))

    def publish(self, path: PageArray) -> list[Checkpoint | None]:
        """Store those on ``path``, of base pages; return them, None for one without rows."""
        stored: list[Checkpoint | None] = []
        for one in [one for one in self._waiting if one.page <= len(path)]:
            needed = self._board.needed(one.page)
            for rows, (window, first) in zip(one.rows, needed, strict=True):
                self._board.store(window, path[first : one.page], rows)
            stored.append(self._board.add(path[: one.page], one.state, one.kind))
            self._drop(one)
        return stored

    def cut(self, page: int) -> None:
        """Drop those behind ``page``."""
        for one in [one for one in self._waiting if one.page > page]:
            self._drop(one)

    def close(self) -> None:
        """Drop all."""
        self.cut(0)

    def _drop(self, one: _Unpublished) -> None:
        self._waiting.remove(one)
        for rows in one.rows:
            self._board.units.release(live_pages(rows))
        self._board.units.release(one.state)

    def references(self) -> Iterator[PageArray]:
        """Yield the pages of all references, for `check`."""
        for one in self._waiting:
            yield one.state
            yield from (live_pages(rows) for rows in one.rows)


class SequenceCheckpoints:
    """The checkpoints of one sequence.

    Thread safety: none; under the cache's lock.

    Attributes:
        plan: where it should leave some.
        own: those that the tree does not have yet.
        last: the one that it used or stored last.
    """

    __slots__ = ("_board", "last", "own", "plan")

    def __init__(self, board: GroupBoard) -> None:
        self._board = board
        self.plan = CheckpointPlan(board.layout)
        self.own = UnpublishedCheckpoints(board)
        self.last: Checkpoint | None = None

    def publish(self, path: PageArray, *, states: bool) -> None:
        """Store those on ``path``, of base pages; without ``states``, add some."""
        for checkpoint in self.own.publish(path):
            self._stored(checkpoint, states=states)
        if not states and len(path):
            self._mark_ends(path)

    def _mark_ends(self, path: PageArray) -> None:
        """Add checkpoints that need no state: where it was planned, and at the end."""
        for page, kind in self.plan.passed(len(path)):
            self._stored(self._board.add(path[:page], None, kind), states=False)
        if self.last is None or self.last.page < len(path):
            self._stored(self._board.add(path, None, "end"), states=False)

    def _stored(self, checkpoint: Checkpoint | None, *, states: bool) -> None:
        """Go on from ``checkpoint``; the one before it is extended, unless prompts branch there.

        Without states that one is of no further use: rows that it needs may go any time.
        """
        before = self.last
        if checkpoint is None or (before is not None and before.page >= checkpoint.page):
            return
        self.last = checkpoint
        if before is not None and before.stored and not before.branches:
            self._board.extended(before, checkpoint)
            if not states and before.node not in self._board.covered:
                self._board.remove(before, replaced=True)
