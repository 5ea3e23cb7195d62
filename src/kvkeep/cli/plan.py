"""``kvkeep plan``: recommends policy, memory and tiers for the traffic of a trace."""

from __future__ import annotations

import json
import shutil
import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from kvkeep.bench.replay import PlannedMemory
from kvkeep.cli import replaying
from kvkeep.cli.arguments import add_json, add_option, add_path
from kvkeep.cli.drawing import visible
from kvkeep.cli.trace import add_reading_arguments, opened
from kvkeep.core.cost import PrefillCost
from kvkeep.core.errors import InvalidValue

if TYPE_CHECKING:
    import argparse

    from kvkeep.bench.replay import Workload
    from kvkeep.cli.arguments import Commands

__all__ = ["add_parser", "run"]


def add_parser(commands: Commands) -> None:
    """Add the command and its options."""
    parser = commands.add_parser(
        "plan",
        help="recommend a policy, memory and tiers for the traffic of a trace",
        description="Replay a trace with several policies, with less and more memory, and with a "
        "tier below it, and recommend in words what to use. docs/replay.md explains the results.",
    )
    parser.add_argument("file", metavar="TRACE", type=Path, help="trace file")
    add_reading_arguments(parser)
    parser.add_argument(
        "--memory",
        metavar="SIZE",
        required=True,
        help="memory for KV: tokens, such as 3M; or bytes, such as 40GiB, with --model",
    )
    add_option(parser, "--disk SIZE", "a tier below it, in tokens or bytes (default: none)")
    add_path(
        parser,
        "--cost",
        "what prompts and tiers take, as `kvkeep calibrate --tier` measures it: with --disk the "
        "plan then says what the tier saves in seconds, and advises against one that saves none",
    )
    replaying.add_replay_arguments(parser.add_argument_group("replaying"))
    replaying.add_price_arguments(parser)
    replaying.add_report_arguments(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Replay, and print the recommendation."""
    replaying.check_out(args)
    kept = replaying.ModelSizes.of(args)
    trace = opened(args, args.file)
    page_tokens = trace.unit_tokens
    groups = kept.layout(page_tokens)
    memory = kept.tokens(args.memory, page_tokens)
    disk = 0 if args.disk is None else kept.tokens(args.disk, page_tokens)
    if disk and groups is not None:
        raise InvalidValue("tiers are replayed without windows and states; leave out --disk")
    cost, read = None, None
    if args.cost is not None:
        cost = PrefillCost.read(args.cost)
        reads = replaying.tier_reads(args.cost, 1 if disk else 0)
        read = reads[1] if reads else None
    prices = replaying.prices_of(args, kept, page_tokens)
    workload = replaying.read_workload(trace)
    plan = PlannedMemory(memory, disk, groups, cost, read)
    runs = plan.runs(workload)
    outcomes = replaying.replayed(workload, runs, args)
    advice = plan.advice(dict(zip(runs, outcomes, strict=True)))
    if args.out is not None:
        replaying.report(workload, outcomes, args, prices, str(advice))
    if args.json:
        found = [one.as_dict() for one in outcomes]
        print(json.dumps({"memory_tokens": memory, "disk_tokens": disk, **asdict(advice),
                          "outcomes": found}))  # fmt: skip
    else:
        _print(workload, [advice.recommendation, *advice.reasons])
    return 0


def _print(workload: Workload, paragraphs: list[str]) -> None:
    tokens = int(workload.tokens.sum(dtype="int64"))
    width = min(88, shutil.get_terminal_size().columns)
    print(f"{visible(workload.name)}: {len(workload):,} requests, {tokens:,} prompt tokens\n")
    for text in paragraphs:
        print(textwrap.fill(text, width) + "\n")
