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

So an owner's runs are complete ends of branches, and a hint is about these alone.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final

from kvkeep.core.errors import InvalidValue, number, told
from kvkeep.core.prefix.node import Coverage, TreeObserver
from kvkeep.core.prefix.policy import AgeQueue

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvkeep.core.events import CacheLock
    from kvkeep.core.keys import Namespace
    from kvkeep.core.prefix import Tree
    from kvkeep.core.prefix.node import Node

    Key = tuple[Namespace, str]

__all__ = ["Owner", "Session", "Sessions", "check_name"]

_LONGEST_ETA_S: Final = 3600.0
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
    """One session, and the runs that only it has used.

    ``hint`` orders its runs, for `Tree`: those of a session that has ``ended`` by the number of
    its end, those of a suspended one by ``-due``, the latest return first; else it is None.
    """

    __slots__ = ("ended", "hint", "nodes")

    def __init__(self) -> None:
        self.nodes: dict[Node, None] = {}
        self.hint: float | None = None
        self.ended = False

    @property
    def num_pages(self) -> int:
        """Pages of its runs, of all groups."""
        return sum(node.weight for node in self.nodes)


class Sessions(TreeObserver):
    """All sessions of a cache. It observes the tree from the first request of a session on.

    A use by another user walks up to the first run without an owner, so it visits each owned run
    once at most.

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
        self.awaited = Coverage(beside=True)
        self._tree = tree
        self._most_awaited = int(num_pages * _AWAITED_SHARE)
        self._clock = clock
        self._closed = 0
        self._suspended: OrderedDict[Owner, None] = OrderedDict()  # in the order of suspension
        self._returns = AgeQueue[float]()  # the same, by the time of their return

    # --- requests and hints ----------------------------------------------------------------------

    def enter(self, key: Key) -> Owner:
        """Return the session of a request that begins."""
        if not self.observing:
            self.observing = True
            self._tree.observe(self.awaited)
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
        if key not in self.owners:
            return 0
        owner = self.enter(key)
        due = self._clock() + min(eta, _LONGEST_ETA_S)
        with self._tree.reordering(owner.nodes):
            owner.hint = -due
        for node in owner.nodes:
            self.awaited.add(node)
        self._suspended[owner] = None
        self._returns.push(owner, due)
        self.expire()
        return owner.num_pages if owner in self._suspended else 0

    def close(self, key: Key) -> int:
        """See `Session.close`."""
        owner = self.owners.pop(key, None)
        if owner is None:
            return 0
        self._wake(owner)
        self._closed += 1
        with self._tree.reordering(owner.nodes):
            owner.ended, owner.hint = True, self._closed
        pages = owner.num_pages
        self.num_dead += pages
        return pages

    def expire(self) -> None:
        """Stop waiting for sessions whose time is over, and for those beyond the share."""
        if not self._suspended:
            return
        for owner, _ in self._returns.pop_until(self._clock()):
            self._wake(owner)
        while self.awaited.num_pages > self._most_awaited:  # suspended longest ago first
            self._wake(next(iter(self._suspended)))

    def _wake(self, owner: Owner) -> None:
        """End the suspension of a session, if it is suspended."""
        if owner not in self._suspended:
            return
        with self._tree.reordering(owner.nodes):
            owner.hint = None
        for node in owner.nodes:
            self.awaited.remove(node)
        del self._suspended[owner]
        if owner in self._returns:
            self._returns.remove(owner)

    # --- observer of the tree --------------------------------------------------------------------

    def used(self, node: Node, owner: Owner | None) -> None:
        """Record that ``owner`` uses the path of ``node``: runs of other owners are shared now."""
        while node.owner is not None and node.owner is not owner:
            with self._tree.reordering([node]):
                self._disown(node)
            assert node.parent is not None
            node = node.parent

    def _disown(self, node: Node) -> None:
        """Take ``node`` from its owner."""
        owner: Owner = node.owner
        del owner.nodes[node]
        if owner.ended:
            self.num_dead -= node.weight
        elif owner in self._suspended:
            self.awaited.remove(node)
        node.owner = None

    def born(self, node: Node, pages: int) -> None:
        owner: Owner | None = node.owner
        if owner is None:
            return
        if pages < node.size:  # it grew
            self.awaited.resized(node, pages)
            self.resized(node, pages)
            return
        owner.nodes[node] = None
        if owner.ended:
            self.num_dead += node.weight
        elif owner in self._suspended:
            self.awaited.add(node)

    def split(self, upper: Node, lower: Node) -> None:
        if upper.owner is not None:
            upper.owner.nodes[upper] = None
            if upper.owner in self._suspended:
                self.awaited.add(upper)

    def joined(self, upper: Node, lower: Node) -> None:
        if upper.owner is not None:
            del upper.owner.nodes[upper]

    def resized(self, node: Node, pages: int) -> None:
        if node.owner is not None and node.owner.ended:
            self.num_dead += pages

    def trimmed(self, leaf: Node, keep: int) -> None:
        self.resized(leaf, keep - leaf.size)

    def gone(self, leaf: Node, parent: Node) -> None:
        if leaf.owner is not None:
            self._disown(leaf)

    def check(self, nodes: Sequence[Node]) -> None:
        """Recount everything from all nodes but the roots. Asserts."""
        owners = set(self.owners.values())
        assert len(owners) <= self.most
        assert {owner for owner in owners if owner.hint is not None} == self._suspended.keys()
        assert len(self._returns) == len(self._suspended)
        assert all(owner in self._returns for owner in self._suspended)
        assert not any(owner.ended for owner in owners)
        owned = [node for node in nodes if node.owner is not None]
        assert all(node in node.owner.nodes for node in owned)
        assert sum(len(owner.nodes) for owner in {node.owner for node in owned}) == len(owned)
        for node in nodes:
            above: Owner | None = None if node.parent is None else node.parent.owner
            assert above in {None, node.owner}, "another's run on an owner's path"
        dead = sum(node.weight for node in owned if node.owner.ended)
        assert dead == self.num_dead, (dead, self.num_dead)
        self.awaited.check(nodes, lambda node: node.owner in self._suspended)
