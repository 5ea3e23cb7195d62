"""Cost of the sampled miss-ratio curve, and its error against the full simulation.

Accuracy: workloads in blocks, at capacities from 500 blocks on; the largest error over all of them
in points of hit rate, over several seeds of the sample. Cost: processor time of the same requests
with and without, in turns, in one process.

    python benchmarks/what_if.py                      # workloads that are made
    python benchmarks/what_if.py --trace FILE         # and a trace, as of Mooncake
    python benchmarks/what_if.py --quick
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvkeep import Namespace, PagedCache
from kvkeep.bench.traces import generate, open_trace
from kvkeep.core.miss_ratio import MissRatioCurve

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    Ids = npt.NDArray[np.int64]
    Tokens = npt.NDArray[np.int32]

CAPACITIES = (500, 700, 1000, 1500, 2000, 3000, 4000, 6000, 8000, 10_000, 15_000, 20_000, 30_000,
              50_000, 100_000)  # fmt: skip
MADE = {"chat": 64}
PAGE = 16


def blocks_of(kind: str, requests: int) -> list[Ids]:
    """Return the whole blocks of a generated workload's prompts."""
    trace = generate(kind, seed=1, requests=requests, unit_tokens=MADE[kind])
    units = [
        request.units[: request.tokens // trace.unit_tokens]
        for request in trace
        if request.units is not None
    ]
    return [one for one in units if len(one)]


def curve_of(prompts: list[Ids], sample: float, seed: int) -> tuple[list[float], float]:
    """Return the curve over blocks with random keys, and its processor seconds."""
    joined = np.concatenate(prompts)
    _, numbers = np.unique(joined, return_inverse=True)
    chance = np.random.default_rng(seed)
    words = chance.integers(0, 2**64, int(numbers.max()) + 1, dtype=np.uint64)[numbers]
    curve = MissRatioCurve(sample, most_blocks=200_000)
    start, begun = 0, time.thread_time()
    for one in prompts:
        curve.add(words[start : start + len(one)], Namespace(), len(one))
        start += len(one)
    curve.settle()
    return curve.curve(CAPACITIES), time.thread_time() - begun


def accuracy(name: str, prompts: list[Ids], seeds: int) -> None:
    """Print the largest errors at 5, 10 and 20 %."""
    exact = np.array(curve_of(prompts, 1.0, 0)[0])
    shown = []
    for sample in (0.05, 0.1, 0.2):
        errors = [
            100 * float(np.abs(np.array(curve_of(prompts, sample, seed)[0]) - exact).max())
            for seed in range(seeds)
        ]
        shown.append(f"{statistics.mean(errors):.2f} ({max(errors):.2f})")
    blocks = sum(map(len, prompts))
    print(f"| {name} | {len(prompts):,} | {blocks:,} | {' | '.join(shown)} |", flush=True)


# --- cost ------------------------------------------------------------------------------------


def serve(cache: PagedCache, prompts: list[Tokens], published: int = 0) -> float:
    """Return the processor seconds of the requests."""
    begun = time.thread_time()
    for prompt in prompts:
        sequence = cache.open(prompt)
        sequence.copies()
        sequence.publish(len(prompt) - published)
        sequence.close()
    cache.check if cache.watch is None else cache.watch.points()
    return time.thread_time() - begun


def cost(name: str, make: Callable[[float | None], PagedCache], prompts: list[Tokens],
         rounds: int, published: int = 0) -> None:  # fmt: skip
    """Print the cost with and without the curve, in turns."""
    plain, watched = [], []
    for _ in range(rounds):
        plain.append(serve(make(None), prompts, published))
        watched.append(serve(make(0.1), prompts, published))
    each = 1e6 / len(prompts)
    ratios = [100 * (more / less - 1) for more, less in zip(watched, plain, strict=True)]
    print(
        f"| {name} | {min(plain) * each:,.1f} | {min(watched) * each:,.1f} "
        f"| {100 * (min(watched) / min(plain) - 1):+.1f} % | {statistics.median(ratios):+.1f} % |",
        flush=True,
    )


def random_tokens(rng: np.random.Generator, length: int) -> Tokens:
    """Return a prompt of random tokens."""
    return rng.integers(0, 128_000, length, dtype=np.int32)


def costs(rounds: int) -> None:
    """Measure the requests of the core benchmark."""
    rng = np.random.default_rng(1)

    def pool(pages: int) -> Callable[[float | None], PagedCache]:
        return lambda what_if: PagedCache(pages, PAGE, what_if=what_if)

    shared = random_tokens(rng, 2048)
    prompts = [np.concatenate((shared, random_tokens(rng, 200))) for _ in range(2000)]
    cost("2,048 shared + 200 own", pool(16_384), prompts, rounds)
    cost("the same, 131,072 pages", pool(131_072), prompts, rounds)
    long = random_tokens(rng, 32_700)
    cost("32,700, all cached", pool(131_072), [long] * 1000, rounds)
    cold = [random_tokens(rng, 32_700) for _ in range(100)]
    cost("32,700, nothing cached", pool(131_072), cold, rounds)
    cold = [random_tokens(rng, 2000) for _ in range(2000)]
    cost("2,000, nothing cached", pool(131_072), cold, rounds)
    talks = []
    talks = [random_tokens(rng, 1500) for _ in range(60)]
    for turn in range(11):
        last = talks[turn * 60 :]
        talks += [np.concatenate((talk, random_tokens(rng, 700))) for talk in last]
    cost("conversations of 12 turns, 1,500 … 9,200", pool(65_536), talks, rounds)


def trace_costs(name: str, prompts: list[Ids], rounds: int) -> None:
    """Measure a trace by units: each block is a page of one token, plus one at the end."""
    joined = np.concatenate(prompts)
    _, numbers = np.unique(joined, return_inverse=True)
    parts = np.split(numbers.astype(np.int32), np.cumsum([len(one) for one in prompts])[:-1])
    ended = [np.append(one, np.int32(2**31 - 1)) for one in parts]

    def make(what_if: float | None) -> PagedCache:
        curve = None if what_if is None else MissRatioCurve(what_if, 1, most_blocks=200_000)
        return PagedCache(5859, 1, what_if=curve)

    cost(f"{name}, by units", make, ended, rounds, published=1)
    # Hardly a prompt ends where a block does.
    tokens = [np.repeat(one, 512)[: -1 - at % 500] for at, one in enumerate(parts[:3000])]
    cost(
        f"{name}, in pages of 16",
        lambda what_if: PagedCache(5859 * 32, PAGE, what_if=what_if),
        tokens,
        rounds,
    )


def main(arguments: list[str] | None = None) -> int:
    """Run all measurements and print two tables in Markdown."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trace", type=Path, action="append", default=[], metavar="FILE")
    parser.add_argument("--quick", action="store_true", help="fewer requests, seeds and rounds")
    parser.add_argument("--only", choices=("accuracy", "cost"))
    options = parser.parse_args(arguments)
    seeds, rounds, requests = (3, 3, 2000) if options.quick else (10, 8, 8000)
    traces = {}
    for path in options.trace:
        trace = open_trace(path)
        traces[trace.name] = [one.units for one in trace if one.units is not None]
    if options.only != "cost":
        print("Largest error at any capacity, in points: mean of the seeds (worst)\n")
        print("| workload | requests | blocks | 5 % | 10 % | 20 % |\n|---|--:|--:|--:|--:|--:|")
        for name, prompts in traces.items():
            accuracy(name, prompts, seeds)
        for kind in MADE:
            accuracy(kind, blocks_of(kind, requests), seeds)
    if options.only != "accuracy":
        print("\nProcessor µs a request, open … close\n")
        print("| requests | without | with | | paired |\n|---|--:|--:|--:|--:|")
        costs(rounds)
        for name, prompts in traces.items():
            trace_costs(name, prompts, rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
