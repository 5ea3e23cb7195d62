"""What a backend must say of itself to be tested, and records that know whose they are."""

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
    """The hooks that a subclass of the suite fills in, and what the tests get by them."""

    persistent = False
    """What was put and flushed is there for who opens the same place again (see `reopen`)."""

    examples = 50
    """How many random walks a backend is sent on; fewer where one call costs much."""

    secrets: tuple[str, ...] = ()
    """Passwords that `make_backend` gives to the backend: no text about it may have them."""

    def make_backend(self, tmp_path: Path) -> Backend:
        """A new backend on an empty place, under ``tmp_path`` or elsewhere."""
        raise NotImplementedError("say how to make the backend that is to be tested")

    def reopen(self, tmp_path: Path) -> Backend:
        """Open the place again that `make_backend` opened last, as a new process would."""
        return self.make_backend(tmp_path)

    def make_bounded(self, tmp_path: Path, capacity: int) -> Backend | None:
        """A new backend on an empty place with this capacity in bytes; None: it knows no bound."""
        del tmp_path, capacity
        return None

    def bounded(self, tmp_path: Path, capacity: int) -> Backend:
        """What `make_bounded` makes, or the test is skipped."""
        backend = self.make_bounded(tmp_path, capacity)
        if backend is None:
            pytest.skip("this backend has no capacity of its own")
        return backend

    @pytest.fixture
    def backend(self, tmp_path: Path) -> Iterator[Backend]:
        """An empty backend, closed when the test is over."""
        with self.make_backend(tmp_path) as backend:
            yield backend


def block_id(number: int, space: int = 0) -> bytes:
    """A block's id as tests name blocks."""
    return space.to_bytes(SPACE_BYTES, "big") + number.to_bytes(KEY_BYTES, "big")


def content(block: bytes, number: int, size: int) -> bytes:
    """Version ``number`` of the record of ``block``: its bytes exist nowhere else.

    A record of 8 bytes or more begins with its version.
    """
    head = number.to_bytes(_VERSION_BYTES, "little")[:size]
    chance = random.Random(block + head + size.to_bytes(8, "little"))  # noqa: S311 - a test
    return head + chance.randbytes(size - len(head))


def version(record: bytes | memoryview) -> int:
    """The version that a record says it is."""
    return int.from_bytes(record[:_VERSION_BYTES], "little")


class Rooms:
    """Gives aligned rooms and remembers them; refuses when it has an ``error``."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.given: list[memoryview] = []
        self.asked: list[int] = []

    def __call__(self, size: int) -> memoryview:
        """A new room of ``size`` bytes."""
        self.asked.append(size)
        if self.error is not None:
            raise self.error
        room = aligned(size)
        room[:] = b"\xa5" * size  # what a backend does not write is found out
        self.given.append(room)
        return room


def put(backend: Backend, block: bytes, record: bytes) -> None:
    """Put ``record``, in a buffer that is used for something else at once."""
    buffer = aligned(len(record))
    buffer[:] = record
    backend.put(block, buffer)
    assert buffer == record, "put changed the caller's buffer"
    buffer[:] = b"\x5a" * len(record)


def get(backend: Backend, block: bytes) -> bytes | None:
    """The record under ``block``."""
    view = backend.get(block, Rooms())
    return None if view is None else bytes(view)


def sizes_listed(backend: Backend) -> dict[bytes, int]:
    """All that the backend lists, each block once."""
    listed = list(backend.list())
    sizes = {one.block: one.size for one in listed}
    assert len(sizes) == len(listed), "a block is listed twice"
    return sizes
