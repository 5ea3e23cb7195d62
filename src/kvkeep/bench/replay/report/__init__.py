"""The report of a replay: one HTML page that loads nothing, with its data as JSON beside it."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import platform
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from importlib.metadata import version
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from kvkeep.bench.replay.bounds import BELADY, INFINITE
from kvkeep.bench.replay.outcome import (
    EVICTED,
    FIRST,
    GROUP_REASONS,
    NEVER,
    NO_STATE,
    NO_WINDOW,
    OTHER,
    REASONS,
    REMAINDER,
    reasons_of,
)
from kvkeep.bench.replay.words import count, duration, number, share, shown, tokens
from kvkeep.core.errors import InvalidValue

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from kvkeep.bench.replay.outcome import Outcome

__all__ = [
    "Arranged",
    "PolicyCurve",
    "escaped",
    "facts_list",
    "findings",
    "sections",
    "write_report",
]

_USUAL = "lru"
_MOST = 5  # capacities in the text
_SAME = 0.0005  # differences of hit rates below this are not mentioned
_LONGEST = 4000
_CLASSES = {"reused": "hit"} | {reason: f"m{at}" for at, reason in enumerate(REASONS)}
_CLASSES |= dict.fromkeys(GROUP_REASONS, "m5")  # a model has one of them
_REASON_WORDS = {
    FIRST: "were never seen before",
    EVICTED: "had been evicted",
    NEVER: "were seen before but never admitted",
    OTHER: "were cached in another namespace",
    REMAINDER: "lay in a page that was not reused whole",
    NO_STATE: "were cached without a state to go on from",
    NO_WINDOW: "were cached, but the windows before them were not",
}


# --- outcomes by policy and capacity -------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PolicyCurve:
    """The outcomes of one policy, by capacity, smallest first."""

    name: str
    outcomes: tuple[Outcome, ...]

    def at(self, capacity: int) -> Outcome | None:
        """Return the outcome with that capacity, or None."""
        return next((one for one in self.outcomes if one.capacity_tokens == capacity), None)

    def capacity_for(self, hit_rate: float) -> float | None:
        """Interpolate the capacity in tokens that reaches ``hit_rate``; None outside the curve."""
        for low, high in pairwise(self.outcomes):
            if low.hit_rate <= hit_rate <= high.hit_rate and low.hit_rate < high.hit_rate:
                part = (hit_rate - low.hit_rate) / (high.hit_rate - low.hit_rate)
                return low.capacity_tokens + part * (high.capacity_tokens - low.capacity_tokens)
        return None


class Arranged:
    """All outcomes of a report: curves of policies and of the optimum, and the endless memory.

    ``capacities`` are those of the policies, smallest first. Raises `InvalidValue` if there are no
    outcomes, or if they are of different traces.
    """

    def __init__(self, outcomes: Sequence[Outcome]) -> None:
        if not outcomes:
            raise InvalidValue("a report needs at least one outcome")
        traces = {outcome.digest for outcome in outcomes}
        if len(traces) > 1:
            raise InvalidValue(f"a report is about one trace; these outcomes are of {len(traces)}")
        policies = [one for one in outcomes if one.policy not in {BELADY, INFINITE}]
        page_sizes = {one.page_tokens for one in policies}
        curves: dict[str, list[Outcome]] = {}
        for outcome in policies:
            name = shown(outcome.policy, 40)
            if len(page_sizes) > 1:
                name += f", pages of {outcome.page_tokens}"
            _place(curves, name, outcome)
        bound = [one for one in outcomes if one.policy == BELADY]
        self.policies = tuple(PolicyCurve(name, _sorted(curve)) for name, curve in curves.items())
        self.belady = PolicyCurve("belady (bound)", _sorted(bound)) if bound else None
        self.infinite = next((one for one in outcomes if one.policy == INFINITE), None)
        self.capacities = tuple(sorted({one.capacity_tokens for one in policies or bound}))

    @property
    def usual(self) -> PolicyCurve | None:
        """The policy that others are compared with: lru, or else the first."""
        named = (curve for curve in self.policies if curve.name == _USUAL)
        return next(named, self.policies[0] if self.policies else None)

    def best(self, capacity: int) -> tuple[PolicyCurve, Outcome] | None:
        """Return the policy with the most reuse at that capacity; the first of equals."""
        there = [(curve, one) for curve, one in self.each() if one.capacity_tokens == capacity]
        return max(there, key=lambda pair: pair[1].hit_rate, default=None)

    def each(self) -> Iterator[tuple[PolicyCurve, Outcome]]:
        """Yield every policy with every capacity: by capacity, then in the given order."""
        for capacity in self.capacities:
            for curve in self.policies:
                outcome = curve.at(capacity)
                if outcome is not None:
                    yield curve, outcome


def _place(curves: dict[str, list[Outcome]], name: str, outcome: Outcome) -> None:
    """Add an outcome to its curve; a repeated policy and capacity starts another one."""
    unique, repeats = name, 1
    while any(one.capacity_tokens == outcome.capacity_tokens for one in curves.get(unique, ())):
        repeats += 1
        unique = f"{name} ({repeats})"
    curves.setdefault(unique, []).append(outcome)


def _sorted(outcomes: Iterable[Outcome]) -> tuple[Outcome, ...]:
    return tuple(sorted(outcomes, key=lambda one: one.capacity_tokens))


# --- findings ------------------------------------------------------------------------------------


def findings(arranged: Arranged) -> Iterator[str]:
    """Yield the findings in sentences, the most important first."""
    if arranged.infinite is not None:
        yield (
            f"Of all blocks requested, {share(arranged.infinite.hit_rate)} had been requested "
            "before: an unlimited cache would reuse all of these."
        )
    usual = arranged.usual
    if usual is not None:
        capacities = [one.capacity_tokens for one in usual.outcomes]
        yield from (_capacity(arranged, usual, capacity) for capacity in _some(capacities))
        yield from _why(usual)
        yield from _waits(usual)
    elif arranged.belady is not None:
        for one in arranged.belady.outcomes:
            yield (
                f"With {tokens(one.capacity_tokens)} tokens, no policy can reuse more than "
                f"{share(one.hit_rate)}."
            )
    refused = [pair for pair in arranged.each() if pair[1].refused]
    if refused:
        curve, outcome = max(refused, key=lambda pair: pair[1].refused)
        yield (
            f"{count(outcome.refused)} of {count(outcome.requests)} requests do not fit into "
            f"{tokens(outcome.capacity_tokens)} tokens at all ({curve.name}); their tokens count "
            "as computed."
        )


def _some(capacities: Sequence[int]) -> list[int]:
    """Return all capacities, or a few from the first to the last."""
    if len(capacities) <= _MOST:
        return list(capacities)
    last = len(capacities) - 1
    return [capacities[round(at * last / (_MOST - 1))] for at in range(_MOST)]


def _capacity(arranged: Arranged, usual: PolicyCurve, capacity: int) -> str:
    mine, best = usual.at(capacity), arranged.best(capacity)
    assert mine is not None
    assert best is not None
    words = (
        f"With {tokens(capacity)} tokens, {usual.name} reuses {share(mine.hit_rate)} of all blocks."
    )
    curve, outcome = best
    if outcome.hit_rate - mine.hit_rate > _SAME:
        words += f" {curve.name} would reuse {share(outcome.hit_rate)}"
        need = usual.capacity_for(outcome.hit_rate)
        if need is not None:
            words += f", for which {usual.name} needs about {tokens(need)}"
        words += "."
    elif len(arranged.policies) > 1:
        words += " No other policy reuses noticeably more."
    bound = arranged.belady.at(capacity) if arranged.belady is not None else None
    if bound is not None:
        words += f" The optimum with that much memory is {share(bound.hit_rate)}."
    return words


def _why(usual: PolicyCurve) -> Iterator[str]:
    """Yield why tokens are computed with the least memory."""
    outcome = usual.outcomes[0]
    missed = sum(outcome.misses.values())
    if missed:
        parts = [
            f"{share(amount / missed)} {_REASON_WORDS.get(reason, reason)}"
            for reason, amount in sorted(outcome.misses.items(), key=lambda pair: -pair[1])
            if amount / missed > _SAME
        ]
        yield (
            f"Of the {tokens(missed)} tokens that {usual.name} computes with "
            f"{tokens(outcome.capacity_tokens)}, {_listed(parts)}."
        )


def _waits(usual: PolicyCurve) -> Iterator[str]:
    """Yield the times to the first token with the least and the most memory."""
    timed = [
        (outcome.capacity_tokens, times["p50"], times["p99"])
        for outcome in usual.outcomes
        if {"p50", "p99"} <= set(times := outcome.latency.get("ttft_s") or {})
    ]
    if not timed:
        return
    capacity, half, most = timed[0]
    words = (
        f"With {tokens(capacity)} tokens and {usual.name}, half of the requests have their first "
        f"token within {duration(half)}, and 99 of 100 within {duration(most)}"
    )
    if len(timed) > 1:
        capacity, half, most = timed[-1]
        words += f"; with {tokens(capacity)} within {duration(half)} and {duration(most)}"
    yield f"{words}."


def _listed(parts: Sequence[str]) -> str:
    if len(parts) < 2:
        return "".join(parts)
    return f"{', '.join(parts[:-1])} and {parts[-1]}"


# --- sections ------------------------------------------------------------------------------------


def sections(arranged: Arranged) -> Iterator[str]:
    """Yield the HTML of all sections that have data."""
    yield _rates(arranged)
    if arranged.policies:
        yield _misses(arranged)
    if any(outcome.tiers for _, outcome in arranged.each()):
        yield _tiers(arranged)


def _rates(arranged: Arranged) -> str:
    """Return the chart of hit rates, which the page's script draws, and its table."""
    timed = any(outcome.latency for _, outcome in arranged.each())
    head = [
        "policy", "capacity, tokens", "hit rate", "token hit rate", "reused tokens",
        "computed tokens", "refused requests", *(["first token, median"] if timed else []),
    ]  # fmt: skip
    curves = [*arranged.policies, *([arranged.belady] if arranged.belady is not None else [])]
    if arranged.infinite is not None:
        curves.append(PolicyCurve("infinite (bound)", (arranged.infinite,)))
    rows = [_result(curve.name, one, timed=timed) for curve in curves for one in curve.outcomes]
    chart = (
        '<figure class="chart" data-chart="rates"><figcaption><h3 id="rates-chart">Hit rate '
        "against capacity</h3><p>The hit rate is the share of the prompts’ blocks that are reused. "
        "belady and infinite are bounds: a cache that knows the future, and one that never evicts."
        '</p></figcaption><div class="plot" tabindex="0" role="img" aria-labelledby="rates-chart" '
        'aria-describedby="keys"></div><div class="legend"></div>'
        f'<p class="said" aria-live="polite"></p>{_table("Every policy and capacity", head, rows)}'
        "</figure>"
    )
    return _section("hit-rate", "How much is reused", chart)


def _result(name: str, outcome: Outcome, *, timed: bool) -> list[str]:
    median = (outcome.latency.get("ttft_s") or {}).get("p50")
    return [
        name,
        count(outcome.capacity_tokens),
        share(outcome.hit_rate),
        share(outcome.token_hit_rate),
        count(outcome.hit_tokens),
        count(outcome.tokens - outcome.hit_tokens),
        count(outcome.refused),
        *(["–" if median is None else duration(median)] if timed else []),
    ]


def _misses(arranged: Arranged) -> str:
    """Return the bars of what became of each token, and their table."""
    outcomes = [outcome for _, outcome in arranged.each()]
    reasons = [
        reason for reason in reasons_of(outcomes) if any(one.misses.get(reason) for one in outcomes)
    ]
    groups = []
    for capacity in arranged.capacities:
        bars = [
            _bar(curve.name, outcome, reasons)
            for curve, outcome in arranged.each()
            if outcome.capacity_tokens == capacity
        ]
        groups.append(f"<h3>With {escaped(tokens(capacity))} tokens</h3>{''.join(bars)}")
    colours = "".join(
        f'<li><svg viewBox="0 0 1 1" aria-hidden="true"><rect class="{_CLASSES.get(one, "m4")}" '
        f'width="1" height="1"/></svg>{escaped(one)}</li>'
        for one in ("reused", *reasons)
    )
    head = ["policy", "capacity, tokens", "prompt tokens", "reused", *reasons]
    rows = (
        [curve.name]
        + [count(figure) for figure in (one.capacity_tokens, one.tokens, one.hit_tokens)]
        + [count(one.misses.get(reason, 0)) for reason in reasons]
        for curve, one in arranged.each()
    )
    return _section(
        "misses",
        "What became of every prompt token",
        "<p>A token is reused, or computed for one reason. These are shares of tokens; hit rates "
        "are shares of blocks, and the last block of a prompt is rarely full.</p>",
        f'<div class="bars"><ul class="key">{colours}</ul>{"".join(groups)}</div>',
        _table("Prompt tokens, reused or computed", head, rows),
    )


def _bar(name: str, outcome: Outcome, reasons: Sequence[str]) -> str:
    """Return a stacked bar."""
    whole = max(1, outcome.tokens)
    parts = [("reused", outcome.hit_tokens / whole)]
    parts += [(reason, outcome.misses.get(reason, 0) / whole) for reason in reasons]
    drawn, at = [], 0.0
    for reason, part in parts:
        if part > 0:
            drawn.append(
                f'<rect class="{_CLASSES.get(reason, "m4")}" x="{1000 * at:.2f}" y="0" '
                f'width="{1000 * part:.2f}" height="1">'
                f"<title>{escaped(f'{reason}: {share(part)}')}</title></rect>"
            )
        at += part
    spoken = "; ".join(f"{reason}: {share(part)}" for reason, part in parts if part > 0)
    return (
        f'<div class="bar"><span class="name"><bdi>{escaped(name)}</bdi></span>'
        '<svg viewBox="0 0 1000 1" preserveAspectRatio="none" role="img" '
        f'aria-label="{escaped(f"{name}: {spoken}")}">{"".join(drawn)}</svg>'
        f'<span class="note">{escaped(share(outcome.hit_tokens / whole))} reused</span></div>'
    )


def _tiers(arranged: Arranged) -> str:
    fields: list[str] = []
    for _, outcome in arranged.each():
        for tier in outcome.tiers:
            fields += [one for one in tier if one != "name" and one not in fields]
    head = ["policy", "tier", *(shown(one.replace("_", " "), 30) for one in fields)]
    rows = (
        [curve.name, shown(tier.get("name", "")), *(_cell(tier.get(one)) for one in fields)]
        for curve, outcome in arranged.each()
        for tier in outcome.tiers
    )
    return _section("tiers", "Tiers", _table("Hits in each tier, and writes", head, rows))


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return shown(value)
    return count(value) if isinstance(value, int) else number(value)


# --- markup --------------------------------------------------------------------------------------


def escaped(text: str) -> str:
    """Escape text for an element or an attribute; invisible characters are spelt out."""
    return escape(shown(text, _LONGEST))


def facts_list(facts: Iterable[tuple[str, str]]) -> str:
    """Return a list of terms and their values."""
    rows = (
        f"<div><dt>{escaped(name)}</dt><dd><bdi>{escaped(value)}</bdi></dd></div>"
        for name, value in facts
    )
    return f"<dl>{''.join(rows)}</dl>"


def _section(name: str, title: str, *content: str) -> str:
    return (
        f'<section id="{name}" aria-labelledby="{name}-title"><h2 id="{name}-title">'
        f"{escaped(title)}</h2>{''.join(content)}</section>"
    )


def _table(caption: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table that is folded away; it may be wider than the page, so the keyboard scrolls.

    The first column has names, and the others have figures.
    """
    top = "".join(f'<th scope="col">{escaped(one)}</th>' for one in head)
    body = "".join(
        f'<tr><th scope="row"><bdi>{escaped(name)}</bdi></th>'
        + "".join(f"<td><bdi>{escaped(cell)}</bdi></td>" for cell in cells)
        + "</tr>"
        for name, *cells in rows
    )
    return (
        '<details><summary>The figures</summary><div class="wide" tabindex="0" role="region" '
        f'aria-label="{escaped(caption)}"><table><caption>{escaped(caption)}</caption>'
        f"<thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div></details>"
    )


_FACTS = {
    "name": "name",
    "requests": "requests",
    "tokens": "prompt tokens",
    "output_tokens": "answer tokens",
    "units": "blocks requested",
    "unit_tokens": "tokens a block",
    "namespaces": "namespaces",
    "skipped": "lines skipped",
    "digest": "digest",
}


def write_report(
    outcomes: Sequence[Outcome],
    path: Path,
    *,
    trace: Mapping[str, Any],
    command: str | None = None,
    advice: str | None = None,
) -> list[Path]:
    """Write the report to ``path`` (``.html``), and JSON of the same name beside it.

    ``trace`` has facts about the workload: ``name``, ``requests``, ``tokens``, ``span_s``
    (seconds), ``unit_tokens``, ``namespaces``, ``skipped``, ``digest``; other entries are listed as
    they are. ``command`` is the command line that ran the replays, ``advice`` the text of a
    separate section. Policies named belady and infinite are drawn as bounds.

    Returns the two files, the page first. Existing files are replaced atomically. Raises
    `InvalidValue` if there are no outcomes, if they are of different traces or if ``path`` does not
    end in .html, and OSError.

    Cost: some milliseconds per outcome.
    """
    path = Path(path)
    if path.suffix.lower() not in {".html", ".htm"}:
        raise InvalidValue(f"a report is an .html file; got {str(path)!r}")
    arranged = Arranged(outcomes)
    data = path.with_suffix(".json")
    text = _page(arranged, trace, command, advice, beside=data.name)
    whole = {
        "trace": dict(trace),
        "command": command,
        "advice": advice,
        "outcomes": [outcome.as_dict() for outcome in outcomes],
    }
    content = {
        path: text.encode(),
        data: json.dumps(_plain(whole), indent=1, allow_nan=False).encode(),
    }
    for file, written in content.items():
        _replace(file, written)
    return list(content)


def _replace(path: Path, content: bytes) -> None:
    """Replace a file atomically."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        unfinished.write_bytes(content)
        unfinished.replace(path)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise


def _plain(value: Any) -> Any:
    """Return a value for JSON: NumPy numbers as Python's, null for NaN and infinity."""
    if isinstance(value, dict):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(one) for one in value]
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, bool | int | float | str | None) else str(value)


# --- the page ------------------------------------------------------------------------------------


def _page(
    arranged: Arranged,
    trace: Mapping[str, Any],
    command: str | None,
    advice: str | None,
    *,
    beside: str,
) -> str:
    """Return the HTML; ``beside`` is the name of the data file next to it."""
    span_s = float(trace.get("span_s") or 0.0)
    outcomes = [*(outcome for _, outcome in arranged.each()), arranged.infinite]
    names = [trace.get("name"), *(one.trace for one in outcomes if one is not None)]
    name = shown(next(filter(None, names), "a trace"))
    scripts = [_vendored("uPlot.iife.min.js"), _text("page.js")]
    styles = [_vendored("uPlot.min.css"), _text("page.css")]
    return Template(_text("page.html")).substitute(
        policy=_policy(scripts, styles),
        title=escaped(f"What a cache would reuse of {name}"),
        name=escaped(name),
        licence=escape(_vendored("LICENSE").replace("--", "- -"), quote=False),
        styles="".join(f"<style>{one}</style>" for one in styles),
        findings="".join(f"<li>{escaped(one)}</li>" for one in findings(arranged)),
        advice=_advice(advice),
        sections="".join(sections(arranged)),
        facts=facts_list(_facts(trace, span_s)),
        made=facts_list(_made(command)),
        beside=f'<a href="{escaped(_link(beside))}">{escaped(shown(beside))}</a>',
        data=_embedded(_chart(arranged)),
        scripts="".join(f"<script>{one}</script>" for one in scripts),
    )


def _text(name: str) -> str:
    return (files("kvkeep.bench.replay.report") / "page" / name).read_text("utf-8")


def _vendored(name: str) -> str:
    return (files("kvkeep") / "vendor/uplot" / name).read_text("utf-8")


def _policy(scripts: Sequence[str], styles: Sequence[str]) -> str:
    """Return a Content-Security-Policy that allows only these scripts and styles, by digest."""
    return (
        f"default-src 'none'; script-src {_digests(scripts)}; style-src {_digests(styles)}; "
        "base-uri 'none'; form-action 'none'"
    )


def _digests(texts: Sequence[str]) -> str:
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts)
    return " ".join(f"'sha256-{one}'" for one in digests)


def _chart(arranged: Arranged) -> dict[str, Any]:
    """Return the data of the chart."""
    infinite = arranged.infinite
    return {
        "policies": [_line(curve) for curve in arranged.policies],
        "belady": None if arranged.belady is None else _line(arranged.belady),
        "infinite": None if infinite is None else round(infinite.hit_rate, 5),
        "capacities": list(arranged.capacities),
    }


def _line(curve: PolicyCurve) -> dict[str, Any]:
    points = [[one.capacity_tokens, round(one.hit_rate, 5)] for one in curve.outcomes]
    return {"name": curve.name, "points": points}


def _embedded(data: dict[str, Any]) -> str:
    """Return JSON that cannot end the script element it is embedded in."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for one in "<>&":
        text = text.replace(one, f"\\u{ord(one):04x}")
    return text


def _link(name: str) -> str:
    """Return the URL of a file beside the page; with ``./``: no name is then read as a scheme."""
    safe = "".join(
        one if one.isascii() and (one.isalnum() or one in "-._") else _percent(one) for one in name
    )
    return f"./{safe}"


def _percent(one: str) -> str:
    return "".join(f"%{byte:02X}" for byte in one.encode("utf-8", "surrogateescape"))


def _facts(trace: Mapping[str, Any], span_s: float) -> Iterator[tuple[str, str]]:
    """Yield the facts of the trace: those with a title first, then all others."""
    for name, title in _FACTS.items():
        if trace.get(name) is not None:
            yield title, _fact(trace[name])
        if name == "requests" and span_s:
            yield "from the first request to the last", duration(span_s)
    for name, value in trace.items():
        if name not in _FACTS and name != "span_s":
            yield shown(name), _fact(value)


def _fact(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return shown(value, 200)
    return count(value) if isinstance(value, int) else f"{value:,.6g}"


def _made(command: str | None) -> Iterator[tuple[str, str]]:
    if command:
        yield "command", shown(command, 2000)
    yield "kvkeep", version("kvkeep")
    yield "Python", f"{platform.python_version()} on {platform.machine()}"
    yield "made on", f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"


def _advice(advice: str | None) -> str:
    """Return the section of the advice, whose paragraphs blank lines separate."""
    if not advice or not advice.strip():
        return ""
    paragraphs = "".join(
        f"<p>{'<br>'.join(escaped(line) for line in one.splitlines())}</p>"
        for one in re.split(r"\n\s*\n", advice.strip())
    )
    return (
        '<section id="advice" class="advice" aria-labelledby="advice-title">'
        f'<h2 id="advice-title">What to do</h2>{paragraphs}</section>'
    )
