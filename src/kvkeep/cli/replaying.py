"""Shared by ``kvkeep replay`` and ``kvkeep plan``: reading a trace, replaying it, the report."""

from __future__ import annotations

import math
import os
import shlex
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvkeep.bench.replay import BOUNDS, GroupSizes, RunLog, Workload, replay
from kvkeep.bench.replay.doubts import gaps
from kvkeep.bench.replay.effort import effort
from kvkeep.bench.replay.runs import increments
from kvkeep.bench.replay.words import duration
from kvkeep.cli.arguments import (
    add_option,
    add_path,
    add_switch,
    count,
    model_geometry,
    number,
)
from kvkeep.cli.drawing import visible
from kvkeep.cli.progress import progress
from kvkeep.core.cost import CostModel
from kvkeep.core.errors import InvalidValue, whole
from kvkeep.core.geometry import parse_bytes, parse_count
from kvkeep.core.geometry.units import format_bytes
from kvkeep.core.groups import GroupPlan

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence
    from pathlib import Path

    from kvkeep.bench.replay import Outcome, ReplayRun
    from kvkeep.bench.replay.report import Prices
    from kvkeep.bench.traces import FileTrace
    from kvkeep.core.cost import TransferCost
    from kvkeep.core.geometry import KVGeometry
    from kvkeep.core.groups import GroupLayout

__all__ = [
    "ModelSizes", "add_price_arguments", "add_replay_arguments", "add_report_arguments",
    "check_out", "facts", "gap_facts", "in_bytes", "prices_of", "read_workload", "replayed",
    "report", "tier_reads",
]  # fmt: skip

_FRONTS = ("memory", "shm", "buffer")  # names of tiers in front of all others
_READ = 64 << 20  # bytes of a read by which tiers are ranked
_MOMENT_S = 5.0
_LOG = ".runs.jsonl"  # suffix of the log of finished replays, beside a report


# --- arguments ---------------------------------------------------------------------------------


def add_replay_arguments(group: argparse._ArgumentGroup) -> None:
    """Add ``--model``, ``--groups`` and ``--jobs``; `ModelSizes.of` reads the first two."""
    add_path(
        group,
        "--model",
        "local model directory or config.json, for the size of a token's KV, and for windows and "
        "states, if the model has some",
        metavar="PATH",
    )
    add_option(
        group,
        "--groups LIST",
        "without --model: windows and states beside the layers that keep every token, in units of "
        "their KV: window=1024x5 (5 times the bytes of a token, for the last 1,024 tokens), "
        "chunk=8192x3, state=2400@64 (as large as 2,400 tokens, resumed at multiples of 64)",
    )
    add_option(
        group,
        "--jobs N",
        "replays to run at once, each in a process (default: one per processor)",
        type=count,
    )


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--out`` and ``--fresh``; `replayed` and `report` read them."""
    add_path(parser, "--out", "write a report to this .html file, with its data as JSON beside it")
    add_switch(
        parser,
        "--fresh",
        "with --out: replay everything again, instead of reusing the log of an earlier call",
    )


def add_price_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the prices; `prices_of` reads them."""
    prices = parser.add_argument_group("cost of a month, for the report (in any currency)")
    for option, metavar, text in (
        ("--gpu-hour", "PRICE", "price per hour of the GPUs that compute prompts"),
        ("--prefill-speed", "N", "prompt tokens that these GPUs compute per second"),
        ("--memory-price", "PRICE", "price per GiB of memory and month"),
        ("--disk-price", "PRICE", "price per GiB of the tiers below memory and month"),
    ):
        prices.add_argument(option, metavar=metavar, type=number, help=text)


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
    for suffix in (args.out.suffix, ".json", _LOG):
        written = args.out.with_suffix(suffix)
        if written.is_dir():
            raise InvalidValue(f"cannot write {written}: it is a directory")
        if written.resolve() in read:
            raise InvalidValue(f"--out {args.out} would overwrite {written}; name another file")


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """What a model keeps: its geometry, or the sizes of groups of layers; nothing without either.

    With windows or states, capacities in tokens count those of the layers that keep every token.
    """

    geometry: KVGeometry | None = None
    sizes: GroupSizes | None = None

    @classmethod
    def of(cls, args: argparse.Namespace) -> ModelSizes:
        """Read ``--model`` or ``--groups``. Raises `InvalidValue`, also for both."""
        if args.model is not None and args.groups is not None:
            raise InvalidValue("--groups describes a model; leave it out with --model")
        if args.model is not None:
            return cls(geometry=model_geometry(args.model))
        return cls(sizes=None if args.groups is None else GroupSizes.parse(args.groups))

    def layout(self, page_tokens: int) -> GroupLayout | None:
        """Return the layout in pages of ``page_tokens``; None without windows and states."""
        if self.sizes is not None:
            return self.sizes.layout(page_tokens)
        return None if self.geometry is None else GroupPlan(self.geometry, page_tokens).layout

    def bytes_per_token(self, page_tokens: int) -> float:
        """Return the bytes of a page per token. Raises `InvalidValue` without a model."""
        if self.geometry is None:
            raise InvalidValue("the size of a token needs --model")
        return GroupPlan(self.geometry, page_tokens).page_bytes / page_tokens

    def tokens(self, text: str, page_tokens: int) -> int:
        """Parse a capacity: tokens (``3M``, ``500k``), or bytes (``40GiB``) of the model's KV."""
        if not in_bytes(text):
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


def in_bytes(text: str) -> bool:
    """Whether a capacity is given in bytes, as 40GiB, and not in tokens."""
    return text.strip().lower().endswith(("b", "i"))


def prices_of(
    args: argparse.Namespace, kept: ModelSizes, page_tokens: int, *, tiers: bool
) -> Prices | None:
    """Return the prices that were given, None if none was.

    ``tiers``: something below memory is replayed, and has a price, too. Raises `InvalidValue` for a
    price that is missing, as it would count as 0, and for one that is negative or no number.
    """
    from kvkeep.bench.replay.report import Prices  # noqa: PLC0415 - only needed with prices

    given = {
        "--gpu-hour": args.gpu_hour,
        "--prefill-speed": args.prefill_speed,
        "--memory-price": args.memory_price,
        "--disk-price": args.disk_price,
    }
    if all(value is None for value in given.values()):
        return None
    needed = given | {"--model": args.model}
    if not tiers:
        del needed["--disk-price"]
    missing = [option for option, value in needed.items() if value is None]
    if missing:
        raise InvalidValue(f"the cost of a month also needs {', '.join(missing)}")
    for option, value in given.items():
        if value is not None and not 0 <= value < math.inf:
            raise InvalidValue(f"{option} is {value}; a number of at least 0 is needed")
    if not args.prefill_speed:
        raise InvalidValue("--prefill-speed is 0; a number of tokens a second above 0 is needed")
    return Prices(
        gpu_hour=args.gpu_hour,
        memory_gib_month=args.memory_price,
        disk_gib_month=args.disk_price or 0.0,  # without tiers nothing is priced by it
        kv_bytes_per_token=round(kept.bytes_per_token(page_tokens)),
        prefill_tokens_per_s=args.prefill_speed,
    )


# --- replaying ---------------------------------------------------------------------------------


def read_workload(trace: FileTrace) -> Workload:
    """Read a trace."""
    with (
        progress("reading", of=trace.length, remaining=True) as advance,
        increments(advance) as read,
    ):
        return Workload.read(trace, read)


def tier_reads(path: Path, levels: int) -> tuple[TransferCost | None, ...]:
    """Return the cost to read memory and ``levels`` tiers below it; () if the file has no tiers.

    The tiers are those of the file, fastest first. Raises `InvalidValue` if it has fewer.
    """
    found = CostModel.read(path).reads()
    known = {name: cost for name, cost in found.items() if name not in _FRONTS}
    if not levels or not known:
        return ()
    if len(known) < levels:
        raise InvalidValue(
            f"{path} has the costs of {', '.join(map(visible, known))}; {levels} tiers below "
            "memory need as many, or --bandwidth"
        )
    ranked = sorted(known.items(), key=lambda one: one[1].seconds(_READ))[:levels]
    said = ", ".join(
        f"{visible(name)} ({format_bytes(int(_READ / cost.seconds(_READ)))}/s)"
        for name, cost in ranked
    )
    print(f"tiers below memory, by {path}: {said}", file=sys.stderr)
    return (None, *(cost for _, cost in ranked))


def replayed(
    workload: Workload, runs: Sequence[ReplayRun], args: argparse.Namespace
) -> list[Outcome]:
    """Replay and return the outcomes, in order; with ``--out``, outcomes in its log are reused.

    The quickest policy of several replays runs first, and foretells on stderr how long the others
    take.
    """
    log = None
    if args.out is not None:
        path = args.out.with_suffix(_LOG)
        if args.fresh:
            path.unlink(missing_ok=True)
        log = RunLog(path)
        known = sum(log.find(workload, run) is not None for run in runs)
        if known:
            print(f"{known} of {len(runs)} replays are taken from {path}", file=sys.stderr)
    jobs = whole("--jobs", args.jobs, 1) if args.jobs is not None else os.cpu_count() or 1
    for run in runs:
        run.check(workload)
    left = [run for run in runs if log is None or log.find(workload, run) is None]
    found: dict[ReplayRun, Outcome] = {}
    with progress("replaying", of=len(runs) * len(workload), remaining=True) as advance:
        if len(left) > 1:
            first = min(left, key=lambda run: (run.policy in BOUNDS, effort(run)))
            found.update(replay(workload, [first], journal=log, progress=advance))
            _foretell(workload, found[first].seconds / effort(first), left, jobs)
        others = [run for run in runs if run not in found]
        found.update(replay(workload, others, jobs=jobs, journal=log, progress=advance))
    return [found[run] for run in runs]


def _foretell(workload: Workload, each_s: float, left: Sequence[ReplayRun], jobs: int) -> None:
    """Print how long the replays will take, if that is longer than a moment."""
    jobs = min(jobs, len(left))
    seconds = each_s * sum(map(effort, left)) / jobs
    if seconds >= _MOMENT_S:
        at_once = f", {jobs} at once" if jobs > 1 else ""
        print(
            f"{len(left)} replays of {len(workload):,} requests{at_once}: about "
            f"{duration(seconds)}",
            file=sys.stderr,
        )


def report(
    workload: Workload,
    outcomes: Sequence[Outcome],
    args: argparse.Namespace,
    prices: Prices | None = None,
    advice: str | None = None,
) -> None:
    """Write the report to ``--out``, and its data beside it."""
    from kvkeep.bench.replay.report import write_report  # noqa: PLC0415 - only needed with --out

    command = shlex.join(["kvkeep", *sys.argv[1:]])
    try:
        written = write_report(
            outcomes, args.out, trace=facts(workload), prices=prices, command=command, advice=advice
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
