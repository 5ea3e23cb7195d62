"""vLLM with a tier of any speed: never slower than without, and as fast as the tier allows.

Real vLLM on this machine's CPU, with a random Llama of 40 million parameters and prompts of 1,000
tokens, which are stored on a disk tier that is throttled to several bandwidths, from far too slow
to as fast as it is. At each, vLLM with kvkeep takes turns with vLLM alone: the time to the first
token, and the time of four prompts at once with 16 tokens each. Requests in the first ten seconds
at a bandwidth still go by what the last one taught; they are shown apart, the first one, too.
Ratios are of pairs that follow one another, and figures their medians.

    .venv-vllm/bin/python benchmarks/vllm_costs.py           # about five minutes
    .venv-vllm/bin/python benchmarks/vllm_costs.py --quick   # three bandwidths, fewer rounds
    .venv-vllm/bin/python benchmarks/vllm_costs.py --json
"""

# ruff: noqa: PLC0415 - vLLM takes half a minute to import, and not every process here needs it

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import vllm_engine
from figures import Figure, show
from vllm_engine import Engine, Served

LENGTH = 1000
POOL = 12  # seeds of four prompts each, that are stored
RATES = (1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 0.0)  # MB/s; 0: as it is
LEARNING_S = 10.0  # of requests at a new bandwidth, which are shown apart
AT_ONCE, ANSWER = 4, 16


class Throttled(Served):
    """One engine, whose disk tier has a bandwidth."""

    rate = 0.0
    _line = threading.Lock()

    def throttle(self, rate: float) -> float:
        """Give the disk tier a bandwidth in MB/s; 0: as it is."""
        from kvkeep.store.backends.disk import DiskBackend

        if not hasattr(DiskBackend, "plain_get"):
            DiskBackend.plain_get = get = DiskBackend.get  # type: ignore[attr-defined]

            def slow(backend: Any, block: bytes, room: Any) -> Any:
                record = get(backend, block, room)
                rate = Throttled.rate
                if record is not None and rate:
                    with Throttled._line:
                        time.sleep(len(record) / 1e6 / rate)
                return record

            DiskBackend.get = slow  # type: ignore[assignment, method-assign]
        Throttled.rate = rate
        return 0.0


def sweep(directory: Path, rates: tuple[float, ...], rounds: int) -> list[Figure]:
    """Measure at each bandwidth."""
    model = vllm_engine.make_model(directory / "model")
    tiers = ["memory://24MiB?touch=yes", f"file://{directory}/kv?size=8GiB"]
    script = Path(__file__).resolve()
    plain = Engine(model, None, directory / "plain.log", script)
    kept = Engine(model, vllm_engine.kvkeep_in(tiers), directory / "kept.log", script)
    for seed in range(1, POOL + 1):
        kept.ask(seed, LENGTH, AT_ONCE, 1)
        kept.flush()
    figures: list[Figure] = []
    turn = 0

    def both(count: int, answer: int) -> tuple[float, float]:
        nonlocal turn
        turn += 1
        seed = 1 + turn % POOL
        pair = [plain, kept] if turn % 2 else [kept, plain]
        times = {}
        for engine in pair:
            engine.forget()
            times[id(engine)] = engine.ask(seed, LENGTH, count, answer)
        return times[id(kept)], times[id(plain)]

    for rate in rates:
        kept.throttle(rate)
        name = f"{rate:g} MB/s" if rate else "unthrottled"
        until = time.monotonic() + LEARNING_S
        first = [both(1, 1)]
        while time.monotonic() < until:
            first.append(both(1, 1))
        figures.append(figure(f"{name}: the first request", first[:1]))
        figures.append(figure(f"{name}: the first {len(first)}, together", [total(first)]))
        figures.append(figure(f"{name}: then", [both(1, 1) for _ in range(rounds)], 1.03))
        many = [both(AT_ONCE, ANSWER) for _ in range(max(2, rounds // 4))]
        figures.append(figure(f"{name}: {AT_ONCE} at once, whole answers", many, 1.03))
    plain.close()
    kept.close()
    return figures


def total(pairs: list[tuple[float, float]]) -> tuple[float, float]:
    """Return the sums of both."""
    return sum(mine for mine, _ in pairs), sum(theirs for _, theirs in pairs)


def figure(text: str, pairs: list[tuple[float, float]], goal: float | None = None) -> Figure:
    """Return the median of the times with kvkeep, and of their ratios to those without."""
    ratios = [mine / theirs for mine, theirs in pairs]
    value = 1e3 * statistics.median(mine for mine, _ in pairs)
    return Figure(
        text, "ms", value, "without", statistics.median(ratios), min(ratios), max(ratios), goal,
        "less",
    )  # fmt: skip


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer bandwidths and rounds")
    parser.add_argument("--rates", help="bandwidths in MB/s, such as 3,30,0; 0: as the disk is")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--dir", type=Path, help="where the disk tier is to be")
    parser.add_argument("--serve", nargs=2, metavar=("MODEL", "TRANSFER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.environ |= vllm_engine.ENVIRONMENT
    if options.serve:
        vllm_engine.serve(*options.serve, kind=Throttled)
        return
    vllm_engine.LAYERS |= {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8}
    vllm_engine.HEADS["num_attention_heads"] = 8
    rates: tuple[float, ...] = (3.0, 30.0, 0.0) if options.quick else RATES
    rounds = 8 if options.quick else 12
    if options.rates:
        rates = tuple(map(float, options.rates.split(",")))
    with tempfile.TemporaryDirectory(dir=options.dir, prefix="kvkeep costs ") as directory:
        figures = sweep(Path(directory), rates, rounds)
    title = f"vLLM on the CPU, {LENGTH:,} tokens, a tier of several speeds, {rounds} rounds"
    sys.exit(show(figures, title, as_json=options.json))


if __name__ == "__main__":
    main()
