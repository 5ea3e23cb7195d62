"""``kvkeep replay``: what policies and memories would have made of a trace."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvkeep.cli.trace import add_reading_arguments, opened
from kvkeep.errors import InvalidValue, MissingExtra, require, whole
from kvkeep.eviction import POLICIES
from kvkeep.geometry import KVGeometry, parse_bytes
from kvkeep.replay import BELADY, BOUNDS, INFINITE, Journal, Run, Workload, replay

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Sequence

    from kvkeep.cli.model import Commands
    from kvkeep.replay import Outcome

__all__ = ["add_parser", "add_replay_arguments", "bar", "parse_tokens", "read_workload", "run"]

_TOKENS = re.compile(r"(\d+(?:\.\d+)?)\s*([kMG]?)")
_BYTES = re.compile(r"\d+(?:\.\d+)?\s*[kKMGT]i?B")
_SCALE = {"": 1, "k": 1_000, "M": 1_000_000, "G": 1_000_000_000}


def add_parser(commands: Commands) -> None:
    """Name the arguments."""
    parser = commands.add_parser(
        "replay",
        help="what policies and memories would have made of a trace",
        description="Replay a trace of requests through the cache's own code, its memory and its "
        "clock virtual, once for each policy and capacity. docs/replay.md tells how to read it.",
    )
    parser.add_argument("file", metavar="TRACE", type=Path)
    add_reading_arguments(parser)
    add_replay_arguments(parser)
    parser.add_argument(
        "--capacity",
        metavar="LIST",
        required=True,
        help="memories to try, in tokens: 3M,5M,10M; or in bytes, with --model: 40GiB,80GiB",
    )
    parser.add_argument(
        "--policy",
        metavar="LIST",
        default="lru,2q,adaptive",
        help=f"eviction policies to try, of {', '.join(POLICIES)}; or bounds, of "
        f"{', '.join(BOUNDS)}; lru+sessions is told which requests belong together, if the trace "
        "tells (default: lru,2q,adaptive)",
    )
    parser.add_argument(
        "--no-bounds",
        action="store_true",
        help="do not look for what no policy can exceed (--json only does when --policy names it)",
    )
    parser.add_argument(
        "--out", metavar="FILE", type=Path, help="write a report: an HTML file, its figures beside"
    )
    parser.add_argument(
        "--fresh",
        action="store_true",
        help="with --out: replay everything again, also what an earlier call has done",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object for each replay")
    parser.set_defaults(run=run)


def add_replay_arguments(parser: argparse.ArgumentParser) -> None:
    """How a trace is replayed, whatever for."""
    how = parser.add_argument_group("replaying")
    how.add_argument(
        "--page",
        metavar="TOKENS",
        type=int,
        help="tokens a page, and hits exact to the token (default: a page for each id of the "
        "trace, full or not, as hit rates of such traces are mostly given)",
    )
    how.add_argument(
        "--prefix", choices=("radix", "chain"), default="radix", help="index (default: radix)"
    )
    how.add_argument(
        "--model",
        metavar="PATH",
        type=Path,
        help="a local model directory or config.json: what a token's KV takes",
    )
    how.add_argument(
        "--jobs", metavar="N", type=int, help="replays at once (default: one a processor)"
    )


def run(args: argparse.Namespace) -> int:
    """Replay, and say what came of it."""
    if args.out is not None and args.out.suffix.lower() not in {".html", ".htm"}:
        raise InvalidValue(f"--out is an HTML file, such as report.html; got {str(args.out)!r}")
    sizes = [parse_tokens(part, args.model) for part in _parts("--capacity", args.capacity)]
    policies = _parts("--policy", args.policy)
    if not args.no_bounds and not args.json:
        policies += [bound for bound in BOUNDS if bound not in policies]
    runs = _runs(policies, sizes, args)
    workload = read_workload(args)
    outcomes = _replayed(workload, runs, args)
    if args.out is not None:
        _report(workload, outcomes, args)
    if args.json:
        for outcome in outcomes:
            print(json.dumps(outcome.as_dict()))
    else:
        _print(workload, outcomes)
    return 0


def parse_tokens(text: str, model: Path | None = None) -> int:
    """A capacity: tokens (``3M``, ``500k``), or bytes (``40GiB``) of ``model``'s KV."""
    if _BYTES.fullmatch(text):
        if model is None:
            raise InvalidValue(f"a capacity of {text} takes --model, to know what a token takes")
        return parse_bytes(text) // KVGeometry.from_config(model).bytes_per_token
    found = _TOKENS.fullmatch(text)
    if found is None:
        raise InvalidValue(f"a capacity is in tokens, such as 3M or 500k, or 40GiB; got {text!r}")
    return int(float(found[1]) * _SCALE[found[2]])


def read_workload(args: argparse.Namespace) -> Workload:
    """The trace that ``args`` names."""
    trace = opened(args, args.file)
    with bar("reading", trace.length) as advance:
        told = 0

        def progress(number: int) -> None:
            nonlocal told
            advance(number - told)
            told = number

        return Workload.read(trace, progress)


def _report(workload: Workload, outcomes: Sequence[Outcome], args: argparse.Namespace) -> None:
    from kvkeep.replay.report import write_report  # noqa: PLC0415 - only where one is asked for

    command = shlex.join(["kvkeep", *sys.argv[1:]])
    written = write_report(
        outcomes, args.out, trace=facts(workload), prices=None, command=command, advice=None
    )
    print("written: " + ", ".join(str(path) for path in written), file=sys.stderr)


def _parts(option: str, text: str) -> list[str]:
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise InvalidValue(f"{option} is a list with commas between, got {text!r}")
    return list(dict.fromkeys(parts))


def _runs(policies: Sequence[str], sizes: Sequence[int], args: argparse.Namespace) -> list[Run]:
    runs = []
    for policy in policies:
        for size in sizes if policy != INFINITE else [0]:
            exact = None if policy in BOUNDS else args.page
            runs.append(Run(policy, size, exact, args.prefix))
    return list(dict.fromkeys(runs))


def _replayed(workload: Workload, runs: Sequence[Run], args: argparse.Namespace) -> list[Outcome]:
    journal = None
    if args.out is not None:
        path = args.out.with_suffix(".runs.jsonl")
        if args.fresh:
            path.unlink(missing_ok=True)
        journal = Journal(path)
        done = sum(journal.find(workload, run) is not None for run in runs)
        if done:
            print(f"{done} of {len(runs)} replays were done before ({path})", file=sys.stderr)
    jobs = whole("--jobs", args.jobs, 1) if args.jobs is not None else os.cpu_count() or 1
    with bar("replaying", len(runs) * len(workload)) as advance:
        found = list(replay(workload, runs, jobs=jobs, journal=journal, progress=advance))
    order = {(run.policy, run.capacity_tokens): place for place, run in enumerate(runs)}
    found.sort(key=lambda one: order.get((one.policy, one.capacity_tokens), len(order)))
    return found


@contextmanager
def bar(doing: str, of: int | None) -> Iterator[Callable[[int], None]]:
    """Show on stderr, where that is a terminal, how far it is; call it with how much more is."""
    if not sys.stderr.isatty():
        yield lambda more: None
        return
    rich = require("rich.progress", "cli")
    console = require("rich.console", "cli").Console(stderr=True)
    columns = [
        rich.TextColumn("{task.description}"), rich.BarColumn(), rich.TaskProgressColumn(),
        rich.TimeElapsedColumn(), rich.TimeRemainingColumn(),
    ]  # fmt: skip
    with rich.Progress(*columns, console=console, transient=True) as shown:
        task = shown.add_task(doing, total=of)
        yield lambda more: shown.advance(task, more)


# --- what came of it -----------------------------------------------------------------------------


def facts(workload: Workload) -> dict[str, Any]:
    """What a report says of the trace."""
    return {
        "name": workload.name,
        "digest": workload.digest,
        "requests": len(workload),
        "tokens": int(workload.tokens.sum(dtype="int64")),
        "output_tokens": int(workload.output_tokens.sum(dtype="int64")),
        "units": int(workload.prompt_units.sum(dtype="int64")),
        "unit_tokens": workload.unit_tokens,
        "span_s": workload.span_s,
        "namespaces": len(workload.namespaces),
        "skipped": workload.skipped,
    }


def _print(workload: Workload, outcomes: Sequence[Outcome]) -> None:
    known = facts(workload)
    print(
        f"{workload.name}: {known['requests']:,} requests, {known['tokens']:,} prompt tokens in "
        f"{known['span_s'] / 60:,.0f} minutes"
        + (f"; {workload.skipped:,} lines skipped" if workload.skipped else "")
    )
    sizes = list(dict.fromkeys(o.capacity_tokens for o in outcomes if o.policy != INFINITE))
    by = {(o.policy, o.capacity_tokens): o for o in outcomes}
    rows = []
    for policy in dict.fromkeys(outcome.policy for outcome in outcomes):
        if policy == INFINITE:
            continue
        cells = [_share(by.get((policy, size))) for size in sizes]
        rows.append([_LABELS.get(policy, policy), *cells])
    endless = next((o for o in outcomes if o.policy == INFINITE), None)
    if endless is not None:
        rows.append([_LABELS[INFINITE], *[_share(endless)] * len(sizes)])
    _table(["blocks reused", *(_amount(size) for size in sizes)], rows)


_LABELS = {BELADY: "best possible", INFINITE: "endless memory"}


def _share(outcome: Outcome | None) -> str:
    return "" if outcome is None else f"{100 * outcome.hit_rate:.1f} %"


def _amount(tokens: int) -> str:
    for scale, letter in ((1_000_000_000, "G"), (1_000_000, "M"), (1_000, "k")):
        if tokens >= scale:
            return f"{tokens / scale:.3g} {letter} tokens"
    return f"{tokens} tokens"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    try:
        rich = require("rich.table", "cli")
        console = require("rich.console", "cli").Console()
        box = require("rich.box", "cli").SIMPLE_HEAD
    except MissingExtra:
        for row in (head, *rows):
            print("  ".join(row))
        return
    table = rich.Table(box=box, pad_edge=False, padding=(0, 1, 0, 0))
    for place, name in enumerate(head):
        table.add_column(name, justify="right" if place else "left")
    for row in rows:
        table.add_row(*row)
    console.print(table)
