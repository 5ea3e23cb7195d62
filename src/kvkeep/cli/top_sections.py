"""The sections of ``kvkeep top``: tiers, tenants, causes, requests.

Imported only to draw, as rich is optional. Every line is one `rich.text.Text`; none is wrapped.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from kvkeep.cli.drawing import ago, amount, percent, seconds, storage
from kvkeep.cli.lines import bar, beside, cell, heading, reuse_bar, row
from kvkeep.cli.replies import cause_words, entries, number, text, tokens_by, whole

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.text import Text

    from kvkeep.cli.watch import Picture

__all__ = ["ROOMY", "main_reason", "sections"]

ROOMY: Final = 110  # columns from which lines have optional parts
_WIDE: Final = 150  # columns from which two sections stand side by side
_SENTENCE: Final = 36  # columns that a sentence needs
# The beginning of the sentence about a request, which has its own column.
_COUNTED: Final = re.compile(r"[0-9,]+ of [0-9,]+ tokens computed(?:: |, )")


def sections(picture: Picture, width: int, rows: int) -> list[Text]:
    """Draw tiers, tenants, causes and requests in ``rows`` lines, shared out among them."""
    live, summary = picture.live, picture.summary
    tiers, tenants = entries(live, "tiers"), entries(live, "tenants")
    causes = entries(summary, "causes")
    requests = picture.requests or []
    pair = width >= _WIDE
    half = 62 if pair else width
    # Rows that each section can use, and rows that it needs, by priority.
    wants = {
        "requests": (len(requests), 4),
        "causes": (min(len(causes), 10), 3),
        "tiers": (min(len(tiers), 8), 3),
        "tenants": (min(len(tenants), 10), 2),
    }
    if pair:  # side by side, they share their rows
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
    """Give each section the rows it needs, then one more in turn until none is left."""
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
    wide = width >= ROOMY
    more = ["queued", "drops", "errors"] * wide + ["place"] * (width >= _WIDE)
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
        if wide:
            cells += [
                cell(storage(whole(tier, "queued_bytes")), 9, right=True),
                _counted(whole(tier, "drops")),
                _counted(whole(tier, "errors") + whole(tier, "damaged")),
                cell(text(tier, "place"), max(width - 129, 0), "dim"),
            ][: len(more)]
        lines.append(row(*cells, width=width))
    return lines


def _counted(trouble: int) -> Text:
    return cell(amount(trouble), 9, "yellow" if trouble else "", right=True)


def _moved(now: Any, before: Any, name: str, passed: float) -> Text:
    """Draw bytes per second since the last picture; the total if there is none."""
    moved = whole(now, name)
    if before is not None:
        moved = max(0, round((moved - whole(before, name)) / passed))
    return cell(storage(moved), 9, right=True)


_SERVING = ("read", "write", "lookup")  # kinds of call that a breaker counts


def _state(tier: Mapping[str, Any]) -> tuple[str, str]:
    """Return the state of the breaker in a word, and its style."""
    breaker = text(tier, "breaker", "–")
    if breaker not in {"closed", "–"}:
        failing = tier.get("breakers")
        calls = [call for call in _SERVING if isinstance(failing, dict) and call in failing]
        return " ".join([breaker, *calls[:1]]), "bold red"
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
    title = f"causes of {amount(sum(tokens_by(summary, 'computed').values()))} computed tokens"
    lines = [heading(row(cell("share", 6, right=True), cell(title, width - 8), width=width))]
    if summary is None:
        return [*lines, _unexplained(width)]
    for one in causes:
        share = cell(percent(number(one, "share") or 0.0, 1.0), 6, "bold", right=True)
        lines.append(row(share, cell(cause_words(one), width - 8), width=width))
    return lines


def _unexplained(width: int) -> Text:
    return cell("        this server does not explain requests", width, "dim")


def _requests(picture: Picture, requests: Sequence[Mapping[str, Any]], width: int) -> list[Text]:
    wide = width >= _WIDE
    named, salt, track = (33, 14, 24) if wide else (12, 8, 14)
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
    if picture.requests is None:
        return [*lines, _unexplained(width)]
    for one in requests:
        computed = tokens_by(one, "computed")
        missed = sum(computed.values())
        reason = main_reason(computed)
        if rest >= _SENTENCE and (sentence := text(one, "sentence")):
            reason = f"{amount(missed):>6}  {_COUNTED.sub('', sentence)}"
        name = text(one, "id", "?")
        lines.append(
            row(
                cell(ago(picture.seen_at - (number(one, "at") or 0.0)), 6, right=True),
                cell(
                    # The common prefix of all ids is left out where space is scarce.
                    name if wide else name.removeprefix("chat").removeprefix("cmpl-"),
                    named,
                    "bold green" if one.get("outcome") is None else "",
                ),
                cell(text(one, "cache_salt") or "–", salt),
                cell(amount(whole(one, "prompt_tokens")), 6, right=True),
                reuse_bar(tokens_by(one, "reused"), missed, track),
                cell(seconds(number(one, "ttft_s")), 7, right=True),
                cell(reason, rest),
                width=width,
            )
        )
    return lines


def main_reason(computed: Mapping[str, int]) -> str:
    """Return the main reason of the computed tokens, ignoring the last, which always is."""
    reasons = [name for name in computed if name != "last_token" and computed[name]]
    return (reasons or ["all reused" if computed else "–"])[0].replace("_", " ")
