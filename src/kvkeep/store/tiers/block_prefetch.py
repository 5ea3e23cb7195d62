"""`BlockPrefetch`: reads blocks into memory in the background."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from kvkeep.store.tiers.reading import ReadRequest
from kvkeep.store.tiers.record import HEADER_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvkeep.store.tiers.reading import Reader

__all__ = ["BlockPrefetch"]


class BlockPrefetch:
    """Handle of a background read of blocks from slower tiers into memory; see `TieredStore`.

    After the store is closed, `done` and `cancel` still work; everything else raises `IllegalStep`.

    Thread safety: all methods.
    """

    def __init__(
        self,
        reader: Reader,
        plan: Callable[[], tuple[Sequence[bytes], Sequence[int]]],
        check_open: Callable[[], object],
        closed: Callable[[], bool],
    ) -> None:
        self._reader = reader
        self._plan = plan
        self._check_open = check_open
        self._closed = closed
        self._blocks: Sequence[bytes] = ()
        self._ready = 0
        self._sources: list[str] = []
        self._cancelled = False
        self._ended = threading.Event()
        if not reader.prefetching.submit(self._run, given_up=self._ended.set):
            self._ended.set()

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
        self._cancelled = True

    # --- in a thread of the reader ---------------------------------------------------------------

    def _run(self) -> None:
        levels = self._reader.levels
        try:
            if self._ends():
                return
            blocks, sizes = self._plan()
            room, count = levels.memory.capacity // 2, 0
            for size in sizes:
                room -= size + HEADER_BYTES
                if room < 0:
                    break
                count += 1
            self._blocks = blocks[:count]
            request = ReadRequest(
                self._reader, sizes[:count], self._arrived,
                sources=self._sources, cancelled=self._ends,
            )  # fmt: skip
            request.bring(self._blocks, levels.locate(self._blocks))
        finally:
            self._ended.set()

    def _arrived(self, at: int, _raw: memoryview) -> None:
        if self._blocks[at] in self._reader.levels.memory:
            self._ready = at + 1
        else:  # memory had no room for it
            self._cancelled = True

    def _ends(self) -> bool:
        return self._cancelled or self._closed()
