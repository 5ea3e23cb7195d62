"""``kvkeep trace``: summarise, generate and convert traces of requests."""

from __future__ import annotations

import json
from argparse import ArgumentTypeError
from pathlib import Path
from typing import TYPE_CHECKING

from kvkeep.bench.replay import summarise
from kvkeep.bench.traces import FORMATS, KINDS, generate, open_trace, write_trace
from kvkeep.cli.arguments import add_count, add_json, add_option, add_switch, count, number, seconds
from kvkeep.cli.drawing import visible
from kvkeep.cli.tables import print_facts, print_table
from kvkeep.core.errors import InvalidValue
from kvkeep.core.geometry import download_hint

if TYPE_CHECKING:
    import argparse

    from kvkeep.bench.replay import TraceSummary
    from kvkeep.bench.traces import FileTrace
    from kvkeep.bench.traces.formats import Tokenize
    from kvkeep.cli.arguments import Commands

__all__ = ["add_parser", "add_reading_arguments", "opened", "run"]

_MOST_STOPS = 12  # rows of the table of how answers end


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
    made.add_argument(
        "--set",
        metavar="NAME=NUMBER",
        action="append",
        default=[],
        help="change a number of the kind: flood=4 for tenants, reasons=0.5 for reasoning "
        "(may be given several times; docs/traces.md names them)",
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
    reading.add_argument("--format", choices=FORMATS, help="format of the file (default: detected)")
    add_option(
        reading,
        "--unit TOKENS",
        "tokens per id (default: mooncake 512, bailian 16, prompts 1, azure 512; kv-cache-tester: "
        "block_size, of which a multiple is possible)",
        type=count,
    )
    add_switch(
        reading,
        "--unchained",
        "an id in the file stands for its own tokens only, not also for all tokens before them",
    )
    add_option(
        reading,
        "--text HOW",
        "how text is split into tokens: words, bytes, or a model directory, for its tokenizer",
        default="words",
    )
    add_option(
        reading,
        "--spread SECONDS",
        "with kv-cache-tester, whose times begin at 0 in each session: seconds over which the "
        "sessions begin",
        type=seconds,
        default=0.0,
    )
    add_option(
        reading,
        "--longest-gap SECONDS",
        "with kv-cache-tester, whose sessions may be left for days: shorten longer times without "
        "requests in a session",
        type=seconds,
    )
    add_switch(reading, "--strict", "fail at an invalid line (default: skip it and count it)")


def opened(args: argparse.Namespace, path: Path) -> FileTrace:
    """Open the trace in ``path`` with the options of `add_reading_arguments`."""
    return open_trace(
        path,
        format=args.format,
        strict=args.strict,
        unit_tokens=args.unit,
        chained=False if args.unchained else None,
        text=_text(args.text),
        spread_s=args.spread,
        longest_gap_s=args.longest_gap,
    )


def run(args: argparse.Namespace) -> int:
    """Run the action."""
    code: int = args.action(args)
    return code


def _text(how: str) -> str | Tokenize:
    if how in {"words", "bytes"}:
        return how
    if not Path(how).is_dir():
        raise InvalidValue(
            f"--text is words, bytes or a model's directory; got {how!r}{download_hint(how)}"
        )
    from kvkeep.serve.engine.text import Tokenizer  # noqa: PLC0415 - seconds, for torch

    return Tokenizer.load(Path(how)).encode  # type: ignore[return-value]


def _info(args: argparse.Namespace) -> int:
    trace = opened(args, args.file)
    found = summarise(trace)
    if args.json:
        print(json.dumps({"file": str(args.file), "format": trace.format, **found.as_dict()}))
        return 0
    print_facts(f"{visible(str(args.file))} ({trace.format})", _rows(found))
    if found.sessions:
        names = ("requests", "pause (median)", "pause (90 %)", "never return")
        print_table(["how answers end", *names], _stop_rows(found))
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
        changed=dict(map(_number, args.set)),
    )
    print(f"{write_trace(trace, args.out):,} requests in {args.out}")
    return 0


def _number(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    try:
        found = number(value)
    except ArgumentTypeError:
        raise InvalidValue(f"--set needs NAME=NUMBER, such as flood=4; got {text!r}") from None
    return name, int(found) if found.is_integer() else found


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
        rows += [
            ("sessions", f"{found.sessions:,}"),
            ("requests in a session of one", f"{found.single_turn:.1%}"),
        ]
    if len(found.kinds) > 1:
        rows += [(f"  {visible(kind)}", f"{count:,}") for kind, count in found.kinds.items()]
    if found.served_tokens:
        rows.append(("reused when captured", f"{found.cached_tokens / found.served_tokens:.1%}"))
    if found.skipped:
        rows.append(("lines skipped", f"{found.skipped:,}"))
    if found.dropped:
        rows.append(("requests dropped by the capture", f"{found.dropped:,}"))
    return rows


def _stop_rows(found: TraceSummary) -> list[list[str]]:
    rows = []
    for stop, one in list(found.stops.items())[:_MOST_STOPS]:
        pauses = [
            "" if seconds is None else _duration(seconds)
            for seconds in (one.pause_p50_s, one.pause_p90_s)
        ]
        never = "" if one.never is None else f"{one.never:.1%}"
        rows.append([visible(stop) or "unknown", f"{one.requests:,}", *pauses, never])
    return rows


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
