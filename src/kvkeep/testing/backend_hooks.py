"""Hooks of `BackendTests`, and records that contain their own block and version."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from kvkeep.core.keys import KEY_BYTES, SPACE_BYTES
from kvkeep.store.backends.buffers import aligned

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvkeep.store.backends import Backend

__all__ = ["BackendHooks", "Rooms", "block_id", "content", "get", "put", "sizes_listed", "version"]

_VERSION_BYTES = 8


class BackendHooks:
    """The hooks that a subclass of the suite implements."""

    persistent = False
    """Whether flushed records are found when the same place is opened again (see `reopen`)."""

    examples = 50
    """Number of random walks; use fewer if calls are expensive."""

    secrets: tuple[str, ...] = ()
    """Passwords that `make_backend` gives to the backend, which its repr and URL must not show."""

    def make_backend(self, tmp_path: Path) -> Backend:
        """Return a new backend on an empty place, below ``tmp_path`` or elsewhere."""
        raise NotImplementedError("override make_backend: it returns the backend to be tested")

    def reopen(self, tmp_path: Path) -> Backend:
        """Open the store that `make_backend` opened last once more, as a new process would."""
        return self.make_backend(tmp_path)

    def make_bounded(self, tmp_path: Path, capacity: int) -> Backend | None:
        """Return a new backend on an empty place with a capacity in bytes; None if it has none."""
        del tmp_path, capacity
        return None

    def bounded(self, tmp_path: Path, capacity: int) -> Backend:
        """Return the backend of `make_bounded`; skip the test if there is none."""
        backend = self.make_bounded(tmp_path, capacity)
        if backend is None:
            pytest.skip("this backend has no capacity of its own")
        return backend

    @pytest.fixture
    def backend(self, tmp_path: Path) -> Iterator[Backend]:
        """Provide an empty backend; close it after the test."""
        with self.make_backend(tmp_path) as backend:
            yield backend


def block_id(number: int, space: int = 0) -> bytes:
    """Return a block id made of two numbers."""
    return space.to_bytes(SPACE_BYTES, "big") + number.to_bytes(KEY_BYTES, "big")


def content(block: bytes, number: int, size: int) -> bytes:
    """Return version ``number`` of the record of ``block``, whose bytes are unique.

    Records of 8 bytes or more begin with their version.
    """
    head = number.to_bytes(_VERSION_BYTES, "little")[:size]
    chance = random.Random(block + head + size.to_bytes(8, "little"))  # noqa: S311 - a test
    return head + chance.randbytes(size - len(head))


def version(record: bytes | memoryview) -> int:
    """Return the version that a record contains."""
    return int.from_bytes(record[:_VERSION_BYTES], "little")


class Rooms:
    """A `Room` that records its calls in ``asked`` and ``given``; raises ``error`` if set."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.given: list[memoryview] = []
        self.asked: list[int] = []

    def __call__(self, size: int) -> memoryview:
        """Return a new aligned buffer of ``size`` bytes."""
        self.asked.append(size)
        if self.error is not None:
            raise self.error
        room = aligned(size)
        room[:] = b"\xa5" * size  # so that bytes the backend does not write are noticed
        self.given.append(room)
        return room


def put(backend: Backend, block: bytes, record: bytes) -> None:
    """Put ``record`` from a buffer that is overwritten afterwards."""
    buffer = aligned(len(record))
    buffer[:] = record
    backend.put(block, buffer)
    assert buffer == record, "put changed the caller's buffer"
    buffer[:] = b"\x5a" * len(record)


def get(backend: Backend, block: bytes) -> bytes | None:
    """Return the record of ``block``, None if missing."""
    view = backend.get(block, Rooms())
    return None if view is None else bytes(view)


def sizes_listed(backend: Backend) -> dict[bytes, int]:
    """Return the listed sizes by block; assert that no block is listed twice."""
    listed = list(backend.list())
    sizes = {one.block: one.size for one in listed}
    assert len(sizes) == len(listed), "a block is listed twice"
    return sizes
