"""Counts what a call goes through: files of kvkeep, calls in them, and objects that they make."""

from __future__ import annotations

import sys
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

HOUSE = str(Path(__file__).resolve().parents[1] / "src" / "kvkeep")


@dataclass
class Way:
    """What calls went through while `Recorder.way` recorded, on all threads that it sees."""

    calls: int = 0
    objects: int = 0
    files: set[str] = field(default_factory=set)

    def __repr__(self) -> str:
        return f"{len(self.files)} files, {self.calls} calls, {self.objects} objects"

    def within(self, *, files: int, calls: int, objects: int) -> bool:
        return len(self.files) <= files and self.calls <= calls and self.objects <= objects


class Recorder:
    """Sees this thread, and all that begin after it was made."""

    def __init__(self) -> None:
        self._way: Way | None = None
        threading.setprofile(self._see)

    def close(self) -> None:
        threading.setprofile(None)

    @contextmanager
    def way(self) -> Iterator[Way]:
        way = self._way = Way()
        sys.setprofile(self._see)
        try:
            yield way
        finally:
            sys.setprofile(None)
            self._way = None

    def _see(self, frame: FrameType, event: str, _argument: Any) -> None:
        way = self._way
        if way is None or event != "call":
            return
        code = frame.f_code
        if code.co_name == "__init__" and code.co_argcount:
            made = type(frame.f_locals.get(code.co_varnames[0]))
            outermost = getattr(made.__init__, "__code__", None) is code
            way.objects += outermost and made.__module__.startswith("kvkeep.")
        if code.co_filename.startswith(HOUSE):
            way.calls += 1
            way.files.add(code.co_filename[len(HOUSE) + 1 :])
