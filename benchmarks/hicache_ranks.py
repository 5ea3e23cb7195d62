"""KV below HiCache that servers with another ``--tp`` wrote: rates of reads and of saves.

Host pages have the shape of Llama 3.1 8B in pages of 64 tokens (8 MiB each, 1 MiB a head), in the
layout ``page_head``; no model runs. A read is SGLang's page function over all pages and all ranks,
one rank after another, from files in the page cache to SGLang's host pools, by storages that were
just opened. In each round every server reads what every server has written by heads, and what it
has itself written by ranks, which no other one could read. A save ends when the files are written.
Rates are per second of CPU time of all threads, so that neighbours disturb them less. Ratios are of
one round, and the figure is their median.

    .venv-sglang/bin/python benchmarks/hicache_ranks.py           # two minutes
    .venv-sglang/bin/python benchmarks/hicache_ranks.py --quick   # 5 rounds
    .venv-sglang/bin/python benchmarks/hicache_ranks.py --page-size 16 --json
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from time import process_time
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests_sglang"))

import without_gpu  # type: ignore[import-not-found]  # noqa: F401 - before SGLang itself
from sglang_pools import (  # type: ignore[import-not-found]
    Pages,
    hashes,
    page_bytes,
    pools,
    scribble,
    server,
    spans,
    storage_of,
)

from figures import Figure, Read, no_collection, reads_of, show

if TYPE_CHECKING:
    from collections.abc import Iterator

RANKS = (1, 2, 4)
TOKENS = 512
POOL = 1024  # on the device, twice as many on the host: SGLang needs a page for each layer
HEADS, LAYERS, DIM = 8, 32, 128
SIZE = TOKENS * HEADS * LAYERS * DIM * 2 * 2


class Servers:
    """The host pools of all servers, and what opens their storages."""

    def __init__(self, directory: Path, page: int) -> None:
        self._directory = directory
        self.names = hashes(TOKENS // page)
        self._pools = {
            ranks: [
                pools("mha", "page_head", page=page, tokens=POOL, heads=HEADS // ranks,
                      dim=DIM, layers=LAYERS)
                for _ in range(ranks)
            ]
            for ranks in RANKS
        }  # fmt: skip
        for ranks in self._pools.values():
            for made in ranks:
                scribble(made.host)

    @contextmanager
    def opened(self, way: str, ranks: int, place: str) -> Iterator[list[Pages]]:
        """The page functions of all ranks of a server; ``way``: heads, or ranks."""
        tiers = ["memory://512MiB", f"file://{self._directory}/{place}?size=4GiB"]
        with ExitStack() as stack:
            if way == "heads":  # without a server's settings nothing proves what heads a rank has
                config = {"num_attention_heads": 32, "num_key_value_heads": HEADS}
                stack.enter_context(server(self._directory / "model", config=config))
            storages: list[Any] = []
            for rank, made in enumerate(self._pools[ranks]):
                storage = storage_of(made.host, tiers, tp_rank=rank, tp_size=ranks)
                stack.callback(storage.close)
                storages.append(Pages(made, storage, v1=True))
            yield storages

    def check(self, ranks: int) -> None:
        """Both halves of every pool are equal: what was saved, and what was loaded."""
        for made in self._pools[ranks]:
            count = len(self.names)
            for page in range(count):
                assert page_bytes(made.host, page) == page_bytes(made.host, count + page), page


def measure(
    directory: Path, page: int, rounds: int
) -> tuple[dict[Read, list[float]], dict[tuple[str, int], list[float]]]:
    """Return seconds of reads, and of saves to files, one for each round."""
    servers = Servers(directory, page)
    names, count = servers.names, len(servers.names)
    reads: dict[Read, list[float]] = {}
    saves: dict[tuple[str, int], list[float]] = {}
    wanted, chance = reads_of(RANKS, "heads", "ranks"), random.Random(0)
    with no_collection():
        for turn in range(-1, rounds):  # the first one writes, and warms up
            for way in ("heads", "ranks"):
                for ranks in RANKS:
                    place = f"{way}{ranks}" if turn < 0 else f"{way}{ranks}-{turn}"
                    with servers.opened(way, ranks, place) as storages:
                        began = process_time()
                        for pages in storages:
                            assert pages.set(names, spans(pages.host, 0, count))
                            assert pages.storage.flush()
                        took = process_time() - began
                    if turn >= 0:
                        saves.setdefault((way, ranks), []).append(took)
                        for file in (directory / place).rglob("*"):
                            if file.is_file():
                                file.unlink()
            chance.shuffle(wanted)  # a reader's pools are in a cache after its last read
            for way, reader, writer in wanted:
                with servers.opened(way, reader, f"{way}{writer}") as storages:
                    began = process_time()
                    for pages in storages:
                        assert pages.get(names, spans(pages.host, count, count)) == count
                    took = process_time() - began
                if turn < 0:
                    if reader == writer:  # pools of other servers have other bytes
                        servers.check(reader)
                else:
                    reads.setdefault((way, reader, writer), []).append(took)
    return reads, saves


def figures(
    reads: dict[Read, list[float]], saves: dict[tuple[str, int], list[float]]
) -> list[Figure]:
    """Return rates, beside those of reads by the writer itself, and of whole pages."""
    lines = []
    for way, reader, writer in reads_of(RANKS, "heads", "ranks"):
        if way == "ranks":
            continue
        seconds = reads[way, reader, writer]
        rate = SIZE / median(seconds) / 1e9
        name = f"--tp {reader} reads what --tp {writer} wrote"
        lines.append(_beside(name, rate, reads["heads", reader, reader], seconds, "its own")
                     if reader != writer else
                     _beside(name, rate, reads["ranks", reader, reader], seconds, "named by ranks")
                     )  # fmt: skip
    for ranks in RANKS:
        mine, other = saves["heads", ranks], saves["ranks", ranks]
        rate = SIZE / median(mine) / 1e9
        lines.append(_beside(f"--tp {ranks} saves", rate, other, mine, "by ranks"))
    return lines


def _beside(
    name: str, rate: float, others: list[float], seconds: list[float], beside: str
) -> Figure:
    ratios = [other / mine for mine, other in zip(seconds, others, strict=True)]
    return Figure(
        name, "GB/s", rate, beside, median(ratios), min(ratios), max(ratios),
        0.9 if beside == "its own" else None,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="5 rounds instead of 25")
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        lines = figures(*measure(Path(directory), given.page_size, 5 if given.quick else 25))
    title = (
        f"{SIZE >> 20} MiB in pages of {given.page_size} tokens; all ranks in one process, CPU time"
    )
    show(lines, title, as_json=given.json)


if __name__ == "__main__":
    main()
