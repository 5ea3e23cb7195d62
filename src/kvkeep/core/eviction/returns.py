"""`ReturnAware`: evict what is least worth keeping until its conversation returns."""

from __future__ import annotations

import heapq
import math
import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kvkeep.core.prefix.node import Root
from kvkeep.core.prefix.policy import AgeQueue, EvictionPolicy
from kvkeep.core.returns import AGES, BUCKETS, Ended, Returns, Wait, bucket_of

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable
    from typing import Self

    import numpy.typing as npt

    from kvkeep.core.keys import Namespace
    from kvkeep.core.prefix.node import Entry, Node
    from kvkeep.core.prefix.tree import Tree

__all__ = ["ReturnAware", "RunningPrompt", "Waits"]

_LEFT: Final = (-1, 0, 0)
_MOST_SHARED: Final = 3  # octaves: a run that eight conversations may need is not worth more

Place = tuple[int, int, int]
"""Class of the wait, octaves above what the class is worth, bucket of its age."""


class ReturnAware(EvictionPolicy):
    """Evicts the run that is worth least until the next request of its conversation comes.

    The worth is learned online, by class and age of the wait (`kvkeep.core.returns.Returns`). Runs
    that a conversation has left behind go first, oldest first. A run that several conversations
    wait behind is worth as much as all of them, up to eight. Runs of equal worth go in the order of
    their last use; a run that no wait is known of counts as one of the most general class.

    Entries wait in one queue per class, factor and age bucket, oldest first. They move to the next
    queue as they age.

    Cost: O(log n) an entry, for each half octave of its age, and O(queues) after each time that
    something was learned. A hit costs nothing.
    """

    name = "returns"

    def __init__(self) -> None:
        self.returns = Returns()
        """What is learned."""
        self.clock: Callable[[], float] = time.monotonic
        """Seconds."""
        self.waits: Waits | None = None
        """Where conversations wait, of a policy for the runs of a tree."""
        self._running: dict[Hashable, RunningPrompt] = {}
        self._version = -1
        self._queues: dict[Place, AgeQueue[float]] = {}
        self._order: list[tuple[float, Place]] = []  # a heap of worths; each queue is in it once …
        self._idle: set[Place] = set()  # … but those that were empty when they came first
        self._aged = 0.0
        self._length = 0
        self._popped = _LEFT
        self._popped_wait: Wait | None = None

    def attend(self, returns: Returns, clock: Callable[[], float]) -> None:
        """Order by waits that ``returns`` learns from, by ``clock``, in seconds."""
        self.returns, self.clock = returns, clock

    # --- events ------------------------------------------------------------------------------

    def attach(self, tree: Tree, clock: Callable[[], float]) -> None:
        super().attach(tree, clock)
        self.clock = clock
        self.waits = Waits(tree, self.returns, clock)

    def join(self, first: Self) -> None:
        self.attend(first.returns, first.clock)
        self.waits = first.waits

    def opened(
        self,
        request: Hashable,
        node: Node,
        namespace: Namespace,
        tokens: int,
        following: Callable[[], bytes],
    ) -> tuple[float, int] | None:
        assert self.waits is not None
        running = self.waits.opened(node, tokens, namespace, following)
        self._running[request] = running
        before = running.before
        return None if before is None else (before.gaps[-1], before.turns)

    def closed(
        self, request: Hashable, node: Node, row: npt.NDArray[Any], ended: Ended | None
    ) -> None:
        running = self._running.pop(request)
        if node.parent is None:
            return
        assert self.waits is not None
        answer = max(0, len(row) - running.tokens)
        first = int(row[running.tokens]) if answer else None
        self.waits.closed(node, running, answer, ended, first)

    def forked(self, request: Hashable, fork: Hashable) -> None:
        self._running[fork] = self._running[request]

    def dropped(self, request: Hashable) -> None:
        del self._running[request]

    def trimmed(self, leaf: Node, keep: int) -> None:
        assert self.waits is not None
        self.waits.trimming(leaf)

    def gone(self, leaf: Node, parent: Node) -> None:
        assert self.waits is not None
        self.waits.evicted(leaf, parent)

    # --- queues ------------------------------------------------------------------------------

    def add(self, entry: Entry) -> None:
        wait = entry.wait
        if wait is None:
            wait = entry.wait = self.unknown()
        self._push(entry, wait.since, self._placed(wait, entry.followers))
        self._length += 1

    def discard(self, entry: Entry) -> None:
        self._queues[entry.rank].remove(entry)
        self._length -= 1

    def pop(self) -> Entry | None:
        """Remove the oldest entry of the queue that is worth least."""
        if not self._length:
            return None
        place = self._first()
        entry = self._queues[place].pop()
        assert entry is not None
        self._length -= 1
        self._popped, self._popped_wait = place, entry.wait
        return entry

    def least(self) -> float | None:
        """Return what the next victim is worth, in returns a second."""
        return self._worth(self._first()) if self._length else None

    def _first(self) -> Place:
        """Return the place of the next victim; there is one."""
        now = self.clock()
        if abs(now - self._aged) >= AGES[1]:
            self._age(now)
        if self.returns.due:
            self.returns.learn(now)
        if self._version != self.returns.version:
            self._rank()
        order, queues = self._order, self._queues
        while not len(queues[order[0][1]]):
            self._idle.add(heapq.heappop(order)[1])
        return order[0][1]

    def put_back(self, entry: Entry) -> None:
        """Make the entry just popped the next victim of its queue."""
        wait: Wait = entry.wait
        if wait is not self._popped_wait or wait.over != (self._popped == _LEFT):
            # Its tail took a wait along.
            self.add(entry)
            return
        queue = self._queues[self._popped]  # it was not removed: the entry came from it
        queue.put_back(entry, wait.since)
        entry.rank = self._popped
        self._length += 1

    def __len__(self) -> int:
        return self._length

    # --- worth -------------------------------------------------------------------------------

    def unknown(self) -> Wait:
        """Return a wait of the most general class, which begins now."""
        return Wait(0, self.clock(), 0, (), self.returns.tenant(None))

    def worth_of(self, wait: Wait, followers: int) -> float:
        """Return the worth of a run that ``wait`` and as many as ``followers`` wait for."""
        return self._worth(self._placed(wait, followers))

    def _placed(self, wait: Wait, followers: int) -> Place:
        if wait.over:
            return _LEFT
        octaves = wait.tenant.octaves
        if followers > 1:
            octaves += min(_MOST_SHARED, followers.bit_length() - 1)
        return wait.kind, octaves, bucket_of(self.clock() - wait.since)

    def _push(self, entry: Entry, since: float, place: Place) -> None:
        (self._queues.get(place) or self._begun(place)).push(entry, since)
        entry.rank = place

    def _begun(self, place: Place) -> AgeQueue[float]:
        """Return the queue of ``place``, and order it if it is new or was idle."""
        queue = self._queues.get(place)
        if queue is None:
            queue = self._queues[place] = AgeQueue()
        elif place in self._idle:
            self._idle.discard(place)
        else:
            return queue
        heapq.heappush(self._order, (self._worth(place), place))
        return queue

    def _worth(self, place: Place) -> float:
        kind, octaves, bucket = place
        return -1.0 if place == _LEFT else self.returns.worth(kind, bucket) * 2.0**octaves

    def _rank(self) -> None:
        """Order the queues by what was learned."""
        self._version = self.returns.version
        for place in self._idle:
            del self._queues[place]
        self._idle.clear()
        self._order = [(self._worth(place), place) for place in self._queues]
        heapq.heapify(self._order)

    def _age(self, now: float) -> None:
        """Move entries that grew older: once per bucket that an entry lives to see."""
        self._aged = now
        for place in list(self._queues):
            kind, octaves, bucket = place
            queue = self._queues[place]
            if place == _LEFT or bucket == BUCKETS - 1 or not len(queue):
                continue
            older = queue.pop_until(now - AGES[bucket + 1])
            begin = -math.inf if bucket + 2 == BUCKETS else now - AGES[bucket + 2]
            if any(since <= begin for _, since in older):  # nothing was evicted for long
                for entry, since in older:
                    self._push(entry, since, (kind, octaves, bucket_of(now - since)))
            elif older:
                next_place = kind, octaves, bucket + 1
                push = self._begun(next_place).push
                for entry, since in older:
                    push(entry, since)
                    entry.rank = next_place

    def describe(self, entry: Entry, moment: int) -> str:
        wait = entry.wait
        if wait is None:
            return super().describe(entry, moment)
        if wait.over:
            return "left behind by its conversation"
        age, worth = self.clock() - wait.since, self.worth_of(wait, entry.followers)
        return f"waits for {age:.3g} s, worth {worth:.3g} returns/s"


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

    def __init__(self, tree: Tree, returns: Returns, clock: Callable[[], float]) -> None:
        self._tree = tree
        self._page_size = tree.page_size
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
        gone = self._at_roots if isinstance(hold, Root) else hold.returns
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
        here: Wait | None = hold.wait
        if here is wait:
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
                if self._tree.is_candidate(node):
                    self._tree.dequeue(node)
                    self._tree.enqueue(node)
                return
            if len(node.children) != 1:
                break
            (node,) = node.children.values()
        self._settle(hold)

    def _settle(self, node: Node) -> None:
        """Give a run whose own wait is over the latest one behind it that is not."""
        gone = node.returns
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
            gone = parent.returns = EvictedWaits() if parent.returns is None else parent.returns
            own = self._at(parent)
            if own is None or own.since < latest.since:
                parent.wait = latest
        key = _key(parent, leaf.key)
        other = gone.get(key)
        if other is not None and other is not latest:
            self.returns.lost(other, self.clock())
        gone.keep(key, latest)
        parent.followers = len(parent.returns or ())

    def trimming(self, leaf: Node) -> None:
        """Keep only the latest of what waits behind ``leaf``, whose tail is about to go.

        Its evicted runs began behind that tail, so their symbols say nothing any longer.
        """
        if leaf.returns:
            leaf.wait = self._latest(leaf) or leaf.wait

    def _latest(self, leaf: Node) -> Wait | None:
        """Return the wait at or behind ``leaf`` that began last, and give up the others."""
        latest = self._at(leaf)
        for wait in () if leaf.returns is None else leaf.returns.values():
            if wait.over or wait is latest:
                continue
            if latest is None or wait.since > latest.since:
                latest, wait = wait, latest  # noqa: PLW2901 - the earlier one is given up
            if wait is not None:
                self.returns.lost(wait, self.clock())
        leaf.returns, leaf.followers = None, 0
        return latest


def _key(node: Node, symbols: bytes) -> object:
    """Return the key in `EvictedWaits` of a page behind ``node``."""
    return (node.namespace, symbols) if isinstance(node, Root) else symbols
