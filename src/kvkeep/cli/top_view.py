"""The picture of ``kvkeep top``: lines of exactly the width there is, as many as fit.

Imported when it is drawn, for it needs rich. Every line is one `rich.text.Text`; nothing wraps.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from rich.text import Text

from kvkeep.cli.drawing import ago, amount, clock, percent, plural, seconds, trend, visible
from kvkeep.cli.lines import REUSE, bar, beside, cell, fit, heading, reuse_bar, row
from kvkeep.cli.watch import below, entries, number, text, tokens_by, whole
from kvkeep.geometry.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvkeep.cli.watch import Picture

    Section = Callable[[int, int], list[Text]]

__all__ = ["draw", "main_reason"]

_LABEL: Final = 10
_EACH_S: Final = 5  # seconds of one point of the history
_POINTS: Final = 120
_RECENT: Final = 12  # points: the last minute
_ROOMY: Final = 110  # from here on, lines say what they could leave out
_WIDE: Final = 150  # from here on, two sections stand beside each other
_TALL: Final = 36  # from here on, what is pleasant and not needed has room
_SPAN: Final = "  last 5 min"  # what the times to the first token are of
_PAGES: Final = (
    ("private", "█", "magenta", "in use"),
    ("cached_held", "▓", "blue", "held"),
    ("cached_evictable", "▒", "green", "cached"),
    ("free", "░", "bright_black", "free"),
)


def draw(picture: Picture, address: str, width: int, height: int, *, ends: str = "") -> list[Text]:
    """At most ``height`` lines of ``width`` columns; ``ends`` says how to leave."""
    tall = height >= _TALL
    head = [
        _title(picture, address, width),
        _requests_line(picture.live, width),
        *_hit_rate(picture.live, width, 3 if tall else 1),
        _ttft(picture.live, width),
        _pages(picture.live, width),
        *([_what_if(picture.live, width)] if tall else []),
    ]
    foot = _foot(width, ends)
    left = height - len(head) - 1
    blank = [cell("", width)] * (left > 24)
    rows = left - len(blank)
    lines = [*head, *blank, *_sections(picture, width, rows)]
    if ends:  # there is a bottom to stand at
        lines += [cell("", width) for _ in range(height - 1 - len(lines))]
    return [*lines[: height - 1], foot]


# --- the head -------------------------------------------------------------------------------------


def _title(picture: Picture, address: str, width: int) -> Text:
    live = picture.live
    line = Text(no_wrap=True, end="")
    line.append(f" {text(live, 'model', '?')} ", "bold reverse")
    line.append(f" {address}")
    if picture.trouble is not None:
        line.append(f"  {visible(picture.trouble)}; asked again", "bold red")
        line.append(f" (seen {ago(time.time() - picture.seen_at)} ago)", "red")
        return fit(line, width)
    line.append(f" · kvkeep {text(live, 'version', '?')} · {text(live, 'policy', '?')}", "dim")
    line.append(f" · up {ago(number(live, 'uptime_s') or 0)}", "dim")
    return fit(line, width - 9).append(f" {clock(picture.seen_at)}", "dim")


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
    """(reused, prompt) tokens of each five seconds of the last ten minutes, the newest last."""
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
        if width >= _ROOMY:
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
    if width >= _ROOMY:
        legend.append(
            f" · of {whole(pages, 'total'):,}, {whole(live, 'page_size')} tokens each", "dim"
        )
    line = _labelled("pages")
    room = max(width - line.cell_len - legend.cell_len, 8)
    parts = [(float(whole(pages, name)), glyph, style) for name, glyph, style, _ in _PAGES]
    return fit(line.append_text(bar(parts, room)).append_text(legend), width)


def _what_if(live: Mapping[str, Any], width: int) -> Text:
    line = _labelled("what if")
    points = entries(live, "what_if")
    for at, point in enumerate(points):
        times, rate = number(point, "times") or 0, number(point, "hit_rate") or 0
        line.append(" · " if at else "").append(f"{times:g}× ", "bold" if times == 1 else "")
        line.append(f"{rate:.0%}", "bold" if times == 1 else "")
    return fit(line.append("  of the memory: the hit rate" if points else "–", "dim"), width)


def _foot(width: int, ends: str) -> Text:
    line = Text(" " + ends, "dim", no_wrap=True, end="")
    for name, (glyph, style) in REUSE.items():
        line.append(f"  {glyph} ", style).append(name)
    return fit(line.append("   why: kvkeep explain URL ID"), width)


# --- the sections ---------------------------------------------------------------------------------


def _sections(picture: Picture, width: int, rows: int) -> list[Text]:
    """Tiers, tenants, causes and requests, each with the rows that it can have."""
    live, summary = picture.live, picture.summary
    tiers, tenants = entries(live, "tiers"), entries(live, "tenants")
    causes = entries(summary, "causes")
    requests = picture.requests or []
    pair = width >= _WIDE
    half = 62 if pair else width
    # What each would like, what it needs, in the order in which it is given.
    wants = {
        "requests": (len(requests), 4),
        "causes": (min(len(causes), 10), 3),
        "tiers": (min(len(tiers), 8), 3),
        "tenants": (min(len(tenants), 10), 2),
    }
    if pair:  # they stand beside each other, and share their rows
        both = max(wants["causes"][0], wants["tenants"][0])
        wants["causes"], wants["tenants"] = (both, 3), (0, 0)
    heads = 1 + bool(tiers) + 2 - pair
    given = _share_out(wants, rows - heads)
    drawn: list[Text] = []
    if tiers:
        drawn += _tiers(picture, tiers[: given["tiers"]], width)
    if pair:
        left = _tenants(tenants[: given["causes"]], half)
        right = _causes(picture, causes[: given["causes"]], width - half - 2)
        drawn += beside(left, right, half, width)
    else:
        drawn += _tenants(tenants[: given["tenants"]], width)
        drawn += _causes(picture, causes[: given["causes"]], width)
    return [*drawn, *_requests(picture, requests[: given["requests"]], width)][:rows]


def _share_out(wants: Mapping[str, tuple[int, int]], rows: int) -> dict[str, int]:
    """Rows for each: what it needs first, then one after the other until all is given."""
    given = dict.fromkeys(wants, 0)
    for needed in (True, False):
        hungry = True
        while hungry and rows > 0:
            hungry = False
            for name, (wanted, least) in wants.items():
                if rows > 0 and given[name] < (min(wanted, least) if needed else wanted):
                    given[name] += 1
                    rows -= 1
                    hungry = True
    return given


def _tiers(picture: Picture, tiers: Sequence[Mapping[str, Any]], width: int) -> list[Text]:
    wide = width >= _ROOMY
    more = ("queued", "drops", "errors", "place") if wide else ()
    before = {text(one, "name"): one for one in entries(picture.before, "tiers")}
    passed = (number(picture.live, "at") or 0) - (number(picture.before, "at") or 0)
    each = "/s" if before and passed > 0 else ""
    lines = [
        heading(
            row(
                cell("tier", 9), cell("fill", 25), cell("hits", 6, right=True),
                cell("misses", 6, right=True), cell(f"read{each}", 9, right=True),
                cell(f"write{each}" if each else "written", 9, right=True), cell("state", 9),
                *(cell(name, 9, right=name != "place") for name in more), width=width,
            )
        )
    ]  # fmt: skip
    for tier in tiers:
        used, capacity = whole(tier, "used_bytes"), whole(tier, "capacity")
        of = f" of {format_bytes(capacity)}" if capacity else ""
        parts = [(used, "█", "cyan"), (max(capacity - used, 0), "░", "bright_black")]
        state, style = _state(tier)
        old = before.get(text(tier, "name")) if each else None
        cells = [
            cell(text(tier, "name", "?"), 9, "bold"),
            bar(parts if capacity else [], 6),
            cell(format_bytes(used) + of, 18),
            cell(amount(whole(tier, "hits")), 6, right=True),
            cell(amount(whole(tier, "misses")), 6, right=True),
            _moved(tier, old, "read_bytes", passed),
            _moved(tier, old, "written_bytes", passed),
            cell(state, 9, style),
        ]
        if wide:
            cells += [
                cell(format_bytes(whole(tier, "queued_bytes")), 9, right=True),
                _counted(whole(tier, "drops")),
                _counted(whole(tier, "errors") + whole(tier, "damaged")),
                cell(text(tier, "place"), max(width - 129, 0), "dim"),
            ]
        lines.append(row(*cells, width=width))
    return lines


def _counted(trouble: int) -> Text:
    return cell(amount(trouble), 9, "yellow" if trouble else "", right=True)


def _moved(now: Any, before: Any, name: str, passed: float) -> Text:
    """Bytes a second since the picture before; what was moved in all where there is none."""
    moved = whole(now, name)
    if before is not None:
        moved = max(0, round((moved - whole(before, name)) / passed))
    return cell(format_bytes(moved), 9, right=True)


def _state(tier: Mapping[str, Any]) -> tuple[str, str]:
    """The breaker in a word, and its style."""
    breaker = text(tier, "breaker", "–")
    if breaker not in {"closed", "–"}:
        return breaker, "bold red"
    troubled = whole(tier, "errors") + whole(tier, "damaged")
    return ("ok", "green") if not troubled else (f"{amount(troubled)} err", "yellow")


def _tenants(tenants: Sequence[Mapping[str, Any]], width: int) -> list[Text]:
    name = 20 if width < 100 else 26
    track = max(width - name - 40, 6)
    lines = [
        heading(
            row(
                cell("tenant (cache_salt)", name), cell("requests", 8, right=True),
                cell("prompt", 8, right=True), cell("pages", 8, right=True),
                cell("reused", 6, right=True), cell("", track), width=width,
            )
        )
    ]  # fmt: skip
    for one in tenants:
        prompt, reused = whole(one, "prompt_tokens"), whole(one, "reused_tokens")
        parts = [(reused, "█", "green"), (max(prompt - reused, 0), "░", "yellow")]
        lines.append(
            row(
                cell(text(one, "cache_salt") or "–", name),
                cell(amount(whole(one, "requests")), 8, right=True),
                cell(amount(prompt), 8, right=True),
                cell(amount(whole(one, "pages")), 8, right=True),
                cell(percent(reused, prompt), 6, right=True),
                bar(parts, track),
                width=width,
            )
        )
    return lines


def _causes(picture: Picture, causes: Sequence[Mapping[str, Any]], width: int) -> list[Text]:
    summary = picture.summary
    title = f"what costs most of {amount(sum(tokens_by(summary, 'computed').values()))} computed"
    lines = [heading(row(cell("tokens", 6, right=True), cell(title, width - 8), width=width))]
    if summary is None:
        return [*lines, _unexplained(width)]
    for one in causes:
        said = cell(text(one, "sentence") or text(one, "reason"), width - 8)
        lines.append(row(cell(amount(whole(one, "tokens")), 6, right=True), said, width=width))
    return lines


def _unexplained(width: int) -> Text:
    return cell("        this server explains nothing (--no-explain)", width, "dim")


def _requests(picture: Picture, requests: Sequence[Mapping[str, Any]], width: int) -> list[Text]:
    wide = width >= 120
    named, salt, track = (33, 14, 24) if wide else (12, 8, 14)
    rest = max(width - named - salt - track - 27, 8)
    lines = [
        heading(
            row(
                cell("ago", 6, right=True), cell("request", named), cell("tenant", salt),
                cell("prompt", 6, right=True), cell("", track), cell("TTFT", 7, right=True),
                cell("computed, for", rest), width=width,
            )
        )
    ]  # fmt: skip
    if picture.requests is None:
        return [*lines, _unexplained(width)]
    for one in requests:
        computed = tokens_by(one, "computed")
        reason = text(one, "sentence") if wide else ""
        name = text(one, "id", "?")
        lines.append(
            row(
                cell(ago(picture.seen_at - (number(one, "at") or 0.0)), 6, right=True),
                cell(
                    # What is the same in all of them says nothing where room is scarce.
                    name if wide else name.removeprefix("chat").removeprefix("cmpl-"),
                    named,
                    "bold green" if one.get("outcome") is None else "",
                ),
                cell(text(one, "cache_salt") or "–", salt),
                cell(amount(whole(one, "prompt_tokens")), 6, right=True),
                reuse_bar(tokens_by(one, "reused"), sum(computed.values()), track),
                cell(seconds(number(one, "ttft_s")), 7, right=True),
                cell(reason or main_reason(computed), rest),
                width=width,
            )
        )
    return lines


def main_reason(computed: Mapping[str, int]) -> str:
    """Why most of the computed tokens were; the last token always is, and is not told of."""
    reasons = [name for name in computed if name != "last_token" and computed[name]]
    return (reasons or ["all reused" if computed else "–"])[0].replace("_", " ")
