"""The screen of ``kvkeep top``: its head, and the sections below.

Imported only to draw, as rich is optional. Every line is one `rich.text.Text` of the screen's
width; none is wrapped.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from rich.text import Text

from kvkeep.cli.drawing import ago, amount, clock, percent, plural, seconds, trend, visible
from kvkeep.cli.lines import REUSE, bar, cell, fit
from kvkeep.cli.replies import below, entries, number, text, whole
from kvkeep.cli.top_sections import ROOMY, sections

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvkeep.cli.watch import Picture

__all__ = ["draw"]

_LABEL: Final = 10
_EACH_S: Final = 5  # seconds per point of the history
_POINTS: Final = 120
_RECENT: Final = 12  # points: the last minute
_TALL: Final = 36  # rows from which optional lines are shown
_SPAN: Final = "  last 5 min"  # of the times to the first token
_PAGES: Final = (
    ("private", "█", "magenta", "in use"),
    ("cached_held", "▓", "blue", "held"),
    ("cached_evictable", "▒", "green", "cached"),
    ("free", "░", "bright_black", "free"),
)


def draw(picture: Picture, address: str, width: int, height: int, *, ends: str = "") -> list[Text]:
    """Draw at most ``height`` lines of ``width`` columns; ``ends`` explains how to quit."""
    tall = height >= _TALL
    head = [
        _title(picture, address, width),
        _requests_line(picture.live, width),
        *_hit_rate(picture.live, width, 3 if tall else 1),
        _ttft(picture.live, width),
        _pages(picture.live, width),
        *_loads(picture.live, width),
        *([_what_if(picture.live, width)] if tall else []),
    ]
    foot = _foot(width, ends)
    left = height - len(head) - 1
    blank = [cell("", width)] * (left > 24)
    rows = left - len(blank)
    lines = [*head, *blank, *sections(picture, width, rows)]
    if ends:  # a full screen: the foot is on its last line
        lines += [cell("", width) for _ in range(height - 1 - len(lines))]
    return [*lines[: height - 1], foot]


# --- the head -------------------------------------------------------------------------------------


def _title(picture: Picture, address: str, width: int) -> Text:
    live = picture.live
    line = Text(no_wrap=True, end="")
    line.append(f" {text(live, 'model', '?')} ", "bold reverse")
    if picture.trouble is not None:
        line.append(f" last seen {ago(time.time() - picture.seen_at)} ago, retrying: ", "red")
        return fit(line.append(visible(picture.trouble), "bold red"), width)
    line.append(
        f" {address} · kvkeep {text(live, 'version', '?')} · {text(live, 'policy', '?')}", "dim"
    )
    line.append(f" · up {ago(number(live, 'uptime_s') or 0)}", "dim")
    return fit(fit(line, width - 9).append(f" {clock(picture.seen_at)}", "dim"), width)


def _labelled(name: str) -> Text:
    return Text(no_wrap=True, end="").append(f" {name:<{_LABEL}}", "bold")


def _requests_line(live: Mapping[str, Any], width: int) -> Text:
    running, waiting, totals = whole(live, "running"), whole(live, "waiting"), below(live, "totals")
    line = _labelled("requests")
    line.append(f"{running:,} running", "green" if running else "")
    line.append(" · ").append(f"{waiting:,} waiting", "yellow" if waiting else "")
    line.append(
        f" · {amount(whole(totals, 'requests'))} so far · "
        f"{amount(whole(totals, 'prompt_tokens'))} tokens in · "
        f"{amount(whole(totals, 'generated_tokens'))} out"
    )
    return fit(line, width)


def _hit_rate(live: Mapping[str, Any], width: int, rows: int) -> list[Text]:
    points = _history(live)
    reused, prompt = (sum(column) for column in zip(*points[-_RECENT:], strict=True))
    totals = below(live, "totals")
    said = f"{percent(reused, prompt):>5} in the last minute"
    so_far = percent(whole(totals, "cached_tokens"), whole(totals, "prompt_tokens"))
    first = _labelled("hit rate").append(said, "bold").append(f" · {so_far} so far  ")
    room = width - first.cell_len - 1
    each = max(1, round(_POINTS / max(room, 1)))
    shown = points[-max(room, 1) * each :]
    lines = [first, *(Text(" " * first.cell_len, end="") for _ in range(rows - 1))]
    for line, columns in zip(lines, trend(shown, each, rows), strict=True):
        line.append(columns, "green")
    if rows > 1:
        span = f"{'':<{_LABEL + 1}}{ago(len(shown) * _EACH_S)}, 0 … 100 %"
        lines[-1] = Text(f"{span:<{first.cell_len}}", "dim", end="").append_text(
            lines[-1][first.cell_len :]
        )
    return [fit(line, width) for line in lines]


def _history(live: Mapping[str, Any]) -> list[tuple[float, float]]:
    """Return (reused, prompt) tokens per five seconds of the last ten minutes, newest last."""
    points = [(0.0, 0.0)] * _POINTS
    found = live.get("history")
    now = number(live, "at") or 0.0
    for entry in found if isinstance(found, list) else []:
        if not isinstance(entry, list) or len(entry) != 3:
            continue
        named = dict(zip(("at", "prompt", "reused"), entry, strict=True))
        back = int((now - (number(named, "at") or 0.0)) // _EACH_S)
        if 0 <= back < _POINTS:
            reused, prompt = points[-1 - back]
            points[-1 - back] = reused + whole(named, "reused"), prompt + whole(named, "prompt")
    return points


def _ttft(live: Mapping[str, Any], width: int) -> Text:
    line = _labelled("TTFT")
    medians = []
    for at, kind in enumerate(("cold", "warm")):
        one = below(below(live, "ttft"), kind)
        count = whole(one, "count")
        medians.append(number(one, "p50_s") if count else None)
        line.append(" · " if at else "").append(f"{kind} ", "bold")
        if not count:
            line.append("none", "dim")
            continue
        line.append(f"{seconds(medians[-1])}, p95 {seconds(number(one, 'p95_s'))}")
        if width >= ROOMY:
            line.append(f" of {plural(count, 'request')}", "dim")
    cold, warm = medians
    if cold and warm:
        line.append(f" · {cold / warm:.1f}× sooner", "bold green" if cold > warm else "")
    if width - line.cell_len >= len(_SPAN):
        line.append(_SPAN, "dim")
    return fit(line, width)


def _pages(live: Mapping[str, Any], width: int) -> Text:
    pages = below(live, "pages")
    legend = Text(end="")
    for name, glyph, style, words in _PAGES:
        legend.append(f" {glyph} ", style).append(f"{amount(whole(pages, name))} {words}")
    if pinned := whole(pages, "pinned"):
        legend.append(f" · {amount(pinned)} pinned", "magenta")
    if width >= ROOMY:
        legend.append(
            f" · of {whole(pages, 'total'):,}, {whole(live, 'page_size')} tokens each", "dim"
        )
    line = _labelled("pages")
    room = max(width - line.cell_len - legend.cell_len, 8)
    parts = [(float(whole(pages, name)), glyph, style) for name, glyph, style, _ in _PAGES]
    return fit(line.append_text(bar(parts, room)).append_text(legend), width)


def _loads(live: Mapping[str, Any], width: int) -> list[Text]:
    """Draw how much of what is stored was loaded lately; nothing without loads."""
    known = below(live, "loads")
    loaded, computed = whole(known, "loaded_tokens"), whole(known, "computed_stored_tokens")
    if not loaded + computed:
        return []
    line = _labelled("loads").append(f"{percent(loaded, loaded + computed)} loaded", "bold")
    line.append(f" of {amount(loaded + computed)} stored tokens")
    if computed:
        line.append(", the others are faster to compute")
    if width >= ROOMY:
        saved = sum(
            number(one, "saved_s") or 0.0
            for one in entries(live, "reused")
            if one.get("source") != "pool"
        )
        line.append(f" · {seconds(saved)} of computing saved by tiers so far", "dim")
        if speed := number(known, "prefill_tokens_per_s"):
            line.append(f" · it computes {amount(round(speed))} tokens/s", "dim")
    return [fit(line, width)]


def _what_if(live: Mapping[str, Any], width: int) -> Text:
    line = _labelled("what if")
    points = entries(live, "what_if")
    for at, point in enumerate(points):
        times, rate = number(point, "times") or 0, number(point, "hit_rate") or 0
        line.append(" · " if at else "").append(f"{times:g}× ", "bold" if times == 1 else "")
        line.append(f"{rate:.0%}", "bold" if times == 1 else "")
    bound = any(point.get("kv_only") is True for point in points)
    rate_of = "the hit rate of the KV alone" if bound else "the pool's hit rate"
    return fit(line.append(f"  of the memory: {rate_of}" if points else "–", "dim"), width)


def _foot(width: int, ends: str) -> Text:
    line = Text(" " + ends, "dim", no_wrap=True, end="")
    for name, (glyph, style) in REUSE.items():
        line.append(f"  {glyph} ", style).append(name)
    return fit(line.append("   why: kvkeep explain URL ID"), width)
