"""The report of a replay: one HTML page that loads nothing, with its data as JSON beside it."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import platform
import re
from datetime import UTC, datetime
from html import escape
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from kvkeep.bench.replay.report.sections import (
    Arranged,
    escaped,
    facts_list,
    findings,
    sections,
)
from kvkeep.bench.replay.words import count, duration, shown
from kvkeep.core.errors import InvalidValue

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from kvkeep.bench.replay.outcome import Outcome
    from kvkeep.bench.replay.report.sections import PolicyCurve

__all__ = ["write_report"]

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
