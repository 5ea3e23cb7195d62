"""`TierProbe`: records that ``kvkeep doctor`` writes to a tier, reads, and deletes."""

from __future__ import annotations

import itertools
import secrets
import threading
import time
from typing import TYPE_CHECKING, Final, NamedTuple

from kvkeep.core.errors import BackendFailed, OutOfRoom
from kvkeep.core.keys import BLOCK_ID_BYTES, SPACE_BYTES
from kvkeep.store.backends.buffers import aligned
from kvkeep.store.tiers import TierOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvkeep.store.backends import Backend

__all__ = ["TierProbe", "TierSpeed"]

_MOST_HELD: Final = 64 << 20  # bytes of records that are there at once
_READERS, _WRITERS = TierOptions().readers, TierOptions().writers  # threads of a tier
_MOST_WRITTEN: Final = 512 << 20  # bytes that are written in all: flash wears
_MOST_RECORDS: Final = 64


class TierSpeed(NamedTuple):
    """What a tier does: bytes a second, 0 where it did nothing in the time; the records' size."""

    written: float
    read: float
    record_bytes: int


class TierProbe:
    """Records in a namespace of their own, which nobody else has.

    `clean` deletes them; it must be called in any case. Thread safety: none. Memory: a record for
    each thread.

    Arguments:
        backend: where they are written.
        record_bytes: of a record.
    """

    def __init__(self, backend: Backend, record_bytes: int) -> None:
        self.space = secrets.token_bytes(SPACE_BYTES)
        self._backend = backend
        self._size = record_bytes
        count = max(2, min(_MOST_RECORDS, _MOST_HELD // record_bytes))
        self._blocks = [
            self.space + secrets.token_bytes(BLOCK_ID_BYTES - SPACE_BYTES) for _ in range(count)
        ]
        self._written: set[bytes] = set()

    def access(self) -> str:
        """Write, read and delete one record; return what is wrong, "" if nothing is.

        Raises `BackendFailed`, `OutOfRoom` or OSError where the backend does.
        """
        block, record = self._blocks[0], _filled(self._size)
        self._put(block, record)
        read = self._backend.get(block, aligned)
        if read is None:
            return "a record that was written is not found"
        if read != record:
            return "a record that was written is read with other bytes"
        self.clean()
        if self._backend.sizes([block]) != [None]:
            return "a record that was deleted is still there"
        return ""

    def speed(self, seconds: float) -> TierSpeed:
        """Write and read for half of ``seconds`` each, with as many threads as a tier has."""
        record, most = _filled(self._size), _MOST_WRITTEN // self._size
        turns = itertools.cycle(self._blocks)
        taken = itertools.count()
        lock = threading.Lock()

        def write() -> bool:
            with lock:
                block, number = next(turns), next(taken)
            if number >= max(most, len(self._blocks)):
                return False
            self._put(block, record)
            return True

        began = time.monotonic()
        count = _repeated([write] * _WRITERS, until=began + seconds / 2)
        self._backend.flush()
        written = count * self._size / (time.monotonic() - began)
        there = itertools.cycle(sorted(self._written))

        def reader() -> Callable[[], bool]:
            room = aligned(self._size)

            def read() -> bool:
                with lock:
                    block = next(there, None)
                if block is None:
                    return False
                return self._backend.get(block, lambda size: room[:size]) is not None

            return read

        began = time.monotonic()
        count = _repeated([reader() for _ in range(_READERS)], until=began + seconds / 2)
        read = count * self._size / (time.monotonic() - began)
        return TierSpeed(written, read, self._size)

    def clean(self) -> None:
        """Delete what was written. Raises as `access`."""
        if self._written:
            self._backend.delete(sorted(self._written))
            self._written.clear()

    def _put(self, block: bytes, record: memoryview) -> None:
        self._written.add(block)  # before: a put that failed may have left one
        self._backend.put(block, record)


def _filled(size: int) -> memoryview:
    """Return a record of random bytes, which no disk compresses."""
    record = aligned(size)
    piece = secrets.token_bytes(min(size, 1 << 20))
    for at in range(0, size, len(piece)):
        record[at : at + len(piece)] = piece[: size - at]
    return record


def _repeated(steps: Sequence[Callable[[], bool]], *, until: float) -> int:
    """Call each of ``steps`` in a thread of its own, once and again; return how many succeeded.

    A step that returns False, or raises an error of the place, ends its thread. Raises the error if
    no step succeeded.
    """
    counts = [0] * len(steps)
    errors: list[Exception] = []

    def repeat(at: int) -> None:
        try:
            while steps[at]():
                counts[at] += 1
                if time.monotonic() >= until:
                    break
        except (BackendFailed, OutOfRoom, OSError) as error:
            errors.append(error)

    threads = [threading.Thread(target=repeat, args=(at,), daemon=True) for at in range(len(steps))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors and not sum(counts):
        raise errors[0]
    return sum(counts)
