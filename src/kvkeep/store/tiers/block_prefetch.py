"""`BlockPrefetch`: the handle of blocks that are read into memory in the background."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["BlockPrefetch", "PrefetchProgress"]


class PrefetchProgress:
    """How far a prefetch has come; written by the reader, read by its `BlockPrefetch`.

    Attributes:
        ready: leading blocks in memory.
        sources: for each of these, the name of the tier that it was read from.
        ended: event that is set when no more blocks will arrive.
        cancelled: whether to start no more reads.
    """

    __slots__ = ("cancelled", "ended", "ready", "sources")

    def __init__(self) -> None:
        self.ready = 0
        self.sources: list[str] = []
        self.ended = threading.Event()
        self.cancelled = False


class BlockPrefetch:
    """Handle of a background read of blocks from slower tiers into memory.

    After the store is closed, `done` and `cancel` still work; everything else raises `IllegalStep`.

    Thread safety: all methods.
    """

    def __init__(self, progress: PrefetchProgress, check_open: Callable[[], object]) -> None:
        self._progress = progress
        self._check_open = check_open

    @property
    def done(self) -> bool:
        """Whether no more blocks will arrive: all are in memory, or the rest cannot be read."""
        return self._progress.ended.is_set()

    @property
    def ready(self) -> int:
        """Number of leading blocks that are in memory by now."""
        self._check_open()
        return self._progress.ready

    @property
    def sources(self) -> list[str]:
        """For each of the `ready` blocks, the name of the tier that it was read from."""
        self._check_open()
        return self._progress.sources[: self._progress.ready]

    def wait(self, timeout: float | None = None) -> int:
        """Wait until `done`, ``timeout`` seconds at most; return `ready`."""
        self._progress.ended.wait(timeout)
        self._check_open()
        return self._progress.ready

    def cancel(self) -> None:
        """Start no more reads. Reads that have begun still complete."""
        self._progress.cancelled = True
