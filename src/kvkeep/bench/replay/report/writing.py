"""Writing a report and its data."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvkeep.bench.replay.report.arranged import arranged
from kvkeep.bench.replay.report.page import page
from kvkeep.core.errors import InvalidValue

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvkeep.bench.replay.outcome import Outcome
    from kvkeep.bench.replay.prices import Prices

__all__ = ["write_report"]


def write_report(
    outcomes: Sequence[Outcome],
    path: Path,
    *,
    trace: Mapping[str, Any],
    prices: Prices | None = None,
    command: str | None = None,
    advice: str | None = None,
) -> list[Path]:
    """Write the report to ``path`` (``.html``), and JSON of the same name beside it.

    ``trace`` has facts about the workload: ``name``, ``requests``, ``tokens``, ``span_s`` (seconds,
    for times and costs), ``unit_tokens``, ``namespaces``, ``skipped``, ``digest``; other entries
    are listed as they are. ``command`` is the command line that ran the replays, ``advice`` the
    text of a separate section. Policies named belady and infinite are drawn as bounds.

    Returns the two files, the page first. Existing files are replaced atomically. Raises
    `InvalidValue` if there are no outcomes, if they are of different traces or if ``path`` does not
    end in .html, and OSError.

    Cost: some milliseconds per outcome.
    """
    path = Path(path)
    if path.suffix.lower() not in {".html", ".htm"}:
        raise InvalidValue(f"a report is an .html file; got {str(path)!r}")
    found = arranged(outcomes)
    data = path.with_suffix(".json")
    text = page(found, trace, prices=prices, command=command, advice=advice, beside=data.name)
    files = {path: text.encode(), data: _json(outcomes, trace, command, advice)}
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
