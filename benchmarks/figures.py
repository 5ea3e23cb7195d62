"""Shared by benchmarks: `Figure`, a clock without garbage collection, and how they are printed."""

from __future__ import annotations

import argparse
import gc
import json
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

__all__ = ["Figure", "Read", "no_collection", "print_lines", "reads_of", "show"]

Line = TypeVar("Line")


@dataclass(frozen=True)
class Figure:
    """One measured line: the median of all rounds, and its ratio to a contender of the same round.

    ``ratio`` is the median of the rounds' ratios, ``low`` and ``high`` the smallest and the
    largest. The ``goal`` applies to the ratio, or to the value if there is no ratio.
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
        """Whether the goal is reached; None without a goal."""
        if self.goal is None:
            return None
        figure = self.value if self.ratio is None else self.ratio
        return figure >= self.goal if self.better == "more" else figure <= self.goal

    def line(self) -> str:
        """The figure as a line of text."""
        text = f"  {self.name:46}{self.value:9.4g} {self.unit:9}"
        if self.ratio is not None:
            text += f" {self.ratio:6.3f}× {self.beside} ({self.low:.3f}–{self.high:.3f})"
        if self.met is not None:
            sign = "≥" if self.better == "more" else "≤"
            text += f"  {'✓' if self.met else '✗'} goal {sign} {self.goal:g}"
        return text


@contextmanager
def no_collection() -> Iterator[None]:
    """Collect garbage once, and not again inside the block."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


Read = tuple[str, int, int]
"""A layout, how many ranks read, and how many ranks wrote what they read."""


def reads_of(ranks: Sequence[int], shared: str, own: str) -> list[Read]:
    """Return all reads: in the layout ``shared`` of what any wrote, in ``own`` of one's own."""
    return [
        (layout, reader, writer)
        for reader in ranks
        for layout in (shared, own)
        for writer in ranks
        if layout == shared or reader == writer
    ]


def show(figures: Sequence[Figure], title: str, *, as_json: bool) -> int:
    """Print figures below ``title``, or as one JSON array; return 1 if a goal is missed, else 0."""
    if as_json:
        print(json.dumps([asdict(one) | {"met": one.met} for one in figures], indent=2))
    else:
        print(title)
        print("\n".join(one.line() for one in figures))
    return int(any(one.met is False for one in figures))


def print_lines(
    measure: Callable[[float], Iterable[Line]],
    text: Callable[[Line], str],
    record: Callable[[list[Line]], dict[str, Any]],
    *,
    doc: str | None,
    quick: tuple[float, str],
    arguments: list[str] | None = None,
) -> int:
    """Run a benchmark that takes ``--json`` and ``--quick``; return the exit code.

    ``measure`` takes the scale: 1, or the first of ``quick``, whose second is the option's help.
    Each line is printed when it is measured, as ``text``; with ``--json`` one ``record`` of all
    lines at the end.
    """
    scale, help_text = quick
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--quick", action="store_true", help=help_text)
    options = parser.parse_args(arguments)
    done: list[Line] = []
    for line in measure(scale if options.quick else 1.0):
        done.append(line)
        if not options.json:
            print(text(line), flush=True)
    if options.json:
        print(json.dumps(record(done), indent=1))
    return 0
