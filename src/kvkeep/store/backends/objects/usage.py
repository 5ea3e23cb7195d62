"""`UsageCount`: counts the bytes held in a store that does not count them itself."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvkeep.core.errors import OutOfRoom

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from kvkeep.store.backends.base import Listed

__all__ = ["UsageCount"]


class UsageCount:
    """Counts the bytes held, from a listing and from this process's puts and deletes.

    A put counts as held while it is under way. After a failed call the content is uncertain: the
    place is listed again before the next put.

    Thread safety: all methods. While the place is listed, other calls wait.
    """

    def __init__(self, capacity: int, where: str, listing: Callable[[], Iterable[Listed]]) -> None:
        self._capacity = capacity
        self._where = where
        self._listing = listing
        self._sizes: dict[bytes, int] | None = None  # None: list the place first
        self._held = 0
        self._coming: dict[bytes, int] = {}  # sizes of puts under way
        self._lock = threading.Lock()

    @contextmanager
    def putting(self, block: bytes, size: int) -> Iterator[None]:
        """Count a put of ``size`` bytes, which runs in the ``with`` block, or raise `OutOfRoom`."""
        with self._lock:
            before = self._known().get(block, 0)
            if self._held - before + size > self._capacity:
                raise OutOfRoom(size, self._where)
            self._set(block, size)
            self._coming[block] = size
        try:
            yield
        except BaseException:
            self._doubt()
            raise
        finally:
            with self._lock:
                self._coming.pop(block, None)

    @contextmanager
    def deleting(self, blocks: Sequence[bytes]) -> Iterator[None]:
        """Count the blocks as gone after the ``with`` block."""
        try:
            yield
        except BaseException:
            self._doubt()
            raise
        with self._lock:
            for block in blocks if self._sizes is not None else ():
                self._set(block, 0)

    def used(self) -> int:
        """Return the bytes held; list the store first if its content is uncertain."""
        with self._lock:
            self._known()
            return self._held

    def _doubt(self) -> None:
        with self._lock:
            self._sizes = None

    def _known(self) -> dict[bytes, int]:
        if self._sizes is None:
            self._sizes = {one.block: one.size for one in self._listing()} | self._coming
            self._held = sum(self._sizes.values())
        return self._sizes

    def _set(self, block: bytes, size: int) -> None:
        assert self._sizes is not None
        self._held += size - self._sizes.pop(block, 0)
        if size:
            self._sizes[block] = size
