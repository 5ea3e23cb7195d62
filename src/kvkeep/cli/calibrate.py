"""``kvkeep calibrate``: measure what prompts, answers and tiers take, for ``--cost``."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from kvkeep.cli.arguments import add_count, add_json, add_option, add_path, count
from kvkeep.cli.calibrating import LENGTHS, measure_engine, measure_server
from kvkeep.cli.model import add_dtype, add_model_arguments, choose_threads
from kvkeep.cli.tables import print_table
from kvkeep.core.cost import PrefillCost
from kvkeep.core.errors import InvalidValue, whole
from kvkeep.core.geometry.units import format_bytes, parse_count

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence
    from pathlib import Path

    from kvkeep.cli.arguments import Commands
    from kvkeep.cli.calibrating import Readings
    from kvkeep.cli.calibrating_tiers import TierReadings
    from kvkeep.core.cost import Fit, TransferCost

__all__ = ["add_parser", "run"]

_CLOSE = 0.1  # median relative error of a good fit


def add_parser(commands: Commands) -> None:
    """Add the command and its options."""
    parser = commands.add_parser(
        "calibrate",
        help="measure the time of prompts, answers and tiers, for kvkeep replay, route and serve",
        description="Measure the time that prompts of several lengths take, with and without a "
        "cached prefix, and the time of an answer; fit a cost to the times and write it as JSON. "
        "Measures kvkeep's own engine, or a server with OpenAI's API; and with --tier what reads "
        "and writes of the model's KV take. See docs/calibrate.md.",
    )
    add_model_arguments(parser, memory="256MiB")
    add_dtype(parser)
    server = parser.add_argument_group("a server instead")
    add_option(
        server, "--url URL", "address of a server with OpenAI's API, such as http://host:8000"
    )
    server.add_argument(
        "--name", help="name of the model there (default: the first that it serves)"
    )
    tiers = parser.add_argument_group("tiers as well")
    tiers.add_argument(
        "--tier",
        metavar="URL",
        action="append",
        default=[],
        help="tier to measure with blocks of the model's KV, codec included: file:///path, "
        "valkey://host:6379, s3://bucket; may be repeated. What is written there is deleted",
    )
    add_option(
        tiers,
        "--block-tokens N",
        "tokens per stored block, as in kvkeep serve (default: 256, rounded up to whole pages)",
        type=count,
    )
    measuring = parser.add_argument_group("measuring")
    add_option(
        measuring,
        "--lengths LIST",
        "prompt lengths in tokens, separated by commas (default: "
        f"{','.join(map(str, LENGTHS))}, up to the model's longest)",
    )
    add_count(measuring, "--repeats", 3, "measurements of each length; their median is used")
    add_count(measuring, "--decode", 32, "tokens per answer")
    add_path(parser, "--out", "write the cost to this file, as JSON")
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure, fit, write and print the cost."""
    whole("--repeats", args.repeats, 1)
    whole("--decode", args.decode, 2)
    if args.url is not None and args.model is not None:
        raise InvalidValue("--model measures the engine and --url a server: give one of the two")
    if args.url is not None and args.tier:
        raise InvalidValue(
            "--tier is measured with KV of the model: leave out --url, or measure the tiers apart"
        )
    if args.out is not None and not args.out.absolute().parent.is_dir():
        raise InvalidValue(f"cannot write {args.out}: there is no folder {args.out.parent}")
    lengths = None if args.lengths is None else _lengths(args.lengths)
    if args.url is None:
        choose_threads(args)  # before torch is imported
        readings = measure_engine(args, lengths)
    else:
        readings = measure_server(args, lengths)
    fit = PrefillCost.fit(
        readings.prefill,
        decode_seconds_per_token=readings.decode_s,
        kv_bytes_per_token=readings.kv_bytes,
        name=readings.name,
    )
    measured: dict[str, Any] = {
        "measured": [
            {"start": one.start, "stop": one.stop, "seconds": one.seconds, "fit_error": error}
            for one, error in zip(readings.prefill, fit.errors, strict=True)
        ],
        "median_error": fit.median_error,
        "largest_error": fit.largest_error,
    }
    measured["model"] = readings.model
    measured["tiers"] = {tier.name: tier.as_dict() for tier in readings.tiers}
    if args.out is not None:
        fit.cost.write(args.out, **measured)
    if args.json:
        print(json.dumps({**fit.cost.as_dict(), **measured}))
    else:
        _print(readings, fit, args.out)
    return 0


def _lengths(text: str) -> list[int]:
    try:
        found = sorted({parse_count(part) for part in text.split(",")})
    except InvalidValue as error:
        raise InvalidValue(f"--lengths is a list such as 256,1k,4096: {error}") from error
    if found[0] < 2 or len(found) < 2:
        raise InvalidValue(
            f"--lengths needs two or more different lengths, of 2 tokens or more; got {text!r}"
        )
    return found


def _print(readings: Readings, fit: Fit, out: Path | None) -> None:
    cost = fit.cost
    print(f"{readings.name}: a prompt of n tokens, the first c of them cached, takes")
    print(
        f"  {_seconds(cost.seconds_fixed)} + (n - c) · {_seconds(cost.seconds_per_token)}"
        f" + (n² - c²) / 2 · {_seconds(cost.seconds_per_token_pair)}"
    )
    print(f"  and each token of the answer {_seconds(cost.decode_seconds_per_token)}")
    print(f"{'cached':>8} {'prompt':>8} {'measured':>10} {'fitted':>10}")
    for one in readings.prefill:
        fitted = cost.prefill_s(one.start, one.stop)
        print(f"{one.start:8,} {one.stop:8,} {_seconds(one.seconds):>10} {_seconds(fitted):>10}")
    print(
        f"Error of the fit: {fit.median_error:.0%} in the median, {fit.largest_error:.0%} at most."
    )
    if fit.median_error > _CLOSE:
        print("That is large: was the machine busy? More --repeats can help.")
    if readings.remark:
        print(readings.remark)
    _print_tiers(readings.tiers, cost.kv_bytes_per_token)
    if out is not None:
        print(f"Written to {out}.")


def _print_tiers(tiers: Sequence[TierReadings], token_bytes: float) -> None:
    """Print what tiers take, and how many tokens a second that is."""
    if not tiers:
        return
    rows = []
    for tier in tiers:
        cells = [tier.name]
        for cost in (tier.read, tier.write):
            if cost is None:
                cells += ["", ""]
            else:
                cells += [_seconds(cost.seconds_fixed), _speed(cost)]
        tokens = tier.block_bytes * tier.blocks / token_bytes
        cells.append(f"{tokens / tier.read.seconds(tokens * token_bytes):,.0f}")
        rows.append(cells)
    head = ["tier", "per read", "bytes read", "per write", "bytes written", "tokens/s"]
    print_table(head, rows)


def _speed(cost: TransferCost) -> str:
    speed = cost.bytes_per_s
    return f"{format_bytes(int(speed))}/s" if speed < math.inf else ""


def _seconds(value: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value / 1e-9:.3g} ns"
