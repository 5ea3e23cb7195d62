"""Buffers: aligned, of the right length, padded, writable, zeroed."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from kvkeep.core.errors import InvalidValue
from kvkeep.store.backends import ALIGNMENT
from kvkeep.store.backends.buffers import aligned


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, (2 << 20) - 1, 2 << 20, 5_000_001])
def test_a_buffer_is_aligned_and_padded(size: int) -> None:
    view = aligned(size)
    assert (view.nbytes, len(view), view.format, view.readonly) == (size, size, "B", False)
    assert not any(np.frombuffer(view, np.uint8))
    if size:
        start = np.frombuffer(view, np.uint8).ctypes.data
        assert start % ALIGNMENT == 0
        padded = -(-size // ALIGNMENT) * ALIGNMENT
        ctypes.memset(start, 7, padded)  # the padding belongs to it
        assert bytes(view[-1:]) == b"\7"


def test_buffers_have_memory_of_their_own() -> None:
    views = [aligned(100) for _ in range(50)]
    for number, view in enumerate(views):
        view[:] = bytes([number]) * 100
    assert [bytes(view) for view in views] == [bytes([number]) * 100 for number in range(50)]


@pytest.mark.parametrize("size", [-1, 1.5, "4096", None, True])
def test_a_size_is_a_whole_number(size: Any) -> None:
    with pytest.raises(InvalidValue, match="size"):
        aligned(size)
