"""Sessions: hints about conversations, which order eviction and change nothing else.

A session is one conversation. Pages that only this session has used are dead once the session is
over: they are evicted first. Pages that a suspended session needs again are evicted last. What a
prompt matches, which pages may be evicted, and whether a request can be opened are the same with
and without hints.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from kvkeep.core.cache.observers import CacheObserver
from kvkeep.core.errors import InvalidValue, number, told
from kvkeep.core.prefix.owners import Owner

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvkeep.core.cache.core import Core
    from kvkeep.core.cache.opening import CacheQuery
    from kvkeep.core.cache.sequence import Sequence
    from kvkeep.core.keys import Namespace
    from kvkeep.core.pages.tables import PageArray
    from kvkeep.core.prefix import PrefixIndex

__all__ = [
    "LONGEST_ETA_S",
    "Session",
    "SessionBoard",
    "check_name",
]

LONGEST_ETA_S = 3600.0
"""Longest time for which pages are kept for a suspended session; a longer ``eta`` is cut."""
_LONGEST_ID = 256
_MOST_SESSIONS = 65_536
_AWAITED_SHARE = 0.5
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

    __slots__ = ("_core", "id", "namespace")

    def __init__(self, core: Core, namespace: Namespace, name: str) -> None:
        self._core = core
        self.namespace = namespace
        self.id = name

    @property
    def known(self) -> bool:
        """Whether the cache knows the session."""
        with self._core:
            return (self.namespace, self.id) in self._core.sessions.states

    @property
    def num_pages(self) -> int:
        """Cached pages that only this session has used and that are not dead, of all groups."""
        with self._core:
            state = self._core.sessions.states.get((self.namespace, self.id))
            return 0 if state is None else sum(node.weight for node in state.nodes)

    def suspend(self, eta: float) -> int:
        """Announce a pause, for a tool or a person, of at most ``eta`` seconds.

        Until the session's next request, or the end of that time, its pages are evicted last, the
        latest return first. ``eta`` is cut to an hour. When suspended sessions keep more than half
        of the pool, those suspended longest ago are no longer awaited. Returns the session's own
        pages that are kept. Raises `InvalidValue` unless ``eta`` is above 0.
        """
        seconds = number("eta", eta, "a number of seconds above 0", above=0)
        with self._core:
            return self._core.sessions.suspend((self.namespace, self.id), seconds)

    def close(self) -> int:
        """End the session. Returns the pages that died: those that only it has used.

        Pages that its running requests publish later are dead from the beginning. A request that
        names the session again begins a new one.
        """
        with self._core:
            return self._core.sessions.close((self.namespace, self.id))

    def __repr__(self) -> str:
        return f"<Session {self.id!r}, {self.num_pages} pages of its own>"


Key = tuple["Namespace", str]


class SessionBoard(CacheObserver):
    """All sessions of a cache; it observes the cache from the first request of a session on.

    Thread safety: none; under the cache's lock. Memory: 650 to 750 bytes a session and the length
    of its name; beyond ``most`` sessions those named longest ago are forgotten. Holds no pages.
    """

    def __init__(self, index: PrefixIndex, num_pages: int, clock: Callable[[], float]) -> None:
        self.states: OrderedDict[Key, Owner] = OrderedDict()
        self.most = _MOST_SESSIONS
        self._index = index
        self._most_awaited = int(num_pages * _AWAITED_SHARE)
        self._clock = clock
        self._suspended: dict[Owner, None] = {}  # in the order of suspension
        # A heap of (due, serial, state); an entry counts while its time is still the state's.
        self._returns: list[tuple[float, int, Owner]] = []
        self._serial = 0

    # --- requests ----------------------------------------------------------------------------

    def opened(self, sequence: Sequence, query: CacheQuery, cached: PageArray) -> None:
        """Note that a session, or a request without one, uses the path of the sequence."""
        if query.session is None:
            self._index.keep_owners().used(sequence.hold, None)
        else:
            sequence.owner = self.enter((query.namespace, query.session), sequence.hold)

    def forked(self, sequence: Sequence, fork: Sequence) -> None:
        """Let the fork publish on behalf of the same session."""
        fork.owner = sequence.owner

    def enter(self, key: Key, hold: Any) -> Owner:
        """Record that a request of a session uses the path of ``hold``; return the session."""
        state = self.states.get(key)
        if state is None:
            state = self._begin(key)
        self.states.move_to_end(key)
        self._wake(state)
        self._index.keep_owners().used(hold, state)
        return state

    def _begin(self, key: Key) -> Owner:
        state = self.states[key] = Owner()
        if len(self.states) > self.most:
            # The forgotten session still owns its runs until others use them.
            self._wake(self.states.popitem(last=False)[1])
        return state

    # --- hints -------------------------------------------------------------------------------

    def suspend(self, key: Key, eta: float) -> int:
        """See `Session.suspend`."""
        state = self.states.get(key)
        if state is None:
            return 0
        self.states.move_to_end(key)
        self._wake(state)
        due = self._clock() + min(eta, LONGEST_ETA_S)
        pages = self._index.keep_owners().suspend(state, due)
        self._suspended[state] = None
        self._serial += 1
        heapq.heappush(self._returns, (due, self._serial, state))
        self.evicting()
        return pages if state in self._suspended else 0

    def close(self, key: Key) -> int:
        """See `Session.close`."""
        state = self.states.pop(key, None)
        if state is None:
            return 0
        self._wake(state)
        dead = self._index.keep_owners().kill(state)
        state.left = True
        return dead

    def evicting(self) -> None:
        """Stop waiting for sessions whose time is over, and for those beyond the share."""
        if not self._suspended:
            return
        now = self._clock()
        while self._returns and (self._returns[0][0] <= now or not _awaits(self._returns[0])):
            due, _, state = heapq.heappop(self._returns)
            if state.due == due:
                self._wake(state)
        owners = self._index.keep_owners()
        if owners.num_awaited > self._most_awaited:
            for state in list(self._suspended):  # suspended longest ago first
                self._wake(state)
                if owners.num_awaited <= self._most_awaited:
                    break

    def _wake(self, state: Owner) -> None:
        if state not in self._suspended:
            return
        del self._suspended[state]
        self._index.keep_owners().wake(state)
        if len(self._returns) > 2 * len(self._suspended) + 64:  # most entries are stale
            self._returns = [item for item in self._returns if _awaits(item)]
            heapq.heapify(self._returns)

    # --- figures -----------------------------------------------------------------------------

    def figures(self) -> Mapping[str, Any]:
        """Return the counts of dead and awaited pages and of sessions."""
        return {
            "pages_dead": self.num_dead,
            "pages_awaited": self.num_awaited,
            "sessions": len(self.states),
        }

    @property
    def num_dead(self) -> int:
        """Dead pages that are still cached."""
        return 0 if self._index.owners is None else self._index.owners.num_dead

    @property
    def num_awaited(self) -> int:
        """Pages that are kept for suspended sessions."""
        return 0 if self._index.owners is None else self._index.owners.num_awaited

    def check(self) -> None:
        """Assert that suspended sessions have a return and that bounds hold."""
        states = set(self.states.values())
        assert states.issuperset(self._suspended)
        assert {state for state in states if state.due is not None} == set(self._suspended)
        assert set(self._suspended) <= {
            state for due, _, state in self._returns if due == state.due
        }
        assert not any(state.left for state in states)
        assert len(states) <= self.most


def _awaits(item: tuple[float, int, Owner]) -> bool:
    """Whether a heap entry is the current one of its session."""
    return item[0] == item[2].due
