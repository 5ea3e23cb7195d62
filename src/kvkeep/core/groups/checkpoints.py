"""`GroupBoard`: the checkpoints of all prefixes in the tree, and what goes first for room."""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final, Literal

import numpy as np

from kvkeep.core.events import Evicted, GroupsLost, GroupsStored, ResumePoint, frozen
from kvkeep.core.groups.rows import TreeRows, live_pages
from kvkeep.core.pages.tables import EMPTY_PAGES, joined
from kvkeep.core.prefix.node import TreeObserver, descend, path_pages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import numpy.typing as npt

    from kvkeep.core.events import CacheLock
    from kvkeep.core.groups.plan import GroupLayout
    from kvkeep.core.groups.rows import Rows
    from kvkeep.core.pages import PagePool
    from kvkeep.core.pages.tables import PageArray
    from kvkeep.core.prefix.node import Coverage, Node
    from kvkeep.core.prefix.tree import Tree

    CheckpointKind = Literal["branch", "end", "tail"]
    Queue = OrderedDict["Checkpoint", None]

__all__ = ["Checkpoint", "GroupBoard", "GroupCounters", "GroupStats"]

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


class Checkpoint:
    """A position at which requests may resume: the end of the base page ``base``.

    That is page ``page - 1`` of its path. It needs the rows that its windows reach back to, and
    keeps ``state``, the pool pages of the state at the position (None for a model without states).
    """

    __slots__ = ("base", "branch", "page", "queue", "state")

    def __init__(self, base: int, page: int, state: PageArray | None, *, branch: bool) -> None:
        self.base = base
        self.page = page
        self.state = state
        self.branch = branch
        """Whether prompts branched here when it was made."""
        self.queue: Queue | None = None
        """Its place in the order of eviction; None once the tree no longer has it."""

    def __repr__(self) -> str:
        return f"<checkpoint at page {self.page}>"


class _Changes:
    """Rows and checkpoints that were stored, or lost, since the last event."""

    __slots__ = ("freed", "points", "rows")

    def __init__(self, windows: int) -> None:
        self.points: list[ResumePoint] = []
        self.rows: list[list[PageArray]] = [[] for _ in range(windows)]
        self.freed = 0

    def __bool__(self) -> bool:
        return bool(self.points) or any(self.rows)

    def parts(self) -> tuple[tuple[ResumePoint, ...], tuple[PageArray, ...]]:
        """Return the checkpoints, and the base pages of the rows of each window."""
        return tuple(self.points), tuple(frozen(joined(rows)) for rows in self.rows)


class GroupBoard(TreeObserver):
    """Keeps rows and checkpoints beside the runs of a prefix tree.

    The tree decides which base pages are stored, and reports every change of its runs. What belongs
    to a base page is found by the page's id. So what a request may reuse is read from the page ids
    of its path, and costs the same in one run or in a thousand.

    Checkpoints wait in three queues, the least recently used first. *Early* ones were left behind
    by the request that made or used them. *Late* ones go with the KV behind them, or when nothing
    else can be evicted. *Pinned* ones were found on paths with soft pins, and return when these
    end.

    Thread safety: none; under the cache's lock. Paths are given as their base pages, in order.
    """

    def __init__(
        self,
        layout: GroupLayout,
        pool: PagePool,
        tree: Tree,
        lock: CacheLock,
        covered: Coverage,
        *,
        reuse: bool,
    ) -> None:
        """``covered``: the runs on paths with pins. Without ``reuse`` nothing is kept."""
        self.layout = layout
        self.pool = pool
        self.lock = lock
        self.reuse = reuse
        self.rows = TreeRows(layout, pool)
        self.counters = GroupCounters()
        self._tree = tree
        self._covered = covered
        self._checkpoints: dict[int, Checkpoint] = {}  # by base page
        self._ends = np.zeros(pool.num_pages, np.bool_)  # base pages at whose end checkpoints are
        self._nodes = np.full(pool.num_pages, None, object)  # by base page
        self._early: Queue = OrderedDict()
        self._late: Queue = OrderedDict()
        self._pinned: Queue = OrderedDict()
        self._stored = _Changes(len(layout.windows))
        self._lost = _Changes(len(layout.windows))
        tree.observe(self)

    # --- what the tree reports, and asks of its runs ---------------------------------------------

    def born(self, node: Node, pages: int) -> None:
        node.groups = self
        self._nodes[node.pages[-pages:]] = node

    def split(self, upper: Node, lower: Node) -> None:
        upper.groups = self
        self._nodes[upper.pages] = upper

    def joined(self, upper: Node, lower: Node) -> None:
        self._nodes[upper.pages] = lower

    def gone(self, leaf: Node, parent: Node) -> None:
        self.trimmed(leaf, 0)

    def trimmed(self, leaf: Node, keep: int) -> None:
        gone = leaf.pages[keep:]
        for checkpoint in self._on(gone):
            self.remove(checkpoint)
        self._drop_rows(gone)
        self._nodes[gone] = None

    def points(self, node: Node) -> tuple[int, ...]:
        """Return the pages of the path behind which ``node`` has checkpoints. Cost: its pages."""
        return tuple(each.page for each in self._on(node.pages))

    def pages_beside(self, node: Node) -> int:
        """Return the pool pages of rows and states of ``node``. Cost: its pages."""
        pages = len(self._on(node.pages)) * self.layout.state_pages
        for rows in self.rows.rows:
            pages += int(np.count_nonzero(rows[node.pages, 0] >= 0)) * rows.shape[1]
        return pages

    def _on(self, bases: PageArray) -> list[Checkpoint]:
        """Return the checkpoints at the ends of base pages."""
        return [self._checkpoints[base] for base in bases[self._ends[bases]].tolist()]

    def _node(self, checkpoint: Checkpoint) -> Node:
        node: Node = self._nodes[checkpoint.base]
        return node

    def _resized(self, bases: PageArray, pages: int) -> None:
        """Tell the owners of runs that ``pages`` more are kept beside each base page, or less."""
        for node, count in Counter(self._nodes[bases].tolist()).items():
            self._tree.resized(node, count * pages)

    # --- where a request can resume --------------------------------------------------------------

    def resume(self, path: PageArray) -> tuple[int, Checkpoint | None]:
        """Return the last position on ``path`` where all groups agree, in pages.

        Also the checkpoint there; 0 and None if there is none. A checkpoint's rows are all there,
        so a model with states resumes at any. Cost: the rows of the windows, and O(pages) behind
        the position, vectorised; the runs of the path cost nothing.
        """
        page = self._last_covered(path) if self.layout.state is None else self._last_end(path)
        return page, self._checkpoints.get(int(path[page - 1])) if page else None

    def _last_end(self, pages: PageArray) -> int:
        """Return how many of ``pages`` the last checkpoint has before it; 0 for none."""
        stop, step = len(pages), _STEP
        while stop:
            start = max(0, stop - step)
            ends = self._ends[pages[start:stop]].nonzero()[0]
            if len(ends):
                return start + 1 + int(ends[-1])
            stop, step = start, step * 4
        return 0

    def _last_covered(self, path: PageArray) -> int:
        """Return the last page of ``path`` behind which all windows are whole; 0 for none."""
        size, stop, step = self.layout.page_size, len(path), _STEP
        while stop:
            start = max(0, stop - step)
            agreed = np.ones(stop - start + 1, np.bool_)
            for window, first in self.layout.needed(start):
                ends = self.rows.ends(window, path[first:stop], first)
                last = np.zeros(stop - first + 1, np.int64)  # where the last lacking token ends
                np.maximum.accumulate(ends, out=last[1:])
                spec = self.layout.windows[window]
                agreed &= last[start - first :] <= spec.first_token_each(start, stop, size)
            pages = agreed.nonzero()[0]
            if len(pages):
                return start + int(pages[-1])
            stop, step = start, step * 4
        return 0

    def used_pages(self, path: PageArray, checkpoint: Checkpoint | None) -> PageArray:
        """Return the pool pages that resuming at the end of ``path`` reads, beside base pages."""
        pages = [
            live_pages(self.rows.rows[window][path[first:]])
            for window, first in self.layout.needed(len(path))
        ]
        if checkpoint is not None and checkpoint.state is not None:
            pages.append(checkpoint.state)
        return joined(pages)

    # --- rows ------------------------------------------------------------------------------------

    def store(self, window: int, bases: PageArray, rows: Rows) -> None:
        """Store ``rows`` for the base pages ``bases``, where missing.

        Rows that are stored already replace those in ``rows``, of which the sequence then has
        references to the stored ones. Where fewer tokens lack in ours, it is the other way round.
        """
        there = self.rows.rows[window][bases]
        ours = rows[:, 0] >= 0
        new = ours & (there[:, 0] < 0)
        if new.any():
            at = bases[new]
            self.rows.put(window, at, rows[new])
            self.counters.rows_stored += len(at)
            if self.lock.hooks:
                self._stored.rows[window].append(at)
            self._resized(at, rows.shape[1])
        other = ours & ~new & (there[:, 0] != rows[:, 0])
        if not other.any():
            return
        lacking = self.rows.lacking
        fuller = other & (lacking(rows[:, 0]) < lacking(there[:, 0]))
        if fuller.any():
            self.rows.remove(window, bases[fuller])
            self.rows.put(window, bases[fuller], rows[fuller])
            other &= ~fuller
        if other.any():
            self.rows.retain(there[other].ravel())
            self.rows.release(rows[other].ravel())
            rows[other] = there[other]

    def _drop_rows(self, bases: PageArray, window: int | None = None) -> int:
        """Remove the rows of ``bases``, of one window or all; return the pages that became free."""
        freed = 0
        for at, rows in enumerate(self.rows.rows):
            if window is not None and window != at:
                continue
            there = bases[rows[bases, 0] >= 0]
            if len(there):
                pages = self.rows.remove(at, there)
                self.counters.rows_evicted += len(there)
                self._resized(there, -rows.shape[1])
                if self.lock.hooks:
                    self._lost.rows[at].append(there)
                    self._lost.freed += pages
                freed += pages
        return freed

    # --- checkpoints -----------------------------------------------------------------------------

    def add(
        self, path: PageArray, state: PageArray | None, *, branch: bool = False
    ) -> Checkpoint | None:
        """Store a checkpoint at the end of ``path``; return it, or the one there.

        None if rows that it needs are missing. ``state`` becomes the tree's if the checkpoint is
        new; the caller keeps its own reference in any case.
        """
        base, position = int(path[-1]), len(path) * self.layout.page_size
        there = self._checkpoints.get(base)
        if there is not None:
            return there
        for window, first in self.layout.needed(len(path)):
            ends = self.rows.ends(window, path[first:], first)
            if (ends > self.layout.windows[window].first_token(position)).any():
                return None
        checkpoint = self._checkpoints[base] = Checkpoint(base, len(path), state, branch=branch)
        self._ends[base] = True
        if state is not None:
            self.rows.store(state)
            self._tree.resized(self._node(checkpoint), len(state))
        self._need(checkpoint, 1)
        self._queue(checkpoint, self._late)
        self.counters.checkpoints_stored += 1
        if self.lock.hooks:
            self._stored.points.append(ResumePoint(base, position))
        return checkpoint

    def remove(self, checkpoint: Checkpoint, *, replaced: bool = False) -> None:
        """Remove a checkpoint and its state; rows that no other one needs become loose.

        It is counted as ``replaced``, or as evicted.
        """
        if self.lock.hooks:
            position = checkpoint.page * self.layout.page_size
            self._lost.points.append(ResumePoint(checkpoint.base, position))
        del self._checkpoints[checkpoint.base]
        self._ends[checkpoint.base] = False
        self._queue(checkpoint, None)
        self._need(checkpoint, -1)
        if replaced:
            self.counters.checkpoints_replaced += 1
        else:
            self.counters.checkpoints_evicted += 1
        if checkpoint.state is not None:
            freed = self.rows.drop(checkpoint.state)
            self._tree.resized(self._node(checkpoint), -len(checkpoint.state))
            if self.lock.hooks:
                self._lost.freed += freed

    def _need(self, checkpoint: Checkpoint, change: int) -> None:
        """Count one checkpoint more or less for the rows that ``checkpoint`` needs."""
        for window, bases in self._needs(checkpoint):
            loose = self.rows.need(window, bases, change)
            if self.layout.state is not None:
                self._drop_rows(loose, window)

    def _needs(self, checkpoint: Checkpoint) -> list[tuple[int, PageArray]]:
        """Return each window, and the base pages whose rows ``checkpoint`` needs."""
        node, page = self._node(checkpoint), checkpoint.page
        return [
            (window, path_pages(node, first, page)) for window, first in self.layout.needed(page)
        ]

    def resumed(self, checkpoint: Checkpoint) -> None:
        """Record that a request resumed at ``checkpoint``: it is the most recently used."""
        self._queue(checkpoint, self._late)

    def extended(self, before: Checkpoint, by: Checkpoint) -> None:
        """Record that the request that used or made ``before`` has left ``by`` behind it.

        ``before`` is early from now on, unless prompts branch there. Without states it is of no
        further use: rows that it needs may go any time.

        The next request of this conversation resumes at ``by``, so its run takes over the hits.
        Otherwise a policy would evict it as new, and the runs before it are of no use alone. The
        run is held by the request, so it is in no queue that is ordered by hits.
        """
        if before.queue is None:
            return
        node, last = self._node(before), self._node(by)
        if before.branch or (before.page == node.end and len(node.children) > 1):
            return
        if node is not last:
            last.hits = max(last.hits, node.hits)
        if self.layout.state is None and node not in self._covered:
            self.remove(before, replaced=True)
        else:
            self._queue(before, self._early)

    @staticmethod
    def _queue(checkpoint: Checkpoint, queue: Queue | None) -> None:
        """Put a checkpoint at the end of ``queue``, and nowhere else."""
        if checkpoint.queue is not None:
            del checkpoint.queue[checkpoint]
        checkpoint.queue = queue
        if queue is not None:
            queue[checkpoint] = None

    # --- pins ------------------------------------------------------------------------------------

    def keep(self, node: Node) -> PageArray:
        """Return references to what resuming on the path to ``node`` reads, for a hard pin."""
        path = path_pages(node, 0, node.end)
        page, checkpoint = self.resume(path)
        pages = self.used_pages(path[:page], checkpoint)
        self.rows.retain(pages)
        return pages

    def pinned(self, node: Node) -> None:
        """Add a checkpoint for a soft pin that ends at ``node``, if it needs no state.

        Where there is none, rows that resuming needs would be freed before anything else.
        """
        if self.layout.state is None:
            path = path_pages(node, 0, node.end)
            page, there = self.resume(path)
            if page and there is None:
                self.add(path[:page], None)

    def unpinned(self, node: Node, pages: PageArray | None) -> None:
        """Record that a pin at ``node`` ended, which kept ``pages`` if it was hard.

        Checkpoints that pins do not cover any longer are the least recently used.
        """
        if pages is not None:
            self.rows.release(pages)
        above: Node | None = node
        while above is not None and above.parent is not None and above not in self._covered:
            for checkpoint in self._on(above.pages):
                if checkpoint.queue is self._pinned:
                    self._queue(checkpoint, self._late)
                    self._late.move_to_end(checkpoint, last=False)
            above = above.parent

    def resumable(self, node: Node) -> int:
        """Return the last position on the path to ``node`` where a request can resume, in pages.

        Thread safety: takes the cache's lock.
        """
        with self.lock:
            return self.resume(path_pages(node, 0, node.end))[0] if node.in_tree else 0

    # --- room ------------------------------------------------------------------------------------

    @property
    def available(self) -> int:
        """How many pages `PagePool.take` can give."""
        return self.pool.num_free + self._tree.num_evictable + self.rows.idle

    def make_room(self, count: int, forget: Callable[[PageArray], None]) -> int:
        """Free up to ``count`` pages; return how many became free. ``forget`` gets base pages.

        In this order:

        1. loose rows, and checkpoints that later ones have replaced;
        2. the run that the policy names, from its tail: the checkpoint at its end, and the KV back
           to the one before;
        3. all other checkpoints;
        4. runs and checkpoints of prompts with soft pins.
        """
        before = self.pool.num_free
        while (short := count - (self.pool.num_free - before)) > 0:
            if not (
                self._free_loose(short)
                or self._remove_first(self._early)
                or self._evict_tail(short, forget)
                or self._remove_first(self._late)
                or self._evict_tail(short, forget, pinned=True)
                or self._remove_first(self._pinned)
            ):
                break
        return self.pool.num_free - before

    def _free_loose(self, needed: int) -> int:
        """Free loose rows that no sequence uses, oldest first, until ``needed`` pages are free."""
        freed, most = 0, max(self.layout.widths, default=1)
        while freed < needed and self.rows.any_queued:
            for window, bases in self.rows.oldest_loose(-(-(needed - freed) // most)):
                freed += self._drop_rows(bases, window)
        return freed

    def _remove_first(self, queue: Queue) -> bool:
        """Remove the first checkpoint of ``queue`` that frees pages; return whether there was one.

        Those met before it go behind others: they are in use, or to the queue of those pinned.
        """
        for _ in range(len(queue) if self.rows.idle else 0):
            checkpoint = next(iter(queue))
            if queue is not self._pinned and self._node(checkpoint) in self._covered:
                self._queue(checkpoint, self._pinned)
            elif self._frees(checkpoint):
                self.remove(checkpoint)
                return True
            else:
                queue.move_to_end(checkpoint)
        return False

    def _frees(self, checkpoint: Checkpoint) -> bool:
        """Whether removing ``checkpoint`` frees pages, or makes rows loose that can be freed.

        Not while sequences or hard pins use what it keeps.
        """
        if checkpoint.state is not None:
            return self.rows.count_idle(checkpoint.state) > 0
        return any(
            self.rows.count_idle(live_pages(self.rows.rows[window][bases]))
            for window, bases in self._needs(checkpoint)
        )

    def _evict_tail(
        self, most: int, forget: Callable[[PageArray], None], *, pinned: bool = False
    ) -> bool:
        """Evict the tail of the next run; return whether there was one.

        With states, all that is behind its last checkpoint, as no request can resume there; the
        checkpoint at its end is removed before. Else ``most``, within the policy's portion.
        """
        parents: list[Node | None] = []

        def choose(leaf: Node, portion: int) -> int:
            parents.append(leaf.parent)  # a leaf that is evicted whole has none afterwards
            end = self._checkpoints.get(int(leaf.pages[-1]))
            if end is not None:
                self.remove(end)
            behind = self._behind(leaf)
            return behind if self.layout.state is not None else min(behind, most, portion)

        pages = self._tree.evict_leaf(choose, pinned=pinned)
        if pages is None:
            return False
        forget(pages)
        if self.layout.state is not None:
            self._evict_useless(parents[0], forget)
        return True

    def _behind(self, node: Node) -> int:
        """Return how many pages of ``node`` are behind its last checkpoint. Cost: O(these)."""
        return node.size - self._last_end(node.pages)

    def _evict_useless(self, node: Node | None, forget: Callable[[PageArray], None]) -> None:
        """Evict what ``node`` and the runs before it have behind their last checkpoints.

        As long as they are leaves that nothing holds or pins. A policy may find such a run worth
        keeping, as many requests used it, but none can any more: they would need a state.
        """
        while node is not None and node.parent is not None:
            behind = self._behind(node)
            if node.children or node.holders or node in self._covered or not behind:
                return
            parent = node.parent if behind == node.size else None
            forget(self._tree.remove(node, behind))
            node = parent

    def drop_idle(self, top: Node) -> None:
        """Drop checkpoints and rows of ``top`` and all nodes behind it that nothing uses."""
        for node in reversed([node for node, _ in descend(top)]):  # what is needed lies before
            for checkpoint in self._on(node.pages):
                if self._frees(checkpoint):
                    self.remove(checkpoint)
            for window, (rows, needs) in enumerate(
                zip(self.rows.rows, self.rows.needs, strict=True)
            ):
                loose = node.pages[(rows[node.pages, 0] >= 0) & (needs[node.pages] == 0)]
                self._drop_rows(loose[self.rows.are_idle(rows[loose, 0])], window)

    # --- figures and events ----------------------------------------------------------------------

    def stats(self) -> GroupStats:
        """Return the figures at this moment."""
        return GroupStats(
            pages=self.rows.stored,
            idle_pages=self.rows.idle,
            rows=self.counters.rows_stored - self.counters.rows_evicted,
            loose_rows=self.rows.num_loose,
            checkpoints=len(self._checkpoints),
            **asdict(self.counters),
        )

    def report(self, sequence: int | None) -> None:
        """Report rows and checkpoints that a sequence or a pin stored, and those replaced."""
        if self._stored:
            stored, self._stored = self._stored, _Changes(len(self.layout.windows))
            self.lock.emit(GroupsStored(sequence, *stored.parts()))
        lost = self.take_lost()
        if lost is not None:
            self.lock.emit(Evicted(frozen(EMPTY_PAGES), "replaced", lost))

    def take_lost(self) -> GroupsLost | None:
        """Return the rows and checkpoints lost since the last call; None: none."""
        if not self._lost:
            return None
        lost, self._lost = self._lost, _Changes(len(self.layout.windows))
        return GroupsLost(*lost.parts(), lost.freed)

    def check(
        self,
        nodes: Iterable[Node],
        references: Iterable[PageArray],
        expected: npt.NDArray[np.int64],
    ) -> None:
        """Assert every invariant; add the references of all groups to ``expected``, by page.

        ``nodes`` are those of the tree but the roots. Sequences and pins have ``references``.
        """
        layout, needs = self.layout, [np.zeros_like(each) for each in self.rows.needs]
        is_base = np.zeros_like(self._ends)
        for node in nodes:
            assert node.groups is self
            assert all(each is node for each in self._nodes[node.pages]), "a page of another node"
            is_base[node.pages] = True
        assert not self._nodes[~is_base].any(), "a node of a page that is not stored"
        bases = np.flatnonzero(self._ends).tolist()
        assert bases == sorted(self._checkpoints), "an end without a checkpoint, or without an end"
        for base, checkpoint in self._checkpoints.items():
            node = self._node(checkpoint)
            assert base == checkpoint.base == node.pages[checkpoint.page - node.depth - 1]
            assert checkpoint.page % layout.grid == 0
            assert (checkpoint.state is None) == (layout.state is None)
            assert checkpoint.queue is not None
            assert checkpoint in checkpoint.queue
            path = path_pages(node, 0, checkpoint.page)
            for window, first in layout.needed(checkpoint.page):
                needs[window][path[first:]] += 1
        queued = len(self._early) + len(self._late) + len(self._pinned)
        assert queued == len(self._checkpoints), "a checkpoint in two queues"
        for counted, right in zip(self.rows.needs, needs, strict=True):
            assert (counted == right).all(), "wrong needs"
        counters = self.counters
        count = sum(int(np.count_nonzero(rows[:, 0] >= 0)) for rows in self.rows.rows)
        assert count == counters.rows_stored - counters.rows_evicted, "rows are counted wrongly"
        gone = counters.checkpoints_evicted + counters.checkpoints_replaced
        assert queued == counters.checkpoints_stored - gone, "a checkpoint was not counted"
        states = [one.state for one in self._checkpoints.values() if one.state is not None]
        for pages in [*references, self.rows.check(states, is_base)]:
            np.add.at(expected, pages, 1)
