"""Times of the core: match, open, publish, append, evict.

A 32,768-token prompt given as a NumPy array of int32, pages of 16 tokens. Seeded; every figure is
the median of many warm runs, with the spread between the 10th and the 90th percentile. CPU time of
the thread, less what reading that clock takes. Garbage collection is off while the clock runs, as
in `timeit`.

    python benchmarks/core.py            # the table
    python benchmarks/core.py --json     # for machines
    python benchmarks/core.py --quick    # fewer runs
    python benchmarks/core.py --only matching forms living
    python benchmarks/core.py --markdown # the table of docs/benchmarks.md
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from array import array
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from figures import no_collection
from kvkeep import Namespace, PagedCache
from kvkeep.core.keys import chain_keys, root_key

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    Tokens = npt.NDArray[np.int32]

PAGE = 16
PROMPT = 32_768
POOL = 16_384
VOCABULARY = 128_000


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure in microseconds, with its goal."""

    name: str
    median: float
    low: float
    high: float
    runs: int
    goal: float | None = None


class Bench:
    """Collects figures; ``runs`` scales all of them."""

    def __init__(self, scale: float) -> None:
        self.scale = scale
        self.figures: list[Figure] = []
        self._clock = 0.0
        self._clock = self.time("the clock", lambda: None, runs=2000)
        self.figures.clear()

    def time(
        self,
        name: str,
        run: Callable[[], object],
        *,
        before: Callable[[], object] | None = None,
        runs: int = 300,
        per: int = 1,
        goal: float | None = None,
    ) -> float:
        """Time ``run``, after an untimed ``before`` each; divide by ``per`` things done in it."""
        runs = max(5, int(runs * self.scale))
        took: list[float] = []
        with no_collection():
            for i in range(-max(2, runs // 20), runs):
                if before is not None:
                    before()
                start = time.thread_time_ns()
                run()
                end = time.thread_time_ns()
                if i >= 0:
                    took.append(((end - start) / 1e3 - self._clock) / per)
        took.sort()
        low, high = took[len(took) // 10], took[(len(took) * 9) // 10]
        figure = Figure(name, statistics.median(took), low, high, runs, goal)
        self.figures.append(figure)
        return figure.median


def prompt(rng: np.random.Generator, length: int = PROMPT) -> Tokens:
    """Random tokens."""
    return rng.integers(0, VOCABULARY, length, dtype=np.int32)


def store(cache: PagedCache, tokens: Tokens) -> None:
    """Open, publish and close one request."""
    sequence = cache.open(tokens)
    sequence.copies()
    sequence.publish()
    sequence.close()


def path(rng: np.random.Generator, nodes: int) -> tuple[PagedCache, Tokens]:
    """Return a cache in which one prompt is a path of ``nodes`` runs, each with a branch."""
    cache = PagedCache(POOL, PAGE)
    tokens = prompt(rng)
    store(cache, tokens)
    pages = PROMPT // PAGE
    for i in range(1, nodes):
        shared = tokens[: i * pages // nodes * PAGE]
        store(cache, np.concatenate((shared, prompt(rng, PAGE))))
    on_path = sum(1 for run in cache.runs() if run.start + len(run.pages) <= pages)
    assert on_path >= nodes, (on_path, nodes)
    return cache, tokens


def floors(bench: Bench, rng: np.random.Generator) -> None:
    """The floor: compare the prompt once, and touch its page ids once."""
    tokens = prompt(rng)
    left, right = tokens.tobytes(), tokens.copy().tobytes()
    ids = rng.permutation(POOL).astype(np.int32)[: PROMPT // PAGE]
    bench.time("floor: one memcmp of the prompt", lambda: left == right, runs=2000)
    bench.time("floor: one NumPy add over the page ids", lambda: ids + 1, runs=2000)


def matching(bench: Bench, rng: np.random.Generator) -> None:
    """Time full hits over paths of one run and of many."""
    for nodes, goal in ((1, 15), (64, 15), (512, 15)):
        cache, tokens = path(rng, nodes)
        bench.time(
            f"match, full hit, path of {nodes}",
            lambda cache=cache, tokens=tokens: cache.match(tokens),  # type: ignore[misc]
            runs=1000,
            goal=goal,
        )
        parting = np.concatenate((tokens[:20_000], prompt(rng, 12_768)))
        bench.time(
            f"match, 20,000 tokens of it, path of {nodes}",
            lambda cache=cache, tokens=parting: cache.match(tokens),  # type: ignore[misc]
            runs=1000,
        )


def forms(bench: Bench, rng: np.random.Generator) -> None:
    """Time full hits of the same prompt in the forms that engines have."""
    import torch  # noqa: PLC0415 - only here

    cache = PagedCache(POOL, PAGE)
    tokens = prompt(rng)
    store(cache, tokens)
    wide = tokens.astype(np.int64)
    shapes = {
        "NumPy array of int32": tokens,
        "array of int32": array("i", tokens.tobytes()),
        "bytes": tokens.tobytes(),
        "tensor of int32": torch.from_numpy(tokens),
        "NumPy array of int64": wide,
        "array of int64": array("q", wide.tobytes()),
        "tensor of int64": torch.from_numpy(wide),
        "Python list": tokens.tolist(),
    }
    for name, given in shapes.items():
        assert cache.match(given).num_tokens == PROMPT
        bench.time(f"match, the prompt as {name}", partial(cache.match, given), runs=500)


def living(bench: Bench, rng: np.random.Generator) -> None:
    """Time open, publish, close and append."""
    for nodes in (64, 512):
        deep, tokens = path(rng, nodes)
        bench.time(
            f"open + close, full hit, path of {nodes}",
            lambda deep=deep, tokens=tokens: deep.open(tokens).close(),  # type: ignore[misc]
            runs=500,
        )
    cache = PagedCache(POOL, PAGE)
    tokens = prompt(rng)
    store(cache, tokens)
    store(cache, tokens)
    bench.time("open + close, full hit", lambda: cache.open(tokens).close(), runs=1000, goal=48)
    last = [cache.open(tokens)]

    def close_last() -> None:
        last.pop().close()

    bench.time(
        "open, full hit",
        lambda: last.append(cache.open(tokens)),
        before=close_last,
        runs=1000,
        goal=60,
    )
    fresh = [prompt(rng) for _ in range(12)]  # more than fit: always cold
    turn = iter(range(10**9))
    cache.clear()

    def open_cold() -> None:
        last.append(cache.open(fresh[next(turn) % len(fresh)]))

    def end_cold() -> None:
        last.pop().close()

    bench.time(
        "open, cold, 2,048 pages allocated",
        open_cold,
        before=end_cold,
        runs=500,
        goal=120,
    )

    def publish_close() -> None:
        sequence = last.pop()
        sequence.publish()
        sequence.close()

    def next_cold() -> None:
        cache.clear()
        open_cold()

    end_cold()
    bench.time(
        "publish + close, 2,048 new pages", publish_close, before=next_cold, runs=500, goal=120
    )
    open_cold()
    bench.time("open, cold, evicting 2,048 pages for it", open_cold, before=publish_close, runs=300)
    publish_close()
    cache.clear()

    appended = 4096
    one = np.array([7], np.int32)
    many = [7]

    def begin() -> None:
        if last:
            end_cold()
        last.append(cache.open(tokens[:1000]))

    def append_array() -> None:
        append = last[0].append
        for _ in range(appended):
            append(one)

    def append_list() -> None:
        append = last[0].append
        for _ in range(appended):
            append(many)

    bench.time("append, a token", append_array, before=begin, runs=20, per=appended, goal=3)
    bench.time(
        "append, a token in a list", append_list, before=begin, runs=20, per=appended, goal=3
    )


def evicting(bench: Bench, rng: np.random.Generator) -> None:
    """Time the eviction of many leaves and of one, among few and among many."""
    for leaves in (10_000, 100_000):
        cache = PagedCache((leaves + 1) * 4, PAGE)
        serial = iter(range(10**9))

        def fill(count: int, cache: PagedCache = cache, serial: object = serial) -> None:
            for _ in range(count):
                tokens = prompt(rng, 4 * PAGE)
                tokens[0] = next(serial)  # type: ignore[call-overload]
                store(cache, tokens)

        fill(leaves)
        bench.time(
            f"evict 2,048 pages: 512 leaves of {leaves:,}",
            lambda cache=cache: cache.evict(2048),  # type: ignore[misc]
            before=lambda fill=fill, cache=cache: fill(cache.stats().pages_free // 4 - 1),  # type: ignore[misc]
            runs=40,
            goal=1000,
        )
    leaves = 50_000
    cache = PagedCache((leaves + 1) * 4, PAGE)
    for i in range(leaves):
        tokens = prompt(rng, 4 * PAGE)
        tokens[0] = i
        store(cache, tokens)
    bench.time(f"evict one leaf of {leaves:,}", lambda: cache.evict(4), runs=2000, goal=10)


def thousand(bench: Bench, rng: np.random.Generator) -> None:
    """Time 1,000 requests with a shared 2k prefix and 200 own tokens, without and with events."""
    shared = prompt(rng, 2048)
    prompts = [np.concatenate((shared, prompt(rng, 200))) for _ in range(1000)]

    def serve(cache: PagedCache) -> None:
        for tokens in prompts:
            sequence = cache.open(tokens)
            sequence.copies()
            sequence.publish()
            sequence.close()

    caches: list[PagedCache] = []

    def plain() -> None:
        caches[:] = [PagedCache(POOL, PAGE)]

    seen: list[object] = []

    def listened() -> None:
        plain()
        seen.clear()
        caches[0].subscribe(seen.append)

    name = "1,000 requests, 2k shared + 200 own"
    off = bench.time(name, lambda: serve(caches[0]), before=plain, runs=30, goal=100_000)
    bench.time(
        f"{name}, events on",
        lambda: serve(caches[0]),
        before=listened,
        runs=30,
        goal=1.5 * off,
    )


def chain(bench: Bench, rng: np.random.Generator) -> None:
    """Time the index over block keys: hashing, and the lookup."""
    tokens = prompt(rng)
    data = tokens.tobytes()
    root = root_key(Namespace())
    hashing = bench.time(
        "chain: hashing 2,048 pages",
        lambda: chain_keys(root, data, PAGE * 4),
        runs=200,
        goal=1300,
    )
    cache = PagedCache(POOL, PAGE, prefix="chain")
    store(cache, tokens)
    bench.time("chain: match, full hit, with hashing", lambda: cache.match(tokens), runs=200)
    index = cache.tree
    space = Namespace()
    symbols = index.encoder(space).lookup(tokens)
    bench.time(
        "chain: lookup, hashed already",
        lambda: index.match(symbols, space),
        runs=500,
        goal=300,
    )
    assert hashing > 0


def main(arguments: list[str] | None = None) -> int:
    """Run all measurements and print them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--markdown", action="store_true", help="the table in Markdown")
    parser.add_argument("--quick", action="store_true", help="a tenth of the runs")
    parser.add_argument("--seed", type=int, default=1)
    parts = (floors, matching, forms, living, thousand, chain, evicting)
    names = [part.__name__ for part in parts]
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="these parts")
    options = parser.parse_args(arguments)
    bench = Bench(0.1 if options.quick else 1.0)
    for part in parts:
        if part.__name__ not in options.only:
            continue
        if not options.json:
            print(f"… {part.__name__}", file=sys.stderr, flush=True)
        part(bench, np.random.default_rng(options.seed))
    if options.json:
        print(json.dumps({"unit": "us", "figures": [asdict(f) for f in bench.figures]}, indent=1))
        return 0
    if options.markdown:
        print("| µs | median | 10 % … 90 % |\n|---|--:|--:|")
        for f in bench.figures:
            digits = 1 if f.median < 1000 else 0
            low, high = f"{f.low:,.{digits}f}", f"{f.high:,.{digits}f}"
            print(f"| {f.name} | {f.median:,.{digits}f} | {low} … {high} |")
        return 0
    width = max(len(figure.name) for figure in bench.figures)
    print(f"{'µs':{width}}  {'median':>10}  {'10 % … 90 %':>21}  {'goal':>9}")
    for f in bench.figures:
        goal = "" if f.goal is None else f"{f.goal:,.0f}" + (" ✓" if f.median <= f.goal else " ✗")
        spread = f"{f.low:,.1f} … {f.high:,.1f}"
        print(f"{f.name:{width}}  {f.median:>10,.1f}  {spread:>21}  {goal:>9}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
