"""``kvkeep replay``: hit rates of eviction policies and memory sizes on a trace."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvkeep.bench.replay import BELADY, BOUNDS, GROUP_REASONS, INFINITE, LOADINGS, ReplayRun
from kvkeep.bench.replay.doubts import gaps
from kvkeep.bench.replay.words import amount
from kvkeep.cli import replaying
from kvkeep.cli.arguments import add_json, add_option, add_path, add_switch, count
from kvkeep.cli.drawing import visible
from kvkeep.cli.sharing import part, print_shares
from kvkeep.cli.tables import print_table
from kvkeep.cli.tenants import weights_in
from kvkeep.cli.trace import add_reading_arguments, opened
from kvkeep.core.cost import PrefillCost, TransferCost
from kvkeep.core.errors import InvalidValue
from kvkeep.core.eviction import POLICIES
from kvkeep.core.geometry import parse_bytes
from kvkeep.store.backends import WriteBudget
from kvkeep.store.tiers import TIERINGS

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from kvkeep.bench.replay import Outcome, Workload
    from kvkeep.cli.arguments import Commands

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
    replaying.add_price_arguments(parser)
    add_switch(
        parser,
        "--no-bounds",
        "leave out the upper bounds (--json has them only if --policy names them, and closed loops "
        "have none that knows the future)",
    )
    replaying.add_report_arguments(parser)
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
        f"{', '.join(BOUNDS)}; lru+sessions tells the policy which requests form a session, if "
        "the trace has sessions",
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
        "--writes LIST",
        "with tiers: write budgets of those below memory, in tokens, or with --model in bytes, a "
        "day or an hour: 500M/day, or 2TB/day (default: any amount)",
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
        "team-a=3,team-b=1, others 1; '=1' for equal weights. A table then compares the hits of "
        "tenants with those that each has alone on its share",
    )
    group.add_argument(
        "--prefix",
        choices=("radix", "chain"),
        default="radix",
        help="prefix index (default: radix)",
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
    add_switch(
        loop,
        "--closed-loop",
        "with --cost: only sessions begin at their times; each further request of a session comes "
        "its pause in the trace after the end of the answer before it, so a slow answer delays all "
        "that follows",
    )
    add_option(
        loop,
        "--bandwidth LIST",
        "with --cost and tiers: bytes per second at which each tier below memory is read, "
        "such as 20GB,3GB (default: the tiers in the file of --cost, fastest first; without "
        "any, reads take no time)",
    )
    loop.add_argument(
        "--loading",
        choices=LOADINGS,
        default=LOADINGS[0],
        help="what is read from tiers: the prefix that pays, before the rest is computed (prefix, "
        "the default); or whatever is stored (all)",
    )


def run(args: argparse.Namespace) -> int:
    """Replay, and print the outcomes."""
    replaying.check_out(args)
    kept = replaying.ModelSizes.of(args)
    trace = opened(args, args.file)
    page_tokens = args.page or trace.unit_tokens
    runs = _planned_runs(args, kept, page_tokens, bounds=not args.no_bounds and not args.json)
    tiers = any(run.below for run in runs)
    prices = replaying.prices_of(args, kept, page_tokens, tiers=tiers)
    workload = replaying.read_workload(trace)
    outcomes = replaying.replayed(workload, runs, args)
    if args.out is not None:
        replaying.report(workload, outcomes, args, prices)
    if args.json:
        for outcome in outcomes:
            print(json.dumps(outcome.as_dict() | replaying.gap_facts(workload)))
    else:
        _print(workload, runs, outcomes)
    return 0


def _planned_runs(
    args: argparse.Namespace, kept: replaying.ModelSizes, page_tokens: int, *, bounds: bool
) -> list[ReplayRun]:
    """Return a replay for each policy and capacity that is given."""
    sizes = [
        [kept.tokens(one.strip(), page_tokens) for one in part.split("+")]
        for part in _parts("--capacity", args.capacity)
    ]
    groups = kept.layout(page_tokens)
    if groups is not None and any(below for _, *below in sizes):
        raise InvalidValue(
            f"tiers are replayed without windows and states, which {_named(args)} has; give one "
            f"capacity, not {args.capacity}"
        )
    policies = _parts("--policy", args.policy)
    if bounds:
        # In a closed loop the policy changes the order of requests, which Belady's bound is of.
        known = [INFINITE] if args.closed_loop or args.users is not None else BOUNDS
        policies += [bound for bound in known if bound not in policies]
    cost = None
    if args.cost is not None:
        cost = PrefillCost.read(args.cost)
    shared = [] if args.share is None else _parts("--share", args.share)
    shares = tuple(weights_in(shared).items())
    reads = _reads(args, max(map(len, sizes)) - 1)
    writes = () if args.writes is None else _write_budgets(args.writes, kept, page_tokens)
    if len(writes) > max(map(len, sizes)):
        raise InvalidValue(
            "--writes takes one budget for each tier below memory; got "
            f"{args.writes} for --capacity {args.capacity}"
        )
    runs: list[ReplayRun] = []
    for policy in policies:
        if policy == INFINITE:
            runs.append(ReplayRun(INFINITE, 0))
            continue
        for first, *below in sizes:
            run = ReplayRun(policy, first, below=tuple(below))
            if policy in BOUNDS:
                runs.append(run)
                continue
            run = replace(
                run, page_tokens=args.page, prefix=args.prefix, cost=cost, users=args.users,
                closed_loop=args.closed_loop, groups=groups,
            )  # fmt: skip
            some = [run]
            if below:
                tierings = _parts("--tiering", args.tiering)
                here = reads[: len(below) + 1]
                some = [
                    replace(run, tiering=one, reads=here, loading=args.loading, writes=writes)
                    for one in tierings
                ]
            runs += some
            runs += [replace(one, shares=shares) for one in some] if shares else []
    return list(dict.fromkeys(runs))


def _parts(option: str, text: str) -> list[str]:
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise InvalidValue(f"{option} is a list separated by commas, got {text!r}")
    return list(dict.fromkeys(parts))


def _reads(args: argparse.Namespace, levels: int) -> tuple[TransferCost | None, ...]:
    """Return the cost to read each tier; memory, the first, takes no time."""
    if args.bandwidth is None:
        return () if args.cost is None else replaying.tier_reads(args.cost, levels)
    if not levels:
        raise InvalidValue("--bandwidth needs tiers below memory, such as --capacity 1M+8M")
    speeds = [parse_bytes(part.removesuffix("/s")) for part in args.bandwidth.split(",")]
    if len(speeds) > levels:
        raise InvalidValue(
            "--bandwidth takes one value for each tier below memory; got "
            f"{args.bandwidth} for --capacity {args.capacity}"
        )
    if not all(speeds):
        raise InvalidValue(f"--bandwidth takes bytes per second above 0, got {args.bandwidth}")
    return (None, *(TransferCost(seconds_per_byte=1 / speed) for speed in speeds))


def _write_budgets(
    text: str, kept: replaying.ModelSizes, page_tokens: int
) -> tuple[WriteBudget | None, ...]:
    """Return the budgets of all tiers, in tokens; memory, the first, has none."""
    spans = {"day": 86_400, "hour": 3_600}
    budgets: list[WriteBudget | None] = [None]
    for one in text.split(","):
        size, slash, span = one.strip().rpartition("/")
        if not slash or span not in spans:
            raise InvalidValue(f"--writes is an amount per day or hour, as 2TB/day; got {one!r}")
        budgets.append(WriteBudget(kept.tokens(size, page_tokens), spans[span]))
    return tuple(budgets)


def _named(args: argparse.Namespace) -> str:
    return f"--groups {args.groups}" if args.model is None else f"--model {args.model}"


def _print(workload: Workload, runs: Sequence[ReplayRun], outcomes: Sequence[Outcome]) -> None:
    known = replaying.facts(workload)
    print(
        f"{visible(workload.name)}: {known['requests']:,} requests, "
        f"{known['tokens']:,} prompt tokens in {known['span_s'] / 60:,.0f} minutes"
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
    print_shares(outcomes)
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
    return part(loaded / stored) if stored else ""


def _print_jobs(outcomes: Sequence[Outcome]) -> None:
    """Print how long sessions take; nothing for traces without sessions."""
    if not outcomes:
        return
    names = ("mean", "p50", "p90", "p99")
    rows = []
    for one in outcomes:
        served = one.latency["job_served_s"]
        rows.append(
            [
                f"{one.policy}, {amount(one.capacity_tokens).removesuffix(' tokens')}",
                *(_long(one.latency["job_s"].get(name)) for name in names),
                *(_long(served.get(name)) for name in ("mean", "p90")),
            ]
        )
    head = ["seconds of a job", *names, "served mean", "served p90"]
    print_table(head, rows)


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
    rows, written = [], []
    for one in outcomes:
        memory, *below = one.tiers
        name = f"{one.policy}, {amount(one.capacity_tokens)}"
        hits, blocks = memory["hits"], max(1, one.blocks)
        writes, over = (sum(tier[what] for tier in below) for what in ("writes", "over_budget"))
        written.append(
            [
                name,
                amount(round(sum(tier["written_tokens_a_day"] for tier in below))),
                part(over / max(1, over + writes)) if over else "",
            ]
        )
        rows.append(
            [
                name,
                part(hits / blocks),
                part(sum(tier["hits"] for tier in below) / blocks),
            ]
        )
    print_table(["blocks reused from", "memory", "tiers"], rows)
    print_table(["written to tiers", "a day", "not written: over budget"], written)


def _memory(run: ReplayRun) -> tuple[int, ...]:
    return (run.capacity_tokens, *run.below)


_LABELS = {BELADY: "best possible", INFINITE: "endless memory"}


def _share(outcome: Outcome | None) -> str:
    return part(None if outcome is None else outcome.hit_rate)


def _long(found: float | None) -> str:
    return "" if found is None else f"{found:,.{1 if found < 100 else 0}f}"


def _seconds(found: float | None) -> str:
    """Format seconds; empty if no request was served."""
    return "" if found is None else f"{found:.2f}"
