"""`Waits`: at which runs of a tree conversations wait for their next request.

A request ends at a run, and a wait is attached to it. The next prompt that reaches the end of this
run, or the end of its prompt, is the return of that conversation:

    root ── first prompt ─┬─ its answer, cut off by the chat template    (left behind)
                          └─ second prompt ── its answer                 (the wait)

Where answers like it are known to be cut off, the wait is attached to the end of the prompt at
once, and the answer counts as left behind before the next prompt has come.

A wait whose run is evicted stays with the run before it, under the symbols of the first evicted
page, so a conversation whose KV is gone is recognised when it returns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kvkeep.core.prefix.node import Root
from kvkeep.core.returns import Ended

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from kvkeep.core.prefix.node import Node
    from kvkeep.core.prefix.tree import RunTree
    from kvkeep.core.returns import Returns, Wait

__all__ = ["RunningPrompt", "Waits"]

_UNKNOWN: Final = Ended()

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


class RunningPrompt(NamedTuple):
    """A request that runs: the wait that it ended, its tokens, and its tenant."""

    before: Wait | None
    tokens: int
    tenant: Hashable


class Waits:
    """Attaches waits to the runs of a tree, and finds the one that a prompt ends.

    Memory: two dictionary entries at most for each wait whose run was evicted. Thread safety: none;
    under the cache's lock.
    """

    def __init__(
        self, tree: RunTree, returns: Returns, clock: Callable[[], float], page_size: int
    ) -> None:
        self._tree = tree
        self._page_size = page_size
        self.returns = returns
        self.clock = clock
        self._at_roots = EvictedWaits()
        """For empty prefixes, by namespace, too: roots are removed when nothing is stored."""

    # --- requests ----------------------------------------------------------------------------

    def opened(
        self,
        hold: Node,
        prompt: int,
        tenant: Hashable,
        following: Callable[[], bytes],
    ) -> RunningPrompt:
        """End the wait of the conversation that a ``prompt`` of so many tokens continues.

        It matches up to the end of ``hold``; ``following`` returns the symbols of its next page.
        Learns what it repeats of the answer before. A prompt that is not longer than the last one,
        as of a request that is sent again, needs the same KV and ends the wait; of the answer it
        says nothing.
        """
        wait = self.ended_by(hold, following)
        if wait is not None:
            if prompt > wait.prompt:
                again = self.read_again(wait, hold, hold.end * self._page_size, following)
                if again is not None:
                    kind = wait.answer_kind
                    self.returns.answers.returned(tenant, kind, wait.answer, again)
            self.end(wait, hold, self.clock())
        return RunningPrompt(wait, prompt, tenant)

    def closed(
        self,
        hold: Node,
        request: RunningPrompt,
        answer: int,
        ended: Ended | None,
        first: int | None,
    ) -> None:
        """Begin to wait for the next request, as one ended at ``hold``, with an ``answer``.

        That counts the tokens stored of it, and ``first`` is its first one.
        """
        ended, tenant = ended or _UNKNOWN, request.tenant
        wait = self.returns.began(
            ended,
            answer if ended.tokens is None else ended.tokens,
            self.clock(),
            before=request.before,
            tenant=tenant,
        )
        wait.prompt, wait.answer = request.tokens, answer
        first = first if ended.first is None else ended.first
        wait.answer_kind = self.returns.first_tokens.kind_of(tenant, ended.stop, first)
        kept = self.returns.answers.kept(tenant, wait.answer_kind, answer)
        self.begin(hold, wait, kept=kept)

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
        wait = self._told(hold)
        if wait is not None and not (gone and wait.evicted):
            return wait
        node = hold
        for _ in range(_RUNS):
            if len(node.children) != 1:
                break
            (node,) = node.children.values()
            wait = self._told(node)
            if wait is not None:
                return wait if wait.place <= hold.end else None
        return None

    def read_again(
        self, wait: Wait, hold: Node, tokens: int, following: Callable[[], bytes]
    ) -> int | None:
        """Return how many tokens of the answer before ``wait`` a prompt contains that ends it.

        The prompt matches ``tokens`` tokens, up to the end of ``hold``. Call it before `end`. None:
        what was evicted meanwhile would tell.
        """
        size = self._page_size
        if wait.evicted:
            return None
        if tokens >= (wait.prompt + wait.answer - 1) // size * size:
            return wait.answer
        if hold.wait is wait:
            if wait.unread is None or tokens < wait.end * size:
                return None
            if wait.unread and wait.unread == following():
                return wait.answer
        elif following() in hold.children:
            return None  # it goes on, but groups of layers resume here
        elif hold.wait is not None and hold.wait.unread_of is wait and not hold.children:
            return None  # its tail is gone
        return min(wait.answer, max(0, tokens - wait.prompt))

    def begin(self, hold: Node, wait: Wait, *, kept: int) -> None:
        """Attach a wait to the run where its request ended, which is held.

        The ``kept`` first tokens of its answer are expected to be in the next prompt.
        """
        size = self._page_size
        wait.place = max(1, wait.prompt // size - _SLACK)
        end = -(-(wait.prompt + kept) // size)
        if kept < wait.answer and 0 < end < hold.end:
            hold = self._leave(hold, end, wait)
        before = self._at(hold)
        if before is not None:
            self.returns.lost(before, self.clock())
        hold.wait = wait
        wait.end = hold.end

    def _leave(self, hold: Node, end: int, wait: Wait) -> Node:
        """Leave the answer behind: all runs of a request behind ``end`` pages; return its prompt's.

        Runs behind which others go on keep their own waits.
        """
        wait.unread = b""
        left = self.returns.left(wait)
        node = hold
        while True:
            if self._at(node) is None:
                node.wait = left
            if node.depth <= end:
                break
            assert node.parent is not None
            node = node.parent
        if node.depth < end:
            return self._tree.split(node, end - node.depth)
        assert node.parent is not None
        return node.parent

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

    def _told(self, node: Node) -> Wait | None:
        """Return the wait at a run, or that of the conversation whose answer the run is."""
        wait = node.wait
        if wait is not None and wait.unread_of is not None:
            wait = wait.unread_of
        return wait if wait is not None and not wait.over and wait in self.returns else None

    # --- events of the tree ------------------------------------------------------------------

    def evicted(self, leaf: Node, parent: Node) -> None:
        """Keep what waits at ``leaf``, which was evicted, with ``parent``."""
        if leaf.wait is not None and leaf.wait.unread_of is not None:
            leaf.wait.unread_of.unread = leaf.key
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
