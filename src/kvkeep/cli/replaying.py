"""Shared by ``kvkeep replay`` and ``kvkeep plan``: reading a trace, replaying it, the report."""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvkeep.bench.replay import Workload, replay
from kvkeep.bench.replay.runs import increments
from kvkeep.bench.replay.summary import gaps
from kvkeep.cli.arguments import add_option, add_path, count, model_geometry
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
    from kvkeep.bench.traces import FileTrace
    from kvkeep.core.cost import TransferCost
    from kvkeep.core.geometry import KVGeometry
    from kvkeep.core.groups import GroupLayout

__all__ = [
    "ModelSizes", "add_replay_arguments", "add_report_argument",
    "check_out", "facts", "gap_facts", "read_workload", "replayed",
    "report", "tier_reads",
]  # fmt: skip

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
    with (
        progress("reading", of=trace.length, remaining=True) as advance,
        increments(advance) as read,
    ):
        return Workload.read(trace, read)


def tier_reads(path: Path, levels: int) -> tuple[TransferCost | None, ...]:
    """Return the cost to read memory and ``levels`` tiers below it; () if the file has no tiers.

    The tiers are those of the file, fastest first. Raises `InvalidValue` if it has fewer.
    """
    reads = CostModel.read(path).reads()
    below = {name: cost for name, cost in reads.items() if name not in _FRONTS}
    if not levels or not below:
        return ()
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
    return (None, *(cost for _, cost in ranked))


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
