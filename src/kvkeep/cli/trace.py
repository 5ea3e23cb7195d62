"""``kvkeep trace``: look at traces of requests, make them from a seed, convert them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from kvkeep.bench.traces import FORMATS, KINDS, generate, open_trace, summarise, write_trace
from kvkeep.cli.drawing import visible
from kvkeep.cli.facts import print_facts
from kvkeep.cli.numbers import count
from kvkeep.core.errors import InvalidValue

if TYPE_CHECKING:
    import argparse

    from kvkeep.bench.traces import FileTrace, TraceSummary
    from kvkeep.bench.traces.formats import Tokenize
    from kvkeep.cli.model import Commands

__all__ = ["add_parser", "add_reading_arguments", "opened", "run"]


def add_parser(commands: Commands) -> None:
    """Name the actions and their arguments."""
    trace = commands.add_parser(
        "trace",
        help="look at traces of requests, make and convert them",
        description="Look at traces of requests, make them from a seed, convert them to kvkeep's "
        "own format. docs/traces.md has the formats.",
    )
    actions = trace.add_subparsers(title="actions", metavar="ACTION", required=True)

    info = actions.add_parser(
        "info",
        help="what is in a trace, and how much of it could be reused",
        description="Count what is in a trace, and what a cache without limits would reuse of it.",
    )
    info.add_argument("file", metavar="FILE", type=Path)
    add_reading_arguments(info)
    info.add_argument("--json", action="store_true", help="print one JSON object instead")
    info.set_defaults(run=run, action=_info)

    made = actions.add_parser(
        "generate",
        help="make a trace",
        description="Make a trace of a kind of traffic; the same seed makes the same one, on "
        "every machine.",
    )
    made.add_argument("kind", choices=KINDS)
    made.add_argument("--seed", metavar="N", type=int, default=0, help="default: 0")
    made.add_argument(
        "--requests", metavar="N", type=count, default=10_000, help="how many (default: 10000)"
    )
    made.add_argument(
        "--unit", metavar="TOKENS", type=count, default=16, help="tokens an id (default: 16)"
    )
    made.add_argument(
        "--rate", metavar="N", type=float, help="sessions that begin a second (default: the kind's)"
    )
    _add_out(made, "--out", required=True)
    made.set_defaults(run=run, action=_generate)

    convert = actions.add_parser(
        "convert",
        help="write any trace in kvkeep's format",
        description="Write a trace in kvkeep's own format. Of prompts, only their ids are left.",
    )
    convert.add_argument("file", metavar="IN", type=Path)
    _add_out(convert, "out", metavar="OUT")
    add_reading_arguments(convert)
    convert.set_defaults(run=run, action=_convert)


def _add_out(parser: argparse.ArgumentParser, name: str, **options: object) -> None:
    options = {"metavar": "FILE", **options}
    parser.add_argument(
        name,
        type=Path,
        help="a file that is not there yet; compressed where it ends in .gz",
        **options,  # type: ignore[arg-type]
    )


def add_reading_arguments(parser: argparse.ArgumentParser) -> None:
    """How a file is read; `opened` reads it."""
    reading = parser.add_argument_group("reading")
    reading.add_argument("--format", choices=FORMATS, help="default: what the file looks like")
    reading.add_argument(
        "--unit",
        metavar="TOKENS",
        type=count,
        help="that an id stands for (default: mooncake 512, bailian 16, prompts 1, azure 512)",
    )
    reading.add_argument(
        "--unchained",
        action="store_true",
        help="an id in the file stands for its own tokens alone, not for all before them too",
    )
    reading.add_argument(
        "--text",
        metavar="HOW",
        default="words",
        help="what a token of a text is: words, bytes, or a model's directory, for its tokenizer "
        "(default: words)",
    )
    reading.add_argument(
        "--strict", action="store_true", help="end at a line that is no request; else it is counted"
    )


def opened(args: argparse.Namespace, path: Path) -> FileTrace:
    """The trace in ``path``, read as the arguments say."""
    return open_trace(
        path,
        format=args.format,
        strict=args.strict,
        unit_tokens=args.unit,
        chained=False if args.unchained else None,
        text=_text(args.text),
    )


def run(args: argparse.Namespace) -> int:
    """Do it."""
    code: int = args.action(args)
    return code


def _text(how: str) -> str | Tokenize:
    if how in {"words", "bytes"}:
        return how
    if not Path(how).is_dir():
        raise InvalidValue(f"--text is words, bytes or a model's directory; got {how!r}")
    from kvkeep.serve.engine.text import Tokenizer  # noqa: PLC0415 - seconds, for torch

    return Tokenizer.load(Path(how)).encode  # type: ignore[return-value]


def _info(args: argparse.Namespace) -> int:
    trace = opened(args, args.file)
    found = summarise(trace)
    if args.json:
        print(json.dumps({"file": str(args.file), "format": trace.format, **found.as_dict()}))
        return 0
    print_facts(f"{visible(str(args.file))} ({trace.format})", _rows(found))
    for reason in found.reasons:
        print(f"left out: {reason}")
    if found.unchained_units:
        print(
            f"kvkeep: {found.unchained_units:,} ids were known though the one before was not: they "
            "are not prefix-chained; read the file with --unchained",
            file=sys.stderr,
        )
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
    left_out = f", {trace.skipped:,} lines left out" if trace.skipped else ""
    print(f"{written:,} requests in {args.out}{left_out}")
    for reason in trace.reasons:
        print(f"left out: {reason}")
    return 0


def _rows(found: TraceSummary) -> list[tuple[str, str]]:
    each = found.unit_tokens
    rows = [
        ("requests", f"{found.requests:,}"),
        ("span", _duration(found.span_s)),
        ("prompt tokens", f"{found.tokens:,}"),
        (
            "a prompt (median, 90 %, longest)",
            f"{found.prompt_p50:,} / {found.prompt_p90:,} / {found.prompt_max:,}",
        ),
        ("answer tokens", f"{found.output_tokens:,}"),
        (f"units of {each} token{'s' * (each > 1)}", f"{found.units:,}"),
        ("reusable at most", f"{found.reusable_share:.1%} of them"),
    ]
    if found.namespaces > 1:
        rows += [
            ("namespaces", f"{found.namespaces:,}"),
            ("known in others alone", f"{found.elsewhere_units / max(1, found.units):.1%}"),
        ]
    if found.sessions:
        rows += [
            ("sessions", f"{found.sessions:,}"),
            ("requests alone in theirs", f"{found.single_turn:.1%}"),
        ]
    if len(found.kinds) > 1:
        rows += [(f"  {visible(kind)}", f"{count:,}") for kind, count in found.kinds.items()]
    if found.served_tokens:
        rows.append(("reused when captured", f"{found.cached_tokens / found.served_tokens:.1%}"))
    if found.skipped:
        rows.append(("lines left out", f"{found.skipped:,}"))
    if found.dropped:
        rows.append(("missed by the capture", f"{found.dropped:,}"))
    return rows


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
