"""``kvkeep doctor``: check options, tiers and the machine before an engine is started."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Final

from kvkeep.cli.arguments import add_count, add_json, add_option, add_seconds, count
from kvkeep.cli.drawing import visible
from kvkeep.core.errors import InvalidValue, whole

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from kvkeep.cli.arguments import Commands
    from kvkeep.cli.doctor_checks import CheckResult

__all__ = ["add_parser", "run"]

_FAILED = 1
_LONGEST_S: Final = 60.0


def add_parser(commands: Commands) -> None:
    """Add the command and its options."""
    parser = commands.add_parser(
        "doctor",
        help="check options, tiers and the machine before an engine is started",
        description="Check what an engine is to be started with: options, and for each tier "
        "access, space and speed; then limits of the machine, and versions. One line a check: ok, "
        "warn, or fail with what to do. Writes, reads and deletes records of its own, and leaves "
        "nothing behind. Exit code 1 if a check failed.",
    )
    parser.add_argument(
        "what",
        metavar="WHAT",
        nargs="*",
        help="vLLM's --kv-transfer-config or kvkeep's options as JSON, a file with either, or URLs "
        "of tiers, fastest first (default: the machine and versions alone)",
    )
    add_option(parser, "--tp RANKS", "tensor-parallel ranks", type=count, default=1)
    add_count(parser, "--block-tokens", 16, "tokens per stored block: vLLM's --block-size")
    add_seconds(parser, "--seconds", 1.0, "time for the speed of each tier; 0: it is not measured")
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Check everything; print each result at once, unless ``--json``."""
    whole("--block-tokens", args.block_tokens, 1)
    whole("--tp", args.tp, 1)
    if not 0 <= args.seconds <= _LONGEST_S:
        raise InvalidValue(f"--seconds is {args.seconds:g}; 0 to {_LONGEST_S:g} are possible")
    results: list[CheckResult] = []
    for result in _results(args):
        results.append(result)
        if not args.json:
            print(visible(str(result)), flush=True)
    counts = Counter(result.state for result in results)
    if args.json:
        print(json.dumps({
            "checks": [asdict(result) for result in results],
            "failed": counts["fail"], "warned": counts["warn"],
        }))  # fmt: skip
    else:
        print(f"{len(results)} checks: {counts['fail']} failed, {counts['warn']} warnings")
    return _FAILED if counts["fail"] else 0


def _results(args: argparse.Namespace) -> Iterator[CheckResult]:
    from kvkeep.cli.doctor_checks import (  # noqa: PLC0415
        TOKEN_BYTES,
        asked_for,
        machine_results,
        tier_results,
    )

    record = max(4096, TOKEN_BYTES * args.block_tokens // args.tp)
    asked, results = asked_for(args.what)
    yield from results
    for part in asked:
        claimed: dict[int, int] = {}
        for place in part.tiers:
            yield from tier_results(
                place,
                record,
                seconds=args.seconds,
                load_timeout=part.load_timeout,
                claimed=claimed,
            )
    yield from machine_results(
        [place for part in asked for place in part.tiers],
        ranks=args.tp,
        rows=max((part.rows for part in asked), default=0),
        engines={part.engine for part in asked},
    )
