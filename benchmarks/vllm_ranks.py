"""KV below vLLM's offloading that engines with other numbers of ranks wrote: rates of reads.

Pages have the shape of Llama 3.1 8B in blocks of 16 tokens (2 MiB each), and no model runs. A read
is everything between the disk and the pages of all ranks: the store's read into vLLM's rows, with
its checksums, and the copies of all workers, one after another. In each round every engine reads
what every engine has written, and what it has itself written in vLLM's direct layout, which no
other engine could read. Ratios are of one round, and the figure is their median; reads take a few
milliseconds, so that a neighbour slows few of many.

    .venv-vllm/bin/python benchmarks/vllm_ranks.py           # half a minute
    .venv-vllm/bin/python benchmarks/vllm_ranks.py --quick   # 15 rounds
    .venv-vllm/bin/python benchmarks/vllm_ranks.py --json
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from time import perf_counter

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
sys.path.insert(0, str(Path(__file__).parents[1] / "tests_vllm"))

from rank_pages import Shape, Workers

from figures import Figure, Read, no_collection, reads_of, show
from kvkeep.store import BlockStore
from kvkeep.store.tiers import PassThrough

RANKS = (1, 2, 4)
BLOCKS = 8
# A float32 head of 64 has the bytes of a bfloat16 head of 128.
LLAMA_8B = Shape(heads=8, layers=32, block=16, head=64, blocks=BLOCKS)
KEYS = [hashlib.sha256(bytes([at])).digest() for at in range(BLOCKS)]
ROWS = list(range(BLOCKS))


def measure(directory: Path, rounds: int) -> tuple[dict[Read, list[float]], dict[str, list[float]]]:
    """Return seconds of reads, and of the copies out of pages, one for each round."""
    truth = LLAMA_8B.truth()
    reads: dict[Read, list[float]] = {}
    saves: dict[str, list[float]] = {}
    with no_collection(), ExitStack() as stack:
        engines: dict[tuple[str, int], Workers] = {}
        stores: dict[tuple[str, int], BlockStore] = {}
        for layout in ("canonical", "direct"):
            for ranks in RANKS:
                canonical = layout == "canonical"
                workers = Workers(LLAMA_8B, ranks, rows=BLOCKS, canonical=canonical)
                engines[layout, ranks] = stack.enter_context(workers)
                tiers = ["memory://256MiB", f"file://{directory}/{layout}{ranks}?size=1GiB"]
                store = BlockStore("", tiers=tiers, policy=PassThrough())
                stores[layout, ranks] = stack.enter_context(store)
                workers.compute(truth)
                workers.to_rows(ROWS)
                workers.save(store, KEYS, ROWS)
                assert store.flush()
        wanted = reads_of(RANKS, "canonical", "direct")
        chance = random.Random(0)
        for turn in range(-1, rounds):  # the first one warms up
            chance.shuffle(wanted)  # a reader's pages are in a cache after its last read
            for layout, reader, writer in wanted:
                workers, store = engines[layout, reader], stores[layout, writer]
                if turn < 0:
                    workers.forget()
                began = perf_counter()
                workers.load(store, KEYS, ROWS)
                workers.from_rows(ROWS)
                took = perf_counter() - began
                if turn < 0:
                    workers.check(truth)
                else:
                    reads.setdefault((layout, reader, writer), []).append(took)
            for (layout, ranks), workers in engines.items():
                began = perf_counter()
                workers.to_rows(ROWS)
                took = perf_counter() - began
                if turn >= 0:
                    saves.setdefault(f"{layout} {ranks}", []).append(took)
    return reads, saves


def figures(reads: dict[Read, list[float]], saves: dict[str, list[float]]) -> list[Figure]:
    """Return rates, beside those of reads by the writer itself."""
    size = LLAMA_8B.truth().nbytes
    lines = []
    for layout, reader, writer in reads_of(RANKS, "canonical", "direct"):
        seconds = reads[layout, reader, writer]
        own = reads["canonical" if layout == "direct" else layout, reader, reader]
        name = f"{reader} ranks read what {writer} wrote"
        beside = "its own"
        goal: float | None = 0.9
        if layout == "direct":
            name, beside = f"{reader} ranks, direct layout", "canonical"
            goal = None
        elif reader == writer:
            lines.append(Figure(name, "GB/s", size / median(seconds) / 1e9))
            continue
        ratios = [mine / other for mine, other in zip(own, seconds, strict=True)]
        lines.append(
            Figure(
                name, "GB/s", size / median(seconds) / 1e9, beside, median(ratios), min(ratios),
                max(ratios), goal,
            )
        )  # fmt: skip
    for ranks in RANKS:
        mine, direct = saves[f"canonical {ranks}"], saves[f"direct {ranks}"]
        ratios = [other / each for each, other in zip(mine, direct, strict=True)]
        lines.append(
            Figure(
                f"{ranks} ranks copy pages to rows", "GB/s", size / median(mine) / 1e9,
                "direct", median(ratios), min(ratios), max(ratios),
            )
        )  # fmt: skip
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="15 rounds instead of 101")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        lines = figures(*measure(Path(directory), 15 if given.quick else 101))
    title = f"{BLOCKS} blocks of 2 MiB, store and workers of all ranks in one process"
    sys.exit(show(lines, title, as_json=given.json))


if __name__ == "__main__":
    main()
