"""Tiering: which tiers hold a block, and when it moves between them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Final

from kvkeep.core.errors import whole

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Exclusive", "Inclusive", "PassThrough", "Planner", "TieringPolicy", "Touches"]

_HEADROOM: Final = 0.1
"""Share of memory kept free where evicted blocks have to be written to a tier first."""
_MOST_COUNTED: Final = 1 << 17  # blocks whose touches are counted, at about 220 bytes each


class TieringPolicy:
    """Which tiers hold a block: one of `Inclusive`, `Exclusive` and `PassThrough`.

    Attributes:
        admit_after: touches of a block from which on tiers below memory take it. A touch is a put
            of a block that was not stored, or a request that found it; the counts of 131,072 blocks
            are remembered.
        exclusive: whether a block is in one level at a time.
        keeps_reads: whether memory keeps a block that is read from a tier.
    """

    exclusive = False
    keeps_reads = True

    def __init__(self, admit_after: int = 1) -> None:
        self.admit_after = whole("admit_after", admit_after, 1)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(admit_after={self.admit_after})"


class Inclusive(TieringPolicy):
    """Every tier writes every block when it is stored; evicting one costs nothing.

    With ``admit_after`` above 1, tiers below memory write a block at its ``admit_after``-th touch:
    most blocks are never requested again, and writes wear out flash.
    """


class Exclusive(TieringPolicy):
    """A block is in one level at a time: a read moves it up to memory, an eviction one level down.

    The levels hold more together than copies would; the price is a write for every eviction.
    Blocks with fewer than ``admit_after`` touches are deleted instead.
    """

    exclusive = True


class PassThrough(Inclusive):
    """As `Inclusive`, but blocks that are read do not stay in memory: the caller keeps them.

    For a store below another cache. Memory then only holds blocks until they are written, and reads
    use a few buffers again and again instead of touching all of memory.
    """

    keeps_reads = False


class Planner:
    """Decides the moves of blocks by a policy, for which it counts touches. It moves nothing.

    A store (`kvkeep.store.tiers.tiered`) performs the moves with bytes and threads, a replay
    (`kvkeep.bench.replay.tiered`) on numbers.

    Thread safety: all methods. Cost: below a microsecond a block.
    """

    def __init__(self, policy: TieringPolicy, tiers: int) -> None:
        self.policy = policy
        self.tiers = tiers
        """Tiers below memory."""
        self._lock = threading.Lock()
        self._touches = Touches()

    def store(self, blocks: Sequence[bytes], *, new: bool) -> list[bool]:
        """Return whether tiers write each of ``blocks``, which are put, now.

        ``new``: no level had them, and the put counts as a touch. One that finds them does not: it
        may be of the request that stored them, which puts the answer behind its prompt.
        """
        needed = self.policy.admit_after
        if needed == 1:
            return [not self.policy.exclusive] * len(blocks)
        with self._lock:
            count = self._touches.touch if new else self._touches.count
            counts = [count(block) for block in blocks]
        return [count >= needed and not self.policy.exclusive for count in counts]

    def read(self, blocks: Sequence[bytes]) -> list[bytes]:
        """Count a touch of ``blocks``; return those that tiers admit from this request on."""
        needed = self.policy.admit_after
        if needed == 1:
            return []
        with self._lock:
            counts = [self._touches.touch(block) for block in blocks]
        if self.policy.exclusive:
            return []
        return [block for block, count in zip(blocks, counts, strict=True) if count == needed]

    def below(self, block: bytes, source: int) -> tuple[int | None, int | None]:
        """Return the level that ``block`` moves to when it leaves level ``source``.

        None: it is deleted; then the second value is the level that would have taken it after more
        touches, if there is one.
        """
        target = source + 1
        if not self.policy.exclusive or target > self.tiers:
            return None, None
        with self._lock:
            # A block found after a restart has no touches, but it was stored, which is one.
            admitted = max(1, self._touches.count(block)) >= self.policy.admit_after
        return (target, None) if admitted else (None, target)

    def excess(self, capacity: int, used: int) -> int:
        """Return how much of memory to demote ahead of need, in the unit of both arguments."""
        demotes = self.policy.exclusive and self.tiers > 0
        return max(0, used - int(capacity * (1 - _HEADROOM))) if demotes else 0


class Touches:
    """Counts of touches, of the `_MOST_COUNTED` blocks touched last."""

    def __init__(self) -> None:
        self._counts: OrderedDict[bytes, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._counts)

    def touch(self, block: bytes) -> int:
        """Count one more touch of ``block`` and return its count."""
        count = self._counts.pop(block, 0) + 1
        self._counts[block] = count
        while len(self._counts) > _MOST_COUNTED:
            self._counts.popitem(last=False)
        return count

    def count(self, block: bytes) -> int:
        """Return the touches of ``block``."""
        return self._counts.get(block, 0)
