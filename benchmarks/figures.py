"""`Figure`: one measured line of a benchmark, and whether its goal is reached."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Figure"]


@dataclass(frozen=True)
class Figure:
    """One line: the median of all rounds, and how it stands to what is beside it in the same one.

    ``ratio`` is the median of the rounds' ratios, ``low`` and ``high`` the smallest and the
    largest. The ``goal`` is for the ratio, or for the value where there is no ratio.
    """

    name: str
    unit: str
    value: float
    beside: str = ""
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    goal: float | None = None
    better: Literal["more", "less"] = "more"
    part: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the goal is reached, if there is one."""
        if self.goal is None:
            return None
        figure = self.value if self.ratio is None else self.ratio
        return figure >= self.goal if self.better == "more" else figure <= self.goal

    def line(self) -> str:
        """As text."""
        text = f"  {self.name:46}{self.value:9.4g} {self.unit:9}"
        if self.ratio is not None:
            text += f" {self.ratio:6.3f}× {self.beside} ({self.low:.3f}–{self.high:.3f})"
        if self.met is not None:
            sign = "≥" if self.better == "more" else "≤"
            text += f"  {'✓' if self.met else '✗'} goal {sign} {self.goal:g}"
        return text
