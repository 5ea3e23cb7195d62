"""What moves where: decided here, done elsewhere. Pure: `TieredStore` and replay run the same."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from typing import TYPE_CHECKING

from kvkeep.core.errors import InvalidValue, whole

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["HEADROOM", "Exclusive", "Inclusive", "Planner", "TieringPolicy", "Touches"]

HEADROOM = 0.1
"""Of memory that is kept free where evicted blocks have to be written first."""
_FIRST_PAUSE = 32  # blocks asked for until the room is counted anew; twice as many each time
_EVER_TOUCHED = 1 << 30
_COUNTED = 8  # times as many blocks as there is room for have their touches counted …
_MOST_COUNTED = 1 << 17  # … and no more than these, at about 220 bytes each


class TieringPolicy(ABC):
    """Decides where blocks go. Tiers are numbered from 0, the memory in front, downwards.

    ``touches`` is how often a block was put or asked for as of now, this time included; counts of
    blocks that nobody asked for lately are forgotten.

    One that watches what is asked for, as `AdaptiveTiering` does, is told of it by `asked`, and by
    `fit` how much there is room for; others need neither. It belongs to one store then.

    Thread safety: none is needed; it is asked under a lock, must not block, and may keep a state.
    """

    def fit(self, blocks: Sequence[int | None]) -> None:  # noqa: B027 - most have no use for it
        """So many blocks have room in each tier, from memory down; None: no end is known.

        Called before the first `asked`, and again as it becomes known how large blocks are.
        """

    def asked(self, blocks: Sequence[bytes]) -> None:  # noqa: B027 - most have no use for it
        """A prompt made of these block ids came: those that were found, then those that are put.

        Chained: an id names all that comes before it, too. Called before anything is moved.
        """

    @abstractmethod
    def admits(self, level: int, touches: int) -> bool:
        """Whether a block that was just put is written to tier ``level`` (1 or lower) now."""

    @abstractmethod
    def promotes(self, level: int, touches: int) -> bool:
        """Whether a block that was found in tier ``level`` stays in memory."""

    @abstractmethod
    def leaves(self, level: int) -> bool:
        """Whether a block that was promoted from tier ``level`` is taken away there."""

    @abstractmethod
    def demotes(self, level: int, touches: int) -> int | None:
        """Tier to which a block goes that is evicted from ``level``; None: it just goes."""


class Inclusive(TieringPolicy):
    """Every tier gets every block as it is put; evicting one costs nothing.

    With ``admit_after`` above 1, tiers below memory get blocks when they are touched that often:
    most blocks are never asked for again, and flash wears out.
    """

    def __init__(self, admit_after: int = 1) -> None:
        self.admit_after = whole("admit_after", admit_after, 1)

    def admits(self, level: int, touches: int) -> bool:
        """From the ``admit_after``-th touch on."""
        del level
        return touches >= self.admit_after

    def promotes(self, level: int, touches: int) -> bool:
        """Always."""
        del level, touches
        return True

    def leaves(self, level: int) -> bool:
        """Never: what is above is below as well."""
        del level
        return False

    def demotes(self, level: int, touches: int) -> int | None:
        """Never: it is there already, or was not worth it."""
        del level, touches
        return None

    def __repr__(self) -> str:
        return f"Inclusive(admit_after={self.admit_after})"


class Exclusive(TieringPolicy):
    """A block lies in one tier: promoted, it is moved up; evicted, it moves one down.

    Tiers hold more together than each alone; the price is a write for every eviction. Blocks that
    were touched fewer than ``admit_after`` times are not worth it.
    """

    def __init__(self, admit_after: int = 1) -> None:
        self.admit_after = whole("admit_after", admit_after, 1)

    def admits(self, level: int, touches: int) -> bool:
        """Only memory takes what is put."""
        del level, touches
        return False

    def promotes(self, level: int, touches: int) -> bool:
        """Always."""
        del level, touches
        return True

    def leaves(self, level: int) -> bool:
        """Always: it is in memory now."""
        del level
        return True

    def demotes(self, level: int, touches: int) -> int | None:
        """One down, from the ``admit_after``-th touch on."""
        return level + 1 if touches >= self.admit_after else None

    def __repr__(self) -> str:
        return f"Exclusive(admit_after={self.admit_after})"


class Planner:
    """What a store has to know to move blocks: a policy, and how often blocks were touched.

    `TieredStore` and `kvkeep.bench.replay.tiers` ask it the same questions at the same steps; what
    it answers, the one does in threads and the other by changing numbers.

    Thread safety: none; who has threads asks under a lock. Cost: about 0.5 µs a question.
    """

    def __init__(self, policy: TieringPolicy, tiers: int) -> None:
        self.policy = policy
        self.tiers = tiers
        """Below memory."""
        self._touches = Touches()
        self._levels = range(1, tiers + 1)
        self._left = 0  # blocks that may be asked for until it is
        self._pause = _FIRST_PAUSE

    def due(self) -> bool:
        """Whether `fit` is to be called before the next `asked`."""
        return self._left <= 0

    def fit(self, blocks: Sequence[int | None]) -> None:
        """So many blocks have room in each tier; None: no end is known."""
        room = None if None in blocks else sum(count for count in blocks if count is not None)
        counted = _MOST_COUNTED if room is None else _COUNTED * max(1, room)
        self._touches.limit = counted = min(_MOST_COUNTED, counted)
        self._left = self._pause = min(2 * self._pause, counted)
        self.policy.fit(blocks)

    def asked(self, blocks: Sequence[bytes]) -> None:
        """A prompt came; see `TieringPolicy.asked`."""
        self._left -= len(blocks)
        self.policy.asked(blocks)

    def put(self, block: bytes) -> int:
        """``block`` is put; how often it was touched, this time included."""
        return self._touches.touch(block)

    def admits(self, level: int, touches: int) -> bool:
        """Whether a block that is put goes to tier ``level`` now."""
        return self.policy.admits(level, touches)

    def ever_admits(self, level: int) -> bool:
        """Whether tier ``level`` gets blocks as they are put, those that are asked for a lot."""
        return self.policy.admits(level, _EVER_TOUCHED)

    def read(self, block: bytes) -> list[int]:
        """``block`` was read; the tiers that admit it from this time on."""
        touches = self._touches.touch(block)
        if touches == 1:
            return []  # not put here lately
        admits = self.policy.admits
        return [
            level for level in self._levels if admits(level, touches) > admits(level, touches - 1)
        ]

    def promotes(self, level: int, block: bytes) -> bool:
        """Whether ``block``, to be read from tier ``level``, stays in memory."""
        return self.policy.promotes(level, self._touches.count(block) + 1)

    def leaves(self, level: int) -> bool:
        """Whether a block that was promoted from tier ``level`` is taken away there."""
        return self.policy.leaves(level)

    def demotes(self, level: int, block: bytes) -> int | None:
        """The tier to which ``block`` goes, evicted from ``level``; None: it just goes."""
        # What lies somewhere was touched: before a restart, say, and only fetched ahead since.
        target = self.policy.demotes(level, max(1, self._touches.count(block)))
        return None if target is None or target > self.tiers else target

    def ever_demotes(self, level: int) -> int | None:
        """The tier to which blocks go from ``level`` that were asked for often enough."""
        target = self.policy.demotes(level, _EVER_TOUCHED)
        return None if target is None or target > self.tiers else target

    def excess(self, capacity: int, used: int) -> int:
        """How much of memory, in any unit, is to be moved down before its room is needed."""
        target = self.policy.demotes(0, _EVER_TOUCHED)
        if target is None or target > self.tiers:
            return 0
        return max(0, used - int(capacity * (1 - HEADROOM)))


class Touches:
    """How often blocks were touched, for the last ``limit`` of them that were."""

    def __init__(self, limit: int = _MOST_COUNTED) -> None:
        if limit < 1:
            raise InvalidValue(f"a limit of {limit} touches; at least one is needed")
        self.limit = limit
        self._counts: OrderedDict[bytes, int] = OrderedDict()

    def touch(self, block: bytes) -> int:
        """Count one more; how many it is now."""
        count = self._counts.pop(block, 0) + 1
        self._counts[block] = count
        while len(self._counts) > self.limit:
            self._counts.popitem(last=False)
        return count

    def __len__(self) -> int:
        return len(self._counts)

    def count(self, block: bytes) -> int:
        """How many it were lately."""
        return self._counts.get(block, 0)
