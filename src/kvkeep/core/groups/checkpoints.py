"""`GroupBoard`: rows and checkpoints beside the pages of a prefix tree, and what goes for room."""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Final

import numpy as np

from kvkeep.core.events import Evicted, GroupsLost, GroupsStored, ResumePoint, frozen
from kvkeep.core.pages.pool import EMPTY_PAGES, joined
from kvkeep.core.prefix.node import TreeObserver, descend, path_pages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import numpy.typing as npt

    from kvkeep.core.events import CacheLock
    from kvkeep.core.groups.plan import GroupLayout
    from kvkeep.core.pages import PagePool
    from kvkeep.core.pages.pool import PageArray
    from kvkeep.core.prefix.node import Coverage, Node
    from kvkeep.core.prefix.tree import Tree

    Rows = npt.NDArray[np.int32]
    Flags = npt.NDArray[np.bool_]
    Tokens = npt.NDArray[np.int64]

__all__ = ["Checkpoint", "GroupBoard", "GroupStats"]

_STEP: Final = 64  # pages that a search for where a request resumes looks at first


@dataclass(slots=True, kw_only=True)
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

    pages: int = 0
    idle_pages: int = 0
    rows: int = 0
    loose_rows: int = 0
    checkpoints: int = 0
    checkpoints_stored: int = 0
    checkpoints_evicted: int = 0
    checkpoints_replaced: int = 0
    checkpoints_without_room: int = 0
    resumes_given_up: int = 0
    unresumed_tokens: int = 0
    rows_stored: int = 0
    rows_evicted: int = 0


@dataclass(slots=True, eq=False)
class Checkpoint:
    """A position at which requests may resume: the end of the base page ``base``.

    That is page ``page - 1`` of its path. It needs the rows that its windows reach back to, and
    keeps ``state``, the pool pages of the state at the position (None for a model without states).
    ``branch``: whether prompts branched here when it was made. ``behind``: whether the request that
    made or used it has stored another one behind it since.
    """

    base: int
    page: int
    state: PageArray | None
    branch: bool
    behind: bool = False


class _Changes:
    """Rows and checkpoints that were stored, or lost, since the last event."""

    __slots__ = ("freed", "points", "rows")

    def __init__(self, windows: int) -> None:
        self.points: list[ResumePoint] = []
        self.rows: list[list[PageArray]] = [[] for _ in range(windows)]
        self.freed = 0

    def pop(self) -> GroupsLost | None:
        """Return and forget all changes, as of what was lost; None if there are none."""
        if not self.points and not any(self.rows):
            return None
        rows = tuple(frozen(joined(pages)) for pages in self.rows)
        changes = GroupsLost(tuple(self.points), rows, self.freed)
        self.points, self.rows, self.freed = [], [[] for _ in rows], 0
        return changes


def _last(path: PageArray, flags: Callable[[PageArray, int], Flags]) -> int:
    """Return the last page of ``path`` that has a flag; 0 for none.

    ``flags`` returns those of the pages from ``start`` to the end of the given path.
    """
    stop, step = len(path), _STEP
    while stop:
        start = max(0, stop - step)
        pages = flags(path[:stop], start).nonzero()[0]
        if len(pages):
            return start + int(pages[-1])
        stop, step = start, step * 4
    return 0


class GroupBoard(TreeObserver):
    """Keeps rows and checkpoints beside the runs of a prefix tree.

    The tree decides which base pages are stored, and reports every change of its runs. A base page
    keeps its id and its position on its path while it is stored, however runs are cut, joined or
    grown. So what belongs to it is found by this id, and what a request may reuse is read from the
    page ids of its path: it costs the same in one run or in a thousand.

    All references to pages of rows and states are counted here. Those that the tree stores and no
    sequence uses are *idle*: they can be freed at any time. A row that no checkpoint needs is
    *loose*: a request may resume behind it, but it goes before anything else, the oldest first. (In
    a model with states no request can, so it goes at once.)

    The KV of a window that `SequenceGroups.load` brings begins where the window does, mostly inside
    a page: the tokens in front of it *lack* in that row. A request that goes on behind the load
    does not attend to them, but one that goes on a little earlier does.

    Thread safety: none; under the cache's lock. Paths are given as their base pages, in order.
    Memory: 21 bytes a pool page, and 4 for each window and each pool page of its rows.

    Attributes:
        rows: for each window, int32 [pool pages, pool pages of a row], by base page; -1 where
            missing.
        lacking: int32 [pool pages], by the first page of a row: how many leading tokens lack. Set
            when it is allocated, also for rows that the tree does not store.
        stored: pages that the tree refers to.
        idle: of these, pages that nothing else refers to.
        counters: the totals of `GroupStats`.
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
        self._tree = tree
        self._covered = covered
        self.stored = self.idle = 0
        self.counters = GroupStats()
        num_pages = pool.num_pages
        # By base page:
        self.rows: list[Rows] = [np.full((num_pages, w), -1, np.int32) for w in layout.widths]
        self._needs = [np.zeros(num_pages, np.int32) for _ in layout.windows]  # by checkpoints
        self._nodes = np.full(num_pages, None, object)
        self._ends = np.zeros(num_pages, np.bool_)  # whether there is a checkpoint
        self._checkpoints: dict[int, Checkpoint] = {}
        # In which they go: those left behind, then the least recently used first.
        self._order: OrderedDict[Checkpoint, None] = OrderedDict()
        self._pinned: OrderedDict[Checkpoint, None] = OrderedDict()  # met on paths with pins
        # By pool page of a row or state:
        self._in_tree = np.zeros(num_pages, np.bool_)
        # By the first page of a row:
        self.lacking = np.zeros(num_pages, np.int32)
        self._loose = np.zeros(num_pages, np.bool_)
        self._bases = np.zeros(num_pages, np.int32)
        self._windows = np.zeros(num_pages, np.int16)
        # First pages of rows that are loose and idle, or were: the oldest first.
        self._queue: OrderedDict[int, None] = OrderedDict()
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
            self._remove(checkpoint)
        for window in range(len(self.rows)):
            self._drop_rows(window, gone)
        self._nodes[gone] = None

    def points(self, node: Node) -> tuple[int, ...]:
        """Return the pages of the path behind which ``node`` has checkpoints. Cost: its pages."""
        return tuple(each.page for each in self._on(node.pages))

    def pages_beside(self, node: Node) -> int:
        """Return the pool pages of rows and states of ``node``. Cost: its pages."""
        pages = len(self._on(node.pages)) * self.layout.state_pages
        for rows in self.rows:
            pages += int(np.count_nonzero(rows[node.pages, 0] >= 0)) * rows.shape[1]
        return pages

    def _on(self, bases: PageArray) -> list[Checkpoint]:
        """Return the checkpoints at the ends of base pages."""
        return [self._checkpoints[base] for base in bases[self._ends[bases]].tolist()]

    def _resized(self, bases: PageArray, pages: int) -> None:
        """Report that ``pages`` more are kept beside each base page, or less."""
        for node, count in Counter(self._nodes[bases].tolist()).items():
            self._tree.resized(node, count * pages)

    # --- references to pages of rows and states --------------------------------------------------

    def take(self, count: int) -> PageArray:
        """Allocate pages for a sequence, after making room for them if need be."""
        pages = self.pool.take(count)
        self.lacking[pages] = 0
        return pages

    def retain(self, pages: PageArray) -> None:
        """Add a sequence's reference."""
        self.idle -= self.count_idle(pages)
        self.pool.retain(pages)

    def release(self, pages: PageArray) -> None:
        """Drop a sequence's reference."""
        self.pool.release(pages)
        idle = pages[self._are_idle(pages)]
        self.idle += len(idle)
        self._enqueue(idle)

    def _add(self, pages: PageArray) -> None:
        """Add the tree's reference to ``pages``, which sequences refer to."""
        assert not self._in_tree[pages].any(), "the tree stores a row or state twice"
        self.pool.retain(pages)
        self._in_tree[pages] = True
        self.stored += len(pages)

    def _drop(self, pages: PageArray) -> int:
        """Drop the tree's reference to ``pages``; return how many became free."""
        self.idle -= self.count_idle(pages)
        self._in_tree[pages] = False
        self.stored -= len(pages)
        return self.pool.release(pages)

    def _are_idle(self, pages: PageArray) -> Flags:
        idle: Flags = self._in_tree[pages] & (self.pool.references[pages] == 1)
        return idle

    def count_idle(self, pages: PageArray) -> int:
        """Return how many of ``pages`` only the tree refers to."""
        return int(np.count_nonzero(self._are_idle(pages)))

    def is_shared(self, pages: PageArray) -> bool:
        """Whether there are references to ``pages`` beside that of the caller."""
        return bool(np.count_nonzero(self.pool.references[pages] != 1))

    def _enqueue(self, idle: PageArray) -> None:
        """Queue the loose rows whose first pages are among these ``idle`` pages."""
        self._queue.update(dict.fromkeys(idle[self._loose[idle]].tolist()))

    # --- where a request can resume --------------------------------------------------------------

    def resume(self, path: PageArray) -> tuple[int, Checkpoint | None]:
        """Return the last position on ``path`` where all groups agree, in pages.

        Also the checkpoint there; 0 and None if there is none. A checkpoint's rows are all there,
        so a model with states resumes at any. Cost: the rows of the windows, and O(pages) behind
        the position, vectorised; the runs of the path cost nothing.
        """
        flags = self._are_covered if self.layout.state is None else self._are_ends
        page = _last(path, flags)
        return page, self._checkpoints.get(int(path[page - 1])) if page else None

    def _are_ends(self, path: PageArray, start: int) -> Flags:
        """Return behind which pages from ``start`` to the end of ``path`` checkpoints are."""
        ends: Flags = self._ends[path[max(0, start - 1) :]]
        return ends if start else np.concatenate(([False], ends))

    def _are_covered(self, path: PageArray, start: int) -> Flags:
        """Return behind which pages from ``start`` to the end of ``path`` all windows are whole."""
        size, stop = self.layout.page_size, len(path)
        covered = np.ones(stop - start + 1, np.bool_)
        positions = np.arange(start, stop + 1, dtype=np.int64) * size
        needed = zip(self.rows, self.layout.windows, self.layout.needed(start), strict=True)
        for rows, spec, first in needed:
            lacking = self._lacking(rows[path[first:], 0])
            begins = np.arange(first, stop, dtype=np.int64) * size
            ends = np.zeros(stop - first + 1, np.int64)  # where the last lacking token ends
            np.maximum.accumulate(np.where(lacking > 0, begins + lacking, 0), out=ends[1:])
            covered &= ends[start - first :] <= spec.first_tokens(positions)
        return covered

    def _lacking(self, firsts: PageArray) -> Tokens:
        """Return how many leading tokens of each row lack: all of them of a missing row."""
        lacking: Tokens = np.where(firsts < 0, self.layout.page_size, self.lacking[firsts])
        return lacking

    def used_pages(self, path: PageArray, checkpoint: Checkpoint | None) -> PageArray:
        """Return the pool pages that resuming at the end of ``path`` reads, beside base pages."""
        needed = zip(self.rows, self.layout.needed(len(path)), strict=True)
        pages = [rows[path[first:]].ravel() for rows, first in needed]
        if checkpoint is not None and checkpoint.state is not None:
            pages.append(checkpoint.state)
        return joined(pages)

    # --- rows ------------------------------------------------------------------------------------

    def store(self, window: int, bases: PageArray, rows: Rows) -> None:
        """Store ``rows``, -1 where the sequence has none, for the base pages ``bases``.

        Rows that are stored already replace those in ``rows``, of which the sequence then has
        references to the stored ones. Where fewer tokens lack in ours, it is the other way round.
        """
        there: Rows = self.rows[window][bases]
        firsts = rows[:, 0]
        differ = (firsts >= 0) & (there[:, 0] != firsts)
        better = differ & (self._lacking(firsts) < self._lacking(there[:, 0]))
        if better.any():
            exchanged = there[better & (there[:, 0] >= 0)]
            self._loose[exchanged[:, 0]] = False
            self._drop(exchanged.ravel())
            at, firsts = bases[better], firsts[better]
            self._add(rows[better].ravel())
            self.rows[window][at] = rows[better]
            self._bases[firsts], self._windows[firsts] = at, window
            self._loose[firsts] = self._needs[window][at] == 0
            new = bases[better & (there[:, 0] < 0)]
            self.counters.rows_stored += len(new)
            self._resized(new, rows.shape[1])
            if self.lock.hooks and len(new):
                self._stored.rows[window].append(new)
        other = differ & ~better
        if other.any():
            self.retain(there[other].ravel())
            self.release(rows[other].ravel())
            rows[other] = there[other]

    def _drop_rows(self, window: int, bases: PageArray) -> int:
        """Remove the rows of ``bases``; return the pages that became free."""
        rows = self.rows[window]
        bases = bases[rows[bases, 0] >= 0]
        if not len(bases):
            return 0
        gone: Rows = rows[bases]
        rows[bases] = -1
        self._loose[gone[:, 0]] = False
        freed = self._drop(gone.ravel())
        self.counters.rows_evicted += len(bases)
        self._resized(bases, -rows.shape[1])
        if self.lock.hooks:
            self._lost.rows[window].append(bases)
            self._lost.freed += freed
        return freed

    # --- checkpoints -----------------------------------------------------------------------------

    def add(
        self, path: PageArray, state: PageArray | None, *, branch: bool = False
    ) -> Checkpoint | None:
        """Store a checkpoint at the end of ``path``; return it, or the one there.

        None if rows that it needs are missing. ``state`` becomes the tree's if the checkpoint is
        new; the caller keeps its own reference in any case.
        """
        base, page = int(path[-1]), len(path)
        there = self._checkpoints.get(base)
        if there is not None or not self._are_covered(path, page)[0]:
            return there
        checkpoint = self._checkpoints[base] = Checkpoint(base, page, state, branch)
        self._order[checkpoint] = None
        self._ends[base] = True
        if state is not None:
            self._add(state)
            self._tree.resized(self._nodes[base], len(state))
        self._need(checkpoint, 1)
        self.counters.checkpoints_stored += 1
        if self.lock.hooks:
            self._stored.points.append(ResumePoint(base, page * self.layout.page_size))
        return checkpoint

    def _remove(self, checkpoint: Checkpoint, *, replaced: bool = False) -> None:
        """Remove a checkpoint and its state; rows that no other one needs become loose.

        It is counted as ``replaced``, or as evicted.
        """
        base, state = checkpoint.base, checkpoint.state
        del self._checkpoints[base]
        del (self._order if checkpoint in self._order else self._pinned)[checkpoint]
        self._ends[base] = False
        self._need(checkpoint, -1)
        self.counters.checkpoints_replaced += replaced
        self.counters.checkpoints_evicted += not replaced
        if self.lock.hooks:
            position = checkpoint.page * self.layout.page_size
            self._lost.points.append(ResumePoint(base, position))
        if state is not None:
            freed = self._drop(state)
            self._tree.resized(self._nodes[base], -len(state))
            if self.lock.hooks:
                self._lost.freed += freed

    def _need(self, checkpoint: Checkpoint, change: int) -> None:
        """Count one checkpoint more or less for the rows that ``checkpoint`` needs."""
        for window, bases in enumerate(self._needed(checkpoint)):
            needs = self._needs[window]
            needs[bases] += change
            if change > 0:
                self._loose[self.rows[window][bases, 0]] = False
            elif self.layout.state is not None:
                self._drop_rows(window, bases[needs[bases] == 0])
            else:
                firsts = self.rows[window][bases[needs[bases] == 0], 0]
                self._loose[firsts] = True
                self._enqueue(firsts[self._are_idle(firsts)])

    def _needed(self, checkpoint: Checkpoint) -> list[PageArray]:
        """Return, for each window, the base pages whose rows ``checkpoint`` needs."""
        node, page = self._nodes[checkpoint.base], checkpoint.page
        return [path_pages(node, first, page) for first in self.layout.needed(page)]

    def resumed(self, checkpoint: Checkpoint) -> None:
        """Record that a request resumed at ``checkpoint``: it is the most recently used."""
        checkpoint.behind = False
        if checkpoint in self._order:
            self._order.move_to_end(checkpoint)

    def extended(self, before: Checkpoint, by: Checkpoint) -> None:
        """Record that the request that used or made ``before`` has stored ``by`` behind it.

        ``before`` is the first to go from now on, unless prompts branch there. Without states it is
        of no further use: rows that it needs may go any time.

        The next request of this conversation resumes at ``by``, so its run takes over the hits.
        Otherwise a policy would evict it as new, and the runs before it are of no use alone. The
        run is held by the request, so it is in no queue that is ordered by hits.
        """
        if self._checkpoints.get(before.base) is not before:
            return
        node, last = self._nodes[before.base], self._nodes[by.base]
        if before.branch or (before.page == node.end and len(node.children) > 1):
            return
        if node is not last:
            last.hits = max(last.hits, node.hits)
        if node in self._covered:
            return
        if before.state is None:
            self._remove(before, replaced=True)
        elif before in self._order:
            before.behind = True
            self._order.move_to_end(before, last=False)

    # --- pins ------------------------------------------------------------------------------------

    def pinned(self, node: Node, *, hard: bool) -> PageArray:
        """Keep what resuming on the path to ``node`` reads, for a pin that ends there.

        Returns its pages, each with a reference, for a hard pin. A soft one gets a checkpoint, if
        that needs no state: rows without one would be freed before anything else.
        """
        path = path_pages(node, 0, node.end)
        page, checkpoint = self.resume(path)
        if not hard:
            if page and self.layout.state is None:
                self.add(path[:page], None)
            return EMPTY_PAGES
        pages = self.used_pages(path[:page], checkpoint)
        self.retain(pages)
        return pages

    def unpinned(self, node: Node) -> None:
        """Record that a pin at ``node`` ended: what none covers any longer is the first to go."""
        above: Node | None = node
        while above is not None and above.parent is not None and above not in self._covered:
            for checkpoint in self._on(above.pages):
                if checkpoint in self._pinned:
                    del self._pinned[checkpoint]
                    self._order[checkpoint] = None
                    self._order.move_to_end(checkpoint, last=False)
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
        return self.pool.num_free + self._tree.num_evictable + self.idle

    def make_room(self, count: int, forget: Callable[[PageArray], None]) -> int:
        """Free up to ``count`` pages; return how many became free. ``forget`` gets base pages.

        In this order:

        1. loose rows, and checkpoints that were left behind;
        2. the run that the policy names, from its tail: the checkpoint at its end, and the KV back
           to the one before;
        3. other checkpoints, the least recently used first;
        4. runs and checkpoints of prompts with soft pins.

        Cost: what is freed; for 3 and 4 also the checkpoints that are in use.
        """
        before = self.pool.num_free
        while (short := count - (self.pool.num_free - before)) > 0:
            if not (
                self._free_loose(short)
                or self._remove_first(self._order, behind=True)
                or self._evict_tail(short, forget)
                or self._remove_first(self._order)
                or self._evict_tail(short, forget, pinned=True)
                or self._remove_first(self._pinned)
            ):
                break
        return self.pool.num_free - before

    def _free_loose(self, needed: int) -> int:
        """Free loose rows that no sequence uses, oldest first, until ``needed`` pages are free.

        Returns how many became free. Rows in use come back to the queue when that ends.
        """
        freed, most = 0, max(self.layout.widths, default=1)
        while freed < needed and self._queue:
            firsts = np.array(list(islice(self._queue, -(-(needed - freed) // most))), np.int32)
            for first in firsts.tolist():
                del self._queue[first]
            firsts = firsts[self._loose[firsts] & self._are_idle(firsts)]
            windows, bases = self._windows[firsts], self._bases[firsts]
            for window in range(len(self.rows)):
                freed += self._drop_rows(window, bases[windows == window])
        return freed

    def _remove_first(self, order: OrderedDict[Checkpoint, None], *, behind: bool = False) -> bool:
        """Remove the first checkpoint that frees pages; return whether there was one.

        Of those left ``behind``, or of all in ``order``. Those met before it that are in use go to
        its end, those under pins to the others.
        """
        for _ in range(len(order) if self.idle else 0):
            checkpoint = next(iter(order))
            if behind and not checkpoint.behind:
                break
            if order is self._order and self._nodes[checkpoint.base] in self._covered:
                del order[checkpoint]
                self._pinned[checkpoint] = None
            elif self._frees(checkpoint):
                self._remove(checkpoint)
                return True
            else:
                order.move_to_end(checkpoint)
            checkpoint.behind = False
        return False

    def _frees(self, checkpoint: Checkpoint) -> bool:
        """Whether removing ``checkpoint`` frees pages, or makes rows loose that can be freed.

        Not while sequences or hard pins use what it keeps.
        """
        if checkpoint.state is not None:
            return self.count_idle(checkpoint.state) > 0
        needed = zip(self.rows, self._needed(checkpoint), strict=True)
        return any(self.count_idle(rows[bases].ravel()) for rows, bases in needed)

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
                self._remove(end)
            behind = leaf.size - _last(leaf.pages, self._are_ends)
            return behind if self.layout.state is not None else min(behind, most, portion)

        pages = self._tree.evict_leaf(choose, pinned=pinned)
        if pages is None:
            return False
        forget(pages)
        node = None if self.layout.state is None else parents[0]
        # Nor can a request use what the runs before it have behind their last checkpoints. A policy
        # may find such a run worth keeping, as many requests used it.
        while node is not None and node.parent is not None:
            behind = node.size - _last(node.pages, self._are_ends)
            if node.children or node.holders or node in self._covered or not behind:
                break
            parent = node.parent if behind == node.size else None
            forget(self._tree.remove(node, behind))
            node = parent
        return True

    def drop_idle(self, top: Node) -> None:
        """Drop checkpoints and rows of ``top`` and all nodes behind it that nothing uses."""
        for node in reversed([node for node, _ in descend(top)]):  # what is needed lies before
            for checkpoint in self._on(node.pages):
                if self._frees(checkpoint):
                    self._remove(checkpoint)
            for window, rows in enumerate(self.rows):
                firsts = rows[node.pages, 0]
                self._drop_rows(window, node.pages[self._loose[firsts] & self._are_idle(firsts)])

    # --- figures and events ----------------------------------------------------------------------

    def stats(self) -> GroupStats:
        """Return the figures at this moment. Cost: the pool's pages, vectorised."""
        counters = self.counters
        return replace(
            counters,
            pages=self.stored,
            idle_pages=self.idle,
            rows=counters.rows_stored - counters.rows_evicted,
            loose_rows=int(np.count_nonzero(self._loose)),
            checkpoints=len(self._checkpoints),
        )

    def report(self, sequence: int | None) -> None:
        """Report rows and checkpoints that a sequence or a pin stored, and those replaced."""
        if (stored := self._stored.pop()) is not None:
            self.lock.emit(GroupsStored(sequence, stored.checkpoints, stored.rows))
        if (lost := self._lost.pop()) is not None:
            self.lock.emit(Evicted(frozen(EMPTY_PAGES), "replaced", lost))

    def take_lost(self) -> GroupsLost | None:
        """Return the rows and checkpoints lost since the last call; None: none."""
        return self._lost.pop()

    def check(
        self,
        nodes: Iterable[Node],
        references: Iterable[PageArray],
        expected: npt.NDArray[np.int64],
    ) -> None:
        """Assert every invariant; add the references of all groups to ``expected``, by page.

        ``nodes`` are those of the tree but the roots. Sequences and pins have ``references``.
        """
        layout, counters = self.layout, self.counters
        is_base, loose = np.zeros_like(self._ends), np.zeros_like(self._loose)
        needs = [np.zeros_like(each) for each in self._needs]
        stored: list[PageArray] = []  # pages of rows and states
        for node in nodes:
            assert node.groups is self
            assert all(each is node for each in self._nodes[node.pages]), "a page of another node"
            is_base[node.pages] = True
        assert not self._nodes[~is_base].any(), "a node of a page that is not stored"
        ends = np.flatnonzero(self._ends).tolist()
        assert ends == sorted(self._checkpoints), "an end without a checkpoint, or without an end"
        ordered = [*self._order, *self._pinned]
        assert ends == sorted(each.base for each in ordered), "a checkpoint that would never go"
        for base, checkpoint in self._checkpoints.items():
            node, state = self._nodes[base], checkpoint.state
            assert base == checkpoint.base == node.pages[checkpoint.page - node.depth - 1]
            assert checkpoint.page % layout.grid == 0
            assert (state is None) == (layout.state is None)
            stored += [] if state is None else [state]
            for window, bases in enumerate(self._needed(checkpoint)):
                needs[window][bases] += 1
        count = 0
        for window, rows in enumerate(self.rows):
            missing = rows < 0
            assert (missing.all(axis=1) == missing.any(axis=1)).all(), "half a row"
            assert missing[~is_base].all(), "a row outlives its page"
            assert (needs[window] == self._needs[window]).all(), "wrong needs"
            assert not needs[window][missing[:, 0]].any(), "a checkpoint needs a missing row"
            bases = np.flatnonzero(~missing[:, 0]).astype(np.int32)
            firsts, count = rows[bases, 0], count + len(bases)
            assert (self._bases[firsts] == bases).all(), "a row has moved"
            assert (self._windows[firsts] == window).all()
            loose[firsts] = needs[window][bases] == 0
            stored.append(rows[bases].ravel())
        assert count == counters.rows_stored - counters.rows_evicted, "rows are counted wrongly"
        gone = counters.checkpoints_evicted + counters.checkpoints_replaced
        assert len(ends) == counters.checkpoints_stored - gone, "a checkpoint was not counted"
        assert (loose == self._loose).all(), "the loose rows are not those that nothing needs"
        assert layout.state is None or not loose.any(), "a loose row, though there are states"
        idle = np.flatnonzero(loose & (self.pool.references == 1))
        assert set(idle.tolist()) <= self._queue.keys(), "a loose row is not queued"
        pages = joined(stored)
        assert len(np.unique(pages)) == len(pages), "the tree stores a row or state twice"
        assert (np.flatnonzero(self._in_tree) == np.sort(pages)).all(), "wrong pages of the tree"
        assert (self.stored, self.idle) == (len(pages), self.count_idle(pages))
        for each in [*references, pages]:
            np.add.at(expected, each, 1)
