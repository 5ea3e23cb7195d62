"""Tiering policies: which tier admits, promotes and demotes which block."""

from __future__ import annotations

from abc import ABC, abstractmethod

from kvkeep.core.errors import whole

__all__ = ["Exclusive", "Inclusive", "PassThrough", "TieringPolicy"]


class TieringPolicy(ABC):
    """Decides which tiers hold a block. Level 0 is memory, 1 the fastest tier below it, and so on.

    ``touches`` counts how often a block was stored or requested lately, this time included; the
    counts are bounded and the oldest are forgotten.

    Thread safety: none needed; it is called under a lock and must not block.
    """

    @abstractmethod
    def admits(self, level: int, touches: int) -> bool:
        """Whether tier ``level`` (1 or lower) writes a block that is stored or requested now."""

    @abstractmethod
    def promotes(self, level: int, touches: int) -> bool:
        """Whether memory keeps a block that is read from tier ``level``."""

    @abstractmethod
    def leaves(self, level: int) -> bool:
        """Whether tier ``level`` deletes a block that memory took from it."""

    @abstractmethod
    def demotes(self, level: int, touches: int) -> int | None:
        """Return the level that a block evicted from ``level`` moves to, None for no level."""


class Inclusive(TieringPolicy):
    """Every tier writes every block when it is stored; evicting one costs nothing.

    With ``admit_after`` above 1, tiers below memory write a block at its ``admit_after``-th touch:
    most blocks are never requested again, and writes wear out flash.
    """

    def __init__(self, admit_after: int = 1) -> None:
        self.admit_after = whole("admit_after", admit_after, 1)

    def admits(self, level: int, touches: int) -> bool:
        del level
        return touches >= self.admit_after

    def promotes(self, level: int, touches: int) -> bool:
        del level, touches
        return True

    def leaves(self, level: int) -> bool:
        del level
        return False

    def demotes(self, level: int, touches: int) -> int | None:
        del level, touches
        return None

    def __repr__(self) -> str:
        return f"Inclusive(admit_after={self.admit_after})"


class Exclusive(TieringPolicy):
    """A block is in one level at a time: a read moves it up to memory, an eviction one level down.

    The levels hold more together than copies would; the price is a write for every eviction.
    Blocks with fewer than ``admit_after`` touches are deleted instead.
    """

    def __init__(self, admit_after: int = 1) -> None:
        self.admit_after = whole("admit_after", admit_after, 1)

    def admits(self, level: int, touches: int) -> bool:
        del level, touches
        return False

    def promotes(self, level: int, touches: int) -> bool:
        del level, touches
        return True

    def leaves(self, level: int) -> bool:
        del level
        return True

    def demotes(self, level: int, touches: int) -> int | None:
        return level + 1 if touches >= self.admit_after else None

    def __repr__(self) -> str:
        return f"Exclusive(admit_after={self.admit_after})"


class PassThrough(Inclusive):
    """As `Inclusive`, but blocks that are read do not stay in memory: the caller keeps them.

    For a store below another cache. Memory then only holds blocks until they are written, and reads
    use a few buffers again and again instead of touching all of memory.
    """

    def promotes(self, level: int, touches: int) -> bool:
        del level, touches
        return False

    def __repr__(self) -> str:
        return f"PassThrough(admit_after={self.admit_after})"
