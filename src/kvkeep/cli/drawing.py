"""Numbers, times and bars as plain text, and text of others made safe for a terminal."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from kvkeep.observe.telemetry.labels import visible

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "ago",
    "amount",
    "clock",
    "percent",
    "plural",
    "seconds",
    "stacked",
    "storage",
    "trend",
    "visible",
]  # fmt: skip

_BARS: Final = " ▁▂▃▄▅▆▇█"
_EIGHTHS: Final = len(_BARS) - 1


def plural(number: float, word: str) -> str:
    """``"1 token"``, ``"2 tokens"``, ``"12,345 tokens"``."""
    return f"{number:,.0f} {word}{'s' * (number != 1)}"


def amount(number: float) -> str:
    """Return a count in at most six characters: ``"9,999"``, ``"12.3 k"``, ``"4.5 M"``."""
    if number < 9999.5:
        return f"{number:,.0f}"
    for unit in "kMGTP":
        number /= 1000
        if number < 99.95:
            return f"{number:.1f} {unit}"
        if number < 999.5:
            break
    return f"{number:,.0f} {unit}"


def storage(number: int) -> str:
    """Return bytes in at most eight characters: ``"1 GiB"``, ``"9.9 MiB"``, ``"134 MiB"``."""
    size = float(number)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1023.5:
            digits = f"{size:.1f}".removesuffix(".0") if size < 9.95 else f"{size:.0f}"
            return f"{digits} {unit}"
        size /= 1024
    return f"{size:,.0f} PiB"


def percent(part: float, whole: float) -> str:
    """Return a share: ``"38 %"``; ``"–"`` if ``whole`` is 0. 0 and 100 only where exact."""
    if whole <= 0:
        return "–"
    share = round(100 * part / whole)
    if part > 0 and share < 1:
        return "<1 %"
    return f"{min(share, 99) if part < whole else share} %"


def seconds(value: float | None) -> str:
    """Return a duration: ``"0.4 ms"``, ``"412 ms"``, ``"1.24 s"``, ``"34 s"``, ``"5 min"``."""
    if value is None:
        return "–"
    if value < 0.01:
        return f"{1000 * value:.1f} ms"
    if value < 0.9995:
        return f"{1000 * value:.0f} ms"
    if value < 9.995:
        return f"{value:.2f} s"
    return ago(value)


def ago(value: float) -> str:
    """Return a rough duration: ``"12 s"``, ``"5 min"``, ``"3.5 h"``, ``"12 d"``."""
    if value < 99.5:
        return f"{max(0.0, value):.0f} s"
    if value < 5970:
        return f"{value / 60:.0f} min"
    return f"{value / 3600:.1f} h" if value < 172_800 else f"{value / 86_400:,.0f} d"


def clock(at: float) -> str:
    """Return the local time of day of a Unix time: ``"12:34:56"``; dashes if out of range."""
    try:
        return time.strftime("%H:%M:%S", time.localtime(at))
    except (OverflowError, OSError, ValueError):
        return "--:--:--"


def stacked(parts: Sequence[float], width: int) -> list[int]:
    """Return how many of ``width`` characters each part of a bar takes.

    The numbers add up to ``width`` (to 0 if all parts are 0). Every part above 0 gets at least one
    character, if there are enough.
    """
    total = sum(parts)
    if total <= 0 or width <= 0:
        return [0] * len(parts)
    exact = [part / total * width for part in parts]
    cells = [max(int(cut), 1) if part > 0 else 0 for part, cut in zip(parts, exact, strict=True)]
    while (left := width - sum(cells)) != 0:
        step = 1 if left > 0 else -1
        # Add a character to the part that rounding cut most, or take one from the part of several
        # characters that rounding favoured most.
        at = max(
            (i for i, count in enumerate(cells) if count),
            key=lambda i: (step > 0 or cells[i] > 1, step * (exact[i] - cells[i])),
        )
        cells[at] += step
    return cells


def trend(shares: Sequence[tuple[float, float]], each: int) -> str:
    """Return shares over time as a line of blocks, the newest on the right.

    A share is (part, whole); a block stands for the sum of ``each`` shares. It is blank only if its
    whole is 0.
    """
    first = len(shares) % each
    starts = range(first, len(shares), each)
    columns = [shares[:first]] * (first > 0) + [shares[at : at + each] for at in starts]
    line = ""
    for column in columns:
        part, whole = (sum(numbers) for numbers in zip(*column, strict=True))
        line += _BARS[max(1, round(min(part / whole, 1.0) * _EIGHTHS)) if whole > 0 else 0]
    return line
