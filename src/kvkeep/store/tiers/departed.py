"""`DepartedPlaces`: what was removed from a store while places were detached from it."""

from __future__ import annotations

import threading
from collections import OrderedDict
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from kvkeep.core.keys import SPACE_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["DepartedPlaces", "RemovedSince"]

_MOST_PLACES = 1024
_MOST_BLOCKS = 1 << 16
_MOST_SPACES = 1 << 12


class RemovedSince(NamedTuple):
    """Removals since a place was detached: of blocks, and of all blocks that begin with a prefix.

    ``number`` is that of the last removal.
    """

    number: int
    blocks: list[bytes]
    prefixes: list[bytes]

    def __bool__(self) -> bool:
        return bool(self.blocks or self.prefixes)


class DepartedPlaces:
    """Records removals while places are detached, so that no place brings removed blocks back.

    Memory has a bound, and what is forgotten is removed rather than kept: beyond 65,536 blocks
    (about 150 bytes each) the namespace of the oldest one counts as removed, and beyond 4,096
    namespaces all blocks do. Of 1,024 places that never came back, the first is forgotten.

    Thread safety: all methods. Cost: nothing while no place is detached.
    """

    def __init__(
        self, *, most_blocks: int = _MOST_BLOCKS, most_prefixes: int = _MOST_SPACES
    ) -> None:
        self._most_blocks, self._most_prefixes = most_blocks, most_prefixes
        self._lock = threading.Lock()
        self._number = 0  # of the last removal
        self._places: OrderedDict[str, int] = OrderedDict()  # the last removal made there
        self._blocks: OrderedDict[bytes, int] = OrderedDict()  # their last removal, oldest first
        self._prefixes: OrderedDict[bytes, int] = OrderedDict()

    def left(self, place: str, undeleted: Iterable[bytes]) -> None:
        """Record that ``place`` is detached; ``undeleted`` could not be deleted there before."""
        with self._lock:
            self._places.pop(place, None)
            self._places[place] = self._number
            while len(self._places) > _MOST_PLACES:
                self._places.popitem(last=False)
            self._note(self._blocks, undeleted)

    def removed(self, blocks: Iterable[bytes]) -> None:
        """Record that ``blocks`` are removed. Call it before they are, and after."""
        with self._lock:
            if self._places:
                self._note(self._blocks, blocks)

    def cleared(self, space: bytes | None) -> None:
        """Record that a namespace is removed, or everything. Call it before it is, and after."""
        with self._lock:
            if self._places:
                self._note(self._prefixes, [space or b""])

    def removed_since(self, place: str) -> RemovedSince:
        """Return what was removed since ``place`` was detached, and is not `made_good` there."""
        with self._lock:
            since = self._places.get(place, self._number)
            return RemovedSince(
                self._number,
                [block for block, number in self._blocks.items() if number > since],
                [prefix for prefix, number in self._prefixes.items() if number > since],
            )

    def made_good(self, place: str, removed: RemovedSince) -> None:
        """Record that the blocks of ``removed`` were deleted in ``place``."""
        with self._lock:
            if place in self._places:
                self._places[place] = removed.number

    @contextmanager
    def coming_back(self, place: str) -> Iterator[bool]:
        """Attach ``place`` within the ``with`` block, if it yields True; no removal is recorded.

        False: something was removed that is not `made_good` there.
        """
        with self._lock:
            last = [next(reversed(one.values()), 0) for one in (self._blocks, self._prefixes)]
            ready = self._places.get(place, self._number) >= max(last)
            yield ready
            if ready:
                self._places.pop(place, None)
                if not self._places:
                    self._blocks.clear()
                    self._prefixes.clear()

    def _note(self, where: OrderedDict[bytes, int], removed: Iterable[bytes]) -> None:
        self._number += 1
        for one in removed:
            where.pop(one, None)
            where[one] = self._number
        while len(self._blocks) > self._most_blocks:
            block, _ = self._blocks.popitem(last=False)
            self._prefixes.pop(block[:SPACE_BYTES], None)
            self._prefixes[block[:SPACE_BYTES]] = self._number
        if len(self._prefixes) > self._most_prefixes:
            self._prefixes.clear()
            self._prefixes[b""] = self._number
