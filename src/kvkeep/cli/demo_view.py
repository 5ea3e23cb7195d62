"""The output of ``kvkeep demo``."""

from __future__ import annotations

import shlex
import sys
from dataclasses import asdict
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

from kvkeep.core.errors import require

if TYPE_CHECKING:
    from pathlib import Path

    from kvkeep.cli.demo import DemoRow

__all__ = ["as_json", "print_rows"]

_NEXT = """\
Next: {serve}, and when it listens
curl localhost:8000/v1/chat/completions -H 'Content-Type: application/json' \
-d '{{"max_tokens": 32, "temperature": 0, \
"messages": [{{"role": "user", "content": "What does heapq.merge do?"}}]}}'"""


def _totals(rows: list[DemoRow]) -> dict[str, float | None]:
    prompt = sum(row.prompt_tokens for row in rows)
    reused = sum(row.reused_tokens for row in rows)
    faster = [row.faster for row in rows if row.reused_tokens]
    return {
        "prompt_tokens": prompt,
        "reused_tokens": reused,
        "reused_share": reused / prompt,
        # None if nothing was reused.
        "ttft_median_ratio": median(faster) if faster else None,
    }


def as_json(url: str, name: str, rows: list[DemoRow], stats: dict[str, Any]) -> dict[str, Any]:
    """Return the output of ``--json``; ``stats`` is the answer of /kv/stats."""
    return {
        "url": url,
        "model": name,
        "requests": [{**asdict(row), "faster": row.faster} for row in rows],
        "same_text": all(row.same_text for row in rows),
        **_totals(rows),
        **stats,
    }


def print_rows(rows: list[DemoRow], clients: int, model: Path | None) -> None:
    """Print a table of the requests, and a summary.

    ``model`` is the directory of the model; None is the bundled model.
    """
    console = require("rich.console", "cli").Console()
    say = partial(console.print, markup=False, highlight=False)
    say(
        f"{len(rows)} requests over HTTP about one document: What does … do?\n"
        "cold      every token is computed, and nothing is kept\n"
        "warm      the KV of earlier requests is reused\n"
        "TTFT      time to first token, as the client measures it\n"
        "tenant …  has its own cache_salt and shares with no other\n"
        f"at once   {clients} clients at the same time, cold as well as warm\n"
        "restarted the server was stopped and started again: its pool is empty"
    )
    console.print(_table(rows))
    say(f"> What does {rows[0].about} do?\n{rows[0].text.strip()}\n")
    totals = _totals(rows)
    line = f"{totals['prompt_tokens']:,} prompt tokens, {totals['reused_share']:.0%} reused"
    if totals["ttft_median_ratio"] is not None:
        line += f"; with reuse, answers began {totals['ttft_median_ratio']:.1f}× sooner (median)"
    say(line)
    last = rows[-1]
    say(
        f"After the restart {last.loaded_tokens:,} of {last.prompt_tokens:,} prompt tokens came "
        f"from disk:\nthe first token after {_milliseconds(last.ttft_warm_s)} instead of "
        f"{_milliseconds(last.ttft_cold_s)}"
    )
    if not all(row.same_text for row in rows):
        print("kvkeep: a warm answer differs from its cold one", file=sys.stderr)
    serve = "kvkeep serve (or make serve)"
    if model is not None:
        serve = f"kvkeep serve --model {shlex.quote(str(model))}"
    print(_NEXT.format(serve=serve))  # not wrapped: users copy it


def _table(rows: list[DemoRow]) -> Any:
    box = require("rich.box", "cli").SIMPLE_HEAD
    table = require("rich.table", "cli").Table(box=box, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("\nrequest", no_wrap=True)
    table.add_column("\nasks about", no_wrap=True)
    for heading in (
        "prompt\ntokens", "reused\ntokens", "TTFT\ncold", "TTFT\nwarm", "tokens\n/s", "same\ntext",
    ):  # fmt: skip
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.request,
            row.about,
            f"{row.prompt_tokens:,}",
            f"{row.reused_tokens:,}",
            _milliseconds(row.ttft_cold_s),
            _milliseconds(row.ttft_warm_s),
            "–" if row.tokens_per_s is None else f"{row.tokens_per_s:,.0f}",
            "yes" if row.same_text else "NO",
        )
    return table


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:,.1f} ms" if seconds < 0.1 else f"{seconds * 1000:,.0f} ms"
