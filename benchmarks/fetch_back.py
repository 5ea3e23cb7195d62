"""How long returning prompts take to read, with and without fetching them back beforehand.

    python benchmarks/fetch_back.py TRACE [--minutes N] [--speed N] [--memory TOKENS]
        [--disk TOKENS] [--tiering NAME] [--json]

Replays the beginning of a trace over a real store, ``--speed`` times as fast: memory above a disk
of 3 GB/s that does one read and one write at a time. A token takes 128 KiB there, as of a model of
8 billion parameters, but records are small, so only the time is real. Both stores order by
``policy=returns``; one of them reads from the disk only what is asked for.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from functools import partial
from statistics import mean, quantiles
from typing import TYPE_CHECKING

import numpy as np

from figures import Figure, show
from kvkeep.bench.replay import Workload
from kvkeep.bench.replay.tiered import Requests
from kvkeep.bench.traces import open_trace
from kvkeep.core.eviction import POLICIES
from kvkeep.core.geometry import parse_count
from kvkeep.store.backends.memory import MemoryBackend
from kvkeep.store.codecs import BlockShape, codec_of, make_codec
from kvkeep.store.tiers import (
    MemorySpec,
    TieredStore,
    TierOptions,
    TierReturns,
    TierSpec,
    fetch_back,
    fetching,
    tiered,
    tiering,
)
from kvkeep.store.tiers.fetching import FetchPlanner
from kvkeep.store.tiers.record import HEADER_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvkeep.store.backends.base import Room

RECORD = 4096
TOKEN_BYTES = 128 << 10
BANDWIDTH = 3e9


class SlowDisk(MemoryBackend):
    """Takes ``seconds`` for each read and each write, and does one of each at a time."""

    def __init__(self, capacity: int, seconds: float) -> None:
        super().__init__(capacity)
        self._seconds = seconds
        self._reading = threading.Lock()
        self._writing = threading.Lock()

    def put(self, block: bytes, record: memoryview) -> None:
        """As memory does, later."""
        with self._writing:
            time.sleep(self._seconds)
        super().put(block, record)

    def get(self, block: bytes, room: Room) -> memoryview | None:
        """As memory does, later."""
        with self._reading:
            time.sleep(self._seconds)
        return super().get(block, room)


class RealTiers:
    """A real store in the place of simulated tiers; `took` has the seconds of each read."""

    def __init__(self, store: TieredStore) -> None:
        self.store = store
        self.returns = store.returns
        self.took: list[float] = []
        self.blocks = 0

    def find(self, blocks: Sequence[bytes]) -> list[int]:
        """Read leading ``blocks``; return how many came from memory and how many from the disk."""
        sources: list[str] = []
        begun = time.perf_counter()
        self.store.read(blocks, [RECORD - HEADER_BYTES] * len(blocks), _ignore, sources=sources)
        self.took.append(time.perf_counter() - begun)
        self.blocks += len(blocks)
        here = sources.count("memory")
        return [here, len(sources) - here]

    def put(self, blocks: Sequence[bytes]) -> None:
        """Store ``blocks``."""
        self.store.write(blocks, [RECORD - HEADER_BYTES] * len(blocks), _ignore)

    def level_of(self, block: bytes) -> int | None:
        """Return the level that has ``block``."""
        return 0 if self.store.knows(block) else None


def _ignore(at: int, raw: memoryview) -> None:
    del at, raw


def serve(workload: Workload, args: argparse.Namespace, *, back: bool) -> list[Figure]:
    """Replay ``workload``; return figures in seconds of the trace."""
    speed, unit = args.speed, workload.unit_tokens
    shape, returns = BlockShape(), POLICIES["returns"]
    disk = SlowDisk(args.disk // unit * RECORD, unit * TOKEN_BYTES / BANDWIDTH / speed)
    spec = TierSpec(
        "disk",
        disk,
        make_codec("raw", shape),
        partial(codec_of, shape=shape),
        TierOptions(policy=returns),
    )
    front = MemorySpec(MemoryBackend(args.memory // unit * RECORD), returns, fetch_back=back)
    store = TieredStore(front, [spec], tiering(args.tiering))
    tiers = RealTiers(store)
    requests = Requests(workload, tiers, whole_answers=False)  # type: ignore[arg-type]
    sources = [0, 0]
    begun = time.monotonic()
    last = int(np.searchsorted(workload.times, workload.times[0] + 60 * args.minutes))
    for number in range(last):
        due = begun + float(workload.times[number] - workload.times[0]) / speed
        time.sleep(max(0.0, due - time.monotonic()))
        found = requests.find(number)
        sources = [sources[0] + found[0], sources[1] + found[1]]
        requests.keep(number, sum(found))
    lag = time.monotonic() - due
    counts = store.memory.stats().counters
    store.close()
    took = [one * speed for one in tiers.took]
    cuts = quantiles(took, n=100)
    name = "fetched back" if back else "asked for only"
    fetched = counts["fetched"]
    return [
        Figure(f"{name}: seconds to read a prompt, mean", "s", mean(took)),
        Figure(f"{name}: … median", "s", cuts[49]),
        Figure(f"{name}: … 90th percentile", "s", cuts[89]),
        Figure(f"{name}: blocks read from memory", "%", 100 * sources[0] / tiers.blocks),
        Figure(f"{name}: blocks read from the disk", "%", 100 * sources[1] / tiers.blocks),
        Figure(f"{name}: blocks fetched back", "%", 100 * fetched / tiers.blocks),
        Figure(f"{name}: of these read", "%", 100 * counts["fetched_hits"] / max(1, fetched)),
        Figure(f"{name}: behind the trace at its end", "s", lag * speed),
        Figure(f"{name}: demotions dropped", "blocks", counts["demotions_dropped"]),
    ]


def main() -> int:
    """Serve the trace twice, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace")
    parser.add_argument("--minutes", type=float, default=200.0)
    parser.add_argument("--speed", type=float, default=100.0)
    parser.add_argument("--memory", type=parse_count, default=parse_count("500k"))
    parser.add_argument("--disk", type=parse_count, default=parse_count("1M"))
    parser.add_argument("--tiering", default="inclusive")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    tiered.TierReturns = partial(  # type: ignore[assignment, attr-defined]
        TierReturns, clock=lambda: time.monotonic() * args.speed
    )
    fetch_back.PAUSE = fetching.PAUSE / args.speed  # type: ignore[attr-defined]
    left = FetchPlanner.left
    FetchPlanner.left = lambda self: left(self) / args.speed  # type: ignore[method-assign]
    workload = Workload.read(open_trace(args.trace))
    figures = [one for back in (False, True) for one in serve(workload, args, back=back)]
    return show(figures, f"{args.trace}, {args.tiering}", as_json=args.json)


if __name__ == "__main__":
    sys.exit(main())
