"""`GrowingArray` holds a page table or tokens; `PageCopy` is a copy the engine must make."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    PageArray = npt.NDArray[np.int32]

__all__ = ["GrowingArray", "PageCopy"]


class PageCopy(NamedTuple):
    """Copy the first ``tokens`` tokens of page ``src`` to page ``dst``, in every layer."""

    src: int
    dst: int
    tokens: int


class GrowingArray:
    """A 1-D int32 array: amortised O(1) append, O(1) cut."""

    __slots__ = ("_array", "_length")

    def __init__(self, values: npt.NDArray[np.int32]) -> None:
        self._array = values.copy()
        self._length = len(values)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, at: int) -> int:
        return int(self._array[at])

    @property
    def values(self) -> npt.NDArray[np.int32]:
        """The values: a view for the owner, valid until the next change."""
        return self._array[: self._length]

    def view(self) -> npt.NDArray[np.int32]:
        """Return the values as a read-only view, valid until the next change."""
        view = self._array[: self._length]
        view.flags.writeable = False
        return view

    def append(self, value: int) -> None:
        """Append one value."""
        if self._length == len(self._array):
            self._grow(self._length + 1)
        self._array[self._length] = value
        self._length += 1

    def extend(self, values: npt.NDArray[np.int32]) -> None:
        """Append an array of values."""
        length = self._length + len(values)
        if length > len(self._array):
            self._grow(length)
        self._array[self._length : length] = values
        self._length = length

    def cut(self, length: int) -> None:
        """Keep the first ``length`` values."""
        assert 0 <= length <= self._length
        self._length = length

    def _grow(self, length: int) -> None:
        grown = np.empty(max(length, len(self._array) * 3 // 2 + 16), np.int32)
        grown[: self._length] = self._array[: self._length]
        self._array = grown
