"""`ReturnAware`: evict what is least worth keeping until its conversation returns."""

from __future__ import annotations

import time
from collections import OrderedDict
from math import inf
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kvkeep.core.prefix.node import Root
from kvkeep.core.prefix.policy import AgeQueue, EvictionPolicy
from kvkeep.core.returns import Ended, Returns, Wait, bucket_of

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable
    from typing import Self

    import numpy.typing as npt

    from kvkeep.core.keys import Namespace
    from kvkeep.core.prefix.node import Entry, Node
    from kvkeep.core.prefix.tree import Tree

__all__ = ["ReturnAware", "RunningPrompt", "Waits"]

_MOST_SHARED: Final = 3  # octaves: a run that eight conversations may need is not worth more
_LOOK: Final = 1.0  # seconds for which the worth of a queue is taken as constant
_LOOKED: Final = 256  # queues that are looked at for each victim, besides those that changed


class _ClassQueue:
    """The candidates of one class, by when their waits began."""

    __slots__ = ("_ages", "_groups", "factor", "kind", "row", "since")

    def __init__(self, kind: int, factor: float, row: int) -> None:
        self.kind = kind
        self.factor = factor
        self.row = row  # in the order of queues
        self.since = 0.0
        """When the wait began that is worth least, as `look` saw it."""
        # By when their waits began: one age for all blocks of a prompt in a tier.
        self._groups: dict[float, OrderedDict[Entry, None]] = {}
        self._ages = AgeQueue[float]()

    def push(self, entry: Entry, since: float, *, first: bool) -> None:
        """Add a candidate; ``first``: in front of those that wait as long."""
        group = self._groups.get(since)
        if group is None:
            group = self._groups[since] = OrderedDict()
            self._ages.push(since, since)
        group[entry] = None
        if first:
            group.move_to_end(entry, last=False)

    def remove(self, entry: Entry, since: float) -> None:
        """Remove a candidate."""
        group = self._groups[since]
        del group[entry]
        if not group:
            del self._groups[since]
            self._ages.remove(since)

    def first(self) -> Entry:
        """Return the first candidate whose wait began at `since`."""
        return next(iter(self._groups[self.since]))

    def look(self, returns: Returns, now: float) -> float:
        """Return what the oldest candidate is worth, or the newest if that is worth less."""
        oldest, newest = self._ages.oldest, self._ages.newest
        if oldest is None:
            return inf
        self.since = oldest
        if self.kind < 0:
            return -1.0
        worths = returns.worths[self.kind]
        worth = worths[bucket_of(now - oldest)]
        if newest is not None:
            last = worths[bucket_of(now - newest)]
            if last < worth:
                self.since, worth = newest, last
        return worth * self.factor


class ReturnAware(EvictionPolicy):
    """Evicts the run that is worth least until the next request of its conversation comes.

    The worth is learned online, by class and age of the wait (`kvkeep.core.returns.Returns`). Runs
    that a conversation has left behind go first, oldest first. A run that several conversations
    wait behind is worth as much as all of them, up to eight. A run that no wait is known of counts
    as one of the most general class.

    Of each class, the run that waits longest and the one whose wait began last are compared: the
    worth of a class rises with age to its peak and falls behind it, so what is worth least is at
    one of these ends, and nothing moves as it ages.

    Cost: 1 µs an entry, 5 µs a victim, and 1 µs more for each class once a second, for 256 of them
    at most in a call; 2 ms where something is learned.
    """

    name = "returns"
    waits: Waits
    """Where conversations wait, of a policy for the runs of a tree."""

    def __init__(self) -> None:
        self.returns = Returns()
        """What is learned."""
        self.clock: Callable[[], float] = time.monotonic
        """Seconds."""
        self._running: dict[Hashable, RunningPrompt] = {}
        self._length = 0
        # By class, and octaves above what that is worth.
        self._queues: dict[tuple[int, int], _ClassQueue] = {}
        self._rows: list[_ClassQueue] = []
        self._worths: list[float] = []  # by row, as of the last look
        self._changed: set[_ClassQueue] = set()  # since then
        self._outdated: list[_ClassQueue] = []  # as time went on, or something was learned
        self._looked = -1, 0.0  # at that version, at that time

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
        if first.attached:
            self.waits = first.waits

    def opened(
        self,
        request: Hashable,
        node: Node,
        namespace: Namespace,
        tokens: int,
        following: Callable[[], bytes],
    ) -> tuple[float, int] | None:
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
        answer = max(0, len(row) - running.tokens)
        first = int(row[running.tokens]) if answer else None
        self.waits.closed(node, running, answer, ended, first)

    def forked(self, request: Hashable, fork: Hashable) -> None:
        self._running[fork] = self._running[request]

    def dropped(self, request: Hashable) -> None:
        del self._running[request]

    def trimmed(self, leaf: Node, keep: int) -> None:
        self.waits.trimming(leaf)

    def gone(self, leaf: Node, parent: Node) -> None:
        self.waits.evicted(leaf, parent)

    # --- order -------------------------------------------------------------------------------

    def add(self, entry: Entry) -> None:
        self._push(entry, first=False)

    def _push(self, entry: Entry, *, first: bool) -> None:
        wait: Wait | None = entry.wait
        if wait is None:
            wait = entry.wait = self.returns.unknown(self.clock())
        place = _place(wait, entry.followers)
        queue = self._queues.get(place)
        if queue is None:
            kind, octaves = place
            queue = self._queues[place] = _ClassQueue(kind, 2.0**octaves, len(self._rows))
            self._rows.append(queue)
            self._worths.append(inf)
        queue.push(entry, wait.since, first=first)
        entry.rank = queue, wait.since
        self._changed.add(queue)
        self._length += 1

    def discard(self, entry: Entry) -> None:
        queue, since = entry.rank
        queue.remove(entry, since)
        self._changed.add(queue)
        self._length -= 1

    def pop(self) -> Entry | None:
        """Remove and return the candidate that is worth least."""
        if not self._length:
            return None
        entry = self._first().first()
        self.discard(entry)
        return entry

    def put_back(self, entry: Entry) -> None:
        self._push(entry, first=True)

    def least(self) -> float | None:
        """Return what the next victim is worth, in returns a second."""
        return self._worths[self._first().row] if self._length else None

    def _first(self) -> _ClassQueue:
        """Return the queue of the next victim; there is one."""
        now, returns = self.clock(), self.returns
        returns.study(now)
        version, looked = self._looked
        if version != returns.version or not 0 <= now - looked < _LOOK:
            self._looked = returns.version, now
            self._outdated = self._rows.copy()
        worths = self._worths
        for queue in (*self._changed, *self._outdated[-_LOOKED:]):
            worths[queue.row] = queue.look(returns, now)
        self._changed.clear()
        del self._outdated[-_LOOKED:]
        return self._rows[worths.index(min(worths))]

    def __len__(self) -> int:
        return self._length

    def describe(self, entry: Entry, moment: int) -> str:
        wait: Wait | None = entry.wait
        if wait is None:
            return super().describe(entry, moment)
        if wait.over:
            return "left behind by its conversation"
        now = self.clock()
        worth = self.returns.worth(wait, now) * 2.0 ** _shared(entry.followers)
        return f"waits for {now - wait.since:.3g} s, worth {worth:.3g} returns/s"


def _place(wait: Wait, followers: int) -> tuple[int, int]:
    """Return a run's class, -1 if nobody waits for it, and the octaves that it is worth more."""
    if wait.over:
        return -1, 0
    return wait.kind, wait.tenant.octaves + _shared(followers)


def _shared(followers: int) -> int:
    """Return the octaves that a run is worth more for so many conversations."""
    return min(_MOST_SHARED, followers.bit_length() - 1) if followers > 1 else 0


# --- waits at the runs of a tree -----------------------------------------------------------------

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
        self._at_roots = _EvictedWaits()
        """For empty prefixes, by namespace, too: roots are removed when nothing is stored."""

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
                    wait.tenant.answers.returned(wait.answer_kind, wait.answer, again)
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

        That counts the tokens stored of it, and ``first`` is its first one. What of it is not
        expected to be in the next prompt is left behind.
        """
        ended, size = ended or _UNKNOWN, self._page_size
        wait = self.returns.began(
            ended,
            answer if ended.tokens is None else ended.tokens,
            self.clock(),
            before=request.before,
            tenant=request.tenant,
        )
        wait.prompt, wait.answer = request.tokens, answer
        wait.answer_kind = ended.stop, first if ended.first is None else ended.first
        worth = wait.tenant.answers.worth(wait.answer_kind, answer)
        end = -(-(wait.prompt + worth) // size)
        if worth < answer and 0 < end < hold.end:
            hold = self._leave(hold, end, wait)
        before: Wait | None = hold.wait
        if before is not None and before.slot >= 0:
            self.returns.lost(before, wait.since)
        hold.wait = wait
        wait.end = hold.end

    def _leave(self, hold: Node, end: int, wait: Wait) -> Node:
        """Leave the answer behind: all runs of a request behind ``end`` pages; return its prompt's.

        Runs behind which others go on keep their own waits.
        """
        wait.unread = b""
        left = Wait(wait.kind, wait.since, wait.turns, (), wait.tenant)
        left.over, left.unread_of = True, wait
        node = hold
        while True:
            if _followed(node) is None:
                node.wait = left
            if node.depth <= end:
                break
            assert node.parent is not None
            node = node.parent
        if node.depth < end:
            return self._tree.split(node, end - node.depth)
        assert node.parent is not None
        return node.parent

    def _ended_by(self, hold: Node, following: Callable[[], bytes]) -> Wait | None:
        """Return the wait that ends with a prompt which matches up to the end of ``hold``.

        ``following`` returns the symbols of the prompt's next page. None: no conversation is known
        to wait there. Cost: O(1), 0.3 µs where nothing was evicted.
        """
        gone, size = self._at_roots if isinstance(hold, Root) else hold.returns, self._page_size
        wait: Wait | None
        if gone:
            wait = gone.get(_key(hold, following()))
            if wait is not None and not wait.over:
                return wait
        wait = _conversation(hold)
        if wait is not None and not (gone and wait.evicted):
            return wait
        node = hold
        for _ in range(_RUNS):
            if len(node.children) != 1:
                break
            (node,) = node.children.values()
            wait = _conversation(node)
            if wait is not None:
                return wait if hold.end >= max(1, wait.prompt // size - _SLACK) else None
        return None

    def read_again(self, wait: Wait, hold: Node, following: Callable[[], bytes]) -> int | None:
        """Return how many tokens of the answer before ``wait`` a prompt contains that ends it.

        The prompt matches up to the end of ``hold``. Call it before the wait is over. None: what
        was evicted meanwhile would tell.
        """
        size = self._page_size
        tokens = hold.end * size
        if wait.evicted:
            return None
        if tokens >= (wait.prompt + wait.answer - 1) // size * size:
            return wait.answer
        attached: Wait | None = hold.wait
        if attached is wait:
            if wait.unread is None or hold.end < wait.end:
                return None
            if wait.unread and wait.unread == following():
                return wait.answer
        elif following() in hold.children:
            return None  # it goes on, but groups of layers resume here
        elif attached is not None and attached.unread_of is wait and not hold.children:
            return None  # its tail is gone
        return min(wait.answer, max(0, tokens - wait.prompt))

    def _end(self, wait: Wait, hold: Node) -> None:
        """Record that a wait at or behind ``hold`` is over, as its conversation has returned.

        A run that the conversation left behind becomes one of the next victims.
        """
        self.returns.returned(wait, self.clock())
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
                if _followed(node) is None:
                    node.wait = gone[key]
                break
            del gone[key]
        node.followers = len(gone or ())

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
            gone = parent.returns = _EvictedWaits() if parent.returns is None else parent.returns
            attached = _followed(parent)
            if attached is None or attached.since < latest.since:
                parent.wait = latest
        key = _key(parent, leaf.key)
        other = gone.get(key)
        if other is not None and other is not latest:
            self.returns.lost(other, self.clock())
        gone.put(key, latest)
        parent.followers = len(parent.returns or ())

    def trimming(self, leaf: Node) -> None:
        """Keep only the latest of what waits behind ``leaf``, whose tail is about to go.

        Its evicted runs began behind that tail, so their symbols say nothing any longer.
        """
        if leaf.returns:
            leaf.wait = self._latest(leaf) or leaf.wait

    def _latest(self, leaf: Node) -> Wait | None:
        """Return the wait at or behind ``leaf`` that began last, and give up the others."""
        waits = {wait: None for wait in (leaf.returns or {}).values() if not wait.over}
        attached = _followed(leaf)
        if attached is not None:
            waits[attached] = None
        leaf.returns, leaf.followers = None, 0
        latest = max(waits, key=lambda wait: wait.since, default=None)
        for wait in waits:
            if wait is not latest:
                self.returns.lost(wait, self.clock())
        return latest


def _followed(node: Node) -> Wait | None:
    """Return the wait at a run, if it is followed and not over."""
    wait: Wait | None = node.wait
    return wait if wait is not None and wait.slot >= 0 else None


def _conversation(node: Node) -> Wait | None:
    """Return the wait at a run, or that of the conversation whose answer the run is."""
    wait: Wait | None = node.wait
    if wait is not None and wait.unread_of is not None:
        wait = wait.unread_of
    return wait if wait is not None and wait.slot >= 0 else None


def _key(node: Node, symbols: bytes) -> object:
    """Return the key in `_EvictedWaits` of a page behind ``node``."""
    return (node.namespace, symbols) if isinstance(node, Root) else symbols
