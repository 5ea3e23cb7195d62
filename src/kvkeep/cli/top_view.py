"""The screen of ``kvkeep top``: its head, and the sections below.

Imported only to draw, as rich is optional. Every line is one `rich.text.Text` of the screen's
width; none is wrapped.
"""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Any, Final

from rich.text import Text

from kvkeep.cli.client import below, cause_words, entries, number, text, tokens_by, whole
from kvkeep.cli.drawing import (
    ago,
    amount,
    clock,
    percent,
    plural,
    seconds,
    storage,
    trend,
    visible,
)
from kvkeep.cli.lines import REUSE, bar, cell, fit, heading, reuse_bar, row

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvkeep.cli.top import Picture

__all__ = ["draw"]

_LABEL: Final = 10
_EACH_S: Final = 5  # seconds per point of the history
_POINTS: Final = 120
_RECENT: Final = 12  # points: the last minute
_ROOMY: Final = 110  # columns from which lines have optional parts
_SENTENCE: Final = 36  # columns that a sentence needs
_PAGES: Final = (
    ("private", "█", "magenta", "in use"),
    ("cached_held", "▓", "blue", "held"),
    ("cached_evictable", "▒", "green", "cached"),
    ("free", "░", "bright_black", "free"),
)
# The beginning of the sentence about a request, which has its own column.
_COUNTED: Final = re.compile(r"[0-9,]+ of [0-9,]+ tokens computed(?:: |, )")


def draw(picture: Picture, address: str, width: int, height: int, *, ends: str = "") -> list[Text]:
    """Draw at most ``height`` lines of ``width`` columns; ``ends`` explains how to quit."""
    live, summary = picture.live, picture.summary
    tiers, causes = entries(live, "tiers")[:8], entries(summary, "causes")[:8]
    lines = [
        _title(picture, address, width),
        _requests_line(live, width),
        _hit_rate(live, width),
        _ttft(live, width),
        _pages(live, width),
        *_loads(live, width),
        *(_tiers(picture, tiers, width) if tiers else ()),
    ]
    rows = height - 3 - len(lines)  # for causes and requests, without their headings and the foot
    lines += _causes(picture, causes[: max(rows // 2, 0)], width)
    lines += _requests(picture, picture.requests[: max(height - 2 - len(lines), 0)], width)
    if ends:  # a full screen: the foot is on its last line
        lines += [cell("", width) for _ in range(height - 1 - len(lines))]
    return [*lines[: height - 1], _foot(width, ends)]


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


def _hit_rate(live: Mapping[str, Any], width: int) -> Text:
    points = _history(live)
    reused, prompt = (sum(column) for column in zip(*points[-_RECENT:], strict=True))
    totals = below(live, "totals")
    said = f"{percent(reused, prompt):>5} in the last minute"
    so_far = percent(whole(totals, "cached_tokens"), whole(totals, "prompt_tokens"))
    line = _labelled("hit rate").append(said, "bold").append(f" · {so_far} so far  ")
    room = width - line.cell_len - 1
    each = max(1, round(_POINTS / max(room, 1)))
    return fit(line.append(trend(points[-max(room, 1) * each :], each), "green"), width)


def _history(live: Mapping[str, Any]) -> list[tuple[float, float]]:
    """Return (reused, prompt) tokens per five seconds of the last ten minutes, newest last."""
    points = [(0.0, 0.0)] * _POINTS
    said = live.get("history")
    now = number(live, "at") or 0.0
    for entry in said if isinstance(said, list) else []:
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
        figures = below(below(live, "ttft"), kind)
        count = whole(figures, "count")
        medians.append(number(figures, "p50_s") if count else None)
        line.append(" · " if at else "").append(f"{kind} ", "bold")
        if not count:
            line.append("none", "dim")
            continue
        line.append(f"{seconds(medians[-1])}, p95 {seconds(number(figures, 'p95_s'))}")
        if width >= _ROOMY:
            line.append(f" of {plural(count, 'request')}", "dim")
    cold, warm = medians
    if cold and warm:
        line.append(f" · {cold / warm:.1f}× sooner", "bold green" if cold > warm else "")
    return fit(line, width)


def _pages(live: Mapping[str, Any], width: int) -> Text:
    pages = below(live, "pages")
    legend = Text(end="")
    for name, glyph, style, words in _PAGES:
        legend.append(f" {glyph} ", style).append(f"{amount(whole(pages, name))} {words}")
    if pinned := whole(pages, "pinned"):
        legend.append(f" · {amount(pinned)} pinned", "magenta")
    line = _labelled("pages")
    room = max(width - line.cell_len - legend.cell_len, 8)
    parts = [(float(whole(pages, name)), glyph, style) for name, glyph, style, _ in _PAGES]
    return fit(line.append_text(bar(parts, room)).append_text(legend), width)


def _loads(live: Mapping[str, Any], width: int) -> list[Text]:
    """Draw how much of what is stored was loaded lately; nothing without loads."""
    figures = below(live, "loads")
    loaded, computed = whole(figures, "loaded_tokens"), whole(figures, "computed_stored_tokens")
    if not loaded + computed:
        return []
    line = _labelled("loads").append(f"{percent(loaded, loaded + computed)} loaded", "bold")
    line.append(f" of {amount(loaded + computed)} stored tokens")
    if computed:
        line.append(", the others are faster to compute")
    return [fit(line, width)]


def _foot(width: int, ends: str) -> Text:
    line = Text(" " + ends, "dim", no_wrap=True, end="")
    for name, (glyph, style) in REUSE.items():
        line.append(f"  {glyph} ", style).append(name)
    return fit(line.append("   why: kvkeep explain URL ID"), width)


# --- the sections ---------------------------------------------------------------------------------


def _tiers(picture: Picture, tiers: Sequence[Mapping[str, Any]], width: int) -> list[Text]:
    more = ("queued", "drops", "errors") if width >= _ROOMY else ()
    before = {text(old, "name"): old for old in entries(picture.before, "tiers")}
    passed = (number(picture.live, "at") or 0) - (number(picture.before, "at") or 0)
    each = "/s" if before and passed > 0 else ""
    lines = [
        heading(
            row(
                cell("tier", 9), cell("fill", 25), cell("hits", 6, right=True),
                cell("misses", 6, right=True), cell(f"read{each}", 9, right=True),
                cell(f"write{each}" if each else "written", 9, right=True), cell("state", 9),
                *(cell(name, 9, right=True) for name in more), width=width,
            )
        )
    ]  # fmt: skip
    for tier in tiers:
        used, capacity = whole(tier, "used_bytes"), whole(tier, "capacity")
        of = f" of {storage(capacity)}" if capacity else ""
        parts = [(used, "█", "cyan"), (max(capacity - used, 0), "░", "bright_black")]
        state, style = _state(tier)
        old = before.get(text(tier, "name")) if each else None
        cells = [
            cell(text(tier, "name", "?"), 9, "bold"),
            bar(parts if capacity else [], 6),
            cell(storage(used) + of if number(tier, "used_bytes") is not None else "–", 18),
            cell(amount(whole(tier, "hits")), 6, right=True),
            cell(amount(whole(tier, "misses")), 6, right=True),
            _moved(tier, old, "read_bytes", passed),
            _moved(tier, old, "written_bytes", passed),
            cell(state, 9, style),
        ]
        if more:
            failed = whole(tier, "errors") + whole(tier, "damaged")
            cells += [
                cell(storage(whole(tier, "queued_bytes")), 9, right=True),
                cell(amount(whole(tier, "drops")), 9, right=True),
                cell(amount(failed), 9, "yellow" if failed else "", right=True),
            ]
        lines.append(row(*cells, width=width))
    return lines


def _moved(now: Any, before: Any, name: str, passed: float) -> Text:
    """Draw bytes per second since the last picture; the total if there is none."""
    moved = whole(now, name)
    if before is not None:
        moved = max(0, round((moved - whole(before, name)) / passed))
    return cell(storage(moved), 9, right=True)


def _state(tier: Mapping[str, Any]) -> tuple[str, str]:
    """Return the state of the breaker in a word, and its style."""
    breaker = text(tier, "breaker", "–")
    if breaker not in {"closed", "–"}:
        return breaker, "bold red"
    troubled = whole(tier, "errors") + whole(tier, "damaged")
    return ("ok", "green") if not troubled else (f"{amount(troubled)} err", "yellow")


def _causes(picture: Picture, causes: Sequence[Mapping[str, Any]], width: int) -> list[Text]:
    summary = picture.summary
    title = f"causes of {amount(sum(tokens_by(summary, 'computed').values()))} computed tokens"
    lines = [heading(row(cell("share", 6, right=True), cell(title, width - 8), width=width))]
    for cause in causes:
        share = cell(percent(number(cause, "share") or 0.0, 1.0), 6, "bold", right=True)
        lines.append(row(share, cell(cause_words(cause), width - 8), width=width))
    return lines


def _requests(picture: Picture, requests: Sequence[Mapping[str, Any]], width: int) -> list[Text]:
    named, salt, track = (33, 14, 24) if width >= 150 else (12, 8, 14)
    rest = max(width - named - salt - track - 27, 8)
    lines = [
        heading(
            row(
                cell("ago", 6, right=True), cell("request", named), cell("tenant", salt),
                cell("prompt", 6, right=True), cell("", track), cell("TTFT", 7, right=True),
                cell("computed, " + ("because" if rest >= _SENTENCE else "for"), rest), width=width,
            )
        )
    ]  # fmt: skip
    for request in requests:
        computed = tokens_by(request, "computed")
        missed = sum(computed.values())
        # The last token, which always is computed, is a reason only where there is no other.
        reasons = [name for name in computed if name != "last_token" and computed[name]]
        reason = (reasons or ["all reused" if computed else "–"])[0].replace("_", " ")
        if rest >= _SENTENCE and (sentence := text(request, "sentence")):
            reason = f"{amount(missed):>6}  {_COUNTED.sub('', sentence)}"
        name = text(request, "id", "?").removeprefix("chat").removeprefix("cmpl-")
        lines.append(
            row(
                cell(ago(picture.seen_at - (number(request, "at") or 0.0)), 6, right=True),
                cell(name, named, "bold green" if request.get("outcome") is None else ""),
                cell(text(request, "cache_salt") or "–", salt),
                cell(amount(whole(request, "prompt_tokens")), 6, right=True),
                reuse_bar(tokens_by(request, "reused"), missed, track),
                cell(seconds(number(request, "ttft_s")), 7, right=True),
                cell(reason, rest),
                width=width,
            )
        )
    return lines
