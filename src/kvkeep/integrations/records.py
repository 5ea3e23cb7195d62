"""Records: the pages of one block, copied one after another into the memory of a store, and back.

NumPy releases the interpreter lock while it copies, so several threads copy at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy.typing as npt

    Bytes = npt.NDArray[np.uint8]

__all__ = ["gather", "scatter"]


def gather(pieces: Iterable[Bytes], raw: memoryview) -> None:
    """Copy ``pieces``, one-dimensional arrays, one after another into the record ``raw``."""
    record, start = np.frombuffer(raw, np.uint8), 0
    for piece in pieces:
        end = start + len(piece)
        record[start:end] = piece
        start = end


def scatter(raw: memoryview, pieces: Iterable[Bytes]) -> None:
    """Copy the record ``raw`` into ``pieces``, in order."""
    record, start = np.frombuffer(raw, np.uint8), 0
    for piece in pieces:
        end = start + len(piece)
        piece[:] = record[start:end]
        start = end
