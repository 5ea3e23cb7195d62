"""One memory for the node beside one copy, and beside memory of one process.

Blocks of Llama 3.1 8B's shape (256 tokens, 32 MiB), or smaller ones with ``--block``. A writer, a
process of its own, puts them; readers are fresh processes, which have mapped the arena in the
background. In each round everything is measured once, so ratios are of one round; the figure is
their median, with the smallest and the largest.

A put and a get are compared with one copy of all bytes, and with the copies of all blocks between
the same places without a store: what they could be at most. Copies of a few MiB are slower than one
of all bytes, because the C library writes past the caches only above some size.

    python benchmarks/shm.py                     # about a minute
    python benchmarks/shm.py --block 2MiB --blocks 128
    python benchmarks/shm.py --clock CPU         # where other processes load the machine
    python benchmarks/shm.py --json
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

sys.path.append(str(Path(__file__).parent))

from figures import Figure
from kvkeep.core.geometry.units import parse_bytes
from kvkeep.store.backends.shm import ShmBackend
from kvkeep.store.blocks import BlockStore
from kvkeep.store.tiers.record import HEADER_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvkeep.store.backends.memory import Lease

    Move = Callable[[int, memoryview], None]

NAME = "kvkeep-benchmark"


CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "CPU": time.thread_time}


def seconds(work: Callable[[], object], clock: str = "wall") -> float:
    """Return the seconds of ``work``; its CPU time where other processes load the machine."""
    now = CLOCKS[clock]
    started = now()
    work()
    return now() - started


def keys_of(seed: int, count: int) -> list[bytes]:
    """Return ``count`` keys of a prompt."""
    chance = np.random.default_rng(seed)
    return [chance.bytes(32) for _ in range(count)]


def measured(  # noqa: PLR0917 - the arguments of a process
    url: str, job: str, keys: list[bytes], block: int, clock: str, out: Any
) -> None:
    """Open the store in this fresh process; put or get ``keys``, beside one copy; send seconds."""
    with BlockStore("benchmark", tiers=[url]) as store:
        backend = store._tiered.memory.backend
        assert isinstance(backend, ShmBackend)
        backend.warmed()
        source = np.full(len(keys) * block, 7, np.uint8)
        target = np.full_like(source, 1)
        sizes = [block] * len(keys)
        times: dict[str, list[float]] = {"copy": [], "work": [], "blocks": []}
        for _ in range(5):
            times["copy"].append(seconds(lambda: np.copyto(target, source), clock))

            def fill(at: int, raw: memoryview) -> None:
                np.copyto(np.asarray(raw), source[at * block : (at + 1) * block])

            def sink(at: int, raw: memoryview) -> None:
                np.copyto(target[at * block : (at + 1) * block], np.asarray(raw))

            if job == "put":
                store.clear()
                times["work"].append(seconds(lambda: store.write(keys, sizes, fill), clock))
            else:
                count = 0

                def get() -> None:
                    nonlocal count
                    count = store.read(keys, sizes, sink)

                times["work"].append(seconds(get, clock))
                assert count == len(keys), f"{count} of {len(keys)} blocks were found"
            leases = backend.lease_all([store._space + key for key in keys])
            move = fill if job == "put" else sink

            def alone(leases: list[Lease] = leases, move: Move = move) -> None:
                for at, lease in enumerate(leases):
                    move(at, lease.record[HEADER_BYTES:])

            times["blocks"].append(seconds(alone, clock))
            backend.release_all(leases)
        out.send(times)


def fresh(url: str, job: str, keys: list[bytes], block: int, clock: str) -> dict[str, list[float]]:
    """Run `measured` in a new process."""
    mine, theirs = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("spawn").Process(
        target=measured, args=(url, job, keys, block, clock, theirs)
    )
    process.start()
    theirs.close()
    times: dict[str, list[float]] = mine.recv()
    process.join()
    return times


def ratios(rounds: list[dict[str, list[float]]], at: int, beside: str) -> list[float]:
    """Return ``beside`` seconds over own seconds of each round; ``at`` numbers the repetition."""
    return sorted(one[beside][at] / one["work"][at] for one in rounds)


def main() -> None:
    """Measure, and print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--block", default="32MiB")
    parser.add_argument("--blocks", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    block, count = parse_bytes(args.block), args.blocks
    size = block * count
    url = f"shm://{size + count * 8192 + (64 << 20)}?name={NAME}"
    keys = keys_of(1, count)
    figures: list[Figure] = []
    path = ""
    try:
        with ShmBackend(size + count * 8192 + (64 << 20), name=NAME) as backend:
            path = backend.path
            puts = [fresh(url, "put", keys, block, args.clock) for _ in range(args.rounds)]
            gets = [fresh(url, "get", keys, block, args.clock) for _ in range(args.rounds)]
            looked = keys_of(2, 512)
            many = [block_lookup(url, looked) for _ in range(args.rounds)]
    finally:
        Path(path).unlink(missing_ok=True)
    for name, rounds, at in (
        ("put, first in a fresh process", puts, 0), ("put", puts, 4),
        ("get, first in a fresh process", gets, 0), ("get", gets, 4),
    ):  # fmt: skip
        speed = size / statistics.median(one["work"][at] for one in rounds) / 1e9
        for beside, told, goal in (
            ("copy", "one NumPy copy", 0.8), ("blocks", "the blocks' copies alone", None),
        ):  # fmt: skip
            ratio = ratios(rounds, at, beside)
            figures.append(
                Figure(name, "GB/s", speed, told, statistics.median(ratio), ratio[0], ratio[-1],
                       goal, part="shm")
            )  # fmt: skip
    for name, at in (("knows, first in a fresh process", 0), ("knows", 1)):
        own = statistics.median(one[at][0] for one in many)
        ratio = sorted(one[at][1] / one[at][0] for one in many)
        figures.append(
            Figure(name, "µs/block", own * 1e6 / 512, "memory://", statistics.median(ratio),
                   ratio[0], ratio[-1], None, part="lookup")
        )  # fmt: skip
    if args.json:
        print(json.dumps([asdict(figure) for figure in figures]))
    else:
        for figure in figures:
            print(figure.line())


def block_lookup(url: str, keys: list[bytes]) -> list[tuple[float, float]]:
    """Return the seconds of `knows` of ``keys``, first and again, beside those of memory://."""
    stores = [BlockStore("lookups", tiers=[one]) for one in (url, "memory://64MiB")]
    for store in stores:
        store.write(keys, [4096] * len(keys), lambda at, raw: None)
    again = BlockStore("lookups", tiers=[url])
    times = [
        (seconds(lambda: again.knows(keys)), seconds(lambda: stores[1].knows(keys)))
        for _ in range(2)
    ]
    assert again.knows(keys) == len(keys)
    for store in (*stores, again):
        store.close()
    return times


if __name__ == "__main__":
    main()
