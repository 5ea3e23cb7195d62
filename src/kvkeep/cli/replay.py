"""``kvkeep replay``: hit rates of eviction policies and memory sizes on a trace."""

from __future__ import annotations

import json
import os
import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvkeep.bench.replay import BELADY, BOUNDS, GROUP_REASONS, INFINITE, ReplayRun, Workload, replay
from kvkeep.bench.replay.runs import increments
from kvkeep.bench.replay.summary import gaps
from kvkeep.bench.replay.words import amount
from kvkeep.cli.arguments import add_json, add_option, add_path, count, model_geometry
from kvkeep.cli.drawing import visible
from kvkeep.cli.serve_options import weights_in
from kvkeep.cli.tables import print_table, progress
from kvkeep.cli.trace import add_reading_arguments, opened
from kvkeep.core.cost import CostModel, PrefillCost
from kvkeep.core.errors import InvalidValue, whole
from kvkeep.core.eviction import POLICIES
from kvkeep.core.geometry import parse_bytes, parse_count
from kvkeep.core.geometry.units import format_bytes
from kvkeep.core.groups import GroupPlan
from kvkeep.store.tiers import TIERINGS

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from kvkeep.bench.replay import Outcome
    from kvkeep.bench.traces import FileTrace
    from kvkeep.cli.arguments import Commands
    from kvkeep.core.cost import TransferCost
    from kvkeep.core.geometry import KVGeometry
    from kvkeep.core.groups import GroupLayout

__all__ = [
    "ModelSizes",
    "add_parser",
    "add_replay_arguments",
    "add_report_argument",
    "check_out",
    "facts",
    "gap_facts",
    "read_costs",
    "read_workload",
    "replayed",
    "report",
    "run",
]

_FRONTS = ("memory", "shm", "buffer")  # names of tiers in front of all others
_READ = 64 << 20  # bytes of a read by which tiers are ranked


# --- arguments ---------------------------------------------------------------------------------


def add_replay_arguments(group: argparse._ArgumentGroup) -> None:
    """Add ``--model`` and ``--jobs``."""
    add_path(
        group,
        "--model",
        "local model directory or config.json, for the size of a token's KV, and for windows and "
        "states, if the model has some",
        metavar="PATH",
    )
    add_option(
        group,
        "--jobs N",
        "replays to run at once, each in a process (default: one per processor)",
        type=count,
    )


def add_report_argument(parser: argparse.ArgumentParser) -> None:
    """Add ``--out``; `report` reads it."""
    add_path(parser, "--out", "write a report to this .html file, with its data as JSON beside it")


# --- values ------------------------------------------------------------------------------------


def check_out(args: argparse.Namespace) -> None:
    """Raise `InvalidValue`, before anything is replayed, if the report cannot be written.

    Also raised if a file of the report would overwrite an input file.
    """
    if args.out is None:
        return
    if args.out.suffix.lower() not in {".html", ".htm"}:
        raise InvalidValue(f"--out needs an .html file, such as report.html; got {str(args.out)!r}")
    if not args.out.parent.is_dir():
        raise InvalidValue(f"cannot write {args.out}: there is no directory {args.out.parent}")
    read = [path.resolve() for path in (args.file, getattr(args, "cost", None)) if path is not None]
    for suffix in (args.out.suffix, ".json"):
        written = args.out.with_suffix(suffix)
        if written.is_dir():
            raise InvalidValue(f"cannot write {written}: it is a directory")
        if written.resolve() in read:
            raise InvalidValue(f"--out {args.out} would overwrite {written}; name another file")


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """What a token of a model keeps, by its geometry; nothing without a model.

    With windows or states, capacities in tokens count those of the layers that keep every token.
    """

    geometry: KVGeometry | None = None

    @classmethod
    def of(cls, args: argparse.Namespace) -> ModelSizes:
        """Read ``--model``. Raises `InvalidValue`."""
        return cls() if args.model is None else cls(model_geometry(args.model))

    def layout(self, page_tokens: int) -> GroupLayout | None:
        """Return the layout in pages of ``page_tokens``; None without windows and states."""
        return None if self.geometry is None else GroupPlan(self.geometry, page_tokens).layout

    def bytes_per_token(self, page_tokens: int) -> float:
        """Return the bytes of a page per token. Raises `InvalidValue` without a model."""
        if self.geometry is None:
            raise InvalidValue("the size of a token needs --model")
        return GroupPlan(self.geometry, page_tokens).page_bytes / page_tokens

    def tokens(self, text: str, page_tokens: int) -> int:
        """Parse a capacity: tokens (``3M``, ``500k``), or bytes (``40GiB``) of the model's KV."""
        if not text.strip().lower().endswith(("b", "i")):
            try:
                return parse_count(text)
            except InvalidValue as error:
                raise InvalidValue(
                    f"a capacity is a count of tokens, or an amount of memory as 40GiB: {error}"
                ) from error
        amount = parse_bytes(text)
        if self.geometry is None:
            raise InvalidValue(f"a capacity of {text} needs --model, for the size of a token")
        return int(amount / self.bytes_per_token(page_tokens))


# --- replaying ---------------------------------------------------------------------------------


def read_workload(trace: FileTrace) -> Workload:
    """Read a trace."""
    with progress("reading") as advance, increments(advance) as read:
        return Workload.read(trace, read)


def read_costs(path: Path, levels: int) -> tuple[PrefillCost, tuple[TransferCost | None, ...]]:
    """Return what computing costs, and reading memory and ``levels`` tiers below it.

    The tiers are those of the file, fastest first; () if it has none. Raises `InvalidValue` if it
    has fewer, or nothing of computing.
    """
    costs = CostModel.read(path)
    if not costs.prefill.known:
        raise InvalidValue(f"{path}: seconds_per_token is missing")
    below = {name: cost for name, cost in costs.reads().items() if name not in _FRONTS}
    if not levels or not below:
        return costs.prefill.cost, ()
    if len(below) < levels:
        raise InvalidValue(
            f"{path} has the costs of {', '.join(map(visible, below))}; {levels} tiers below "
            "memory need as many"
        )
    ranked = sorted(below.items(), key=lambda one: one[1].seconds(_READ))[:levels]
    said = ", ".join(
        f"{visible(name)} ({format_bytes(int(_READ / cost.seconds(_READ)))}/s)"
        for name, cost in ranked
    )
    print(f"tiers below memory, by {path}: {said}", file=sys.stderr)
    return costs.prefill.cost, (None, *(cost for _, cost in ranked))


def replayed(
    workload: Workload, runs: Sequence[ReplayRun], args: argparse.Namespace
) -> list[Outcome]:
    """Replay and return the outcomes, in order."""
    jobs = whole("--jobs", args.jobs, 1) if args.jobs is not None else os.cpu_count() or 1
    with progress("replaying", of=len(runs) * len(workload), remaining=True) as advance:
        outcomes = dict(replay(workload, runs, jobs=jobs, progress=advance))
    return [outcomes[run] for run in runs]


def report(
    workload: Workload,
    outcomes: Sequence[Outcome],
    args: argparse.Namespace,
    advice: str | None = None,
) -> None:
    """Write the report to ``--out``, and its data beside it."""
    from kvkeep.bench.replay.report import write_report  # noqa: PLC0415 - only needed with --out

    command = shlex.join(["kvkeep", *sys.argv[1:]])
    try:
        written = write_report(
            outcomes, args.out, trace=facts(workload), command=command, advice=advice
        )
    except OSError as error:
        raise InvalidValue(f"cannot write {args.out}: {error.strerror}") from error
    print("written: " + ", ".join(str(path) for path in written), file=sys.stderr)


def facts(workload: Workload) -> dict[str, Any]:
    """Return the facts about the trace that a report lists."""
    missing = " · ".join(gaps(workload))
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
        **({"left out": missing} if missing else {}),
    }


def gap_facts(workload: Workload) -> dict[str, Any]:
    """Return how many lines and requests a trace leaves out, for JSON."""
    return {
        "skipped": workload.skipped,
        "skipped_reasons": list(workload.skipped_reasons),
        "dropped": workload.dropped,
        "unknown": workload.unknown,
    }


def add_parser(commands: Commands) -> None:
    """Add the command and its options."""
    parser = commands.add_parser(
        "replay",
        help="what other policies and memories would have reused of a trace",
        description="Replay a trace of requests through the cache's own code, with virtual memory "
        "and a virtual clock, once for each policy and capacity. docs/replay.md explains the "
        "results.",
    )
    parser.add_argument("file", metavar="TRACE", type=Path, help="trace file")
    add_reading_arguments(parser)
    _add_replaying(parser.add_argument_group("replaying"))
    _add_loop(parser.add_argument_group("time to the first token"))
    add_report_argument(parser)
    add_json(parser, "print one JSON object per replay instead of text")
    parser.set_defaults(run=run)


def _add_replaying(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--capacity",
        metavar="LIST",
        required=True,
        help="memories to try, in tokens: 3M,5M,10M; or in bytes, with --model: 40GiB,80GiB; with "
        "tiers below, fastest first: 1M+8M",
    )
    add_option(
        group,
        "--policy LIST",
        f"eviction policies to try, of {', '.join(POLICIES)}, with tiers also 2q, and bounds, of "
        f"{', '.join(BOUNDS)}",
        default="lru,returns",
    )
    add_option(
        group,
        "--tiering LIST",
        f"tiering policies to try if there are tiers, of {', '.join(TIERINGS)}",
        default="inclusive,exclusive",
    )
    add_option(
        group,
        "--page TOKENS",
        "tokens per page, with hits counted to the token (default: one page per id of the "
        "trace, full or not, as most published hit rates are counted; with windows or states, "
        "full ones only)",
        type=count,
    )
    add_option(
        group,
        "--share LIST",
        "replay each policy also with fair shares of memory and tiers, by weight: "
        "team-a=3,team-b=1, others 1; '=1' for equal weights. --json has the hits of each tenant",
    )
    add_replay_arguments(group)


def _add_loop(loop: argparse._ArgumentGroup) -> None:
    add_path(
        loop,
        "--cost",
        "time to compute a prompt, as `kvkeep serve` learns it; requests then wait in a queue",
    )
    add_option(
        loop,
        "--users N",
        "with --cost: number of users, each of whom waits for an answer before the next "
        "request (default: requests arrive at their times in the trace)",
        type=count,
    )


def run(args: argparse.Namespace) -> int:
    """Replay, and print the outcomes."""
    check_out(args)
    sizes = ModelSizes.of(args)
    trace = opened(args, args.file)
    runs = _planned_runs(args, sizes, args.page or trace.unit_tokens)
    workload = read_workload(trace)
    outcomes = replayed(workload, runs, args)
    if args.out is not None:
        report(workload, outcomes, args)
    if args.json:
        for outcome in outcomes:
            print(json.dumps(outcome.as_dict() | gap_facts(workload)))
    else:
        _print(workload, runs, outcomes)
    return 0


def _planned_runs(args: argparse.Namespace, sizes: ModelSizes, page_tokens: int) -> list[ReplayRun]:
    """Return a replay for each policy and capacity that is given."""
    capacities = [
        [sizes.tokens(size.strip(), page_tokens) for size in part.split("+")]
        for part in _parts("--capacity", args.capacity)
    ]
    groups = sizes.layout(page_tokens)
    if groups is not None and any(below for _, *below in capacities):
        raise InvalidValue(
            f"tiers are replayed without windows and states, which --model {args.model} has; give "
            f"one capacity, not {args.capacity}"
        )
    policies = _parts("--policy", args.policy)
    if not args.json:
        # Users change the order of requests, which Belady's bound is of.
        bounds = BOUNDS if args.users is None else [INFINITE]
        policies += [bound for bound in bounds if bound not in policies]
    cost: PrefillCost | None = None
    reads: tuple[TransferCost | None, ...] = ()
    if args.cost is not None:
        cost, reads = read_costs(args.cost, max(map(len, capacities)) - 1)
    shared = [] if args.share is None else _parts("--share", args.share)
    shares = tuple(weights_in(shared).items())
    runs: list[ReplayRun] = []
    for policy in policies:
        if policy == INFINITE:
            runs.append(ReplayRun(INFINITE, 0))
            continue
        for first, *below in capacities:
            run = ReplayRun(policy, first, below=tuple(below))
            if policy in BOUNDS:
                runs.append(run)
                continue
            run = replace(
                run, page_tokens=args.page, cost=cost, users=args.users, groups=groups,
                reads=reads[: len(below) + 1] if below else (),
            )  # fmt: skip
            some = [run]
            if below:
                some = [replace(run, tiering=one) for one in _parts("--tiering", args.tiering)]
            runs += some
            runs += [replace(one, shares=shares) for one in some] if shares else []
    return list(dict.fromkeys(runs))


def _parts(option: str, text: str) -> list[str]:
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise InvalidValue(f"{option} is a list separated by commas, got {text!r}")
    return list(dict.fromkeys(parts))


def _print(workload: Workload, runs: Sequence[ReplayRun], outcomes: Sequence[Outcome]) -> None:
    figures = facts(workload)
    print(
        f"{visible(workload.name)}: {figures['requests']:,} requests, "
        f"{figures['tokens']:,} prompt tokens in {figures['span_s'] / 60:,.0f} minutes"
    )
    for gap in gaps(workload):
        print(f"Warning: {visible(gap)}")
    sizes = list(dict.fromkeys(_memory(run) for run in runs if run.policy != INFINITE))
    by = {(run.name, _memory(run)): one for run, one in zip(runs, outcomes, strict=True)}
    endless = next((one for one in outcomes if one.policy == INFINITE), None)
    rows = []
    for name in dict.fromkeys(run.name for run in runs):
        if name == INFINITE:
            cells = [_share(endless)] * len(sizes)
        else:
            cells = [_share(by.get((name, size))) for size in sizes]
        label = _LABELS.get(name, name)
        if name == BELADY and any(run.groups is not None for run in runs):
            label = "best for KV alone"
        rows.append([label, *cells])
    print_table(["blocks reused", *(" + ".join(map(amount, size)) for size in sizes)], rows)
    _print_groups([one for one in outcomes if one.groups])
    _print_tiers([one for one in outcomes if one.tiers])
    timed = [one for one in outcomes if one.latency]
    if timed:
        names = ("p50", "p90", "p99")
        loaded = [_loaded(one) for one in timed]
        print_table(
            ["seconds to the first token", *names, "saved", *["loaded"] * any(loaded)],
            [
                [
                    f"{one.policy}, {amount(one.capacity_tokens)}",
                    *(_seconds(one.latency["ttft_s"].get(name)) for name in names),
                    f"{one.latency['saved_s']:,.0f} s",
                    *[share] * any(loaded),
                ]
                for one, share in zip(timed, loaded, strict=True)
            ],
        )
        _print_jobs([one for one in timed if one.latency.get("jobs")])


def _loaded(outcome: Outcome) -> str:
    """Return the share of tokens that were loaded, of those stored in tiers that take time."""
    loaded = outcome.latency["loaded_tokens"]
    stored = loaded + outcome.latency["computed_stored_tokens"]
    return _percent(loaded / stored) if stored else ""


def _print_jobs(outcomes: Sequence[Outcome]) -> None:
    """Print how long sessions take; nothing for traces without sessions."""
    names = ("mean", "p50", "p90", "p99")
    rows = [
        [
            f"{one.policy}, {amount(one.capacity_tokens)}",
            *(_long(one.latency["job_s"].get(name)) for name in names),
        ]
        for one in outcomes
    ]
    if rows:
        print_table(["seconds of a job", *names], rows)


def _print_groups(outcomes: Sequence[Outcome]) -> None:
    """Print what windows and states cost; nothing for other models."""
    if not outcomes:
        return
    rows = []
    for one in outcomes:
        missed = sum(one.misses.get(reason, 0) for reason in GROUP_REASONS)
        rows.append(
            [
                f"{one.policy}, {amount(one.capacity_tokens)}",
                f"{100 * missed / max(1, one.tokens):.1f} %",
                f"{one.groups['checkpoints_stored']:,}",
                f"{one.groups['checkpoints_without_room']:,}",
                f"{100 * one.groups['most_pages_stored'] / one.groups['pages']:.0f} %",
            ]
        )
    print_table(
        ["windows and states", "not resumed", "checkpoints", "no room", "of memory"],
        rows,
    )


def _print_tiers(outcomes: Sequence[Outcome]) -> None:
    """Print where reused blocks were, and what was written; nothing without tiers."""
    if not outcomes:
        return
    rows = []
    for one in outcomes:
        memory, *below = one.tiers
        hits, blocks = memory["hits"], max(1, one.blocks)
        rows.append(
            [
                f"{one.policy}, {amount(one.capacity_tokens)}",
                _percent(hits / blocks),
                _percent(sum(tier["hits"] for tier in below) / blocks),
                amount(round(sum(tier["written_tokens_a_day"] for tier in below))),
            ]
        )
    print_table(["blocks reused from", "memory", "tiers", "written to tiers a day"], rows)


def _memory(run: ReplayRun) -> tuple[int, ...]:
    return (run.capacity_tokens, *run.below)


_LABELS = {BELADY: "best possible", INFINITE: "endless memory"}


def _share(outcome: Outcome | None) -> str:
    return "" if outcome is None else _percent(outcome.hit_rate)


def _percent(part: float) -> str:
    return f"{100 * part:.1f} %"


def _long(found: float | None) -> str:
    return "" if found is None else f"{found:,.{1 if found < 100 else 0}f}"


def _seconds(found: float | None) -> str:
    """Format seconds; empty if no request was served."""
    return "" if found is None else f"{found:.2f}"
