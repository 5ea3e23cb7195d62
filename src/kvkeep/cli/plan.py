"""``kvkeep plan``: recommends policy, memory and tiers for the traffic of a trace."""

from __future__ import annotations

import json
import shlex
import shutil
import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from kvkeep.bench.replay import PlannedMemory, advise
from kvkeep.cli import replay
from kvkeep.cli.arguments import add_json, add_option, add_path
from kvkeep.cli.drawing import visible
from kvkeep.cli.trace import add_reading_arguments, opened
from kvkeep.core.errors import InvalidValue

if TYPE_CHECKING:
    import argparse

    from kvkeep.bench.replay import Advice, PlanCandidate, Workload
    from kvkeep.cli.arguments import Commands

__all__ = ["add_parser", "moves_between_tiers", "run", "serve_command", "vllm_option"]

_FOLDER = "/var/lib/kvkeep"  # the place of a disk tier in what is to be pasted
_MIB = 1 << 20
_USUAL = "lru"


def moves_between_tiers(chosen: PlanCandidate) -> bool:
    """Whether a setting's tiering does more than to write everything below.

    The pool of a server does this much: what it computes is written below, and stays in the pool.
    """
    return chosen.tiering not in {None, "inclusive"}


def serve_command(chosen: PlanCandidate, model: Path, bytes_per_token: float) -> str:
    """Return the ``kvkeep serve`` that uses this setting.

    The memory is the pool's; where the tiering moves blocks between memory and disk, it is a tier.
    """
    words = ["kvkeep", "serve", "--model", str(model)]
    if moves_between_tiers(chosen):
        for tier in _tiers(chosen, bytes_per_token):
            words += ["--tier", tier]
        return shlex.join([*words, "--tiering", str(chosen.tiering)])
    words += ["--memory", _bytes(chosen.memory_tokens * bytes_per_token)]
    words += ["--eviction", chosen.policy]
    if not chosen.disk_tokens:
        return shlex.join([*words, "--no-store"])
    words += ["--tier", _disk(chosen, bytes_per_token), "--tiering", str(chosen.tiering)]
    return shlex.join(words)


def vllm_option(chosen: PlanCandidate, bytes_per_token: float) -> str:
    """Return the ``--kv-transfer-config`` of vLLM with the memory and disk of a setting."""
    config = {
        "kv_connector": "KVKeepConnector",
        "kv_connector_module_path": "kvkeep.integrations.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"tiers": _tiers(chosen, bytes_per_token)},
    }
    return f"--kv-transfer-config {shlex.quote(json.dumps(config))}"


def _tiers(chosen: PlanCandidate, bytes_per_token: float) -> list[str]:
    memory = _bytes(chosen.memory_tokens * bytes_per_token)
    tiers = [f"memory://{memory}{_query(chosen, '?')}"]
    return [*tiers, _disk(chosen, bytes_per_token)] if chosen.disk_tokens else tiers


def _disk(chosen: PlanCandidate, bytes_per_token: float) -> str:
    size = _bytes(chosen.disk_tokens * bytes_per_token)
    return f"file://{quote(_FOLDER)}?size={size}{_query(chosen, '&')}"


def _query(chosen: PlanCandidate, mark: str) -> str:
    return "" if chosen.policy == _USUAL else f"{mark}policy={chosen.policy}"


def _bytes(amount: float) -> str:
    """Return an amount for the parsers of sizes: whole GiB where it is some, else MiB."""
    mib = max(1, round(amount / _MIB))
    return f"{mib}MiB" if mib % 1024 else f"{mib // 1024}GiB"


def add_parser(commands: Commands) -> None:
    """Add the command and its options."""
    parser = commands.add_parser(
        "plan",
        help="recommend a policy, memory and tiers for the traffic of a trace",
        description="Replay a trace with several policies, with less and more memory, and with a "
        "tier below it, and recommend what reuses most. docs/replay.md explains the results.",
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
    replay.add_replay_arguments(parser.add_argument_group("replaying"))
    replay.add_report_argument(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Replay, and print the recommendation."""
    replay.check_out(args)
    sizes = replay.ModelSizes.of(args)
    trace = opened(args, args.file)
    page_tokens = trace.unit_tokens
    groups = sizes.layout(page_tokens)
    memory = sizes.tokens(args.memory, page_tokens)
    disk = 0 if args.disk is None else sizes.tokens(args.disk, page_tokens)
    if disk and groups is not None:
        raise InvalidValue("tiers are replayed without windows and states; leave out --disk")
    cost, read = None, None
    if args.cost is not None:
        cost, reads = replay.read_costs(args.cost, 1 if disk else 0)
        read = reads[1] if reads else None
    size = None if args.model is None else sizes.bytes_per_token(page_tokens)
    plan = PlannedMemory(memory, disk, groups, cost, read, size)
    workload = replay.read_workload(trace)
    runs = plan.runs(workload)
    outcomes = replay.replayed(workload, runs, args)
    advice = advise(plan, dict(zip(runs, outcomes, strict=True)), workload)
    if args.out is not None:
        replay.report(workload, outcomes, args, str(advice))
    if args.json:
        print(json.dumps({"memory_tokens": memory, "disk_tokens": disk, **asdict(advice),
                          **replay.gap_facts(workload),
                          "outcomes": [one.as_dict() for one in outcomes]}))  # fmt: skip
        return 0
    _print(workload, advice)
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


def _print_flags(chosen: PlanCandidate, model: Path | None, bytes_per_token: float | None) -> None:
    """Print the setting as commands to paste; they need the size of a token."""
    if model is None or bytes_per_token is None:
        print("With --model PATH, the flags of kvkeep serve and of vLLM are printed here.")
        return
    print("kvkeep's server:\n")
    print(f"  {serve_command(chosen, model, bytes_per_token)}\n")
    if moves_between_tiers(chosen):
        _paragraph(
            f"The tiering {chosen.tiering} is one of tiers, so the memory is a tier here. The pool "
            "of running requests comes on top; --memory gives its size."
        )
    print("vLLM, with this memory beside the GPU's:\n")
    print(f"  {vllm_option(chosen, bytes_per_token)}\n")
    if moves_between_tiers(chosen):
        _paragraph("vLLM's connector has the tiering inclusive only.")
