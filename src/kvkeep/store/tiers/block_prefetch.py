"""`BlockPrefetch`: the handle of blocks that are read into memory in the background."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["BlockPrefetch"]


class BlockPrefetch:
    """Handle of a background read of blocks from slower tiers into memory.

    After the store is closed, `done` and `cancel` still work; everything else raises `IllegalStep`.

    Thread safety: all methods.

    Attributes:
        cancelled: whether to start no more reads.
    """

    def __init__(self, check_open: Callable[[], object]) -> None:
        self._check_open = check_open
        self._ready = 0
        self._sources: list[str] = []
        self._ended = threading.Event()
        self.cancelled = False

    @property
    def done(self) -> bool:
        """Whether no more blocks will arrive: all are in memory, or the rest cannot be read."""
        return self._ended.is_set()

    @property
    def ready(self) -> int:
        """Number of leading blocks that are in memory by now."""
        self._check_open()
        return self._ready

    @property
    def sources(self) -> list[str]:
        """For each of the `ready` blocks, the name of the tier that it was read from."""
        self._check_open()
        return self._sources[: self._ready]

    def wait(self, timeout: float | None = None) -> int:
        """Wait until `done`, ``timeout`` seconds at most; return `ready`."""
        self._ended.wait(timeout)
        self._check_open()
        return self._ready

    def cancel(self) -> None:
        """Start no more reads. Reads that have begun still complete."""
        self.cancelled = True

    # --- called by the reader --------------------------------------------------------------------

    def arrived(self, ready: int, sources: list[str]) -> None:
        """Note that so many leading blocks are in memory, from these tiers."""
        self._sources = sources
        self._ready = ready

    def end(self) -> None:
        """Note that no more blocks will arrive."""
        self._ended.set()
