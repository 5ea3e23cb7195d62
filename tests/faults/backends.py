"""Backends around another one, which count its calls or make them fail on demand."""

from __future__ import annotations

import random
import threading
from collections import Counter
from contextlib import contextmanager
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
"""Calls that can be counted and can fail. "room" is the moment of a get between the call
of its `Room` and the read."""


class CountingBackend(Backend):
    """Passes calls on to ``inner`` and counts them.

    Thread safety: all methods.

    Attributes:
        calls: calls begun, by name (see `CALLS`).
        asked: calls begun, by name and block.
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
        with self._call("put", [block]):
            self.inner.put(block, record)

    def get(self, block: bytes, room: Room) -> memoryview | None:
        """As ``inner`` does."""

        def counted(size: int) -> memoryview:
            given = room(size)
            with self._call("room", [block]):
                return given

        with self._call("get", [block]):
            return self._read(block, counted)

    def sizes(self, blocks: Sequence[bytes]) -> list[int | None]:
        """As ``inner`` does."""
        with self._call("sizes", blocks):
            return self.inner.sizes(blocks)

    def delete(self, blocks: Sequence[bytes]) -> int:
        """As ``inner`` does."""
        with self._call("delete", blocks):
            return self.inner.delete(blocks)

    def part(self, block: bytes) -> str:
        """As ``inner`` does; neither counted nor made to fail."""
        return self.inner.part(block)

    @property
    def last_progress(self) -> float:  # type: ignore[override] # the contract only reads it
        """As ``inner`` has it."""
        return self.inner.last_progress

    def note_space(self, space: bytes, note: bytes) -> None:
        """As ``inner`` does; neither counted nor made to fail."""
        self.inner.note_space(space, note)

    def noted_spaces(self) -> dict[bytes, bytes]:
        """As ``inner`` does; neither counted nor made to fail."""
        return self.inner.noted_spaces()

    def list(self) -> Iterator[Listed]:
        """As ``inner`` does."""
        with self._call("list"):
            return self.inner.list()

    def touch(self, blocks: Sequence[bytes], used: Sequence[float] | None = None) -> None:
        """As ``inner`` does."""
        with self._call("touch", blocks):
            self.inner.touch(blocks, used)

    def quarantine(self, block: bytes, reason: str) -> None:
        """As ``inner`` does."""
        with self._call("quarantine", [block]):
            self.inner.quarantine(block, reason)

    def used(self) -> int | None:
        """As ``inner`` does."""
        with self._call("used"):
            return self.inner.used()

    def flush(self) -> None:
        """As ``inner`` does."""
        with self._call("flush"):
            self.inner.flush()

    def close(self) -> None:
        """As ``inner`` does."""
        with self._call("close"):
            self.inner.close()

    def describe(self) -> str:
        """Return the URL of ``inner`` with a prefix."""
        return f"{self.scheme}+{self.inner.describe()}"

    def wait_inside(self, call: str, count: int = 1, timeout: float = 10.0) -> None:
        """Wait until ``count`` calls of that name are running; AssertionError after ``timeout``."""
        with self._changed:
            came = self._changed.wait_for(lambda: self.inside[call] >= count, timeout)
            assert came, f"{self.inside[call]} of {count} calls of {call} came in {timeout:g} s"

    def _read(self, block: bytes, room: Room) -> memoryview | None:
        return self.inner.get(block, room)

    @contextmanager
    def _call(self, name: str, blocks: Sequence[bytes] = ()) -> Iterator[None]:
        """Count a call from its begin to its end, however it ends."""
        with self._changed:
            self.calls[name] += 1
            self.inside[name] += 1
            self.asked.update((name, block) for block in blocks)
            self._changed.notify_all()
        try:
            self._before(name)
            yield
        finally:
            with self._changed:
                self.inside[name] -= 1
                self._changed.notify_all()

    def _before(self, call: str) -> None:
        """Called when a call was counted and has done nothing yet."""


@dataclass
class _Fault:
    """A fault in calls of these names, for so many more calls; None: for all."""

    calls: frozenset[str]
    times: int | None = None
    seconds: float | None = None
    error: Exception | None = None

    def strikes(self, call: str) -> bool:
        """Whether the fault strikes this call; counts it if so. Needs the backend's lock."""
        if call not in self.calls or self.times == 0:
            return False
        if self.times is not None:
            self.times -= 1
        return True


class FaultyBackend(CountingBackend):
    """``inner`` with faults that are switched on and off while it is used.

    There is one fault of each kind: switching a kind on again replaces it, and calls that hang or
    are slow because of the old one continue. ``times`` is the number of calls it strikes, None for
    all until `heal`. Names of calls are those of `CALLS`. Faults strike a call in this order:
    `hang`, `slow`, `fail`, `fill_up`, `lose`, then damage to the record.

    Thread safety: all methods.
    """

    scheme = "faulty"

    def __init__(self, inner: Backend, *, seed: int = 0) -> None:
        super().__init__(inner)
        self._faults: dict[str, _Fault] = {}
        self._chance = random.Random(seed)

    def hang(self, *calls: str, times: int | None = None) -> None:
        """Make calls wait until `heal`, then do their work. Without names: all calls."""
        self._switch("hang", calls, times=times)

    def slow(self, seconds: float, *calls: str, times: int | None = None) -> None:
        """Make calls take ``seconds`` longer, or until `heal`. Without names: all calls."""
        self._switch("slow", calls, times=times, seconds=seconds)

    def go_on_slowly(self, seconds: float, *calls: str) -> None:
        """End `hang`; calls that hung, and later ones, take ``seconds`` longer, as with `slow`.

        With `hang` and `wait_inside` before it, no call ends before it was noticed.
        """
        self.slow(seconds, *calls)
        self.heal("hang")

    def fail(self, *calls: str, times: int | None = None, error: Exception | None = None) -> None:
        """Make calls raise ``error`` or `BackendFailed`. Without names: all calls but close."""
        self._switch(
            "fail", calls or tuple(c for c in CALLS if c != "close"), times=times, error=error
        )

    def fill_up(self, times: int | None = None) -> None:
        """Make `put` raise `OutOfRoom`."""
        self._switch("fill_up", ("put",), times=times)

    def lose(self, times: int | None = None) -> None:
        """Make `put` return without storing the record."""
        self._switch("lose", ("put",), times=times)

    def flip(self, times: int | None = None) -> None:
        """Make `get` return the record with one random bit inverted."""
        self._switch("flip", ("get",), times=times)

    def truncate(self, times: int | None = None) -> None:
        """Make `get` return a random prefix of the record, of one byte or more."""
        self._switch("truncate", ("get",), times=times)

    def heal(self, *kinds: str) -> None:
        """End faults of these kinds (the names of the methods above), or all without names.

        Calls that hang or are slow because of them continue.
        """
        with self._changed:
            for kind in kinds or tuple(self._faults):
                self._faults.pop(kind, None)
            self._changed.notify_all()

    def put(self, block: bytes, record: memoryview) -> None:
        """As ``inner`` does, unless a fault strikes."""
        with self._call("put", [block]):
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

    def _before(self, call: str) -> None:
        """Hang, be slow or fail, if such a fault strikes ``call``."""
        with self._changed:
            for kind in ("hang", "slow"):
                fault = self._faults.get(kind)
                if fault is not None and fault.strikes(call):
                    self._changed.wait_for(partial(self._is_over, kind, fault), fault.seconds)
            fault = self._faults.get("fail")
            if fault is not None and fault.strikes(call):
                raise fault.error or BackendFailed(f"{self.describe()}: {call} fails on demand")

    def _is_over(self, kind: str, fault: _Fault) -> bool:
        return self._faults.get(kind) is not fault
