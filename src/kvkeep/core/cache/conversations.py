"""`waiting`: the conversations of a cache, by when their next request is expected.

`expected`: how many wait, and how many of them are expected within some seconds.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple

from kvkeep.core.errors import number, whole

if TYPE_CHECKING:
    from kvkeep.core.cache.core import Core
    from kvkeep.core.keys import Namespace

__all__ = ["Conversation", "ReturnCounts", "expected", "waiting"]

_LOOKED_AT: Final = 1000
_COUNTED: Final = 8192


class ReturnCounts(NamedTuple):
    """How many conversations wait, and how many of them are expected to return in time."""

    waiting: int
    expected: float


class Conversation(NamedTuple):
    """A conversation whose last request ended ``paused_s`` seconds ago.

    ``chance`` is that of another request, and ``expected_s`` are the seconds until it has come in
    half of the cases in which it comes at all; both are learned from what came before. ``tokens``
    are those of the last request with its answer, whose end is ``cached`` or was evicted. ``stop``
    says why the answer ended.
    """

    namespace: Namespace
    session: str | None
    stop: str | None
    turns: int
    paused_s: float
    chance: float
    expected_s: float
    tokens: int
    cached: bool


def waiting(core: Core, most: int = 20) -> list[Conversation] | None:
    """Return conversations that wait, the one that is probably next first.

    Of the 1,000 whose last requests ended last, ``most`` at most. None: the cache's policy does not
    follow conversations (see `kvkeep.core.eviction.ReturnAware`). Thread safety: takes the cache's
    lock. Cost: about 5 ms for 1,000.
    """
    most = whole("most", most, 0)
    with core:
        board = core.returning
        if board is None:
            return None
        now = board.clock()
        found = []
        for wait in islice(reversed(board.returns), _LOOKED_AT):
            chance, expected = board.returns.outlook(wait, now)
            found.append(
                Conversation(
                    wait.namespace, wait.session, wait.stop, wait.turns, max(0.0, now - wait.since),
                    chance, expected, wait.prompt + wait.answer, not wait.evicted,
                )
            )  # fmt: skip
    return sorted(found, key=lambda one: one.expected_s / max(one.chance, 1e-9))[:most]


def expected(core: Core, seconds: float) -> ReturnCounts | None:
    """Return how many conversations wait, and how many are expected within ``seconds``.

    Expected are those of the 8,192 whose last requests ended last. None: as `waiting`. Thread
    safety: takes the cache's lock. Cost: about 5 ms for 8,192.
    """
    seconds = number("seconds", seconds, above=-1)
    with core:
        board = core.returning
        if board is None:
            return None
        waits = list(islice(reversed(board.returns), _COUNTED))
        chances = board.returns.within(waits, board.clock(), seconds) if waits else []
        return ReturnCounts(len(board.returns), sum(chances))
