"""The page: one HTML file that loads nothing and runs no script but its own."""

from __future__ import annotations

import base64
import hashlib
import json
import platform
from datetime import UTC, datetime
from html import escape
from importlib.metadata import version
from importlib.resources import files
from string import Template
from typing import TYPE_CHECKING, Any

from kvkeep.bench.replay.report.charts import chart_data
from kvkeep.bench.replay.report.findings import GLOSSARY, findings
from kvkeep.bench.replay.report.markup import escaped, glossary, paragraphs
from kvkeep.bench.replay.report.sections import sections
from kvkeep.bench.replay.words import count, duration, shown

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from kvkeep.bench.replay.prices import Prices
    from kvkeep.bench.replay.report.arranged import Arranged

__all__ = ["page"]

_SCRIPTS = ("words.js", "chart.js", "page.js")
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


def page(
    found: Arranged,
    trace: Mapping[str, Any],
    *,
    prices: Prices | None,
    command: str | None,
    advice: str | None,
    beside: str,
) -> str:
    """Return the HTML; ``beside`` is the name of the data file next to it."""
    span_s = float(trace.get("span_s") or 0.0)
    name = shown(trace.get("name") or _any_name(found) or "a trace")
    scripts = [_vendored("uPlot.iife.min.js"), *(_text(one) for one in _SCRIPTS)]
    styles = [_vendored("uPlot.min.css"), _text("page.css")]
    return Template(_text("page.html")).substitute(
        policy=_policy(scripts, styles),
        title=escaped(f"What a cache would reuse of {name}"),
        name=escaped(name),
        licence=escape(_vendored("LICENSE").replace("--", "- -"), quote=False),
        styles="".join(f"<style>{one}</style>" for one in styles),
        summary=escaped(_summary(trace, span_s)),
        findings="".join(f"<li>{escaped(one)}</li>" for one in findings(found, prices, span_s)),
        advice=_advice(advice),
        sections="".join(sections(found, prices, span_s)),
        words=glossary(GLOSSARY),
        facts=glossary(_facts(trace, span_s)),
        made=glossary(_made(command)),
        beside=f'<a href="{escaped(_link(beside))}">{escaped(shown(beside))}</a>',
        data=_embedded(chart_data(found, prices, span_s)),
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
    found = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts)
    return " ".join(f"'sha256-{one}'" for one in found)


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


def _any_name(found: Arranged) -> str:
    outcomes = [outcome for _, outcome in found.each()] + [found.infinite]
    return next((one.trace for one in outcomes if one is not None and one.trace), "")


def _summary(trace: Mapping[str, Any], span_s: float) -> str:
    parts = []
    if trace.get("requests"):
        parts.append(f"{count(trace['requests'])} requests")
    if trace.get("tokens"):
        parts.append(f"{count(trace['tokens'])} prompt tokens")
    if span_s:
        parts.append(duration(span_s))
    return " · ".join(parts)


def _facts(trace: Mapping[str, Any], span_s: float) -> Iterator[tuple[str, str]]:
    """Yield the facts of the trace: known ones first, then all others."""
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
    if not advice or not advice.strip():
        return ""
    return (
        '<section id="advice" class="advice" aria-labelledby="advice-title">'
        f'<h2 id="advice-title">What to do</h2>{paragraphs(advice)}</section>'
    )
