"""`GroupBoard`: the rows and checkpoints of all prefixes in the tree."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from kvkeep.core.events import Evicted, GroupsLost, GroupsStored, ResumePoint, frozen
from kvkeep.core.groups.stored import Checkpoint, NodeCheckpoints, TreeRows, live_pages
from kvkeep.core.groups.units import TreeUnits
from kvkeep.core.pages.tables import EMPTY_PAGES, joined
from kvkeep.core.prefix.node import TreeObserver, descend, path_pages

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import numpy.typing as npt

    from kvkeep.core.events import CacheLock
    from kvkeep.core.groups.stored import CheckpointKind, Rows
    from kvkeep.core.groups.tables import SequenceGroups
    from kvkeep.core.pages import PagePool
    from kvkeep.core.pages.layout import GroupLayout
    from kvkeep.core.pages.tables import PageArray
    from kvkeep.core.prefix.node import Coverage, Node
    from kvkeep.core.prefix.tree import Tree

__all__ = ["GroupBoard", "GroupCounters", "GroupStats", "check_groups"]

_STEP: Final = 64  # pages that a search for where a request resumes looks at first


@dataclass(slots=True)
class GroupCounters:
    """Counts of what happened since the cache was made; they never fall."""

    checkpoints_stored: int = 0
    checkpoints_evicted: int = 0
    checkpoints_replaced: int = 0
    checkpoints_without_room: int = 0
    resumes_given_up: int = 0
    unresumed_tokens: int = 0
    rows_stored: int = 0
    rows_evicted: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStats:
    """What a cache keeps beside its base pages, at one moment; totals since it was made.

    ``pages`` of the pool hold ``rows`` and states of the tree; of these, ``idle_pages`` are used by
    no sequence. No checkpoint needs ``loose_rows`` rows. Each of ``checkpoints`` has a state, if
    the model has any.

    Totals: ``checkpoints_stored`` became reusable; ``checkpoints_evicted`` went for lack of room or
    with their pages; ``checkpoints_replaced`` needed no state, and a later one took their place;
    ``checkpoints_without_room`` were planned and not kept. ``resumes_given_up`` requests did not
    fit beside what resuming reads, and resumed earlier. ``unresumed_tokens`` of prompts were
    computed though their KV was cached, as a window or a state was missing.
    """

    pages: int
    idle_pages: int
    rows: int
    loose_rows: int
    checkpoints: int
    checkpoints_stored: int
    checkpoints_evicted: int
    checkpoints_replaced: int
    checkpoints_without_room: int
    resumes_given_up: int
    unresumed_tokens: int
    rows_stored: int
    rows_evicted: int


class GroupBoard(TreeObserver):
    """Keeps rows and checkpoints beside the runs of a prefix tree.

    The tree decides which base pages are stored, and reports every change of its runs. What belongs
    to a base page is found by the page's id. So what a request may reuse is read from the page ids
    of its path, and costs the same in one run or in a thousand. A row that no checkpoint needs is
    *loose*: a request may resume behind it, but it is freed before anything else.

    Thread safety: none; under the cache's lock. Paths are given as their base pages, in order.
    """

    def __init__(
        self, layout: GroupLayout, pool: PagePool, tree: Tree, lock: CacheLock, covered: Coverage
    ) -> None:
        self.layout = layout
        self.pool = pool
        self.lock = lock
        self.reuse = True
        """False: nothing is kept for later requests."""
        self.covered = covered
        """The runs on paths with pins."""
        self._tree = tree
        self.units = TreeUnits(pool)
        self.order = self.units.order
        self.loose = self.units.loose
        self.stored_rows = TreeRows(layout, pool.num_pages)
        self._ends = np.zeros(pool.num_pages, np.bool_)  # base pages at whose end checkpoints are
        self._nodes = np.full(pool.num_pages, None, object)  # by base page
        self.counters = GroupCounters()
        self.journal = GroupJournal(layout, lock)
        tree.observe(self)

    def available(self) -> int:
        """Return how many pages `PagePool.take` can give."""
        return self.pool.num_free + self._tree.num_evictable + self.units.idle

    def report(self, sequence: int | None) -> None:
        """Report rows and checkpoints that a sequence or a pin stored, and those replaced."""
        stored = self.journal.take_stored(sequence)
        if stored is not None:
            self.lock.emit(stored)
        lost = self.journal.take_lost()
        if lost is not None and self.lock.hooks:
            self.lock.emit(Evicted(frozen(EMPTY_PAGES), "replaced", lost))

    # --- what the tree reports -------------------------------------------------------------------

    def born(self, node: Node, pages: int) -> None:
        if pages == node.size:
            node.groups = NodeCheckpoints(node, self.stored_rows)
        self._nodes[node.pages[-pages:]] = node

    def split(self, upper: Node, lower: Node) -> None:
        upper.groups = lower.groups.split(upper)
        self._nodes[upper.pages] = upper

    def joined(self, upper: Node, lower: Node) -> None:
        lower.groups.absorb(upper.groups)
        upper.groups = None
        self._nodes[upper.pages] = lower

    def gone(self, leaf: Node, parent: Node) -> None:
        self.trimmed(leaf, 0)

    def trimmed(self, leaf: Node, keep: int) -> None:
        while leaf.groups.last > leaf.depth + keep:
            self.remove(leaf.groups.all[-1])
        gone = leaf.pages[keep:]
        for window, rows in enumerate(self.stored_rows.rows):
            firsts = rows[gone, 0]
            there = firsts >= 0
            self.loose.discard(firsts[there].tolist())
            self._drop_rows(window, gone[there])
        self._nodes[gone] = None

    # --- rows ------------------------------------------------------------------------------------

    def store(self, window: int, bases: PageArray, rows: Rows) -> None:
        """Store ``rows`` for the base pages ``bases``, where missing.

        Rows that are stored already replace those in ``rows``, of which the sequence then has
        references to the stored ones. Where fewer tokens lack in ours, it is the other way round.
        """
        table, needs = self.stored_rows.rows[window], self.stored_rows.needs[window]
        there = table[bases]
        ours = rows[:, 0] >= 0
        new = ours & (there[:, 0] < 0)
        if new.any():
            at = bases[new]
            self.stored_rows.put(window, at, rows[new])
            self.units.store(rows[new].ravel())
            self.counters.rows_stored += len(at)
            self.journal.stored_rows(window, at)
            self._resized(self._nodes[at], rows.shape[1])
            self.loose.add(rows[new & (needs[bases] == 0), 0].tolist())
        other = ours & ~new & (there[:, 0] != rows[:, 0])
        if not other.any():
            return
        lacking = self.stored_rows.lacking
        fuller = other & (lacking(rows[:, 0]) < lacking(there[:, 0]))
        if fuller.any():
            self._exchange(window, bases[fuller], rows[fuller])
            other &= ~fuller
        if other.any():
            self.units.retain(there[other].ravel())
            self.units.release(rows[other].ravel())
            rows[other] = there[other]

    def _exchange(self, window: int, bases: PageArray, rows: Rows) -> None:
        """Store ``rows`` in place of those of ``bases``, which are the same but less."""
        old: Rows = self.stored_rows.rows[window][bases]
        loose = self.stored_rows.needs[window][bases] == 0
        self.loose.discard(old[loose, 0].tolist())
        self.units.drop(old.ravel())
        self.stored_rows.put(window, bases, rows)
        self.units.store(rows.ravel())
        self.loose.add(rows[loose, 0].tolist())

    def free_loose(self, needed: int) -> int:
        """Free loose rows that no sequence uses, oldest first, until ``needed`` pages are free."""
        freed, most = 0, max(self.layout.widths, default=1)
        while freed < needed and self.units.idle:
            oldest = self.loose.oldest(-(-(needed - freed) // most))
            if not oldest:
                break
            for window, bases in self.stored_rows.places(np.array(oldest)):
                freed += self._free_rows(window, bases)
        return freed

    def _free_rows(self, window: int, bases: PageArray) -> int:
        """Free the loose rows of ``bases`` that no sequence uses; set others aside."""
        rows: Rows = self.stored_rows.rows[window][bases]
        idle = self.units.are_idle(rows)
        self.loose.set_aside(rows[~idle, 0].tolist())
        return self._drop_rows(window, bases[idle])

    def _drop_rows(self, window: int, bases: PageArray) -> int:
        """Remove the rows of ``bases`` from the tree; return the pages that became free."""
        if not len(bases):
            return 0
        rows: Rows = self.stored_rows.rows[window][bases]
        self.stored_rows.remove(window, bases)
        freed = self.units.drop(rows.ravel())
        self.counters.rows_evicted += len(rows)
        self._resized(self._nodes[bases], -rows.shape[1])
        self.journal.lost_rows(window, bases, freed)
        return freed

    # --- checkpoints -----------------------------------------------------------------------------

    def add(
        self, path: PageArray, state: PageArray | None, kind: CheckpointKind
    ) -> Checkpoint | None:
        """Store a checkpoint at the end of ``path``; return it, or the one there.

        None if rows that it needs are missing. ``state`` becomes the tree's if the checkpoint is
        new; the caller keeps its own reference in any case.
        """
        there = self._at(path)
        if there is not None:
            return there
        position = len(path) * self.layout.page_size
        for window, first in self.needed(len(path)):
            ends = self.stored_rows.ends(window, path[first:], first)
            if (ends > self.layout.windows[window].first_token(position)).any():
                return None
        node: Node = self._nodes[path[-1]]
        checkpoint = Checkpoint(node, len(path), state, kind)
        node.groups.add(checkpoint)
        self._ends[path[-1]] = True
        if state is not None:
            self.units.store(state)
            self._resized([node], len(state))
        self._need(checkpoint, 1)
        self.order.add(checkpoint)
        self.counters.checkpoints_stored += 1
        self.journal.stored(checkpoint)
        return checkpoint

    def extended(self, before: Checkpoint, by: Checkpoint) -> None:
        """Record that the request that used or made ``before`` has left ``by`` behind it.

        The next request of this conversation resumes at ``by``, so its run takes over the hits.
        Otherwise a policy would evict it as new, and the runs before it are of no use alone. The
        run is held by the request, so it is in no queue that is ordered by hits.
        """
        self.order.extended(before)
        if before.node is not by.node:
            by.node.hits = max(by.node.hits, before.node.hits)

    def remove(self, checkpoint: Checkpoint, *, replaced: bool = False) -> None:
        """Remove a checkpoint and its state; rows that no other one needs become loose.

        It is counted as ``replaced``, or as evicted.
        """
        checkpoint.node.groups.all.remove(checkpoint)
        self._ends[checkpoint.base] = False
        checkpoint.stored = False
        self.order.discard(checkpoint)
        self._need(checkpoint, -1)
        if replaced:
            self.counters.checkpoints_replaced += 1
        else:
            self.counters.checkpoints_evicted += 1
        freed = 0
        if checkpoint.state is not None:
            freed = self.units.drop(checkpoint.state)
            self._resized([checkpoint.node], -len(checkpoint.state))
        self.journal.lost(checkpoint, freed)

    def frees(self, checkpoint: Checkpoint) -> bool:
        """Whether removing ``checkpoint`` frees pages, or makes rows loose that can be freed.

        Not while sequences or hard pins use what it keeps.
        """
        if checkpoint.state is not None:
            return self.units.is_idle(checkpoint.state)
        return any(
            self.units.count_idle(live_pages(self.stored_rows.rows[window][bases]))
            for window, bases in self._needs(checkpoint)
        )

    def drop_idle(self, top: Node) -> None:
        """Drop checkpoints and rows of ``top`` and all nodes behind it that nothing uses."""
        nodes = [node for node, _ in descend(top) if node.groups is not None]
        for node in nodes:
            for checkpoint in node.groups.all.copy():
                if self.frees(checkpoint):
                    self.remove(checkpoint)
        for node in nodes:
            for window, rows in enumerate(self.stored_rows.rows):
                firsts = rows[node.pages, 0]
                loose = (firsts >= 0) & (self.stored_rows.needs[window][node.pages] == 0)
                self.loose.discard(firsts[loose].tolist())
                self._free_rows(window, node.pages[loose])

    def needed(self, page: int) -> Iterable[tuple[int, int]]:
        """Yield each window, and the first page whose row is needed to resume at ``page``."""
        size = self.layout.page_size
        for window, spec in enumerate(self.layout.windows):
            yield window, spec.first_needed(page * size, size)

    def _needs(self, checkpoint: Checkpoint) -> Iterator[tuple[int, PageArray]]:
        """Yield each window, and the base pages whose rows ``checkpoint`` needs."""
        for window, first in self.needed(checkpoint.page):
            yield window, path_pages(checkpoint.node, first, checkpoint.page)

    def _need(self, checkpoint: Checkpoint, change: int) -> None:
        """Count one checkpoint more or less for the rows that ``checkpoint`` needs."""
        for window, bases in self._needs(checkpoint):
            needs = self.stored_rows.needs[window]
            needs[bases] += change
            turned = bases[needs[bases] == (1 if change > 0 else 0)]
            firsts = self.stored_rows.rows[window][turned, 0]
            rows = firsts[firsts >= 0].tolist()
            if change < 0:
                self.loose.add(rows)
            else:
                self.loose.discard(rows)

    def resume(self, path: PageArray) -> tuple[int, Checkpoint | None]:
        """Return the last position on ``path`` where all groups agree, in pages.

        Also the checkpoint there; 0 and None if there is none. A checkpoint's rows are all there,
        so a model with states resumes at any. Cost: the rows of the windows, and O(pages) behind
        the position, vectorised; the runs of the path cost nothing.
        """
        stop, step = len(path), _STEP
        while True:
            start = max(0, stop - step)
            page = self._last(path, start, stop)
            if page >= start:
                return page, self._at(path[:page])
            stop, step = start, step * 4

    def _last(self, path: PageArray, start: int, stop: int) -> int:
        """Return the last position up to ``stop`` where all groups agree; -1 if before ``start``.

        The beginning of the path is such a position.
        """
        layout = self.layout
        if layout.state is not None:
            ends = self._ends[path[start:stop]].nonzero()[0]
            if len(ends):
                return start + 1 + int(ends[-1])
            return -1 if start else 0
        agreed = np.ones(stop - start + 1, np.bool_)
        for window, first in self.needed(start):
            ends = self.stored_rows.ends(window, path[first:stop], first)
            last = np.zeros(stop - first + 1, np.int64)  # where the last lacking token ends
            np.maximum.accumulate(ends, out=last[1:])
            spec = layout.windows[window]
            agreed &= last[start - first :] <= spec.first_token_each(start, stop, layout.page_size)
        pages = agreed.nonzero()[0]
        return start + int(pages[-1]) if len(pages) else -1

    def _at(self, path: PageArray) -> Checkpoint | None:
        """Return the checkpoint at the end of ``path``."""
        if not len(path) or not self._ends[path[-1]]:
            return None
        checkpoint: Checkpoint | None = self._nodes[path[-1]].groups.at(len(path))
        return checkpoint

    def _resized(self, nodes: Iterable[Node], pages: int) -> None:
        """Tell the owners of runs that ``pages`` more are kept of each of ``nodes``, or less."""
        for node in nodes:
            self._tree.resized(node, pages)

    def stats(self) -> GroupStats:
        """Return the figures at this moment."""
        return GroupStats(
            pages=self.units.stored,
            idle_pages=self.units.idle,
            loose_rows=len(self.loose),
            rows=self.counters.rows_stored - self.counters.rows_evicted,
            checkpoints=len(self.order),
            **asdict(self.counters),
        )

    def check(self, nodes: Iterable[Node], checkpoints: Iterable[Checkpoint]) -> None:
        """Assert that base pages are noted as those of ``nodes`` and ends of ``checkpoints``."""
        there = np.zeros_like(self._ends)
        for node in nodes:
            assert all(each is node for each in self._nodes[node.pages]), "a page of another node"
            there[node.pages] = True
        assert not self._nodes[~there].any(), "a node of a page that is not stored"
        for window, rows in enumerate(self.stored_rows.rows):
            assert not (rows[~there] >= 0).any(), "a row outlives its page"
            self.stored_rows.check(window)
        ends = np.zeros_like(there)
        ends[np.array([each.base for each in checkpoints], np.intp)] = True
        assert (ends == self._ends).all(), "an end without a checkpoint, or the other way round"


def check_groups(
    board: GroupBoard,
    tree: Tree,
    sequences: Iterable[SequenceGroups],
    expected: npt.NDArray[np.int64],
) -> None:
    """Assert every invariant; add the references of all groups to ``expected``, by page."""
    stored: list[PageArray] = []
    checkpoints: list[Checkpoint] = []
    nodes: list[Node] = []
    for root in tree.roots.values():
        for node, _ in descend(root):
            if node.parent is not None:
                _check_node(board, node)
                checkpoints += node.groups.all
                nodes.append(node)
    board.check(nodes, checkpoints)
    loose: set[int] = set()
    for rows, needs in zip(board.stored_rows.rows, board.stored_rows.needs, strict=True):
        stored.append(live_pages(rows))
        loose |= {int(row) for row in rows[(needs == 0) & (rows[:, 0] >= 0), 0]}
    stored += [one.state for one in checkpoints if one.state is not None]
    assert set(board.order) == set(checkpoints), "a checkpoint without a place in the order"
    assert len(board.order) == len(checkpoints)
    board.order.check(board.units.is_idle)
    assert board.loose.firsts() == loose, "the loose rows are not those that no checkpoint needs"
    for first in board.loose.aside():
        assert not board.units.is_idle(np.array([first])), "a row is set aside and nobody uses it"
    _check_needs(board, checkpoints)
    for sequence in sequences:
        for pages in sequence.references():
            np.add.at(expected, pages, 1)
    counters = board.counters
    count = sum(int(np.count_nonzero(rows[:, 0] >= 0)) for rows in board.stored_rows.rows)
    assert count == counters.rows_stored - counters.rows_evicted, "rows are counted wrongly"
    gone = counters.checkpoints_evicted + counters.checkpoints_replaced
    assert len(checkpoints) == counters.checkpoints_stored - gone, "a checkpoint was not counted"
    pages = np.concatenate([np.empty(0, np.int32), *stored])
    np.add.at(expected, pages, 1)
    board.units.check(pages)


def _check_node(board: GroupBoard, node: Node) -> None:
    layout, checkpoints = board.layout, node.groups.all
    pages = [each.page for each in checkpoints]
    assert pages == sorted(set(pages)), "two checkpoints at one position"
    for checkpoint in checkpoints:
        assert checkpoint.node is node
        assert checkpoint.stored
        assert node.depth < checkpoint.page <= node.end, "a checkpoint outside its run"
        assert checkpoint.page % layout.grid == 0
        assert (checkpoint.state is None) == (layout.state is None)
    path: list[Node] = []
    above: Node | None = node
    while above is not None:
        path.append(above)
        above = above.parent
    every = np.concatenate([each.pages for each in path[::-1]])
    for start in {0, node.depth, node.end // 2}:
        assert (path_pages(node, start, node.end) == every[start:]).all(), "wrong pages of a path"


def _check_needs(board: GroupBoard, checkpoints: Iterable[Checkpoint]) -> None:
    expected = [np.zeros_like(needs) for needs in board.stored_rows.needs]
    for checkpoint in checkpoints:
        path = path_pages(checkpoint.node, 0, checkpoint.page)
        for window, first in board.needed(checkpoint.page):
            expected[window][path[first:]] += 1
    for needs, right in zip(board.stored_rows.needs, expected, strict=True):
        assert (needs == right).all(), "wrong needs"


class GroupJournal:
    """Collects changes of rows and checkpoints for the next event; nothing without hooks.

    Thread safety: none; under the cache's lock.
    """

    __slots__ = ("_freed", "_lock", "_lost", "_lost_rows", "_size", "_stored", "_stored_rows")

    def __init__(self, layout: GroupLayout, lock: CacheLock) -> None:
        self._lock = lock
        self._size = layout.page_size
        self._freed = 0
        self._stored: list[ResumePoint] = []
        self._lost: list[ResumePoint] = []
        self._stored_rows: list[list[PageArray]] = [[] for _ in layout.windows]
        self._lost_rows: list[list[PageArray]] = [[] for _ in layout.windows]

    def stored_rows(self, window: int, bases: PageArray) -> None:
        """Note that rows of the base pages ``bases`` were stored."""
        if self._lock.hooks:
            self._stored_rows[window].append(bases)

    def stored(self, checkpoint: Checkpoint) -> None:
        """Note that a checkpoint was stored."""
        if self._lock.hooks:
            self._stored.append(self._point(checkpoint))

    def lost_rows(self, window: int, bases: PageArray, freed: int) -> None:
        """Note that rows of ``bases`` went, and ``freed`` pool pages with them."""
        if self._lock.hooks:
            self._lost_rows[window].append(bases)
            self._freed += freed

    def lost(self, checkpoint: Checkpoint, freed: int) -> None:
        """Note that a checkpoint went, and ``freed`` pool pages with it."""
        if self._lock.hooks:
            self._lost.append(self._point(checkpoint))
            self._freed += freed

    def _point(self, checkpoint: Checkpoint) -> ResumePoint:
        return ResumePoint(checkpoint.base, checkpoint.page * self._size)

    def take_stored(self, sequence: int | None) -> GroupsStored | None:
        """Return the rows and checkpoints stored for a sequence since the last call; None: none."""
        if not self._stored and not any(self._stored_rows):
            return None
        event = GroupsStored(
            sequence, tuple(self._stored), tuple(frozen(joined(rows)) for rows in self._stored_rows)
        )
        self._stored = []
        self._stored_rows = [[] for _ in self._stored_rows]
        return event

    def take_lost(self) -> GroupsLost | None:
        """Return the rows and checkpoints lost since the last call; None: none."""
        if not self._lost and not any(self._lost_rows):
            return None
        lost = GroupsLost(
            tuple(self._lost),
            tuple(frozen(joined(rows)) for rows in self._lost_rows),
            self._freed,
        )
        self._lost, self._freed = [], 0
        self._lost_rows = [[] for _ in self._lost_rows]
        return lost
