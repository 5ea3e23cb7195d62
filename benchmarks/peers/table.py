"""What was measured, as tables in Markdown between two marks of a page."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from peers.work import OURS, SYSTEMS, Sizes, cases

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from peers.work import Case, Part

__all__ = ["BEGIN", "END", "TITLES", "Measured", "notes", "rows_of", "table", "write"]

BEGIN = "<!-- peers: written by benchmarks/beside_peers.py -->"
END = "<!-- peers: end -->"
TITLES: dict[Part, str] = {"prefixes": "µs", "tiers": "µs or ms"}
NOTHING = "–"


@dataclass(slots=True)
class Measured:
    """Seconds of each round by case and system, and why some have none.

    ``load``: runnable processes when the measurements began, as the system's mean of a minute.
    """

    sizes: Sizes
    load: float = 0.0
    seconds: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    failed: dict[str, dict[str, str]] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def add(self, case: Case, system: str, took: float | str) -> None:
        """Keep one measurement, or why there is none."""
        if isinstance(took, str):
            self.failed.setdefault(case.name, {})[system] = took
        else:
            self.seconds.setdefault(case.name, {}).setdefault(system, []).append(took)

    @classmethod
    def read(cls, text: str) -> Measured:
        """Return what was printed as JSON."""
        found = json.loads(text)
        found["sizes"] = Sizes.read(found["sizes"])
        return cls(**found)

    def cell(self, case: Case, system: str) -> str:
        """Return the median, and its ratio to kvkeep's: the median, smallest, largest of rounds."""
        taken = self.seconds.get(case.name, {}).get(system)
        if not taken:
            return "failed" if system in self.failed.get(case.name, {}) else NOTHING
        unit = f" {case.unit}" if case.part == "tiers" else ""
        text = case.printed(statistics.median(taken)) + unit
        ours = self.seconds[case.name].get(OURS, [])
        if system == OURS or not ours:
            return text
        ratios = sorted(one / own for one, own in zip(taken, ours, strict=False))
        return (
            f"{text}: {_short(statistics.median(ratios))}× "
            f"({_short(ratios[0])} … {_short(ratios[-1])})"
        )


def _short(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio < 10 else f"{ratio:,.0f}"


def table(measured: Measured, part: Part) -> list[str]:
    """Return a table: a line for each case, a column for each system."""
    systems = [one.name for one in SYSTEMS if one.part == part]
    lines = [
        f"| {TITLES[part]} | {' | '.join(systems)} |",
        "|---|" + "--:|" * len(systems),
    ]
    lines += [
        f"| {case.title} | {' | '.join(measured.cell(case, one) for one in systems)} |"
        for case in cases(measured.sizes)
        if case.part == part
    ]
    return lines


def notes(measured: Measured) -> list[str]:
    """Return what was run on what, where others are faster, and what could not be measured."""
    versions = {name.partition(" ")[0].strip(","): text for name, text in measured.versions.items()}
    rounds = max((len(one) for by in measured.seconds.values() for one in by.values()), default=0)
    lines = [
        f"Medians of {rounds} rounds; when they began, {measured.load:.1f} other processes wanted "
        f"the machine's CPUs. Versions: {', '.join(map(' '.join, versions.items()))}."
    ]
    faster = list(_faster(measured))
    if faster:
        lines += ["", "Faster than kvkeep in all rounds:", "", *faster]
    gaps = [f"- {name} was not measured: {why}." for name, why in measured.missing.items()]
    gaps += [
        f"- {name} failed at “{case.title}”: {why}."
        for case in cases(measured.sizes)
        for name, why in measured.failed.get(case.name, {}).items()
        if name not in measured.missing
    ]
    return [*lines, "", *gaps] if gaps else lines


def _faster(measured: Measured) -> Iterator[str]:
    for case in cases(measured.sizes):
        taken = dict(measured.seconds.get(case.name, {}))
        ours = taken.pop(OURS, [])
        found = [
            name
            for name, theirs in taken.items()
            if ours and all(one < own for one, own in zip(theirs, ours, strict=False))
        ]
        if found:
            yield f"- {case.title}: {'; '.join(found)}"


def rows_of(lines: Iterable[str]) -> list[list[str]]:
    """Return the cells of a table's lines, without the line below its header."""
    cells = [[one.strip() for one in line.strip().strip("|").split("|")] for line in lines]
    return [row for row in cells if set("".join(row)) - set("-:")]


def write(page: Path, lines: list[str]) -> None:
    """Replace what is between the marks of a page.

    Raises:
        ValueError: the page lacks a mark.
    """
    text = page.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page} has no {BEGIN} … {END}")
    page.write_text("\n".join([before + BEGIN, "", *lines, "", END + after]), encoding="utf-8")
