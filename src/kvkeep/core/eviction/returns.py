"""`ReturnAware`: evict what is least worth keeping until its conversation returns."""

from __future__ import annotations

import heapq
import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kvkeep.core.prefix.node import Root
from kvkeep.core.prefix.policy import AgeQueue, EvictionPolicy
from kvkeep.core.returns import AGES, Ended, Returns, Wait

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator
    from typing import Self

    import numpy.typing as npt

    from kvkeep.core.keys import Namespace
    from kvkeep.core.prefix.node import Entry, Node
    from kvkeep.core.prefix.tree import Tree

__all__ = ["ReturnAware", "RunningPrompt", "Waits"]

_BEHIND: Final = -1
"""The class of runs that their conversations have left behind."""
_MOST_SHARED: Final = 3  # octaves: a run that eight conversations may need is not worth more
_RANKED: Final = 256  # queues for each victim, at most


class _ClassQueue(AgeQueue[float]):
    """The candidates of a `place`, by when their waits began.

    ``item`` is its newest item in the order of queues.
    """

    __slots__ = ("item", "newest_first", "place")

    def __init__(self, place: tuple[int, int]) -> None:
        super().__init__()
        self.place = place
        self.newest_first = False
        self.item: tuple[float, float, int, _ClassQueue] | None = None


class ReturnAware(EvictionPolicy):
    """Evicts the run that is worth least until the next request of its conversation comes.

    The worth is learned online, by class and age of the wait (`kvkeep.core.returns.Returns`). Runs
    that a conversation has left behind go first, oldest first. A run that several conversations
    wait behind is worth as much as all of them, up to eight. Runs of equal worth go in the order of
    their waits; a run that no wait is known of counts as one of the most general class.

    Of each class, the run that waits longest and the one that began last are compared: what is
    worth least is one of them as long as the worth of a class rises with age up to a peak, and
    falls behind it. So nothing moves as it ages.

    Cost: O(log n) a victim. Each looks up what 256 classes are worth at most, of those that changed
    since, and of all every two seconds. A hit costs nothing.
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
        self._queues: dict[tuple[int, int], _ClassQueue] = {}
        self._changed: dict[_ClassQueue, None] = {}  # since their worth was looked up
        self._order: list[tuple[float, float, int, _ClassQueue]] = []  # a heap
        self._items = 0
        self._looked = -1, 0.0  # the version and the time at which all queues were looked up
        self._length = 0

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

    # --- candidates --------------------------------------------------------------------------

    def add(self, entry: Entry) -> None:
        wait = entry.wait
        if wait is None:
            wait = entry.wait = Wait(0, self.clock(), 0, (), self.returns.tenant(None))
        place = self._place(wait, entry.followers)
        queue = self._queues.get(place)
        if queue is None:
            queue = self._queues[place] = _ClassQueue(place)
        entry.rank = queue
        queue.push(entry, wait.since)
        self._changed[queue] = None
        self._length += 1

    def discard(self, entry: Entry) -> None:
        entry.rank.remove(entry)
        self._changed[entry.rank] = None
        self._length -= 1

    def pop(self) -> Entry | None:
        """Remove the candidate that is worth least."""
        if not self._length:
            return None
        queue = self._first()
        entry = queue.pop_newest() if queue.newest_first else queue.pop()
        self._changed[queue] = None
        self._length -= 1
        return entry

    def put_back(self, entry: Entry) -> None:
        queue = entry.rank
        if queue.place != self._place(entry.wait, entry.followers):
            self.add(entry)  # its tail took a wait along
            return
        oldest = queue.oldest
        if oldest is None or entry.wait.since <= oldest:
            queue.put_back(entry, entry.wait.since)
        else:
            queue.push(entry, entry.wait.since)
        self._changed[queue] = None
        self._length += 1

    def least(self) -> float | None:
        """Return what the next victim is worth, in returns a second."""
        if not self._length:
            return None
        item = self._first().item
        assert item is not None
        return item[0]

    def __len__(self) -> int:
        return self._length

    # --- worth -------------------------------------------------------------------------------

    @staticmethod
    def _place(wait: Wait, followers: int) -> tuple[int, int]:
        """Return the class of a run's wait, and the octaves that it is worth more."""
        if wait.over:
            return _BEHIND, 0
        octaves = wait.tenant.octaves
        if followers > 1:
            octaves += min(_MOST_SHARED, followers.bit_length() - 1)
        return wait.kind, octaves

    def _worth(self, place: tuple[int, int], age: float) -> float:
        kind, octaves = place
        return -1.0 if kind < 0 else self.returns.worth(kind, age) * 2.0**octaves

    def _first(self) -> _ClassQueue:
        """Return the queue of the next victim; there is one."""
        now = self.clock()
        self.returns.study(now)
        changed, order = self._changed, self._order
        version, looked = self._looked
        if version != self.returns.version or abs(now - looked) >= AGES[1]:
            self._looked = self.returns.version, now
            changed.update(dict.fromkeys(self._queues.values()))
        for _ in range(min(_RANKED, len(changed))):
            self._rank(changed.popitem()[0], now)
        while True:
            while order and order[0] is not order[0][3].item:
                heapq.heappop(order)
            if order and order[0][3] not in changed:
                return order[0][3]
            queue = order[0][3] if order else next(iter(changed))
            del changed[queue]
            self._rank(queue, now)

    def _rank(self, queue: _ClassQueue, now: float) -> None:
        """Look up what a queue is worth; one without candidates ends."""
        since = queue.oldest
        if since is None:
            queue.item = None
            del self._queues[queue.place]
            return
        worth, last = (self._worth(queue.place, now - at) for at in (since, queue.newest))
        queue.newest_first = last < worth
        if queue.newest_first:
            worth, since = last, queue.newest
        item = queue.item
        if item is None or item[0] != worth or item[1] != since:
            self._items += 1
            queue.item = worth, since, self._items, queue
            heapq.heappush(self._order, queue.item)
            if len(self._order) > 4 * len(self._queues) + 64:
                self._order[:] = [item for item in self._order if item is item[3].item]
                heapq.heapify(self._order)

    def describe(self, entry: Entry, moment: int) -> str:
        wait = entry.wait
        if wait is None:
            return super().describe(entry, moment)
        if wait.over:
            return "left behind by its conversation"
        age = self.clock() - wait.since
        worth = self._worth(self._place(wait, entry.followers), age)
        return f"waits for {age:.3g} s, worth {worth:.3g} returns/s"


_UNKNOWN: Final = Ended()

_RUNS: Final = 8
"""Runs behind a prompt's end that are searched for the wait of its conversation."""
_SLACK: Final = 1
"""Pages at the end of a prompt that may differ in the conversation's next one."""


class _EvictedWaits(dict[Any, Wait]):
    """Waits whose runs were evicted, by the symbols of the first evicted page.

    Those that are over are dropped when they may be half of all.
    """

    __slots__ = ("_most",)

    def __init__(self) -> None:
        super().__init__()
        self._most = 16

    def put(self, key: object, wait: Wait) -> None:
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
        # Behind empty prefixes, also by namespace: roots are removed when nothing is stored.
        self._at_roots = _EvictedWaits()

    # --- requests ----------------------------------------------------------------------------

    def opened(
        self, hold: Node, prompt: int, tenant: Hashable, following: Callable[[], bytes]
    ) -> RunningPrompt:
        """End the wait of the conversation that a ``prompt`` of so many tokens continues.

        It matches up to the end of ``hold``; ``following`` returns the symbols of its next page.
        Learns what it repeats of the answer before. A prompt that is not longer than the last one,
        as of a request that is sent again, needs the same KV and ends the wait; of the answer it
        says nothing.
        """
        wait = self._ended_by(hold, following)
        if wait is not None:
            if prompt > wait.prompt:
                again = self.read_again(wait, hold, following)
                if again is not None:
                    kind = wait.answer_kind
                    self.returns.answers.returned(tenant, kind, wait.answer, again)
            self._end(wait, hold)
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
        ended, tenant, returns = ended or _UNKNOWN, request.tenant, self.returns
        wait = returns.began(
            ended,
            answer if ended.tokens is None else ended.tokens,
            self.clock(),
            before=request.before,
            tenant=tenant,
        )
        wait.prompt, wait.answer = request.tokens, answer
        first = first if ended.first is None else ended.first
        kind = wait.answer_kind = returns.answers.ended(tenant, ended.stop, first)
        size = self._page_size
        wait.place = max(1, wait.prompt // size - _SLACK)
        read = returns.answers.worth(tenant, kind, answer)
        end = -(-(wait.prompt + read) // size)
        if read < answer and 0 < end < hold.end:
            hold = self._leave(hold, end, wait)
        before = _live(hold.wait)
        if before is not None:
            returns.lost(before, self.clock())
        hold.wait = wait
        wait.end = hold.end

    def _ended_by(self, hold: Node, following: Callable[[], bytes]) -> Wait | None:
        """Return the wait that ends with a prompt which matches up to the end of ``hold``.

        ``following`` returns the symbols of the prompt's next page. None: no conversation is known
        to wait there. Cost: O(1), 0.3 µs where nothing was evicted.
        """
        evicted = self._evicted(hold)
        if evicted:
            wait = evicted.get(_key(hold, following()))
            if wait is not None and not wait.over:
                return wait
        wait = _conversation(hold)
        if wait is not None and not (evicted and wait.evicted):
            return wait
        for node in _behind(hold):
            wait = _conversation(node)
            if wait is not None:
                return wait if wait.place <= hold.end else None
        return None

    def read_again(self, wait: Wait, hold: Node, following: Callable[[], bytes]) -> int | None:
        """Return how many tokens of the answer before ``wait`` a prompt contains that ends it.

        The prompt matches up to the end of ``hold``. None: what was evicted meanwhile would tell.
        """
        size = self._page_size
        tokens = hold.end * size
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

    def _leave(self, hold: Node, end: int, wait: Wait) -> Node:
        """Leave the answer behind: all runs of a request behind ``end`` pages; return its prompt's.

        Runs behind which others go on keep their own waits.
        """
        wait.unread = b""
        answer = Wait(wait.kind, wait.since, 0, (), wait.tenant)
        answer.over, answer.unread_of = True, wait
        node = hold
        while True:
            if _live(node.wait) is None:
                node.wait = answer
            if node.depth <= end:
                break
            assert node.parent is not None
            node = node.parent
        if node.depth < end:
            return self._tree.split(node, end - node.depth)
        assert node.parent is not None
        return node.parent

    def _end(self, wait: Wait, hold: Node) -> None:
        """Record that a wait at or behind ``hold`` is over, as its conversation has returned.

        A run that the conversation left behind becomes one of the next victims.
        """
        self.returns.returned(wait, self.clock())
        node = hold
        if node.wait is not wait and not wait.evicted:
            node = next((node for node in _behind(hold) if node.wait is wait), hold)
        self._settle(node)
        if self._tree.is_candidate(node):
            self._tree.dequeue(node)
            self._tree.enqueue(node)

    def _settle(self, node: Node) -> None:
        """Give a run whose own wait is over the latest one behind it that is not."""
        evicted = node.returns
        while evicted:
            key = next(reversed(evicted))
            if not evicted[key].over:
                if _live(node.wait) is None:
                    node.wait = evicted[key]
                break
            del evicted[key]
        node.followers = len(evicted or ())

    # --- events of the tree ------------------------------------------------------------------

    def evicted(self, leaf: Node, parent: Node) -> None:
        """Keep what waits at ``leaf``, which was evicted, with ``parent``."""
        if leaf.wait is not None and leaf.wait.unread_of is not None:
            leaf.wait.unread_of.unread = leaf.key
        latest = self._latest(leaf)
        if latest is None:
            return
        latest.evicted = True
        evicted = self._evicted(parent)
        if evicted is None:
            evicted = parent.returns = _EvictedWaits()
        key = _key(parent, leaf.key)
        before = evicted.get(key)
        if before is not None and before is not latest:
            self.returns.lost(before, self.clock())
        evicted.put(key, latest)
        if evicted is parent.returns:
            parent.followers = len(evicted)
            wait = _live(parent.wait)
            if wait is None or wait.since < latest.since:
                parent.wait = latest

    def trimming(self, leaf: Node) -> None:
        """Keep only the latest of what waits behind ``leaf``, whose tail is about to go.

        Its evicted runs began behind that tail, so their symbols say nothing any longer.
        """
        if leaf.returns:
            leaf.wait = self._latest(leaf) or leaf.wait

    def _latest(self, leaf: Node) -> Wait | None:
        """Return the wait at or behind ``leaf`` that began last, and give up the others."""
        latest = _live(leaf.wait)
        for wait in () if leaf.returns is None else leaf.returns.values():
            if wait.over or wait is latest:
                continue
            earlier = wait
            if latest is None or wait.since > latest.since:
                latest, earlier = wait, latest
            if earlier is not None:
                self.returns.lost(earlier, self.clock())
        leaf.returns, leaf.followers = None, 0
        return latest

    def _evicted(self, node: Node) -> _EvictedWaits | None:
        evicted: _EvictedWaits | None = node.returns
        return self._at_roots if isinstance(node, Root) else evicted


def _live(wait: Wait | None) -> Wait | None:
    """Return ``wait`` if a conversation is followed that waits."""
    return wait if wait is not None and wait.turns and not wait.over else None


def _conversation(node: Node) -> Wait | None:
    """Return the wait at a run, or that of the conversation whose answer the run is."""
    wait: Wait | None = node.wait
    return _live(wait if wait is None else wait.unread_of or wait)


def _behind(node: Node) -> Iterator[Node]:
    """Return the next runs behind ``node``, up to where paths branch."""
    for _ in range(_RUNS):
        if len(node.children) != 1:
            return
        (node,) = node.children.values()
        yield node


def _key(node: Node, symbols: bytes) -> object:
    """Return the key in `_EvictedWaits` of a page behind ``node``."""
    return (node.namespace, symbols) if isinstance(node, Root) else symbols
