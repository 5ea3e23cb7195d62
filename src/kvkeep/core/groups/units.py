"""`TreeUnits`: the rows and states that the tree keeps, and which of them only the tree uses."""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING

import numpy as np

from kvkeep.core.groups.tables import SequenceGroups
from kvkeep.core.prefix.node import path_pages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import numpy.typing as npt

    from kvkeep.core.groups.board import GroupBoard
    from kvkeep.core.groups.stored import Checkpoint, Rows
    from kvkeep.core.pages import PagePool
    from kvkeep.core.pages.tables import PageArray
    from kvkeep.core.prefix.node import Node
    from kvkeep.core.prefix.tree import Tree

__all__ = ["PinnedGroups", "TreeUnits", "make_room"]


class TreeUnits:
    """References to the pages of rows and states, on behalf of the tree and of sequences.

    A page that the tree stores and no sequence uses is *idle*: it can be freed at any time. All
    references to pages of rows and states are taken and dropped here, so that `idle` is right.

    Thread safety: none; under the cache's lock. Cost: O(pages), vectorised.

    Attributes:
        idle: pages that only the tree refers to.
        stored: pages that the tree refers to.
        loose: rows of the tree that no checkpoint needs.
        order: the checkpoints of the tree.
    """

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._in_tree = np.zeros(pool.num_pages, np.bool_)
        self.loose = LooseRows()
        self.order = CheckpointOrder()
        self.idle = 0
        self.stored = 0

    def store(self, pages: PageArray) -> None:
        """Add the tree's reference to ``pages``, which sequences refer to."""
        assert not self._in_tree[pages].any(), "the tree stores a row or state twice"
        self._pool.retain(pages)
        self._in_tree[pages] = True
        self.stored += len(pages)

    def drop(self, pages: PageArray) -> int:
        """Drop the tree's reference to ``pages``; return how many became free."""
        self.idle -= self.count_idle(pages)
        self._in_tree[pages] = False
        self.stored -= len(pages)
        return self._pool.release(pages)

    def retain(self, pages: PageArray) -> None:
        """Add a sequence's reference."""
        self.idle -= self.count_idle(pages)
        self._pool.retain(pages)

    def release(self, pages: PageArray) -> None:
        """Drop a sequence's reference."""
        self._pool.release(pages)
        idle = pages[self._in_tree[pages] & (self._pool.references[pages] == 1)]
        self.idle += len(idle)
        self.loose.released(idle)
        self.order.released(idle)

    def is_idle(self, pages: PageArray) -> bool:
        """Whether only the tree refers to each of ``pages``."""
        return self.count_idle(pages) == len(pages)

    def are_idle(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Return which of ``rows`` the tree alone refers to, in all of their pages."""
        idle = self._in_tree[rows] & (self._pool.references[rows] == 1)
        return np.all(idle, axis=1)  # type: ignore[no-any-return]

    def is_sole(self, pages: PageArray) -> bool:
        """Whether there is one reference to each of ``pages``, that of the caller."""
        return not np.count_nonzero(self._pool.references[pages] != 1)

    def count_idle(self, pages: PageArray) -> int:
        """Return how many of ``pages`` only the tree refers to."""
        return int(np.count_nonzero(self._in_tree[pages] & (self._pool.references[pages] == 1)))

    def check(self, stored: PageArray) -> None:
        """Recount from all pages of rows and states in the tree. Asserts."""
        assert len(np.unique(stored)) == len(stored), "the tree stores a row or state twice"
        expected = np.zeros_like(self._in_tree)
        expected[stored] = True
        assert (expected == self._in_tree).all(), "a page is marked as the tree's and is not"
        assert self.stored == len(stored)
        idle = int(np.count_nonzero(self._pool.references[stored] == 1))
        assert self.idle == idle, (self.idle, idle)


class LooseRows:
    """Loose rows by their first pages.

    Rows that a sequence uses, too, are set aside when they are met, and return when it releases
    them. So none is looked at twice. Thread safety: none; under the cache's lock. Cost: O(1) a row.
    """

    __slots__ = ("_aside", "_waiting")

    def __init__(self) -> None:
        self._waiting: OrderedDict[int, None] = OrderedDict()
        self._aside: set[int] = set()

    def __len__(self) -> int:
        return len(self._waiting) + len(self._aside)

    def add(self, firsts: Iterable[int]) -> None:
        """Add rows."""
        self._waiting.update(dict.fromkeys(firsts))

    def discard(self, firsts: Iterable[int]) -> None:
        """Remove rows, as far as they are loose."""
        for first in firsts:
            if first in self._waiting:
                del self._waiting[first]
            else:
                self._aside.discard(first)

    def oldest(self, most: int) -> list[int]:
        """Remove and return the oldest that were not set aside, ``most`` at most."""
        oldest = list(islice(self._waiting, most))
        for first in oldest:
            del self._waiting[first]
        return oldest

    def set_aside(self, firsts: Iterable[int]) -> None:
        """Keep rows that `oldest` returned, and that sequences use, until they are `released`."""
        self._aside.update(firsts)

    def released(self, pages: PageArray) -> None:
        """Record that no sequence uses ``pages`` any more; other pages than of rows are ignored."""
        if self._aside:
            for page in pages.tolist():
                if page in self._aside:
                    self._aside.remove(page)
                    self._waiting[page] = None

    def firsts(self) -> set[int]:
        """Return the first pages of all. Cost: all of them."""
        return self._aside.union(self._waiting)

    def aside(self) -> set[int]:
        """Return the first pages of those set aside, for `check`."""
        return set(self._aside)


class CheckpointOrder:
    """Checkpoints by class and recency, least recently used first.

    *Early* ones are guesses that no request has used, and those whose request left a later one:
    they go before any KV of tokens. *Late* ones go with the KV behind them, or when nothing else
    can be evicted. *Pinned* ones are on paths with pins, *used* ones have states that sequences or
    hard pins use: both are set aside when they are met, and return when that ends. So none is
    looked at twice.

    Thread safety: none; under the cache's lock. Cost: O(1).
    """

    __slots__ = ("_early", "_late", "_pinned", "_used")

    def __init__(self) -> None:
        self._early: OrderedDict[Checkpoint, None] = OrderedDict()
        self._late: OrderedDict[Checkpoint, None] = OrderedDict()
        self._pinned: OrderedDict[Checkpoint, None] = OrderedDict()
        self._used: dict[int, Checkpoint] = {}  # by the first page of the state

    def __len__(self) -> int:
        return len(self._early) + len(self._late) + len(self._pinned) + len(self._used)

    def __iter__(self) -> Iterator[Checkpoint]:
        return chain(self._early, self._late, self._pinned, self._used.values())

    def add(self, checkpoint: Checkpoint) -> None:
        """Add a new checkpoint."""
        self._class(checkpoint)[checkpoint] = None

    def _class(self, checkpoint: Checkpoint) -> OrderedDict[Checkpoint, None]:
        return self._early if checkpoint.early else self._late

    def used(self, checkpoint: Checkpoint) -> None:
        """Record that a request resumed at ``checkpoint``: it is no longer early."""
        self.discard(checkpoint)
        checkpoint.guess = checkpoint.extended = False
        self.add(checkpoint)

    def extended(self, checkpoint: Checkpoint) -> None:
        """Record that the request that used ``checkpoint`` last has left a later one."""
        self.discard(checkpoint)
        checkpoint.extended = True
        self.add(checkpoint)

    def discard(self, checkpoint: Checkpoint) -> None:
        """Remove a checkpoint."""
        for some in (self._early, self._late, self._pinned):
            some.pop(checkpoint, None)
        if checkpoint.state is not None:
            self._used.pop(int(checkpoint.state[0]), None)

    # --- set aside -------------------------------------------------------------------------------

    def set_aside(self, pinned: Iterable[Checkpoint], used: Iterable[Checkpoint]) -> None:
        """Keep checkpoints apart, until they are `unpinned`, or their states `released`."""
        for checkpoint in pinned:
            self.discard(checkpoint)
            self._pinned[checkpoint] = None
        for checkpoint in used:
            assert checkpoint.state is not None
            self.discard(checkpoint)
            self._used[int(checkpoint.state[0])] = checkpoint

    def unpinned(self, checkpoints: Iterable[Checkpoint]) -> None:
        """Record that a pin which covered them ended: they are the least recently used."""
        for checkpoint in checkpoints:
            if checkpoint in self._pinned:
                self._return(checkpoint)

    def released(self, pages: PageArray) -> None:
        """Record that only the tree uses ``pages``; other pages than of states are ignored."""
        if self._used:
            for page in pages.tolist():
                checkpoint = self._used.get(page)
                if checkpoint is not None:
                    self._return(checkpoint)

    def _return(self, checkpoint: Checkpoint) -> None:
        self.discard(checkpoint)
        self.add(checkpoint)
        self._class(checkpoint).move_to_end(checkpoint, last=False)

    # --- victims ---------------------------------------------------------------------------------

    def early(self) -> Iterator[Checkpoint]:
        """Yield the early ones, least recently used first; end before anything changes."""
        return iter(self._early)

    def late(self) -> Iterator[Checkpoint]:
        """Yield the late ones, as `early`."""
        return iter(self._late)

    def pinned(self) -> Iterator[Checkpoint]:
        """Yield those that were set aside for pins, as `early`."""
        return iter(self._pinned)

    def check(self, is_idle: Callable[[PageArray], bool]) -> None:
        """Assert that those set aside are under pins, or in use."""
        for page, one in self._used.items():
            assert one.state is not None
            assert page == one.state[0]
            assert not is_idle(one.state), "set aside, and nobody uses it"


class PinnedGroups:
    """Rows and checkpoints on the paths of a cache's pins.

    Thread safety: `resumable` takes the cache's lock; the others are called under it.
    """

    __slots__ = ("_board",)

    def __init__(self, board: GroupBoard) -> None:
        self._board = board

    def keep(self, node: Node) -> SequenceGroups:
        """Return references to what resuming on the path to ``node`` needs, for a hard pin."""
        board = self._board
        kept = SequenceGroups(board)
        path = path_pages(node, 0, node.end)
        page, checkpoint = board.resume(path)
        kept.hold(path[:page], checkpoint)
        kept.state = None if checkpoint is None else checkpoint.state
        return kept

    @staticmethod
    def pages(kept: SequenceGroups) -> list[int]:
        """Return the pool pages that a hard pin keeps."""
        return [page for pages in kept.references() for page in pages.tolist()]

    def mark(self, node: Node) -> None:
        """Add a checkpoint for a soft pin that ends at ``node``, if it needs no state.

        Where there is none, rows that resuming needs would be freed before anything else.
        """
        board = self._board
        if board.layout.state is None:
            path = path_pages(node, 0, node.end)
            page, there = board.resume(path)
            if page and there is None:
                board.add(path[:page], None, "end")

    def unpinned(self, node: Node) -> None:
        """Let checkpoints go again that a pin at ``node``, which ended, kept."""
        above: Node | None = node
        while above is not None and above.parent is not None and above not in self._board.covered:
            self._board.order.unpinned(above.groups.all)
            above = above.parent

    def resumable(self, node: Node) -> int:
        """Return the last position on the path to ``node`` where a request can resume, in pages."""
        with self._board.lock:
            return self._board.resume(path_pages(node, 0, node.end))[0] if node.in_tree else 0


def make_room(
    board: GroupBoard,
    tree: Tree,
    pool: PagePool,
    count: int,
    forget: Callable[[PageArray], None],
) -> int:
    """Free up to ``count`` pages; return how many became free. ``forget`` gets evicted base pages.

    In this order:

    1. loose rows, which no checkpoint needs;
    2. checkpoints that are worth least (`CheckpointOrder`);
    3. the run that the policy names, from its tail: the checkpoint at its end, and the KV back to
       the one before. With states that is freed at once, as no request can resume in between, and
       so is what the runs before it have behind their last checkpoint, if no other run follows;
    4. all other checkpoints;
    5. runs and checkpoints of prompts with soft pins.
    """
    before = pool.num_free
    while (left := count - (pool.num_free - before)) > 0:
        if board.free_loose(left) or _remove(board, board.order.early()):
            continue
        evicted: list[Node] = []
        choose = partial(_tail, board, left, evicted)
        pages = tree.evict_leaf(choose)
        if pages is None and _remove(board, board.order.late()):
            continue
        if pages is None:
            pages = tree.evict_leaf(choose, pinned=True)
        if pages is not None:
            if len(pages):
                forget(pages)
            if board.layout.state is not None and evicted:
                _evict_behind(board, tree, evicted[0], forget)
            continue
        if not _remove(board, board.order.pinned(), pinned=True):
            break
    return pool.num_free - before


def _tail(board: GroupBoard, most: int, parents: list[Node], leaf: Node, portion: int) -> int:
    """Return how many pages to evict from the tail of ``leaf``.

    With states, all that is behind its last checkpoint, as no request can resume there; the
    checkpoint at its end is removed before. Else ``most``, within the policy's ``portion``. Adds
    the parent to ``parents``, as the leaf no longer has one afterwards if it is evicted whole.
    """
    assert leaf.parent is not None
    parents.append(leaf.parent)
    if leaf.groups.last == leaf.end:
        board.remove(leaf.groups.all[-1])
    behind: int = leaf.end - leaf.groups.last
    return behind if board.layout.state is not None else min(behind, most, portion)


def _evict_behind(
    board: GroupBoard, tree: Tree, node: Node | None, forget: Callable[[PageArray], None]
) -> None:
    """Evict what ``node`` and the runs before it have behind their last checkpoints.

    As long as they are leaves that nothing holds or pins. A policy may find such a run worth
    keeping, as many requests used it, but none can any more: they would need a state.
    """
    while node is not None and node.parent is not None:
        if node.children or node.holders or node in board.covered:
            return
        behind = node.end - node.groups.last
        if not behind:
            return
        parent = node.parent if behind == node.size else None
        forget(tree.remove(node, behind))
        node = parent


def _remove(board: GroupBoard, order: Iterator[Checkpoint], *, pinned: bool = False) -> bool:
    """Remove the first checkpoint in ``order`` that frees pages; return whether there was one.

    Those met before it are set aside: on paths with pins unless ``pinned``, or with states in use.
    """
    covered: list[Checkpoint] = []
    used: list[Checkpoint] = []
    found = None
    for checkpoint in order:
        if checkpoint.node in board.covered and not pinned:
            covered.append(checkpoint)
        elif board.frees(checkpoint):
            found = checkpoint
            break
        elif checkpoint.state is not None:
            used.append(checkpoint)
    board.order.set_aside(covered, used)
    if found is not None:
        board.remove(found)
    return found is not None
