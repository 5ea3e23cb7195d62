"""`GroupBoard`: the rows and checkpoints of all prefixes in the tree."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvkeep.core.groups.fronts import RowFronts
from kvkeep.core.groups.journal import GroupJournal
from kvkeep.core.groups.kept import Checkpoint, Kept, live_pages
from kvkeep.core.groups.path import kept_between, resumable, up
from kvkeep.core.groups.places import RowPlaces
from kvkeep.core.groups.units import TreeUnits
from kvkeep.core.prefix.listener import TreeListener
from kvkeep.core.prefix.node import descend

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy.typing as npt

    from kvkeep.core.groups.kept import CheckpointKind, Rows
    from kvkeep.core.pages import PagePool
    from kvkeep.core.pages.layout import GroupLayout
    from kvkeep.core.pages.table import PageArray
    from kvkeep.core.prefix.node import Node
    from kvkeep.core.prefix.tree import RunTree

__all__ = ["GroupBoard", "GroupCounters", "GroupStats"]


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


class GroupBoard(TreeListener):
    """Keeps rows and checkpoints beside the runs of a prefix tree.

    The tree decides which base pages are stored; it reports every change of its shape, so that
    `Node.extra` fits its node. A row that no checkpoint needs is *loose*: a request may resume
    behind it, but it is freed before anything else.

    Thread safety: none; under the cache's lock.
    """

    def __init__(self, layout: GroupLayout, pool: PagePool, tree: RunTree) -> None:
        self.layout = layout
        self._tree = tree
        self.units = TreeUnits(pool)
        self.order = self.units.order
        self.loose = self.units.loose
        self.places = RowPlaces(pool.num_pages)
        self.fronts = RowFronts(pool.num_pages, layout.page_size)
        self.counters = GroupCounters()
        self.journal = GroupJournal(layout)

    # --- what the tree reports -------------------------------------------------------------------

    def grown(self, node: Node, pages: int) -> None:
        if node.extra is not None:
            node.extra.grow(pages)

    def split(self, upper: Node, lower: Node) -> None:
        if lower.extra is None:
            return
        upper.extra = lower.extra.split(upper.size, upper, upper.depth)
        self.places.moved(upper.extra.rows, upper)

    def rejoined(self, upper: Node, lower: Node) -> None:
        if upper.extra is None and lower.extra is None:
            return
        widths = self.layout.widths
        front = upper.extra or Kept.empty(upper.size, widths)
        if lower.extra is None:
            lower.extra = Kept.empty(lower.size - upper.size, widths)
        lower.extra.absorb(front, lower)
        upper.extra = None
        self.places.moved(front.rows, lower)

    def trimming(self, leaf: Node, keep: int) -> None:
        kept = leaf.extra
        if kept is None:
            return
        while kept.checkpoints and kept.checkpoints[-1].page > leaf.depth + keep:
            self.remove(kept.checkpoints[-1])
        for window, rows in enumerate(kept.trim(keep)):
            there = np.flatnonzero(rows[:, 0] >= 0)
            self.loose.discard(rows[there, 0].tolist())
            self._dropped(leaf, window, there + keep, rows[there])

    # --- rows ------------------------------------------------------------------------------------

    def store(self, node: Node, window: int, start: int, rows: Rows) -> None:
        """Store ``rows`` for the pages from ``start`` on of the path to ``node``, where missing.

        Rows that are stored already replace those in ``rows``, of which the sequence then has
        references to the stored ones. Where fewer tokens lack in ours, it is the other way round.
        """
        widths = self.layout.widths
        stop = start + len(rows)
        for one in up(node):
            if one.end <= start:
                break
            if one.depth >= stop:
                continue
            if one.extra is None:
                one.extra = Kept.empty(one.size, widths)
            first, last = max(start, one.depth), min(stop, one.end)
            self._store(one, window, first - one.depth, rows[first - start : last - start])

    def _store(self, node: Node, window: int, at: int, rows: Rows) -> None:
        kept = node.extra
        assert kept is not None
        there = kept.rows[window][at : at + len(rows)]
        ours = rows[:, 0] >= 0
        new = ours & (there[:, 0] < 0)
        if new.any():
            there[new] = rows[new]
            self.units.store(rows[new].ravel())
            self.counters.rows_stored += int(new.sum())
            stored = at + np.flatnonzero(new)
            self.places.put(rows[new, 0], node, window, node.depth + stored)
            self.journal.stored_rows(node, window, stored)
            self._resized(node, len(stored) * rows.shape[1])
            needs = kept.needs[window][at : at + len(rows)]
            self.loose.add(rows[new & (needs == 0), 0].tolist())
        other = ours & ~new & (there[:, 0] != rows[:, 0])
        fuller = other & (self.fronts.lacking(rows) < self.fronts.lacking(there))
        if fuller.any():
            self._exchange(node, window, at + np.flatnonzero(fuller), rows[fuller])
            other &= ~fuller
        if other.any():
            self.units.retain(there[other].ravel())
            self.units.release(rows[other].ravel())
            rows[other] = there[other]

    def _exchange(self, node: Node, window: int, at: npt.NDArray[np.int64], rows: Rows) -> None:
        """Store ``rows`` in place of those ``at`` pages of a node, which are the same but less."""
        kept = node.extra
        assert kept is not None
        old: Rows = kept.rows[window][at]
        loose = kept.needs[window][at] == 0
        self.loose.discard(old[loose, 0].tolist())
        self.places.forget(old[:, 0])
        self.units.drop(old.ravel())
        kept.rows[window][at] = rows
        self.units.store(rows.ravel())
        self.places.put(rows[:, 0], node, window, node.depth + at)
        self.loose.add(rows[loose, 0].tolist())

    def rows(self, node: Node, window: int, start: int, stop: int) -> Rows:
        """Return the rows of pages ``start`` … ``stop`` of the path to ``node``; -1 if missing."""
        found = np.full((stop - start, self.layout.widths[window]), -1, np.int32)
        for one, kept, inside in kept_between(node, start, stop):
            at = one.depth + inside.start - start
            found[at : at + inside.stop - inside.start] = kept.rows[window][inside]
        return found

    def free_loose(self, needed: int) -> int:
        """Free loose rows that no sequence uses, oldest first, until ``needed`` pages are free."""
        freed, most = 0, max(self.layout.widths, default=1)
        while freed < needed and self.units.idle:
            oldest = self.loose.oldest(-(-(needed - freed) // most))
            if not oldest:
                break
            for node, window, pages in self.places.of(np.array(oldest)):
                freed += self._free_rows(node, window, pages - node.depth)
        return freed

    def _free_rows(self, node: Node, window: int, at: npt.NDArray[np.integer[Any]]) -> int:
        """Free the loose rows ``at`` pages of a node that no sequence uses; set others aside."""
        assert node.extra is not None
        rows: Rows = node.extra.rows[window][at]
        idle = self.units.are_idle(rows)
        self.loose.set_aside(rows[~idle, 0].tolist())
        node.extra.rows[window][at[idle]] = -1
        return self._dropped(node, window, at[idle], rows[idle])

    def _dropped(
        self, node: Node, window: int, at: npt.NDArray[np.integer[Any]], rows: Rows
    ) -> int:
        """Drop the tree's references to ``rows``, of the pages ``at`` of a node."""
        if not len(rows):
            return 0
        self.places.forget(rows[:, 0])
        freed = self.units.drop(rows.ravel())
        self.counters.rows_evicted += len(rows)
        self._resized(node, -rows.size)
        self.journal.lost_rows(node, window, at, freed)
        return freed

    # --- checkpoints -----------------------------------------------------------------------------

    def add(
        self, node: Node, page: int, state: PageArray | None, kind: CheckpointKind
    ) -> Checkpoint | None:
        """Store a checkpoint at ``page`` of the path to ``node``; return it, or the one there.

        None if rows that it needs are missing. ``state`` becomes the tree's if the checkpoint is
        new; the caller keeps its own reference in any case.
        """
        owner = next(one for one in up(node) if one.depth < page)
        if owner.extra is None:
            owner.extra = Kept.empty(owner.size, self.layout.widths)
        there: Checkpoint | None = owner.extra.at(page)
        if there is not None:
            return there
        if self._incomplete(owner, page):
            return None
        checkpoint = Checkpoint(owner, page, state, kind)
        owner.extra.add(checkpoint)
        if state is not None:
            self.units.store(state)
            self._resized(owner, len(state))
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
        kept = checkpoint.node.extra
        assert kept is not None
        kept.checkpoints.remove(checkpoint)
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
            self._resized(checkpoint.node, -len(checkpoint.state))
        self.journal.lost(checkpoint, freed)

    def frees(self, checkpoint: Checkpoint) -> bool:
        """Whether removing ``checkpoint`` frees pages, or makes rows loose that can be freed.

        Not while sequences or hard pins use what it keeps.
        """
        if checkpoint.state is not None:
            return self.units.is_idle(checkpoint.state)
        return any(
            self.units.count_idle(live_pages(kept.rows[window][inside]))
            for window, first in self.needed(checkpoint.page)
            for _, kept, inside in kept_between(checkpoint.node, first, checkpoint.page)
        )

    def drop_idle(self, top: Node) -> None:
        """Drop checkpoints and rows of ``top`` and all nodes behind it that nothing uses."""
        for node, _ in descend(top):
            kept: Kept | None = node.extra
            if kept is None:
                continue
            for checkpoint in kept.checkpoints.copy():
                if self.frees(checkpoint):
                    self.remove(checkpoint)
        for node, _ in descend(top):
            kept = node.extra
            for window, rows in enumerate([] if kept is None else kept.rows):
                assert kept is not None
                loose = np.flatnonzero((rows[:, 0] >= 0) & (kept.needs[window] == 0))
                self.loose.discard(rows[loose, 0].tolist())
                self._free_rows(node, window, loose)

    def _incomplete(self, node: Node, page: int) -> bool:
        position = page * self.layout.page_size
        return not all(
            self.fronts.are_complete(
                self.rows(node, window, first, page), first, self.layout.windows[window], position
            )
            for window, first in self.needed(page)
        )

    def needed(self, page: int) -> Iterable[tuple[int, int]]:
        """Yield each window, and the first page whose row is needed to resume at ``page``."""
        size = self.layout.page_size
        for window, spec in enumerate(self.layout.windows):
            yield window, spec.first_needed(page * size, size)

    def _need(self, checkpoint: Checkpoint, change: int) -> None:
        """Count one checkpoint more or less for the rows that ``checkpoint`` needs."""
        for window, first in self.needed(checkpoint.page):
            for _, kept, inside in kept_between(checkpoint.node, first, checkpoint.page):
                needs = kept.needs[window][inside]
                needs += change
                turned = kept.rows[window][inside, 0][needs == (1 if change > 0 else 0)]
                rows = turned[turned >= 0].tolist()
                if change < 0:
                    self.loose.add(rows)
                else:
                    self.loose.discard(rows)

    def resume(self, node: Node, pages: int) -> tuple[int, Checkpoint | None]:
        """Return the last position up to ``pages`` of the path to ``node`` where all groups agree.

        In pages, with the checkpoint there; 0 and None if there is none. A checkpoint's rows are
        all there, so a model with states resumes at any. Cost: O(checkpoints on the path); O(pages)
        without states.
        """
        if self.layout.state is None:
            page = int(np.flatnonzero(resumable(self.layout, self.fronts, node, pages))[-1])
            return page, self._at(node, page)
        for one in up(node):
            kept: Kept | None = one.extra
            for checkpoint in reversed([] if kept is None else kept.checkpoints):
                if checkpoint.page <= pages:
                    return checkpoint.page, checkpoint
        return 0, None

    def _at(self, node: Node, page: int) -> Checkpoint | None:
        owner = next((one for one in up(node) if one.depth < page), None)
        kept: Kept | None = None if owner is None else owner.extra
        return None if kept is None else kept.at(page)

    def _resized(self, node: Node, pages: int) -> None:
        """Tell the owners of runs that more is kept of ``node``, or less."""
        if self._tree.owners is not None:
            self._tree.owners.resized(node, pages)

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
