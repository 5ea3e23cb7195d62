"""``kvkeep trace``: summarise, generate and convert traces of requests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from kvkeep.bench.replay import summarise
from kvkeep.bench.traces import FORMATS, KINDS, generate, open_trace, write_trace
from kvkeep.cli.arguments import add_count, add_json, add_option, count, number
from kvkeep.cli.drawing import visible
from kvkeep.cli.tables import print_facts

if TYPE_CHECKING:
    import argparse

    from kvkeep.bench.replay import TraceSummary
    from kvkeep.bench.traces import FileTrace
    from kvkeep.cli.arguments import Commands

__all__ = ["add_parser", "add_reading_arguments", "opened", "run"]


def add_parser(commands: Commands) -> None:
    """Add the command, its actions and their options."""
    trace = commands.add_parser(
        "trace",
        help="summarise, generate and convert traces of requests",
        description="Summarise traces of requests, generate them from a seed, and convert them to "
        "kvkeep's own format. docs/traces.md describes the formats.",
    )
    actions = trace.add_subparsers(title="actions", metavar="ACTION", required=True)

    info = actions.add_parser(
        "info",
        help="summarise a trace, and how much of it a cache could reuse",
        description="Count the requests and tokens of a trace, and what an unlimited cache would "
        "reuse of them.",
    )
    info.add_argument("file", metavar="FILE", type=Path, help="trace file")
    add_reading_arguments(info)
    add_json(info)
    info.set_defaults(run=run, action=_info)

    made = actions.add_parser(
        "generate",
        help="generate a trace",
        description="Generate a trace of one kind of traffic. The same seed gives the same trace "
        "on every machine.",
    )
    made.add_argument("kind", choices=KINDS, help="kind of traffic")
    add_option(made, "--seed N", "seed", type=count, default=0)
    add_count(made, "--requests", 10_000, "number of requests")
    add_count(made, "--unit", 16, "tokens per id", metavar="TOKENS")
    add_option(
        made,
        "--rate N",
        "sessions that begin per second (default: depends on the kind)",
        type=number,
    )
    _add_out(made, "--out", required=True)
    made.set_defaults(run=run, action=_generate)

    convert = actions.add_parser(
        "convert",
        help="convert any trace to kvkeep's format",
        description="Write a trace in kvkeep's own format, which has ids in place of prompts.",
    )
    convert.add_argument("file", metavar="IN", type=Path, help="trace file to read")
    _add_out(convert, "out", metavar="OUT")
    add_reading_arguments(convert)
    convert.set_defaults(run=run, action=_convert)


def _add_out(parser: argparse.ArgumentParser, name: str, **options: object) -> None:
    options = {"metavar": "FILE", **options}
    parser.add_argument(
        name,
        type=Path,
        help="file to write, which must not exist; compressed if the name ends in .gz or .zst",
        **options,  # type: ignore[arg-type]
    )


def add_reading_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options for reading a trace; `opened` uses them."""
    reading = parser.add_argument_group("reading")
    formats = f"format of the file: {', '.join(FORMATS)} (default: detected)"
    reading.add_argument("--format", metavar="NAME", choices=FORMATS, help=formats)
    add_option(
        reading,
        "--unit TOKENS",
        "tokens per id (default: mooncake 512, bailian 16, prompts 1; kv-cache-tester: block_size, "
        "of which a multiple is possible)",
        type=count,
    )


def opened(args: argparse.Namespace, path: Path) -> FileTrace:
    """Open the trace in ``path`` with the options of `add_reading_arguments`."""
    return open_trace(path, format=args.format, unit_tokens=args.unit)


def run(args: argparse.Namespace) -> int:
    """Run the action."""
    code: int = args.action(args)
    return code


def _info(args: argparse.Namespace) -> int:
    trace = opened(args, args.file)
    found = summarise(trace)
    if args.json:
        print(json.dumps({"file": str(args.file), "format": trace.format, **found.as_dict()}))
        return 0
    print_facts(f"{visible(str(args.file))} ({trace.format})", _rows(found))
    for gap in found.warnings:
        print(f"Warning: {visible(gap)}")
    for reason in found.skipped_reasons[1:]:
        print(f"skipped: {visible(reason)}")
    return 0


def _generate(args: argparse.Namespace) -> int:
    trace = generate(
        args.kind,
        seed=args.seed,
        requests=args.requests,
        unit_tokens=args.unit,
        sessions_per_second=args.rate,
    )
    print(f"{write_trace(trace, args.out):,} requests in {args.out}")
    return 0


def _convert(args: argparse.Namespace) -> int:
    trace = opened(args, args.file)
    written = write_trace(trace, args.out)
    skipped = f", {trace.skipped:,} lines skipped" if trace.skipped else ""
    print(f"{written:,} requests in {args.out}{skipped}")
    for reason in trace.reasons:
        print(f"skipped: {visible(reason)}")
    return 0


def _rows(found: TraceSummary) -> list[tuple[str, str]]:
    each, most = found.unit_tokens, found.reusable_share
    rows = [
        ("requests", f"{found.requests:,}"),
        ("span", _duration(found.span_s)),
        ("prompt tokens", f"{found.tokens:,}"),
        (
            "tokens per prompt (median, 90 %, longest)",
            f"{found.prompt_p50:,} / {found.prompt_p90:,} / {found.prompt_max:,}",
        ),
        ("answer tokens", f"{found.output_tokens:,}"),
        (f"units of {each} token{'s' * (each > 1)}", f"{found.units:,}"),
        ("reusable at most", "unknown" if most is None else f"{most:.1%} of the units"),
    ]
    if found.namespaces > 1:
        rows += [
            ("namespaces", f"{found.namespaces:,}"),
            (
                "cached only in other namespaces",
                f"{found.elsewhere_tokens / max(1, found.tokens):.1%}",
            ),
        ]
    if found.sessions:
        rows.append(("sessions", f"{found.sessions:,}"))
    if found.served_tokens:
        rows.append(("reused when captured", f"{found.cached_tokens / found.served_tokens:.1%}"))
    if found.skipped:
        rows.append(("lines skipped", f"{found.skipped:,}"))
    if found.dropped:
        rows.append(("requests dropped by the capture", f"{found.dropped:,}"))
    return rows


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
