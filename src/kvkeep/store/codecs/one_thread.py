"""Keep torch's thread pool out of a computation in the calling thread."""

from __future__ import annotations

import ctypes
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["one_thread"]


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute in the calling thread alone, until the end of the block.

    ``torch.set_num_threads`` is for the whole process. The number of threads of OpenMP, which torch
    asks, belongs to each thread. Where torch has no OpenMP, nothing is changed.
    """
    openmp = _openmp()
    if openmp is None:
        yield
        return
    before = openmp.omp_get_max_threads()
    openmp.omp_set_num_threads(1)
    try:
        yield
    finally:
        openmp.omp_set_num_threads(before)


@cache
def _openmp() -> ctypes.CDLL | None:
    """Return the library of OpenMP that torch has loaded into the process."""
    try:
        process = ctypes.CDLL(None)
    except (OSError, TypeError):
        return None
    names = ("omp_set_num_threads", "omp_get_max_threads")
    return process if all(hasattr(process, name) for name in names) else None
