"""The report's first chart as a PNG."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from kvkeep.bench.replay.words import tokens
from kvkeep.core.errors import require

if TYPE_CHECKING:
    from kvkeep.bench.replay.report.arranged import Arranged

__all__ = ["picture"]

_COLOURS = (
    "#1f6fb4", "#d1560b", "#0a8a5f", "#a3348f", "#8a6d00", "#00899b", "#7a4b2a", "#5b5bd6",
)  # fmt: skip


def picture(found: Arranged) -> bytes:
    """Draw hit rate against capacity, as a PNG of 1600 × 1000 pixels.

    Raises `MissingExtra` without matplotlib. Needs no display, and leaves matplotlib's global
    state alone.
    """
    figures = require("matplotlib.figure", "report")
    figure = figures.Figure(figsize=(8, 5), dpi=200, layout="constrained")
    axes = figure.add_subplot()
    for at, line in enumerate(found.policies):
        colour = _COLOURS[at % len(_COLOURS)]
        x = [one.capacity_tokens for one in line.outcomes]
        y = [100 * one.hit_rate for one in line.outcomes]
        axes.plot(x, y, color=colour, marker="o", label=_plain(line.name))
        curve = line.what_if()
        if curve:
            label = _plain(f"{line.name}, what-if")
            points = ([at for at, _ in curve], [100 * rate for _, rate in curve])
            axes.plot(*points, color=colour, linestyle="--", linewidth=1, label=label)
    _bounds(axes, found)
    axes.set_xscale("log")
    axes.set_xticks(found.capacities, [tokens(one) for one in found.capacities])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_title("Hit rate against capacity", loc="left")
    axes.set_xlabel("capacity, tokens")
    axes.set_ylabel("hit rate, % of blocks")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right upper", frameon=False)
    content = io.BytesIO()
    figure.savefig(content, format="png")
    return content.getvalue()


def _bounds(axes: Any, found: Arranged) -> None:
    if found.belady is not None:
        x = [one.capacity_tokens for one in found.belady.outcomes]
        y = [100 * one.hit_rate for one in found.belady.outcomes]
        axes.plot(x, y, color="#666666", linestyle="--", label="belady (bound)")
        axes.fill_between(x, y, color="#666666", alpha=0.08, linewidth=0)
    if found.infinite is not None:
        rate = 100 * found.infinite.hit_rate
        axes.axhline(rate, color="#666666", linestyle=":", label="infinite (bound)")


def _plain(name: str) -> str:
    """Return a label in ASCII, which matplotlib neither parses as a formula nor hides."""
    plain = name.encode("ascii", "backslashreplace").decode().replace("$", r"\$")
    return f" {plain}" if plain.startswith("_") else plain
