"""The process that measures one system: answers a line of JSON with a line of JSON.

    python -m peers.worker MODULE VARIANT SIZES CPU DIRECTORY

First it says ``{"ready": version, "cases": [names]}`` or ``{"missing": reason}``. Then it answers
``{"case": name, "clock": "cpu", "times": 1}`` with ``{"seconds": s}`` or ``{"failed": reason}``.
It ends with its input.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from peers.work import Sizes

__all__ = ["Making", "Setting", "Steps", "main"]

CLOCKS = {"cpu": time.process_time, "wall": time.perf_counter}


Steps = Generator[Callable[[], Any], Any, None]
"""A case: it prepares, yields a call to measure, gets what the last one returned, and goes on."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What a case works with: sizes, the variant of its system, an empty directory of its own.

    What it yields is called ``times`` in a row; the figure is that of one.
    """

    sizes: Sizes
    variant: str
    directory: Path
    times: int = 1


Making = Callable[[Setting], Steps]


class Worker:
    """Runs the cases of a module, one at a time."""

    def __init__(self, made: dict[str, Making], setting: Setting) -> None:
        self._made = made
        self._setting = setting
        self._steps: Steps | None = None
        self._next: Callable[[], Any] | None = None
        self._case = ""

    def seconds(self, case: str, clock: str, times: int) -> float:
        """Measure once; a case other than the last one is prepared before."""
        if case != self._case:
            self.forget()
            self._steps = self._made[case](replace(self._setting, times=times))
            self._next = next(self._steps)
            self._case = case
        assert self._steps is not None
        assert self._next is not None
        now, call = CLOCKS[clock], self._next
        began = now()
        for _ in range(times):
            result = call()
        took = now() - began
        self._next = self._steps.send(result)
        return took / times

    def forget(self) -> None:
        """End the running case, so that the next one has the memory."""
        if self._steps is not None:
            self._steps.close()
        self._steps = self._next = None
        self._case = ""
        gc.collect()


def main(arguments: Sequence[str]) -> None:
    """Serve until the input ends."""
    module, variant, sizes, cpu, directory = arguments
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is not part of the protocol

    def say(**answer: object) -> None:
        lines.write(json.dumps(answer) + "\n")
        lines.flush()

    setting = Setting(Sizes.read(json.loads(sizes)), variant, Path(directory))
    try:
        found = importlib.import_module(f"peers.{module}")
        version = found.version(variant)
    except ImportError as error:
        say(missing=str(error))
        return
    for thread in os.listdir("/proc/self/task"):  # later ones inherit it
        os.sched_setaffinity(int(thread), {int(cpu)})
    worker = Worker(found.CASES, setting)
    gc.collect()
    gc.disable()  # a collection in the middle would be that of another call's objects
    say(ready=version, cases=list(found.CASES))
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            say(seconds=worker.seconds(asked["case"], asked["clock"], asked["times"]))
        except Exception as error:  # noqa: BLE001 - whatever another system raises; the driver says it
            traceback.print_exc()
            with suppress(Exception):
                worker.forget()
            say(failed=f"{type(error).__name__}: {error}")
    worker.forget()
    if hasattr(found, "close"):
        found.close()


if __name__ == "__main__":
    main(sys.argv[1:])
