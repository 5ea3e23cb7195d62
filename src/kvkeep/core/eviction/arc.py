"""ARC: recency and frequency share the memory, and misses move the border."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from kvkeep.core.eviction.history import leading
from kvkeep.core.eviction.queues import OncePolicy

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["ARC", "Directory"]


class ARC(OncePolicy):
    """Two LRU queues, for entries requested once and again; misses move the border between them.

    A miss of something evicted from the first queue gives that queue more room; a miss of something
    evicted from the second takes room away. (Megiddo, Modha: ARC, 2003.)

    Runs of pages have no name that outlives them, so misses are recognised by a `Directory` of
    blocks: the original algorithm over keys alone, for a memory of the same size. Memory: up to 500
    bytes a block of the memory. Cost: about 0.5 µs a block of every prompt.
    """

    name = "arc"
    remembers = True
    advised = True

    def __init__(self) -> None:
        super().__init__()
        self._block = 1
        self._directory = Directory(1)

    def fit(self, size: int, block: int) -> None:
        self._block = block
        self._directory = Directory(max(1, size // block))

    def requested(self, keys: Sequence[bytes]) -> int:
        """Record a prompt; return how many of its leading blocks the directory knows."""
        directory = self._directory
        known = leading(keys, directory)
        for key in reversed(keys):  # the end of a prompt is evicted before its beginning
            directory.requested(key)
        return known

    def excess(self) -> int:
        """Return by how many pages the first queue exceeds the target."""
        return self._once_size - int(self._directory.target * self._block)


class Directory:
    """ARC over keys: the ``size`` blocks it would hold, and as many that it evicted.

    ``once`` and ``again`` are held (T1 and T2 in the paper), ``once_gone`` and ``again_gone`` were
    evicted (B1 and B2); each oldest first. ``target`` is how many held blocks may be in ``once``
    (p).
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.target = 0.0
        self.once: OrderedDict[bytes, None] = OrderedDict()
        self.again: OrderedDict[bytes, None] = OrderedDict()
        self.once_gone: OrderedDict[bytes, None] = OrderedDict()
        self.again_gone: OrderedDict[bytes, None] = OrderedDict()

    def __contains__(self, key: object) -> bool:
        return (
            key in self.again or key in self.once or key in self.once_gone or key in self.again_gone
        )

    def __len__(self) -> int:
        return len(self.once) + len(self.again) + len(self.once_gone) + len(self.again_gone)

    def requested(self, key: bytes) -> bool:
        """Request ``key``; return whether it was held."""
        once, again = self.once, self.again
        if key in again:
            again.move_to_end(key)
            return True
        if key in once:
            del once[key]
            again[key] = None
            return True
        once_gone, again_gone = self.once_gone, self.again_gone
        if key in once_gone:
            step = max(1.0, len(again_gone) / len(once_gone))
            self.target = min(float(self.size), self.target + step)
            self._replace(tie=False)
            del once_gone[key]
            again[key] = None
        elif key in again_gone:
            step = max(1.0, len(once_gone) / len(again_gone))
            self.target = max(0.0, self.target - step)
            self._replace(tie=True)
            del again_gone[key]
            again[key] = None
        else:
            self._make_room()
            once[key] = None
        return False

    def _make_room(self) -> None:
        """Make room for an unknown key: evict one, and forget one if too many are known."""
        if len(self.once) + len(self.once_gone) >= self.size:
            if not self.once_gone:
                self.once.popitem(last=False)  # everything held was requested once
                return
            self.once_gone.popitem(last=False)
            self._replace(tie=False)
        elif len(self) >= self.size:
            if len(self) >= 2 * self.size:
                self.again_gone.popitem(last=False)
            self._replace(tie=False)

    def _replace(self, *, tie: bool) -> None:
        held = len(self.once)
        if held and (held > self.target or (tie and held == self.target)):
            self.once_gone[self.once.popitem(last=False)[0]] = None
        else:
            self.again_gone[self.again.popitem(last=False)[0]] = None
