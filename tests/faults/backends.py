"""Backends around a real one: counted, or made to fail on demand."""

from __future__ import annotations

import random
import threading
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from kvkeep.core.errors import BackendFailed, InvalidValue, OutOfRoom
from kvkeep.store.backends import Backend
from kvkeep.store.backends.buffers import aligned

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvkeep.store.backends import TierURL
    from kvkeep.store.backends.base import Listed, Room

__all__ = ["CALLS", "CountingBackend", "FaultyBackend"]

CALLS = (
    "put", "get", "room", "sizes", "delete", "list", "touch", "quarantine", "used", "flush",
    "close",
)  # fmt: skip
"""What can be counted and can fail. "room" is the moment in a get when the reader gave its room and
nothing was read yet."""


class CountingBackend(Backend):
    """``inner``, and how often it was asked what.

    Thread safety: all methods.

    Attributes:
        inner: does the work.
        calls: calls that were begun, by name (see `CALLS`).
        asked: the same by name and block, of calls that name blocks.
        inside: calls that have not returned yet, by name.
    """

    scheme = "counting"

    def __init__(self, inner: Backend) -> None:
        self.inner = inner
        self.shared = inner.shared
        self.capacity = inner.capacity
        self.unit = inner.unit
        self.timeout = inner.timeout
        self.calls: Counter[str] = Counter()
        self.asked: Counter[tuple[str, bytes]] = Counter()
        self.inside: Counter[str] = Counter()
        self._changed = threading.Condition()

    @classmethod
    def from_url(cls, url: TierURL) -> NoReturn:
        """Not by URL: raises `InvalidValue`."""
        raise InvalidValue(
            f"{url.safe}: a {cls.__name__} is made around another backend, for tests"
        )

    def put(self, block: bytes, record: memoryview) -> None:
        """As ``inner`` does."""
        with _Call(self, "put", [block]):
            self.inner.put(block, record)

    def get(self, block: bytes, room: Room) -> memoryview | None:
        """As ``inner`` does."""

        def counted(size: int) -> memoryview:
            given = room(size)
            with _Call(self, "room", [block]):
                return given

        with _Call(self, "get", [block]):
            return self._read(block, counted)

    def sizes(self, blocks: Sequence[bytes]) -> list[int | None]:
        """As ``inner`` does."""
        with _Call(self, "sizes", blocks):
            return self.inner.sizes(blocks)

    def delete(self, blocks: Sequence[bytes]) -> int:
        """As ``inner`` does."""
        with _Call(self, "delete", blocks):
            return self.inner.delete(blocks)

    def part(self, block: bytes) -> str:
        """As ``inner`` does; not counted, and it does not fail."""
        return self.inner.part(block)

    @property
    def stale_listings(self) -> int:  # type: ignore[override] # the contract only reads it
        """As ``inner`` has it."""
        return self.inner.stale_listings

    @property
    def last_progress(self) -> float:  # type: ignore[override] # the contract only reads it
        """As ``inner`` has it."""
        return self.inner.last_progress

    def peek(self, block: bytes, size: int) -> bytes | None:
        """As ``inner`` does; not counted, and it does not fail."""
        return self.inner.peek(block, size)

    def note_space(self, space: bytes, note: bytes) -> None:
        """As ``inner`` does; not counted, and it does not fail."""
        self.inner.note_space(space, note)

    def noted_spaces(self) -> dict[bytes, bytes]:
        """As ``inner`` does; not counted, and it does not fail."""
        return self.inner.noted_spaces()

    def list(self) -> Iterator[Listed]:
        """As ``inner`` does."""
        with _Call(self, "list"):
            return self.inner.list()

    def touch(self, blocks: Sequence[bytes], used: Sequence[float] | None = None) -> None:
        """As ``inner`` does."""
        with _Call(self, "touch", blocks):
            self.inner.touch(blocks, used)

    def quarantine(self, block: bytes, reason: str) -> None:
        """As ``inner`` does."""
        with _Call(self, "quarantine", [block]):
            self.inner.quarantine(block, reason)

    def used(self) -> int | None:
        """As ``inner`` does."""
        with _Call(self, "used"):
            return self.inner.used()

    def flush(self) -> None:
        """As ``inner`` does."""
        with _Call(self, "flush"):
            self.inner.flush()

    def close(self) -> None:
        """As ``inner`` does."""
        with _Call(self, "close"):
            self.inner.close()

    def describe(self) -> str:
        """The place of ``inner``, and what stands in front of it."""
        return f"{self.scheme}+{self.inner.describe()}"

    def wait_inside(self, call: str, count: int = 1, timeout: float = 10.0) -> None:
        """Wait until ``count`` calls of that name are on their way; AssertionError if not so."""
        with self._changed:
            came = self._changed.wait_for(lambda: self.inside[call] >= count, timeout)
            assert came, f"{self.inside[call]} of {count} calls of {call} came in {timeout:g} s"

    def _read(self, block: bytes, room: Room) -> memoryview | None:
        return self.inner.get(block, room)

    def _begin(self, call: str, blocks: Sequence[bytes]) -> None:
        with self._changed:
            self.calls[call] += 1
            self.inside[call] += 1
            self.asked.update((call, block) for block in blocks)
            self._changed.notify_all()

    def _end(self, call: str) -> None:
        with self._changed:
            self.inside[call] -= 1
            self._changed.notify_all()


class _Call:
    """One call, from its begin to its end, whatever that is."""

    def __init__(self, backend: CountingBackend, name: str, blocks: Sequence[bytes] = ()) -> None:
        self._backend, self._name = backend, name
        backend._begin(name, blocks)

    def __enter__(self) -> None:
        try:
            if isinstance(self._backend, FaultyBackend):
                self._backend._suffer(self._name)
        except BaseException:
            self._backend._end(self._name)
            raise

    def __exit__(self, *_: object) -> None:
        self._backend._end(self._name)


@dataclass
class _Fault:
    """One thing that goes wrong, in calls of these names, so many times more; None: always."""

    calls: frozenset[str]
    times: int | None = None
    seconds: float | None = None
    error: Exception | None = None

    def strikes(self, call: str) -> bool:
        """Whether it happens in this call; counts it, too. Under the backend's lock."""
        if call not in self.calls or self.times == 0:
            return False
        if self.times is not None:
            self.times -= 1
        return True


class FaultyBackend(CountingBackend):
    """``inner`` with faults that are switched on and off while it is used.

    Each kind of fault is there once: switched on again it takes its own place, and what hung or was
    slow by it goes on. ``times`` is how many
    calls it strikes, None for all until `heal`. Call names are those of `CALLS`. Of one call, what
    strikes first is what comes first here: `hang`, `slow`, `fail`, `fill_up`, `lose`, then what
    happens to the record.

    Thread safety: all methods.
    """

    scheme = "faulty"

    def __init__(self, inner: Backend, *, seed: int = 0) -> None:
        super().__init__(inner)
        self._faults: dict[str, _Fault] = {}
        self._chance = random.Random(seed)

    def hang(self, *calls: str, times: int | None = None) -> None:
        """Calls wait until `heal`, then do their work. Without names: every call."""
        self._switch("hang", calls, times=times)

    def slow(self, seconds: float, *calls: str, times: int | None = None) -> None:
        """Calls take ``seconds`` longer, or until `heal`. Without names: every call."""
        self._switch("slow", calls, times=times, seconds=seconds)

    def fail(self, *calls: str, times: int | None = None, error: Exception | None = None) -> None:
        """Calls raise ``error``, else `BackendFailed`. Without names: every call but close."""
        self._switch(
            "fail", calls or tuple(c for c in CALLS if c != "close"), times=times, error=error
        )

    def fill_up(self, times: int | None = None) -> None:
        """`put` finds no room, whatever was deleted."""
        self._switch("fill_up", ("put",), times=times)

    def lose(self, times: int | None = None) -> None:
        """`put` says that it did, and did not."""
        self._switch("lose", ("put",), times=times)

    def flip(self, times: int | None = None) -> None:
        """`get` gives a record with one bit, any bit, the other way round."""
        self._switch("flip", ("get",), times=times)

    def truncate(self, times: int | None = None) -> None:
        """`get` gives the front of a record, any length of it from one byte on."""
        self._switch("truncate", ("get",), times=times)

    def heal(self, *kinds: str) -> None:
        """End faults of these kinds (the names of the methods above); without names: all.

        What hangs or is slow by them goes on.
        """
        with self._changed:
            for kind in kinds or tuple(self._faults):
                self._faults.pop(kind, None)
            self._changed.notify_all()

    def put(self, block: bytes, record: memoryview) -> None:
        """As ``inner`` does, or as the faults want it."""
        with _Call(self, "put", [block]):
            if self._strikes("fill_up", "put"):
                raise OutOfRoom(len(record), self.describe())
            if not self._strikes("lose", "put"):
                self.inner.put(block, record)

    def _read(self, block: bytes, room: Room) -> memoryview | None:
        if self._strikes("truncate", "get"):
            whole = self.inner.get(block, aligned)
            if whole is None:
                return None
            front = room(self._chance.randrange(1, len(whole)))
            front[:] = whole[: len(front)]
            return front
        record = self.inner.get(block, room)
        if record is not None and self._strikes("flip", "get"):
            record[self._chance.randrange(len(record))] ^= 1 << self._chance.randrange(8)
        return record

    def _switch(
        self,
        kind: str,
        calls: Sequence[str],
        *,
        times: int | None,
        seconds: float | None = None,
        error: Exception | None = None,
    ) -> None:
        unknown = set(calls) - set(CALLS)
        if unknown:
            raise InvalidValue(f"no call is named {', '.join(sorted(unknown))}; see CALLS")
        with self._changed:
            self._faults[kind] = _Fault(frozenset(calls or CALLS), times, seconds, error)

    def _strikes(self, kind: str, call: str) -> bool:
        with self._changed:
            fault = self._faults.get(kind)
            return fault is not None and fault.strikes(call)

    def _suffer(self, call: str) -> None:
        """Hang, be slow or fail, if that is switched on for ``call``."""
        with self._changed:
            for kind in ("hang", "slow"):
                fault = self._faults.get(kind)
                if fault is not None and fault.strikes(call):
                    self._changed.wait_for(partial(self._is_over, kind, fault), fault.seconds)
            fault = self._faults.get("fail")
            if fault is not None and fault.strikes(call):
                raise fault.error or BackendFailed(f"{self.describe()}: {call} fails, as was asked")

    def _is_over(self, kind: str, fault: _Fault) -> bool:
        return self._faults.get(kind) is not fault
