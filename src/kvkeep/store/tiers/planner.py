"""`Planner`: the moves of blocks between tiers, as values. It moves nothing itself.

A store (`kvkeep.store.tiers.tiered`) performs the moves with bytes and threads, a replay
(`kvkeep.bench.replay.tiers`) on numbers.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

from kvkeep.core.errors import InvalidValue

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvkeep.store.tiers.tiering import TieringPolicy

__all__ = ["Copy", "Demote", "Drop", "Planner", "Promote", "Refuse", "Touches"]

_HEADROOM = 0.1
"""Share of memory kept free where evicted blocks have to be written to a tier first."""
_FIRST_PAUSE = 32  # blocks requested before `fit` is due again; doubles each time
_MANY_TOUCHES = 1 << 30  # more than any policy requires
_COUNTED = 8  # blocks whose touches are counted, over the blocks that all levels can hold …
_MOST_COUNTED = 1 << 17  # … at most this many, at about 220 bytes each


class Copy(NamedTuple):
    """Write ``block``, which memory holds, to tier ``target`` as well."""

    block: bytes
    target: int


class Refuse(NamedTuple):
    """Do not write ``block`` to tier ``target`` yet: the policy requires more touches."""

    block: bytes
    target: int


class Promote(NamedTuple):
    """Read ``block`` from tier ``source``; memory keeps it if ``stays``.

    The tier then deletes its copy if ``leaves``.
    """

    block: bytes
    source: int
    stays: bool
    leaves: bool


class Demote(NamedTuple):
    """Write ``block`` to tier ``target`` before ``source`` deletes it."""

    block: bytes
    source: int
    target: int


class Drop(NamedTuple):
    """Delete ``block`` from ``source``.

    ``refused`` is the tier that would have taken it after more touches, None if there is none.
    """

    block: bytes
    source: int
    refused: int | None


class Planner:
    """Decides the moves of blocks by a policy, for which it counts touches.

    Thread safety: all methods, by one lock that is held only while the policy decides. Cost: about
    a microsecond a call.
    """

    def __init__(self, policy: TieringPolicy, tiers: int) -> None:
        self.policy = policy
        self.tiers = tiers
        """Tiers below memory."""
        self._lock = threading.Lock()
        self._touches = Touches()
        self._until_fit = 0  # blocks that may be requested before `fit` is due
        self._pause = _FIRST_PAUSE

    @property
    def fit_due(self) -> bool:
        """Whether `fit` is to be called before the next `requested`."""
        return self._until_fit <= 0

    def fit(self, blocks: Sequence[int | None]) -> None:
        """Set how many blocks each level has room for; None where there is no budget."""
        room = None if None in blocks else sum(count for count in blocks if count is not None)
        counted = _MOST_COUNTED if room is None else _COUNTED * max(1, room)
        with self._lock:
            self._touches.limit = counted = min(_MOST_COUNTED, counted)
            self._until_fit = self._pause = min(2 * self._pause, counted)

    def requested(self, blocks: Sequence[bytes]) -> None:
        """Count the blocks of a prompt, before any move for it."""
        with self._lock:
            self._until_fit -= len(blocks)

    def store(self, blocks: Sequence[bytes]) -> list[Copy | Refuse]:
        """Return what each tier does with each of ``blocks``, which a prompt stores now."""
        admits = self.policy.admits
        moves: list[Copy | Refuse] = []
        with self._lock:
            for block in blocks:
                touches = self._touches.touch(block)
                for level in range(1, self.tiers + 1):
                    if admits(level, touches):
                        moves.append(Copy(block, level))
                    elif admits(level, _MANY_TOUCHES):
                        moves.append(Refuse(block, level))
        return moves

    def read(self, blocks: Sequence[bytes]) -> list[Copy]:
        """Return the copies of ``blocks`` that tiers admit from this request on."""
        admits = self.policy.admits
        moves: list[Copy] = []
        with self._lock:
            for block in blocks:
                touches = self._touches.touch(block)
                if touches > 1:  # else no earlier touch is known: it was not stored here lately
                    moves += [
                        Copy(block, level)
                        for level in range(1, self.tiers + 1)
                        if admits(level, touches) and not admits(level, touches - 1)
                    ]
        return moves

    def promote(self, block: bytes, source: int) -> Promote:
        """Return how ``block`` is read from tier ``source``."""
        with self._lock:
            stays = self.policy.promotes(source, self._touches.count(block) + 1)
            return Promote(block, source, stays, stays and self.policy.leaves(source))

    def leaves(self, source: int) -> bool:
        """Whether tier ``source`` deletes its copy of a block that memory keeps after a read."""
        with self._lock:
            return self.policy.leaves(source)

    def evict(self, block: bytes, source: int) -> Demote | Drop:
        """Return what to do with ``block``, which has to leave level ``source``."""
        with self._lock:
            # A block found after a restart has no touches, but it was stored, which is one.
            target = self._target(source, max(1, self._touches.count(block)))
            if target is not None:
                return Demote(block, source, target)
            return Drop(block, source, self._target(source, _MANY_TOUCHES))

    def excess(self, capacity: int, used: int) -> int:
        """Return how much of memory to demote ahead of need, in the unit of both arguments."""
        with self._lock:
            demotes = self._target(0, _MANY_TOUCHES) is not None
        return max(0, used - int(capacity * (1 - _HEADROOM))) if demotes else 0

    def _target(self, source: int, touches: int) -> int | None:
        target = self.policy.demotes(source, touches)
        return None if target is None or target > self.tiers else target


class Touches:
    """Counts of touches, of the ``limit`` blocks touched last."""

    def __init__(self, limit: int = _MOST_COUNTED) -> None:
        if limit < 1:
            raise InvalidValue(f"a limit of {limit} touches; at least one is needed")
        self.limit = limit
        self._counts: OrderedDict[bytes, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._counts)

    def touch(self, block: bytes) -> int:
        """Count one more touch of ``block`` and return its count."""
        count = self._counts.pop(block, 0) + 1
        self._counts[block] = count
        while len(self._counts) > self.limit:
            self._counts.popitem(last=False)
        return count

    def count(self, block: bytes) -> int:
        """Return the touches of ``block``."""
        return self._counts.get(block, 0)
