"""Sessions: what those who send requests say of the future, and what their requests tell.

A session is one line of conversation: each of its requests continues the one before, or replaces
it. What only this session has used dies with it, or with the branch that was replaced; what it
will need again is kept for its return. All of that orders eviction and does nothing else: what is
found, what may go, and whether a request can be opened are the same with and without hints.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from numbers import Real
from typing import TYPE_CHECKING, Any

from kvkeep.core.errors import InvalidValue, whole
from kvkeep.core.prefix.owners import Owner

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvkeep.core.cache.core import Core
    from kvkeep.core.keys import Namespace
    from kvkeep.core.prefix import PrefixIndex

__all__ = [
    "LONGEST_ETA_S",
    "Session",
    "SessionBoard",
    "SessionState",
    "check_name",
    "check_session",
]

LONGEST_ETA_S = 3600.0
"""A session is awaited for an hour at most, whatever is said."""
_LONGEST_ID = 256
_MOST_SESSIONS = 65_536
_AWAITED_SHARE = 0.5
"""Of the pool: what is kept for sessions that are away, with all that lies before it."""


def check_session(session: object, turn: object) -> tuple[str | None, int | None]:
    """A session's name and the number of its turn, or `InvalidValue`."""
    if session is None:
        if turn is not None:
            raise InvalidValue(f"turn {turn!r} is one of a session; give its session, too")
        return None, None
    return check_name(session), None if turn is None else whole("turn", turn, 0)


def check_name(session: object) -> str:
    """A session's name, or `InvalidValue`."""
    if not isinstance(session, str) or not 0 < len(session) <= _LONGEST_ID:
        raise InvalidValue(
            f"a session is named by a text of 1 … {_LONGEST_ID} characters, got {session!r:.80}"
        )
    return session


class SessionState(Owner):
    """One session, as the cache keeps it: what it owns, and its latest ``turn``."""

    __slots__ = ("turn",)

    def __init__(self) -> None:
        super().__init__()
        self.turn = -1


class Session:
    """Hints about one session, made by `PagedCache.session`; it holds nothing and needs no end.

    A session that the cache does not know (it never came, was closed, or so many others came since
    that it was forgotten) takes every hint and nothing happens.

    Thread safety: every method takes the cache's one lock.
    """

    __slots__ = ("_core", "id", "namespace")

    def __init__(self, core: Core, namespace: Namespace, name: str) -> None:
        self._core = core
        self.namespace = namespace
        self.id = name

    @property
    def known(self) -> bool:
        """Whether the cache knows it."""
        with self._core:
            return (self.namespace, self.id) in self._core.sessions.lines

    @property
    def num_pages(self) -> int:
        """Pages that are cached, have not died, and were used by this session alone."""
        with self._core:
            line = self._core.sessions.lines.get((self.namespace, self.id))
            return 0 if line is None else sum(node.size for node in line.nodes)

    def suspend(self, eta: float) -> int:
        """It is away, for a tool or a person, and expected back in at most ``eta`` seconds.

        Until its next request, or that time is over, what it used is evicted when all else is
        gone, the latest return first. ``eta`` counts as an hour if it is more. When all that is
        awaited keeps more than half of the pool, who went first is not awaited any more. Returns
        the pages of its own that are kept. Raises `InvalidValue` unless ``eta`` is above 0.
        """
        seconds = _seconds(eta)
        with self._core:
            return self._core.sessions.suspend((self.namespace, self.id), seconds)

    def supersede(self) -> int:
        """What it used so far will not be continued: its next request begins anew.

        Returns the pages that died: those that only this session has used.
        """
        with self._core:
            return self._core.sessions.supersede((self.namespace, self.id))

    def close(self) -> int:
        """It is over. Returns the pages that died: those that only this session has used.

        What requests of it that still run will leave is dead from the beginning. A request that
        names the session again begins a new one.
        """
        with self._core:
            return self._core.sessions.close((self.namespace, self.id))

    def __repr__(self) -> str:
        return f"<Session {self.id!r}, {self.num_pages} pages of its own>"


Key = tuple["Namespace", str]


class SessionBoard:
    """All sessions of a cache. Thread safety: none; under the cache's lock.

    Memory: about 300 bytes a session and the length of its name; the sessions named longest ago
    are forgotten beyond ``most`` of them. Nothing here holds a page.
    """

    def __init__(self, index: PrefixIndex, num_pages: int, clock: Callable[[], float]) -> None:
        self.lines: OrderedDict[Key, SessionState] = OrderedDict()
        self.most = _MOST_SESSIONS
        self._index = index
        self._may_keep = int(num_pages * _AWAITED_SHARE)
        self._clock = clock
        self._away: dict[SessionState, None] = {}  # in the order in which they went
        self._returns: list[
            tuple[float, int, SessionState]
        ] = []  # a heap; only those still due count
        self._serial = 0

    # --- requests ----------------------------------------------------------------------------

    def enter(self, key: Key, hold: Any, turn: int | None) -> tuple[SessionState, int]:
        """A request of this session has taken ``hold``: what it leaves aside has died.

        ``turn`` None is the next one. Requests of the same turn stand side by side, and one of an
        earlier turn comes late: neither replaces anything.
        """
        line = self.lines.get(key)
        if line is None:
            line = self._begin(key)
        self.lines.move_to_end(key)
        owners = self._index.keep_owners()
        self._wake(line)
        owners.used(hold, line)
        if turn is None:
            turn = line.turn + 1
        if turn > line.turn:
            line.turn = turn
            owners.kill(line, hold)
        return line, turn

    def _begin(self, key: Key) -> SessionState:
        line = self.lines[key] = SessionState()
        if len(self.lines) > self.most:
            # What it owns, it owns still, until others use it: only nobody speaks for it any more.
            self._wake(self.lines.popitem(last=False)[1])
        return line

    # --- hints -------------------------------------------------------------------------------

    def suspend(self, key: Key, eta: float) -> int:
        """It will be back in ``eta`` seconds."""
        line = self.lines.get(key)
        if line is None:
            return 0
        self.lines.move_to_end(key)
        self._wake(line)
        due = self._clock() + min(eta, LONGEST_ETA_S)
        pages = self._index.keep_owners().suspend(line, due)
        self._away[line] = None
        self._serial += 1
        heapq.heappush(self._returns, (due, self._serial, line))
        self.settle()
        return pages if line in self._away else 0

    def supersede(self, key: Key) -> int:
        """All that is its own has died."""
        line = self.lines.get(key)
        if line is None:
            return 0
        self.lines.move_to_end(key)
        self._wake(line)
        return self._index.keep_owners().kill(line)

    def close(self, key: Key) -> int:
        """It is over."""
        dead = self.supersede(key)
        line = self.lines.pop(key, None)
        if line is not None:
            line.left = True
        return dead

    def settle(self) -> None:
        """Nobody is awaited longer than was said, nor are all that are away more than may be."""
        if not self._away:
            return
        now = self._clock()
        while self._returns and (self._returns[0][0] <= now or not self._awaits(self._returns[0])):
            due, _, line = heapq.heappop(self._returns)
            if line.due == due:
                self._wake(line)
        owners = self._index.keep_owners()
        if owners.num_awaited > self._may_keep:
            for line in list(self._away):  # who is away longest first; it comes to an end
                self._wake(line)
                if owners.num_awaited <= self._may_keep:
                    break

    def _awaits(self, item: tuple[float, int, SessionState]) -> bool:
        return item[0] == item[2].due

    def _wake(self, line: SessionState) -> None:
        if line not in self._away:
            return
        del self._away[line]
        self._index.keep_owners().wake(line)
        if len(self._returns) > 2 * len(self._away) + 64:  # mostly of those who came back before
            self._returns = [item for item in self._returns if self._awaits(item)]
            heapq.heapify(self._returns)

    # --- looking -----------------------------------------------------------------------------

    @property
    def num_dead(self) -> int:
        """Pages that died and are still there."""
        return 0 if self._index.owners is None else self._index.owners.num_dead

    @property
    def num_awaited(self) -> int:
        """Pages that are kept for sessions that are away."""
        return 0 if self._index.owners is None else self._index.owners.num_awaited

    def check(self) -> None:
        """Assert that who is away is known to be so, and keeps no more than may be kept."""
        lines = set(self.lines.values())
        assert lines.issuperset(self._away)
        assert {line for line in lines if line.due is not None} == set(self._away)
        assert set(self._away) <= {line for due, _, line in self._returns if due == line.due}
        assert not any(line.left for line in lines)
        assert len(lines) <= self.most


def _seconds(eta: object) -> float:
    number = float("nan") if isinstance(eta, bool) or not isinstance(eta, Real) else float(eta)
    if not number > 0:
        raise InvalidValue(f"a session is back in some seconds, got eta={eta!r}")
    return number
