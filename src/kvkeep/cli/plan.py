"""``kvkeep plan``: recommends policy, memory and tiers for the traffic of a trace."""

from __future__ import annotations

import json
import shutil
import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from kvkeep.bench.replay import PlannedMemory, Prices, advise
from kvkeep.bench.replay.words import money
from kvkeep.cli import replaying
from kvkeep.cli.arguments import add_json, add_option, add_path
from kvkeep.cli.drawing import visible
from kvkeep.cli.plan_flags import moves_between_tiers, serve_command, vllm_option
from kvkeep.cli.tables import print_table
from kvkeep.cli.trace import add_reading_arguments, opened
from kvkeep.core.cost import PrefillCost
from kvkeep.core.errors import InvalidValue

if TYPE_CHECKING:
    import argparse

    from kvkeep.bench.replay import Advice, PlanCandidate, Workload
    from kvkeep.cli.arguments import Commands

__all__ = ["add_parser", "run"]


def add_parser(commands: Commands) -> None:
    """Add the command and its options."""
    parser = commands.add_parser(
        "plan",
        help="recommend a policy, memory and tiers for the traffic of a trace",
        description="Replay a trace with several policies, with less and more memory, and with a "
        "tier below it, and recommend what to use: what reuses most or, with prices, what costs "
        "least. docs/replay.md explains the results.",
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
        "what prompts and tiers take, as `kvkeep serve` learns it: with --disk the "
        "plan then says what the tier saves in seconds, and advises against one that saves none",
    )
    replaying.add_replay_arguments(parser.add_argument_group("replaying"))
    add_option(
        parser,
        "--prices LIST",
        "with --model and --cost: recommend what costs least a month, by the price of a GPU hour "
        "and of a GiB of memory and disk a month, in any currency: gpu=2.5,memory=3,disk=0.1",
    )
    replaying.add_report_argument(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Replay, and print the recommendation."""
    replaying.check_out(args)
    prices = None if args.prices is None else Prices.parse(args.prices)
    if prices is not None and (args.model is None or args.cost is None):
        raise InvalidValue("--prices needs --model, for bytes, and --cost, for the time of GPUs")
    sizes = replaying.ModelSizes.of(args)
    trace = opened(args, args.file)
    page_tokens = trace.unit_tokens
    groups = sizes.layout(page_tokens)
    memory = sizes.tokens(args.memory, page_tokens)
    disk = 0 if args.disk is None else sizes.tokens(args.disk, page_tokens)
    if disk and groups is not None:
        raise InvalidValue("tiers are replayed without windows and states; leave out --disk")
    cost, read = None, None
    if args.cost is not None:
        cost = PrefillCost.read(args.cost)
        reads = replaying.tier_reads(args.cost, 1 if disk else 0)
        read = reads[1] if reads else None
    size = None if args.model is None else sizes.bytes_per_token(page_tokens)
    plan = PlannedMemory(memory, disk, groups, cost, read, prices, size)
    workload = replaying.read_workload(trace)
    runs = plan.runs(workload)
    outcomes = replaying.replayed(workload, runs, args)
    advice = advise(plan, dict(zip(runs, outcomes, strict=True)), workload)
    if args.out is not None:
        replaying.report(workload, outcomes, args, str(advice))
    if args.json:
        print(json.dumps({"memory_tokens": memory, "disk_tokens": disk, **asdict(advice),
                          **replaying.gap_facts(workload),
                          "outcomes": [one.as_dict() for one in outcomes]}))  # fmt: skip
        return 0
    _print(workload, advice)
    if advice.chosen.month is not None:
        _print_costs(plan, advice)
    _print_flags(advice.chosen, args.model, size)
    return 0


def _print(workload: Workload, advice: Advice) -> None:
    tokens = int(workload.tokens.sum(dtype="int64"))
    print(f"{visible(workload.name)}: {len(workload):,} requests, {tokens:,} prompt tokens\n")
    _paragraph(advice.recommendation)
    for text in advice.warnings:
        _paragraph(f"Warning: {text}")
    for text in advice.reasons:
        _paragraph(text)


def _paragraph(text: str) -> None:
    width = min(88, shutil.get_terminal_size().columns)
    print(textwrap.fill(text, width, break_long_words=False, break_on_hyphens=False) + "\n")


def _print_costs(plan: PlannedMemory, advice: Advice) -> None:
    """Print what a month costs with each memory and disk, the cheapest first."""
    best: dict[tuple[int, int], PlanCandidate] = {}
    for one in sorted(advice.candidates, key=lambda one: one.month or 0.0):
        best.setdefault((one.memory_tokens, one.disk_tokens), one)
    rows = []
    for one in best.values():
        sizes = [plan.size(size) for size in (one.memory_tokens, one.disk_tokens) if size]
        how = "" if one.policy is None else one.policy
        if one.tiering is not None:
            how += f"/{one.tiering}"
        rows.append(
            [
                " + ".join(sizes) or "no cache",
                how,
                f"{100 * one.hit_rate:.1f} %",
                money(one.month or 0.0),
            ]
        )
    print_table(["a month of this traffic", "policy", "reused", "costs"], rows)
    print()


def _print_flags(chosen: PlanCandidate, model: Path | None, bytes_per_token: float | None) -> None:
    """Print the setting as commands to paste; they need the size of a token."""
    if model is None or bytes_per_token is None:
        print("With --model PATH, the flags of kvkeep serve and of vLLM are printed here.")
        return
    print("kvkeep's server:\n")
    print(f"  {serve_command(chosen, model, bytes_per_token)}\n")
    if chosen.policy is None:
        return
    if moves_between_tiers(chosen):
        _paragraph(
            f"The tiering {chosen.tiering} is one of tiers, so the memory is a tier here. The pool "
            "of running requests comes on top; --memory gives its size."
        )
    print("vLLM, with this memory beside the GPU's:\n")
    print(f"  {vllm_option(chosen, bytes_per_token)}\n")
    if moves_between_tiers(chosen):
        _paragraph("vLLM's connector has the tiering inclusive only.")
