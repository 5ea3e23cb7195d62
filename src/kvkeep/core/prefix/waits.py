"""`Waits`: at which runs of a tree conversations wait for their next request.

A request ends at a run, and a wait is attached to it. The next prompt that reaches the end of this
run, or the end of its prompt, is the return of that conversation:

    root ── first prompt ─┬─ its answer, cut off by the chat template    (left behind)
                          └─ second prompt ── its answer                 (the wait)

A wait whose run is evicted stays with the run before it, under the symbols of the first evicted
page, so a conversation whose KV is gone is recognised when it returns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from kvkeep.core.prefix.node import Root

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvkeep.core.prefix.node import Node
    from kvkeep.core.prefix.tree import RunTree
    from kvkeep.core.returns import Returns, Wait

__all__ = ["Waits"]

_RUNS: Final = 8
"""Runs behind a prompt's end that are searched for the wait of its conversation."""
_SLACK: Final = 1
"""Pages at the end of a prompt that may differ in the conversation's next one."""


class EvictedWaits(dict[Any, "Wait"]):
    """Waits whose runs were evicted, by the symbols of the first evicted page.

    Those that are over are dropped when they may be half of all.
    """

    __slots__ = ("_most",)

    def __init__(self) -> None:
        super().__init__()
        self._most = 16

    def keep(self, key: object, wait: Wait) -> None:
        """Set the wait of ``key``. Cost: O(1), amortised."""
        self[key] = wait
        if len(self) > self._most:
            for old in [old for old, other in self.items() if other.over]:
                del self[old]
            self._most = 2 * len(self) + 16


class Waits:
    """Attaches waits to the runs of a tree, and finds the one that a prompt ends.

    Memory: two dictionary entries at most for each wait whose run was evicted. Thread safety: none;
    under the cache's lock.
    """

    def __init__(self, tree: RunTree, returns: Returns, clock: Callable[[], float]) -> None:
        self._tree = tree
        self.returns = returns
        self.clock = clock
        self._at_roots = EvictedWaits()
        """For empty prefixes, by namespace, too: roots are removed when nothing is stored."""

    # --- requests ----------------------------------------------------------------------------

    def ended_by(self, hold: Node, following: Callable[[], bytes]) -> Wait | None:
        """Return the wait that ends with a prompt which matches up to the end of ``hold``.

        ``following`` returns the symbols of the prompt's next page. None: no conversation is known
        to wait there. Cost: O(1), 0.3 µs where nothing was evicted.
        """
        gone = self._at_roots if isinstance(hold, Root) else hold.gone
        if gone:
            wait = gone.get(_key(hold, following()))
            if wait is not None and not wait.over:
                return wait
        wait = self._at(hold)
        if wait is not None and not (gone and wait.evicted):
            return wait
        node = hold
        for _ in range(_RUNS):
            if len(node.children) != 1:
                break
            (node,) = node.children.values()
            wait = self._at(node)
            if wait is not None:
                return wait if wait.place <= hold.end else None
        return None

    def begin(self, hold: Node, wait: Wait, prompt_pages: int) -> None:
        """Attach a wait to the run where its request ended, which is held."""
        before = self._at(hold)
        if before is not None:
            self.returns.lost(before, self.clock())
        hold.wait = wait
        wait.place = max(0, prompt_pages - _SLACK)

    def end(self, wait: Wait, hold: Node, now: float) -> None:
        """Record that a wait at or behind ``hold`` is over, as its conversation has returned.

        A run that the conversation left behind becomes one of the next victims.
        """
        self.returns.returned(wait, now)
        node = hold
        for _ in range(1 if wait.evicted else _RUNS):
            if node.wait is wait:
                self._settle(node)
                if not (node.children or node.holders or node.pins) and node.parent is not None:
                    self._tree.dequeue(node)
                    self._tree.enqueue(node)
                return
            if len(node.children) != 1:
                break
            (node,) = node.children.values()
        self._settle(hold)

    def _settle(self, node: Node) -> None:
        """Give a run whose own wait is over the latest one behind it that is not."""
        gone = node.gone
        while gone:
            key = next(reversed(gone))
            if not gone[key].over:
                if self._at(node) is None:
                    node.wait = gone[key]
                break
            del gone[key]
        node.followers = len(gone or ())

    def _at(self, node: Node) -> Wait | None:
        """Return the wait at a run, if it is followed and not over."""
        wait = node.wait
        return wait if wait is not None and not wait.over and wait in self.returns else None

    # --- events of the tree ------------------------------------------------------------------

    def evicted(self, leaf: Node, parent: Node) -> None:
        """Keep what waits at ``leaf``, which was evicted, with ``parent``."""
        latest = self._latest(leaf)
        if latest is None:
            return
        latest.evicted = True
        if isinstance(parent, Root):
            gone = self._at_roots
        else:
            gone = parent.gone = EvictedWaits() if parent.gone is None else parent.gone
            own = self._at(parent)
            if own is None or own.since < latest.since:
                parent.wait = latest
        key = _key(parent, leaf.key)
        other = gone.get(key)
        if other is not None and other is not latest:
            self.returns.lost(other, self.clock())
        gone.keep(key, latest)
        parent.followers = len(parent.gone or ())

    def trimming(self, leaf: Node) -> None:
        """Keep only the latest of what waits behind ``leaf``, whose tail is about to go.

        Its evicted runs began behind that tail, so their symbols say nothing any longer.
        """
        if leaf.gone:
            leaf.wait = self._latest(leaf) or leaf.wait

    def _latest(self, leaf: Node) -> Wait | None:
        """Return the wait at or behind ``leaf`` that began last, and give up the others."""
        latest = self._at(leaf)
        for wait in () if leaf.gone is None else leaf.gone.values():
            if wait.over or wait is latest:
                continue
            if latest is None or wait.since > latest.since:
                latest, wait = wait, latest  # noqa: PLW2901 - the earlier one is given up
            if wait is not None:
                self.returns.lost(wait, self.clock())
        leaf.gone, leaf.followers = None, 0
        return latest


def _key(node: Node, symbols: bytes) -> object:
    """Return the key in `EvictedWaits` of a page behind ``node``."""
    return (node.namespace, symbols) if isinstance(node, Root) else symbols
