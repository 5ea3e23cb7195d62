"""Rows of a part's table, written after each, and contenders that take turns on the clock."""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
from dataclasses import asdict, dataclass, field
from importlib import metadata
from time import perf_counter
from typing import TYPE_CHECKING, Literal

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

__all__ = ["Clock", "Report", "Row", "Setting", "SizeName", "Skipped", "needs", "ratios", "short"]

SizeName = Literal["full", "small", "smallest"]


class Skipped(Exception):
    """A part, or the rest of it, cannot run here; the message says why."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What a part is to run on: ``size`` of models and prompts, and a ``folder`` on a disk."""

    device: torch.device
    size: SizeName
    folder: Path

    @property
    def on_gpu(self) -> bool:
        """Whether the device is a GPU, which has a queue, and copies from pinned memory."""
        return self.device.type == "cuda"

    def pick(self, full: int, small: int, smallest: int) -> int:
        """Return the number for this size."""
        return {"full": full, "small": small, "smallest": smallest}[self.size]


@dataclass(frozen=True, slots=True)
class Row:
    """A line of a table.

    ``values`` of all rounds are in ``unit``. ``ratios`` are those to the first row of the ``case``,
    round by round; above 1 this row is better. ``right`` tells the outcome of a check, and is None
    without one.
    """

    case: str
    name: str
    unit: str = ""
    values: tuple[float, ...] = ()
    ratios: tuple[float, ...] = ()
    right: bool | None = None
    note: str = ""

    def as_dict(self) -> dict[str, object]:
        """Return the row with its medians."""
        return {
            **asdict(self),
            "median": statistics.median(self.values) if self.values else None,
            "ratio": statistics.median(self.ratios) if self.ratios else None,
        }


@dataclass(slots=True)
class Report:
    """What a part has found so far, in a JSON file that is complete after each addition."""

    file: Path
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)

    def add(self, *rows: Row) -> None:
        """Add rows."""
        self.rows += rows
        self._write()

    def note(self, text: str) -> None:
        """Add a sentence that is printed above the table."""
        self.notes.append(text)
        self._write()

    def skip(self, text: str) -> None:
        """Add what does not run here, with the reason."""
        self.skipped.append(text)
        self._write()

    def tell(self, facts: Mapping[str, str]) -> None:
        """Add facts about the machine."""
        self.facts.update(facts)
        self._write()

    def _write(self) -> None:
        found = {
            "rows": [row.as_dict() for row in self.rows],
            "notes": self.notes,
            "skipped": self.skipped,
            "facts": self.facts,
        }
        new = self.file.with_suffix(".new")
        new.write_text(json.dumps(found))
        os.replace(new, self.file)


def short(value: float) -> str:
    """Return a number with three digits, or all of those before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:,.3g}"


class Clock:
    """Times calls up to where their results are there."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def wait(self) -> None:
        """Wait until the device has done all that it was given."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def seconds(self, call: Callable[[], object]) -> float:
        """Return the seconds that ``call`` takes."""
        self.wait()
        began = perf_counter()
        call()
        self.wait()
        return perf_counter() - began

    def turns(
        self, contenders: Mapping[str, Callable[[], object]], rounds: int
    ) -> dict[str, list[float]]:
        """Let contenders take turns; return the seconds of each in every round.

        Two rounds before are not counted. Each round begins with another one.
        """
        names = list(contenders)
        taken: dict[str, list[float]] = {name: [] for name in names}
        for number in range(-2, rounds):
            first = number % len(names)
            for name in names[first:] + names[:first]:
                seconds = self.seconds(contenders[name])
                if number >= 0:
                    taken[name].append(seconds)
        return taken


def ratios(taken: Sequence[float], others: Sequence[float]) -> tuple[float, ...]:
    """Return for each round how many times as fast as the other one it was."""
    return tuple(other / one for one, other in zip(taken, others, strict=True))


_LEAST = {"transformers": 5}  # major versions, as in pyproject.toml


def needs(**packages: str) -> None:
    """Raise `Skipped` if one of ``packages`` is missing or old: names with what needs each."""
    missing = []
    for name, what in packages.items():
        least = _LEAST.get(name, 0)
        if importlib.util.find_spec(name) is None:
            missing.append(f"{what} needs {name}")
        elif least and int((there := metadata.version(name)).partition(".")[0]) < least:
            missing.append(f"{what} needs {name} {least}, not {there}")
    if missing:
        raise Skipped("; ".join(missing))
