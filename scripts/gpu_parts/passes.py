"""Part "passes": `PassTimer` measures what a pass takes, and nothing waits for it."""

from __future__ import annotations

from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING

import torch

from gpu_parts.figures import Clock, Row, ratios
from kvkeep.core.cost import LearnedPrefill
from kvkeep.serve.engine.step import PassTimer

if TYPE_CHECKING:
    from gpu_parts.figures import Report, Setting

__all__ = ["run"]


class _Noted(LearnedPrefill):
    """A model of costs that notes what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []

    def observe(self, pieces: list[tuple[int, int]], seconds: float) -> None:  # type: ignore[override]
        """See `LearnedPrefill.observe`."""
        self.seconds.append(seconds)
        super().observe(pieces, seconds)


def run(report: Report, setting: Setting) -> None:
    """Time passes of products of matrices by both clocks."""
    width, count = setting.pick(8192, 512, 128), setting.pick(20, 8, 4)
    dtype = torch.bfloat16 if setting.on_gpu else torch.float32
    rounds = setting.pick(20, 9, 3)
    matrix = torch.randn(width, width, dtype=dtype, device=setting.device) / width**0.5
    noted, clock = _Noted(), Clock(setting.device)
    timer = PassTimer(noted, setting.device)
    walls: list[float] = []
    ends: list[float] = []
    for number in range(-2, rounds):
        clock.wait()
        began = perf_counter()
        timer.begin()
        product = matrix
        for _ in range(count):
            product = product @ matrix
        handed = perf_counter()
        timer.end([(0, 1024 * (1 + number % 4))])
        ended = perf_counter()
        clock.wait()
        took = perf_counter() - began - (ended - handed)
        timer.learn()
        if number < 0:
            noted.seconds.clear()
        else:
            walls.append(took)
            ends.append(ended - handed)
    report.note(
        f"A pass is {count} products of matrices of {width:,} × {width:,}; the clock on the wall "
        "waits for the device at both ends, `PassTimer` does not. `PassTimer.end` also learns."
    )
    told = tuple(noted.seconds)
    apart = ratios(told, walls) if len(told) == rounds else ()
    # The wall also has the calls that hand the work over.
    right = bool(apart) and 0.95 <= median(apart) <= 2
    report.add(
        Row("a pass", "on the wall", "ms", tuple(one * 1e3 for one in walls)),
        Row("a pass", "by PassTimer", "ms", tuple(one * 1e3 for one in told), apart, right),
        Row("PassTimer.end", "returns after", "µs", tuple(one * 1e6 for one in ends)),
    )  # fmt: skip
