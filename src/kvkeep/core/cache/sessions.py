"""Sessions: hints about conversations, which order eviction and change nothing else.

A session is one conversation. Pages that only this session has used are dead once the session is
over: they are evicted first. Pages that a suspended session needs again are evicted last. What a
prompt matches, which pages may be evicted, and whether a request can be opened are the same with
and without hints.

`Node.owner` is the only session so far that has used a run; None stands for several users, or a
request without a session. It changes from an owner to None and never back. A use of a run is a use
of all runs before it:

    root ── system prompt (None) ─┬─ A's first turn (A) ── A's second turn (A)
                                  └─ B's first turn (B)

So an owner's runs are complete ends of branches, and a hint changes these alone.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from operator import attrgetter
from typing import TYPE_CHECKING, Final

from kvkeep.core.errors import InvalidValue, number, told
from kvkeep.core.prefix.node import Coverage, TreeObserver

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvkeep.core.events import CacheLock
    from kvkeep.core.keys import Namespace
    from kvkeep.core.prefix import Tree
    from kvkeep.core.prefix.node import Node

    Key = tuple[Namespace, str]

__all__ = ["LONGEST_ETA_S", "Owner", "Session", "Sessions", "check_name"]

LONGEST_ETA_S: Final = 3600.0
"""Longest time for which pages are kept for a suspended session; a longer ``eta`` is cut."""
_LONGEST_ID: Final = 256
_MOST_SESSIONS: Final = 65_536
_AWAITED_SHARE: Final = 0.5
"""Share of the pool that suspended sessions keep at most, prefixes of their pages included."""


def check_name(session: object) -> str:
    """Return a session's name; `InvalidValue` if it is not valid."""
    if not isinstance(session, str) or not 0 < len(session) <= _LONGEST_ID:
        raise InvalidValue(
            f"a session is named by a text of 1 … {_LONGEST_ID} characters, got {told(session)}"
        )
    return session


class Session:
    """Hints about one session, made by `PagedCache.session`; holds no pages, needs no closing.

    Hints about a session that the cache does not know have no effect: one that no request named,
    that was closed, or that was forgotten because too many others were named since.

    Thread safety: every method takes the cache's lock.
    """

    __slots__ = ("_lock", "_sessions", "id", "namespace")

    def __init__(self, lock: CacheLock, sessions: Sessions, namespace: Namespace, id_: str) -> None:
        self._lock = lock
        self._sessions = sessions
        self.namespace = namespace
        self.id = id_

    @property
    def known(self) -> bool:
        """Whether the cache knows the session."""
        with self._lock:
            return (self.namespace, self.id) in self._sessions.owners

    @property
    def num_pages(self) -> int:
        """Cached pages that only this session has used and that are not dead, of all groups."""
        with self._lock:
            owner = self._sessions.owners.get((self.namespace, self.id))
            return 0 if owner is None else owner.num_pages

    def suspend(self, eta: float) -> int:
        """Announce a pause, for a tool or a person, of at most ``eta`` seconds.

        Until the session's next request, or the end of that time, its pages are evicted last, those
        of the latest return first. ``eta`` is cut to an hour. When suspended sessions keep more
        than half of the pool, those suspended longest ago are no longer awaited. Returns the pages
        that are kept and that only this session has used. Raises `InvalidValue` unless ``eta`` is
        above 0.
        """
        seconds = number("eta", eta, "a number of seconds above 0", above=0)
        with self._lock:
            return self._sessions.suspend((self.namespace, self.id), seconds)

    def close(self) -> int:
        """End the session. Returns the pages that died: those that only it has used.

        Pages that its running requests publish later are dead from the beginning. A request that
        names the session again begins a new one.
        """
        with self._lock:
            return self._sessions.close((self.namespace, self.id))

    def __repr__(self) -> str:
        return f"<Session {self.id!r}, {self.num_pages} pages of its own>"


class Owner:
    """One session, and the living runs that only it has used.

    ``due`` is when it is expected back, if it is suspended; what it stores once it has ``ended`` is
    dead at once.
    """

    __slots__ = ("due", "ended", "nodes")

    def __init__(self) -> None:
        self.nodes: dict[Node, None] = {}
        self.due: float | None = None
        self.ended = False

    @property
    def num_pages(self) -> int:
        """Pages of its runs, of all groups."""
        return sum(node.weight for node in self.nodes)


class Sessions(TreeObserver):
    """All sessions of a cache. It observes the tree from the first request of a session on.

    Descendants of a dead run are dead. A use by another user walks up to the first run without an
    owner, so it visits each owned run once at most.

    Thread safety: none; under the cache's lock. Memory: 650 to 750 bytes a session and the length
    of its name, and a dictionary entry a run; beyond ``most`` sessions those named longest ago are
    forgotten. Holds no pages.

    Attributes:
        owners: the sessions, in the order in which they were last named.
        observing: whether any request has named a session.
        num_dead: pages that are dead and still stored, those of rows and states included.
        awaited: pages of suspended sessions, and all pages before them.
    """

    def __init__(self, tree: Tree, num_pages: int, clock: Callable[[], float]) -> None:
        self.owners: OrderedDict[Key, Owner] = OrderedDict()
        self.most = _MOST_SESSIONS
        self.observing = False
        self.num_dead = 0
        self.awaited = Coverage(attrgetter("weight"))
        self._tree = tree
        self._most_awaited = int(num_pages * _AWAITED_SHARE)
        self._clock = clock
        self._deaths = 0
        self._suspended: dict[Owner, None] = {}  # in the order of suspension
        # A heap of (due, serial, owner); an entry counts while its time is still the owner's.
        self._returns: list[tuple[float, int, Owner]] = []
        self._serial = 0

    # --- requests and hints ----------------------------------------------------------------------

    def enter(self, key: Key) -> Owner:
        """Return the session of a request that begins."""
        if not self.observing:
            self.observing = True
            self._tree.observe(self)
        owner = self.owners.get(key)
        if owner is None:
            owner = self.owners[key] = Owner()
            if len(self.owners) > self.most:
                # The forgotten session still owns its runs until others use them.
                self._wake(self.owners.popitem(last=False)[1])
        self.owners.move_to_end(key)
        self._wake(owner)
        return owner

    def suspend(self, key: Key, eta: float) -> int:
        """See `Session.suspend`."""
        owner = self.owners.get(key)
        if owner is None:
            return 0
        self.owners.move_to_end(key)
        self._wake(owner)
        owner.due = self._clock() + min(eta, LONGEST_ETA_S)
        for node in owner.nodes:
            self._change(node, 0, owner.due)
        pages = owner.num_pages
        self._suspended[owner] = None
        self._serial += 1
        heapq.heappush(self._returns, (owner.due, self._serial, owner))
        self.expire()
        return pages if owner in self._suspended else 0

    def close(self, key: Key) -> int:
        """See `Session.close`."""
        owner = self.owners.pop(key, None)
        if owner is None:
            return 0
        self._wake(owner)
        before = self.num_dead
        for node in list(owner.nodes):
            self._change(node, self._death(), None)
        owner.ended = True
        return self.num_dead - before

    def expire(self) -> None:
        """Stop waiting for sessions whose time is over, and for those beyond the share."""
        if not self._suspended:
            return
        now = self._clock()
        while self._returns and (self._returns[0][0] <= now or not _awaits(self._returns[0])):
            due, _, owner = heapq.heappop(self._returns)
            if owner.due == due:
                self._wake(owner)
        if self.awaited.num_pages > self._most_awaited:
            for owner in list(self._suspended):  # suspended longest ago first
                self._wake(owner)
                if self.awaited.num_pages <= self._most_awaited:
                    break

    def _wake(self, owner: Owner) -> None:
        """End the suspension of a session."""
        if owner not in self._suspended:
            return
        del self._suspended[owner]
        owner.due = None
        for node in owner.nodes:
            self._change(node, 0, None)
        if len(self._returns) > 2 * len(self._suspended) + 64:  # most entries are stale
            self._returns = [item for item in self._returns if _awaits(item)]
            heapq.heapify(self._returns)

    def _death(self) -> int:
        self._deaths += 1
        return self._deaths

    # --- observer of the tree --------------------------------------------------------------------

    def used(self, node: Node, owner: Owner | None) -> None:
        """Record that ``owner`` uses the path of ``node``; dead runs on it revive.

        Cost: up to the first run for which the use changes nothing.
        """
        while node.owner is not None:
            if node.owner is not owner:
                self._share(node)
            elif node.died and not owner.ended:
                self._change(node, 0, owner.due)
            else:
                return
            assert node.parent is not None
            node = node.parent

    def born(self, node: Node, pages: int) -> None:
        owner: Owner | None = node.owner
        if pages < node.size:
            self.resized(node, pages)
        elif owner is not None:
            owner.nodes[node] = None
            dead = owner.ended or (node.parent is not None and bool(node.parent.died))
            self._set(node, self._death() if dead else 0, None if dead else owner.due)

    def split(self, upper: Node, lower: Node) -> None:
        self.awaited.split(upper, lower)
        if upper.owner is not None and not upper.died:
            upper.owner.nodes[upper] = None
            if upper.due is not None:
                self.awaited.add(upper)

    def joined(self, upper: Node, lower: Node) -> None:
        if upper.owner is not None and not upper.died:
            del upper.owner.nodes[upper]
        self.awaited.joined(upper)

    def resized(self, node: Node, pages: int) -> None:
        if node.died:
            self.num_dead += pages
        self.awaited.resized(node, pages)

    def trimmed(self, leaf: Node, keep: int) -> None:
        self.resized(leaf, keep - leaf.size)

    def gone(self, leaf: Node, parent: Node) -> None:
        if leaf.died:
            self.num_dead -= leaf.weight
        elif leaf.owner is not None:
            if leaf.due is not None:
                self.awaited.remove(leaf)
            del leaf.owner.nodes[leaf]
        leaf.owner = None

    def _share(self, node: Node) -> None:
        """Record that ``node`` has a second user."""
        owner: Owner = node.owner
        self._change(node, 0, None)
        del owner.nodes[node]
        node.owner = None

    def _change(self, node: Node, died: int, due: float | None) -> None:
        """Change the hints of ``node``, and its place among the candidates."""
        queued = self._tree.is_candidate(node)
        if queued:
            self._tree.dequeue(node)
        self._set(node, died, due)
        if queued:
            self._tree.enqueue(node)

    def _set(self, node: Node, died: int, due: float | None) -> None:
        owner: Owner = node.owner
        if node.died:
            self.num_dead -= node.weight
            owner.nodes[node] = None
        if died:
            self.num_dead += node.weight
            del owner.nodes[node]
        if due is not None and node.due is None:
            self.awaited.add(node)
        elif node.due is not None and due is None:
            self.awaited.remove(node)
        node.died, node.due = died, due

    def check(self, nodes: Sequence[Node]) -> None:
        """Recount everything from all nodes but the roots. Asserts."""
        owners = set(self.owners.values())
        assert owners.issuperset(self._suspended)
        assert {owner for owner in owners if owner.due is not None} == set(self._suspended)
        assert set(self._suspended) <= {
            owner for due, _, owner in self._returns if due == owner.due
        }
        assert not any(owner.ended for owner in owners)
        assert len(owners) <= self.most
        for node in nodes:
            parent = node.parent
            assert parent is not None
            assert parent.owner in {None, node.owner}, "another owner's run on an owner's path"
            hinted = node.died or node.due is not None
            assert node.owner is not None or not hinted, "a hint without an owner"
            assert node.died or not parent.died, "a living run follows a dead one"
            assert not (node.died and node.due is not None)
            if node.owner is not None:
                assert (node in node.owner.nodes) == (not node.died)
                assert node.due == (None if node.died else node.owner.due)
        dead = sum(node.weight for node in nodes if node.died)
        assert dead == self.num_dead, (dead, self.num_dead)
        self.awaited.check(nodes, lambda node: node.due is not None)


def _awaits(item: tuple[float, int, Owner]) -> bool:
    """Whether a heap entry is the current one of its session."""
    return item[0] == item[2].due
