"""A disk whose speed a test sets, below an engine in this process."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from kvkeep.store.backends.disk import DiskBackend

if TYPE_CHECKING:
    from collections.abc import Iterator


class Disk:
    """``block_s``: seconds that each record takes, one after another; or it ``hangs``."""

    def __init__(self) -> None:
        self.block_s = 0.0
        self.after: int | None = None  # records that still come before it hangs
        self._line = threading.Lock()
        self._going_on = threading.Event()
        self._going_on.set()

    def hang(self, after: int = 0) -> None:
        self.after = after
        self._going_on.clear()

    def go_on(self) -> None:
        self.after = None
        self._going_on.set()

    def delay(self) -> None:
        with self._line:
            if self.after is not None:
                self.after -= 1
                if self.after < 0:
                    self._going_on.wait(60)
            time.sleep(self.block_s)


@contextmanager
def throttled() -> Iterator[Disk]:
    disk, get = Disk(), DiskBackend.get

    def slow(backend: Any, block: bytes, room: Any) -> Any:
        disk.delay()
        return get(backend, block, room)

    DiskBackend.get = slow  # type: ignore[method-assign]
    try:
        yield disk
    finally:
        disk.go_on()
        DiskBackend.get = get  # type: ignore[method-assign]
