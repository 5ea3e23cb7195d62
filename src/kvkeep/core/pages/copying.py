"""The order in which pages can be copied: plain numbers, no tensors."""

from __future__ import annotations

import itertools
import operator
from typing import TYPE_CHECKING

import numpy as np

from kvkeep.core.errors import InvalidValue

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import numpy.typing as npt

    Copy = tuple[int, int, int]

__all__ = ["checked_copies", "independent", "runs"]


def checked_copies(copies: Iterable[Copy], num_pages: int, page_size: int) -> list[Copy]:
    """Return the copies (src, dst, tokens) with src ≠ dst, as plain integers.

    Raises `InvalidValue` for a page outside the pool, or tokens beyond a page.
    """
    checked: list[Copy] = []
    for copy in copies:
        try:
            src, dst, tokens = map(operator.index, copy)
        except (TypeError, ValueError):
            src = dst = tokens = -1
        if not (0 <= src < num_pages and 0 <= dst < num_pages and 0 < tokens <= page_size):
            raise InvalidValue(
                f"{copy!r} is no copy here; (src, dst, tokens) are two pages of 0 … {num_pages - 1}"
                f" and 1 … {page_size} tokens"
            )
        if src != dst:
            checked.append((src, dst, tokens))
    return checked


def independent(copies: Iterable[Copy]) -> Iterator[list[Copy]]:
    """Split copies, in order, into groups in which no copy touches a page another one writes."""
    run: list[Copy] = []
    read: set[int] = set()
    written: set[int] = set()
    for copy in copies:
        src, dst, _ = copy
        if src in written or dst in written or dst in read:
            yield run
            run, read, written = [], set(), set()
        run.append(copy)
        read.add(src)
        written.add(dst)
    if run:
        yield run


def runs(pages: npt.NDArray[np.int64]) -> Iterator[tuple[int, int, int]]:
    """Yield (start, stop, first page) of each run of neighbours: ``pages[start:stop]``."""
    if len(pages):
        cuts = np.flatnonzero(np.diff(pages) != 1) + 1
        for start, stop in itertools.pairwise([0, *cuts.tolist(), len(pages)]):
            yield start, stop, int(pages[start])
