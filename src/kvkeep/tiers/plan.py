"""What moves where: decided here, done elsewhere. Pure, so that a simulator can run it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict

from kvkeep.errors import InvalidValue, whole

__all__ = ["Exclusive", "Inclusive", "TieringPolicy", "Touches"]


class TieringPolicy(ABC):
    """Decides where blocks go. Tiers are numbered from 0, the memory in front, downwards.

    ``touches`` is how often a block was put or asked for as of now, this time included; counts of
    blocks that nobody asked for lately are forgotten.

    Thread safety: none is needed; it is asked under a lock, must not block, and may keep a state
    (an adaptive policy will).
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


class Touches:
    """How often blocks were touched, for the last ``limit`` of them that were."""

    def __init__(self, limit: int = 1 << 16) -> None:
        if limit < 1:
            raise InvalidValue(f"a limit of {limit} touches; at least one is needed")
        self._limit = limit
        self._counts: OrderedDict[bytes, int] = OrderedDict()

    def touch(self, block: bytes) -> int:
        """Count one more; how many it is now."""
        count = self._counts.pop(block, 0) + 1
        self._counts[block] = count
        if len(self._counts) > self._limit:
            self._counts.popitem(last=False)
        return count

    def count(self, block: bytes) -> int:
        """How many it were lately."""
        return self._counts.get(block, 0)
