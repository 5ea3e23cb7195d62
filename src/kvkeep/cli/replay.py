"""``kvkeep replay``: hit rates of eviction policies and memory sizes on a trace."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvkeep.bench.replay import BELADY, BOUNDS, GROUP_REASONS, INFINITE, ReplayRun
from kvkeep.bench.replay.summary import gaps
from kvkeep.bench.replay.words import amount
from kvkeep.cli import replaying
from kvkeep.cli.arguments import add_json, add_option, add_path, count
from kvkeep.cli.drawing import visible
from kvkeep.cli.tables import print_table
from kvkeep.cli.tenants import weights_in
from kvkeep.cli.trace import add_reading_arguments, opened
from kvkeep.core.cost import PrefillCost
from kvkeep.core.errors import InvalidValue
from kvkeep.core.eviction import POLICIES
from kvkeep.store.tiers import TIERINGS

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from kvkeep.bench.replay import Outcome, Workload
    from kvkeep.cli.arguments import Commands
    from kvkeep.core.cost import TransferCost

__all__ = ["add_parser", "run"]


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
    replaying.add_report_argument(parser)
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
    replaying.add_replay_arguments(group)


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
    replaying.check_out(args)
    sizes = replaying.ModelSizes.of(args)
    trace = opened(args, args.file)
    runs = _planned_runs(args, sizes, args.page or trace.unit_tokens)
    workload = replaying.read_workload(trace)
    outcomes = replaying.replayed(workload, runs, args)
    if args.out is not None:
        replaying.report(workload, outcomes, args)
    if args.json:
        for outcome in outcomes:
            print(json.dumps(outcome.as_dict() | replaying.gap_facts(workload)))
    else:
        _print(workload, runs, outcomes)
    return 0


def _planned_runs(
    args: argparse.Namespace, sizes: replaying.ModelSizes, page_tokens: int
) -> list[ReplayRun]:
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
        cost = PrefillCost.read(args.cost)
        reads = replaying.tier_reads(args.cost, max(map(len, capacities)) - 1)
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
    facts = replaying.facts(workload)
    print(
        f"{visible(workload.name)}: {facts['requests']:,} requests, "
        f"{facts['tokens']:,} prompt tokens in {facts['span_s'] / 60:,.0f} minutes"
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
