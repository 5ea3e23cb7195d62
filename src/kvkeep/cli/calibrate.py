"""``kvkeep calibrate``: measure what prefill and decode take here, for replay in a closed loop."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from kvkeep.bench.replay.costs import PrefillCost
from kvkeep.cli.calibrating import LENGTHS, measure_engine, measure_server
from kvkeep.cli.model import add_model_arguments, choose_threads
from kvkeep.cli.numbers import count
from kvkeep.core.errors import InvalidValue, whole
from kvkeep.core.geometry.units import parse_count

if TYPE_CHECKING:
    import argparse

    from kvkeep.bench.replay.costs import Fit
    from kvkeep.cli.calibrating import Readings
    from kvkeep.cli.model import Commands

__all__ = ["add_parser", "run"]

_CLOSE = 0.1


def add_parser(commands: Commands) -> None:
    """Name the arguments."""
    parser = commands.add_parser(
        "calibrate",
        help="measure what a prompt and an answer take, for kvkeep replay",
        description="Measure how long prompts of several lengths take, with and without a cached "
        "prefix, and how long an answer takes; fit a cost to it and write it as JSON. On kvkeep's "
        "own engine, or on a server that speaks OpenAI's API. docs/calibrate.md has more.",
    )
    add_model_arguments(parser, memory="256MiB")
    parser.add_argument("--dtype", help="float32, float16 or bfloat16 (default: as saved)")
    server = parser.add_argument_group("a server instead")
    server.add_argument(
        "--url",
        metavar="URL",
        help="of a server that speaks OpenAI's API, such as http://host:8000",
    )
    server.add_argument(
        "--name", help="of the model to ask there (default: the first that it serves)"
    )
    measuring = parser.add_argument_group("measuring")
    measuring.add_argument(
        "--lengths",
        metavar="LIST",
        help="of prompts, in tokens, with commas between (default: "
        f"{','.join(map(str, LENGTHS))}, as far as the model goes)",
    )
    measuring.add_argument(
        "--repeats",
        metavar="N",
        type=count,
        default=3,
        help="of each, the median counts (default: 3)",
    )
    measuring.add_argument(
        "--decode", metavar="N", type=count, default=32, help="tokens of an answer (default: 32)"
    )
    parser.add_argument("--out", metavar="FILE", type=Path, help="write the cost there, as JSON")
    parser.add_argument("--json", action="store_true", help="print it as one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure, fit, write, say what came of it."""
    whole("--repeats", args.repeats, 1)
    whole("--decode", args.decode, 2)
    if args.url is not None and args.model is not None:
        raise InvalidValue("--model is measured here and --url elsewhere: give one of the two")
    if args.out is not None and not args.out.absolute().parent.is_dir():
        raise InvalidValue(f"cannot write {args.out}: there is no folder {args.out.parent}")
    lengths = None if args.lengths is None else _lengths(args.lengths)
    if args.url is None:
        choose_threads(args)  # before torch comes
        readings = measure_engine(args, lengths)
    else:
        readings = measure_server(args, lengths)
    fit = PrefillCost.fit(
        readings.prefill,
        decode_seconds_per_token=readings.decode_s,
        kv_bytes_per_token=readings.kv_bytes,
        name=readings.name,
    )
    measured = {
        "measured": [
            {"start": one.start, "stop": one.stop, "seconds": one.seconds, "fit_error": error}
            for one, error in zip(readings.prefill, fit.errors, strict=True)
        ],
        "median_error": fit.median_error,
        "largest_error": fit.largest_error,
    }
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
            f"--lengths are two or more different ones, of 2 tokens or more; got {text!r}"
        )
    return found


def _print(readings: Readings, fit: Fit, out: Path | None) -> None:
    cost = fit.cost
    print(f"{readings.name}: a prompt of n tokens behind c cached ones takes")
    print(
        f"  {_seconds(cost.seconds_fixed)} + {_seconds(cost.seconds_per_token)} a token"
        f" + {_seconds(cost.seconds_per_token_pair)} a pair, of which there are (n² - c²) / 2"
    )
    print(f"  and each token of an answer {_seconds(cost.decode_seconds_per_token)}")
    print(f"{'cached':>8} {'prompt':>8} {'measured':>10} {'by the fit':>10}")
    for one in readings.prefill:
        by_fit = cost.prefill_s(one.start, one.stop)
        print(f"{one.start:8,} {one.stop:8,} {_seconds(one.seconds):>10} {_seconds(by_fit):>10}")
    print(
        f"The fit misses half of these by less than {fit.median_error:.0%}, and none by more than "
        f"{fit.largest_error:.0%}."
    )
    if fit.median_error > _CLOSE:
        print("That is far: was something else running? More --repeats can help.")
    if readings.remark:
        print(readings.remark)
    if out is not None:
        print(f"Written to {out}.")


def _seconds(value: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value / 1e-9:.3g} ns"
