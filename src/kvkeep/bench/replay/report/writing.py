"""Writing a report and its data files."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvkeep.bench.replay.outcome import reasons_of
from kvkeep.bench.replay.report.arranged import arranged
from kvkeep.bench.replay.report.charts import PERCENTILES
from kvkeep.bench.replay.report.page import page
from kvkeep.bench.replay.report.picture import picture
from kvkeep.core.errors import InvalidValue, MissingExtra

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvkeep.bench.replay.outcome import Outcome
    from kvkeep.bench.replay.prices import Prices

__all__ = ["write_report"]

_COLUMNS = (
    "policy", "capacity_tokens", "page_tokens", "hit_rate", "token_hit_rate", "requests", "refused",
    "tokens", "hit_tokens", "blocks", "hit_blocks", "evicted_pages", "seconds",
)  # fmt: skip


def write_report(
    outcomes: Sequence[Outcome],
    path: Path,
    *,
    trace: Mapping[str, Any],
    prices: Prices | None = None,
    command: str | None = None,
    advice: str | None = None,
) -> list[Path]:
    """Write the report to ``path`` (``.html``), and JSON, CSV and PNG of the same name beside it.

    ``trace`` has facts about the workload: ``name``, ``requests``, ``tokens``, ``span_s`` (seconds,
    for times and costs), ``unit_tokens``, ``namespaces``, ``skipped``, ``digest``; other entries
    are listed as they are. ``command`` is the command line that ran the replays, ``advice`` the
    text of a separate section. Policies named belady and infinite are drawn as bounds.

    Returns the files that were written, the page first; without matplotlib (the extra ``report``)
    there is no PNG. Existing files are replaced atomically. Raises `InvalidValue` if there are no
    outcomes, if they are of different traces or if ``path`` does not end in .html, and OSError.

    Cost: some milliseconds per outcome; a second for the PNG.
    """
    path = Path(path)
    if path.suffix.lower() not in {".html", ".htm"}:
        raise InvalidValue(f"a report is an .html file; got {str(path)!r}")
    found = arranged(outcomes)
    files: dict[Path, bytes] = {}
    with suppress(MissingExtra):  # optional: the page does not need it
        files[path.with_suffix(".png")] = picture(found)
    files = {
        path.with_suffix(".json"): _json(outcomes, trace, command, advice),
        path.with_suffix(".csv"): _csv(outcomes),
        **files,
    }
    beside = tuple(one.name for one in files)
    text = page(found, trace, prices=prices, command=command, advice=advice, beside=beside)
    files = {path: text.encode(), **files}
    for file, content in files.items():
        _replace(file, content)
    return list(files)


def _replace(path: Path, content: bytes) -> None:
    """Replace a file atomically."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        unfinished.write_bytes(content)
        unfinished.replace(path)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise


def _json(
    outcomes: Sequence[Outcome], trace: Mapping[str, Any], command: str | None, advice: str | None
) -> bytes:
    whole = {
        "trace": dict(trace),
        "command": command,
        "advice": advice,
        "outcomes": [outcome.as_dict() for outcome in outcomes],
    }
    return json.dumps(_plain(whole), indent=1, allow_nan=False).encode()


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


def _csv(outcomes: Sequence[Outcome]) -> bytes:
    """Return a line per outcome, with columns for reasons and for percentiles of times."""
    reasons = reasons_of(outcomes)
    timed = any(outcome.latency for outcome in outcomes)
    text = io.StringIO(newline="")
    lines = csv.writer(text, lineterminator="\n")
    kinds = ["ttft"] if timed else []
    if any(outcome.latency.get("jobs") for outcome in outcomes):
        kinds += ["job", "job_served"]
    times = [f"{kind}_{one}_s" for kind in kinds for one in PERCENTILES]
    lines.writerow([*_COLUMNS, *(_column(one) for one in reasons), *times])
    for outcome in outcomes:
        found = [outcome.latency.get(f"{kind}_s") or {} for kind in kinds]
        lines.writerow([
            *(getattr(outcome, name) for name in _COLUMNS),
            *(outcome.misses.get(one, 0) for one in reasons),
            *(times_of.get(one, "") for times_of in found for one in PERCENTILES),
        ])  # fmt: skip
    return text.getvalue().encode("utf-8", "backslashreplace")


def _column(reason: str) -> str:
    return f"missed_{reason.replace(' ', '_')}_tokens"
