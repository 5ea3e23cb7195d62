"""How costs grow with the number of running forks, of pins, of evictable leaves, of runs on a path.

Each line is one operation at several sizes, with the ratio of the cost at the largest size to that
at the smallest. A cost that does not grow has a ratio near 1, apart from the cost of memory that
does not fit the processor's caches. Every figure is the median of many single operations. Seeded;
garbage collection is off.

    python benchmarks/growth.py            # up to 4,000 forks, 64,000 pins, 100,000 leaves
    python benchmarks/growth.py --quick    # a tenth of that, in seconds
    python benchmarks/growth.py --json     # for machines
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import asdict, dataclass
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from figures import no_collection, print_lines
from kvkeep import PagedCache
from kvkeep.core.groups import GroupLayout, WindowSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PAGE = 4
FORKS = (250, 1000, 4000)
PINS = (1000, 8000, 64_000)
LEAVES = (10_000, 100_000)
RUNS = (8, 64, 512)
WINDOWED = (100, 1000, 10_000)
VOCABULARY = 128_000
TIMED = 200


@dataclass(frozen=True, slots=True)
class Line:
    """One operation: microseconds by size."""

    name: str
    sizes: tuple[int, ...]
    micros: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """The cost at the largest size divided by the cost at the smallest."""
        return self.micros[-1] / self.micros[0]


def timed(steps: Iterator[Callable[[], object]]) -> float:
    """Return the median of single operations in microseconds; only the steps are timed."""
    took: list[float] = []
    with no_collection():
        for step in steps:
            start = perf_counter()
            step()
            took.append(perf_counter() - start)
    return statistics.median(took) * 1e6


def store(cache: PagedCache, tokens: object) -> None:
    """Open, publish and close one request."""
    with cache.open(tokens) as sequence:  # type: ignore[arg-type]
        sequence.copies()
        sequence.publish()


def forking(count: int, *, tail: int) -> Iterator[Callable[[], object]]:
    """Yield steps in which each of ``count`` forks of a prompt decodes and publishes a page."""
    cache = PagedCache(6 * count + 100, PAGE)
    first = cache.open(range(16 * PAGE + tail))
    first.publish()
    forks = [first.fork() for _ in range(count)]

    def go_on(i: int) -> None:
        forks[i].append([i, 1, 2, 3])
        forks[i].copies()
        forks[i].publish()

    for i in range(count):
        if i < count - TIMED:
            go_on(i)
        else:
            yield lambda i=i: go_on(i)  # type: ignore[misc]


def pinning(count: int, *, hard: bool) -> Iterator[Callable[[], object]]:
    """Yield steps that add one pin to ``count`` pins."""
    cache = PagedCache(3 * count + 1000, PAGE)
    rng = np.random.default_rng(1)
    for i in range(count + TIMED):
        tokens = rng.integers(0, 2**30, PAGE + 1)
        store(cache, tokens)
        if i < count:
            cache.pin(tokens, hard=hard)
        else:
            yield lambda tokens=tokens: cache.pin(tokens, hard=hard)  # type: ignore[misc]


def breaking(count: int) -> Iterator[Callable[[], object]]:
    """Yield requests that evict a pinned prompt if all prompts are pinned, and are then pinned."""
    cache = PagedCache(count, PAGE)
    rng = np.random.default_rng(1)

    def serve() -> None:
        tokens = rng.integers(0, 2**30, PAGE + 1)
        store(cache, tokens)
        cache.pin(tokens)

    for _ in range(count + 10):
        serve()
    for _ in range(TIMED):
        yield serve


def matching(count: int) -> Iterator[Callable[[], object]]:
    """Yield full hits of a prompt of 2,048 pages, whose path has ``count`` runs."""
    cache = PagedCache(8192, 16)
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, VOCABULARY, 32_768, dtype=np.int32)
    store(cache, tokens)
    for i in range(1, count):
        shared = tokens[: i * 2048 // count * 16]
        store(cache, np.concatenate((shared, rng.integers(0, VOCABULARY, 16, dtype=np.int32))))
    for _ in range(TIMED):
        yield lambda: cache.match(tokens)


def windowed(count: int, *, step: str) -> Iterator[Callable[[], object]]:
    """Yield steps of a prompt of ``count`` runs of one page, with a window of 64 tokens."""
    cache = PagedCache(8 * count + 1000, GroupLayout(PAGE, (WindowSpec(64),)))
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, VOCABULARY, PAGE * count + 9, dtype=np.int32)

    def serve(prompt: object) -> None:
        with cache.open(prompt) as sequence:  # type: ignore[arg-type]
            sequence.copies()
            groups = sequence.groups
            assert groups is not None
            groups.copies()
            groups.reach(sequence.num_tokens)
            sequence.publish()

    serve(tokens)
    for at in range(count, 0, -1):
        serve(np.concatenate((tokens[: PAGE * at], rng.integers(VOCABULARY, 2 * VOCABULARY, 5))))
    with cache.open(tokens) as sequence:
        steps = {
            "match": lambda: cache.match(tokens),
            "serve": lambda: serve(tokens),
            "fork": lambda: sequence.fork().close(),
        }
        for _ in range(TIMED):
            yield steps[step]


def evicting(count: int, *, pages: int, alike: str) -> Iterator[Callable[[], object]]:
    """Evict so many pages of ``count`` prompts of four pages each.

    ``alike`` says how their first tokens are: all "different", "random" of 128,000 ids, or the
    "same". A prompt that begins like another cuts that after its first page, so there are up to
    twice as many runs to evict for as many pages.
    """
    cache = PagedCache(4 * count + 64, 16)
    rng = np.random.default_rng(1)
    prompts = rng.integers(0, VOCABULARY, (count, 64), dtype=np.int32)
    if alike == "different":
        prompts[:, 0] = rng.permutation(count)
    elif alike == "same":
        prompts[:, 0] = 5
    for prompt in prompts:
        store(cache, prompt)
    for _ in range(min(TIMED, max(1, 2 * count // pages))):
        yield lambda: cache.evict(pages)


def lines(scale: float) -> Iterator[Line]:
    """Measure all operations, at ``scale`` times the sizes."""

    def line(
        name: str, sizes: tuple[int, ...], work: Callable[[int], Iterator[Callable[[], object]]]
    ) -> Line:
        scaled = tuple(max(1, int(size * scale)) for size in sizes)
        return Line(name, scaled, tuple(timed(work(size)) for size in scaled))

    yield line("match 2,048 pages, of runs on their path", RUNS, matching)
    for step in ("match", "serve", "fork"):
        yield line(
            f"with a window: {step}, of runs of a page", WINDOWED, partial(windowed, step=step)
        )
    yield line("append and publish a page, of forks", FORKS, partial(forking, tail=0))
    yield line("the same, their last page was shared", FORKS, partial(forking, tail=2))
    yield line("a soft pin more, of pins", PINS, partial(pinning, hard=False))
    yield line("a hard pin more, of pins", PINS, partial(pinning, hard=True))
    yield line("a request that breaks a pin, of pins", PINS, breaking)
    for alike in ("different", "random", "same"):
        yield line(
            f"evict 2,048 pages, first tokens {alike}, of leaves",
            LEAVES,
            partial(evicting, pages=2048, alike=alike),
        )
        yield line(
            f"evict 4 pages, first tokens {alike}, of leaves",
            LEAVES,
            partial(evicting, pages=4, alike=alike),
        )


def text(line: Line) -> str:
    """One printed line."""
    figures = "  ".join(
        f"{size:,}: {micros:,.1f}" for size, micros in zip(line.sizes, line.micros, strict=True)
    )
    return f"{line.name:55} µs  {figures:45}  × {line.ratio:.1f}"


def record(done: list[Line]) -> dict[str, object]:
    """All lines for ``--json``."""
    return {"unit": "us", "lines": [{**asdict(line), "ratio": line.ratio} for line in done]}


if __name__ == "__main__":
    quick = (0.1, "a tenth of the sizes")
    sys.exit(print_lines(lines, text, record, doc=__doc__, quick=quick))
