"""``kvkeep replay``: what policies and memories would have made of a trace."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvkeep.bench.replay import BELADY, BOUNDS, INFINITE, ReplayRun, RunLog, Workload, replay
from kvkeep.bench.replay.planning import amount
from kvkeep.cli.drawing import visible
from kvkeep.cli.model import progress
from kvkeep.cli.numbers import count
from kvkeep.cli.trace import add_reading_arguments, opened
from kvkeep.core.errors import InvalidValue, MissingExtra, require, whole
from kvkeep.core.eviction import POLICIES
from kvkeep.core.geometry import KVGeometry, parse_bytes, parse_count
from kvkeep.store.tiers import TIERINGS

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from kvkeep.bench.replay import Outcome
    from kvkeep.bench.replay.report import Prices
    from kvkeep.cli.model import Commands

__all__ = [
    "add_parser", "add_price_arguments", "add_replay_arguments", "add_report_arguments",
    "check_out", "facts", "parse_tokens", "planned_runs", "prices_of", "read_workload",
    "replayed", "report", "run",
]  # fmt: skip

_JOURNAL = ".runs.jsonl"  # beside a report: the replays that are done


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
        help="memories to try, in tokens: 3M,5M,10M; or in bytes, with --model: 40GiB,80GiB; with "
        "tiers below, fastest first: 1M+8M",
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
        "--tiering",
        metavar="LIST",
        default="inclusive,exclusive,adaptive",
        help=f"what moves where, if there are tiers: of {', '.join(TIERINGS)} "
        "(default: inclusive,exclusive,adaptive)",
    )
    loop = parser.add_argument_group("time to the first token")
    loop.add_argument(
        "--cost",
        metavar="FILE",
        type=Path,
        help="what a prompt costs, as `kvkeep calibrate` measures it: requests then wait in line",
    )
    loop.add_argument(
        "--users",
        metavar="N",
        type=count,
        help="with --cost: so many users, each of whom waits for an answer before asking again "
        "(default: requests come at their times)",
    )
    loop.add_argument(
        "--bandwidth",
        metavar="LIST",
        help="with --cost and tiers: bytes a second that each tier below memory is read at, as "
        "20GB,3GB (default: at once)",
    )
    add_price_arguments(parser)
    parser.add_argument(
        "--no-bounds",
        action="store_true",
        help="do not look for what no policy can exceed (--json only does when --policy names it)",
    )
    add_report_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print a JSON object for each replay")
    parser.set_defaults(run=run)


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    """Where a report goes; `replayed` and `report` read it."""
    parser.add_argument(
        "--out", metavar="FILE", type=Path, help="write a report: an HTML file, its figures beside"
    )
    parser.add_argument(
        "--fresh",
        action="store_true",
        help="with --out: replay everything again, also what an earlier call has done",
    )


def add_price_arguments(parser: argparse.ArgumentParser) -> None:
    """What things cost; `prices_of` reads it."""
    prices = parser.add_argument_group("cost of a month, in the report")
    prices.add_argument(
        "--gpu-hour", metavar="PRICE", type=float, help="of what computes prompts, an hour"
    )
    prices.add_argument(
        "--prefill-speed", metavar="N", type=float, help="prompt tokens it computes a second"
    )
    prices.add_argument(
        "--memory-price", metavar="PRICE", type=float, help="of a GiB of memory, a month"
    )
    prices.add_argument(
        "--disk-price", metavar="PRICE", type=float, help="of a GiB below memory, a month"
    )


def add_replay_arguments(parser: argparse.ArgumentParser, *, pages: bool = True) -> None:
    """How a trace is replayed, whatever for."""
    how = parser.add_argument_group("replaying")
    if pages:
        _add_page_arguments(how)
    how.add_argument(
        "--model",
        metavar="PATH",
        type=Path,
        help="a local model directory or config.json: what a token's KV takes",
    )
    how.add_argument(
        "--jobs", metavar="N", type=count, help="replays at once (default: one a processor)"
    )


def _add_page_arguments(how: argparse._ArgumentGroup) -> None:
    how.add_argument(
        "--page",
        metavar="TOKENS",
        type=count,
        help="tokens a page, and hits exact to the token (default: a page for each id of the "
        "trace, full or not, as hit rates of such traces are mostly given)",
    )
    how.add_argument(
        "--prefix", choices=("radix", "chain"), default="radix", help="index (default: radix)"
    )


def run(args: argparse.Namespace) -> int:
    """Replay, and say what came of it."""
    check_out(args)
    prices = prices_of(args)
    runs = planned_runs(args, bounds=not args.no_bounds and not args.json)
    workload = read_workload(args)
    outcomes = replayed(workload, runs, args)
    if args.out is not None:
        report(workload, outcomes, args, prices)
    if args.json:
        for outcome in outcomes:
            print(json.dumps(outcome.as_dict()))
    else:
        _print(workload, runs, outcomes)
    return 0


def check_out(args: argparse.Namespace) -> None:
    """Raise `InvalidValue` where ``--out`` cannot be a report: before anything is replayed.

    What is written beside it takes the place of nothing that is read.
    """
    if args.out is None:
        return
    if args.out.suffix.lower() not in {".html", ".htm"}:
        raise InvalidValue(f"--out is an HTML file, such as report.html; got {str(args.out)!r}")
    if not args.out.parent.is_dir():
        raise InvalidValue(f"cannot write {args.out}: there is no directory {args.out.parent}")
    read = [path.resolve() for path in (args.file, getattr(args, "cost", None)) if path is not None]
    for suffix in (args.out.suffix, ".json", ".csv", ".png", _JOURNAL):
        written = args.out.with_suffix(suffix)
        if written.is_dir():
            raise InvalidValue(f"cannot write {written}: it is a directory")
        if written.resolve() in read:
            raise InvalidValue(f"--out {args.out} would write over {written}; name another file")


def parse_tokens(text: str, model: Path | None = None) -> int:
    """A capacity: tokens (``3M``, ``500k``), or bytes (``40GiB``) of ``model``'s KV."""
    if not text.strip().lower().endswith("b"):
        try:
            return parse_count(text)
        except InvalidValue as error:
            raise InvalidValue(
                f"a capacity is a count of tokens, or an amount of memory as 40GiB: {error}"
            ) from error
    amount = parse_bytes(text)
    if model is None:
        raise InvalidValue(f"a capacity of {text} takes --model, to know what a token takes")
    return amount // KVGeometry.from_config(model).bytes_per_token


def read_workload(args: argparse.Namespace) -> Workload:
    """The trace that ``args`` names."""
    trace = opened(args, args.file)
    with progress("reading", of=trace.length, remaining=True) as advance:
        told = 0

        def read(number: int) -> None:
            nonlocal told
            advance(number - told)
            told = number

        return Workload.read(trace, read)


def report(
    workload: Workload,
    outcomes: Sequence[Outcome],
    args: argparse.Namespace,
    prices: Prices | None = None,
    advice: str | None = None,
) -> None:
    """Write the page that ``--out`` names, and what lies beside it."""
    from kvkeep.bench.replay.report import write_report  # noqa: PLC0415 - only where one is asked for

    command = shlex.join(["kvkeep", *sys.argv[1:]])
    try:
        written = write_report(
            outcomes, args.out, trace=facts(workload), prices=prices, command=command, advice=advice
        )
    except OSError as error:
        raise InvalidValue(f"cannot write {args.out}: {error.strerror}") from error
    print("written: " + ", ".join(str(path) for path in written), file=sys.stderr)
    if not any(path.suffix == ".png" for path in written):
        print("no PNG: that takes pip install 'kvkeep[report]'", file=sys.stderr)


def prices_of(args: argparse.Namespace) -> Prices | None:
    """What was given of prices; `InvalidValue` where a part is missing."""
    from kvkeep.bench.replay.report import Prices  # noqa: PLC0415 - only where one is asked for

    given = {
        "--gpu-hour": args.gpu_hour,
        "--prefill-speed": args.prefill_speed,
        "--memory-price": args.memory_price,
        "--model": args.model,
    }
    if args.gpu_hour is None and args.memory_price is None and args.disk_price is None:
        return None
    missing = [option for option, value in given.items() if value is None]
    if missing:
        raise InvalidValue(f"for the cost of a month {', '.join(missing)} is needed, too")
    return Prices(
        gpu_hour=args.gpu_hour,
        memory_gib_month=args.memory_price,
        disk_gib_month=args.disk_price or 0.0,
        kv_bytes_per_token=KVGeometry.from_config(args.model).bytes_per_token,
        prefill_tokens_per_s=args.prefill_speed,
    )


def _parts(option: str, text: str) -> list[str]:
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise InvalidValue(f"{option} is a list with commas between, got {text!r}")
    return list(dict.fromkeys(parts))


def planned_runs(args: argparse.Namespace, *, bounds: bool) -> list[ReplayRun]:
    """A replay for each policy and capacity that was asked for."""
    sizes = [_capacities(part, args.model) for part in _parts("--capacity", args.capacity)]
    policies = _parts("--policy", args.policy)
    if bounds:
        policies += [bound for bound in BOUNDS if bound not in policies]
    cost = None
    if args.cost is not None:
        from kvkeep.bench.replay.costs import PrefillCost  # noqa: PLC0415 - only where one is named

        cost = PrefillCost.read(args.cost)
    speeds = _bandwidths(args.bandwidth)
    if speeds and not any(below for _, *below in sizes):
        raise InvalidValue("--bandwidth is of tiers below memory: --capacity 1M+8M has one")
    if len(speeds) > max(map(len, sizes)):
        raise InvalidValue(
            "--bandwidth is of each tier below memory, memory itself left out; got "
            f"{args.bandwidth} for --capacity {args.capacity}"
        )
    runs = []
    for policy in policies:
        if policy == INFINITE:
            runs.append(ReplayRun(INFINITE, 0))
            continue
        for first, *below in sizes:
            if policy in BOUNDS:
                runs.append(ReplayRun(policy, first, below=tuple(below)))
            elif below:
                runs += [
                    ReplayRun(
                        policy,
                        first,
                        args.page,
                        args.prefix,
                        tuple(below),
                        tiering,
                        cost,
                        args.users,
                        speeds,
                    )
                    for tiering in _parts("--tiering", args.tiering)
                ]
            else:
                runs.append(
                    ReplayRun(policy, first, args.page, args.prefix, cost=cost, users=args.users)
                )
    return list(dict.fromkeys(runs))


def _bandwidths(text: str | None) -> tuple[float | None, ...]:
    """Of tiers, memory first, which is there at once."""
    if text is None:
        return ()
    return (None, *(float(parse_bytes(part.removesuffix("/s"))) for part in text.split(",")))


def _capacities(text: str, model: Path | None) -> list[int]:
    """Of one memory, or of tiers with a plus between them."""
    return [parse_tokens(part.strip(), model) for part in text.split("+")]


def replayed(
    workload: Workload, runs: Sequence[ReplayRun], args: argparse.Namespace
) -> list[Outcome]:
    """Outcomes in the order of ``runs``; with ``--out`` those that are known are not redone."""
    journal = None
    if args.out is not None:
        path = args.out.with_suffix(_JOURNAL)
        if args.fresh:
            path.unlink(missing_ok=True)
        journal = RunLog(path)
        done = sum(journal.find(workload, run) is not None for run in runs)
        if done:
            print(f"{done} of {len(runs)} replays were done before ({path})", file=sys.stderr)
    jobs = whole("--jobs", args.jobs, 1) if args.jobs is not None else os.cpu_count() or 1
    found: dict[ReplayRun, Outcome] = {}
    with progress("replaying", of=len(runs) * len(workload), remaining=True) as advance:
        found.update(replay(workload, runs, jobs=jobs, journal=journal, progress=advance))
    return [found[run] for run in runs]


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


def _print(workload: Workload, runs: Sequence[ReplayRun], outcomes: Sequence[Outcome]) -> None:
    known = facts(workload)
    print(
        f"{visible(workload.name)}: {known['requests']:,} requests, "
        f"{known['tokens']:,} prompt tokens in {known['span_s'] / 60:,.0f} minutes"
        + (f"; {workload.skipped:,} lines skipped" if workload.skipped else "")
    )
    sizes = list(dict.fromkeys(_memory(run) for run in runs if run.policy != INFINITE))
    by = {(run.name, _memory(run)): one for run, one in zip(runs, outcomes, strict=True)}
    endless = next((one for one in outcomes if one.policy == INFINITE), None)
    rows = []
    for name in dict.fromkeys(run.name for run in runs):
        if name == INFINITE:
            cells = [_share(endless)] * len(sizes)
        else:
            cells = [_share(by.get((name, size))) for size in sizes]
        rows.append([_LABELS.get(name, name), *cells])
    _table(["blocks reused", *(" + ".join(map(amount, size)) for size in sizes)], rows)
    timed = [one for one in outcomes if one.latency]
    if timed:
        names = ("p50", "p90", "p99")
        _table(
            ["seconds to the first token", *names, "saved"],
            [
                [
                    f"{one.policy}, {amount(one.capacity_tokens)}",
                    *(_seconds(one.latency["ttft_s"].get(name)) for name in names),
                    f"{one.latency['saved_s']:,.0f} s",
                ]
                for one in timed
            ],
        )


def _memory(run: ReplayRun) -> tuple[int, ...]:
    return (run.capacity_tokens, *run.below)


_LABELS = {BELADY: "best possible", INFINITE: "endless memory"}


def _share(outcome: Outcome | None) -> str:
    return "" if outcome is None else f"{100 * outcome.hit_rate:.1f} %"


def _seconds(found: float | None) -> str:
    """Nothing where no request was served."""
    return "" if found is None else f"{found:.2f}"


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
