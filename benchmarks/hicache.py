"""SGLang's storage interface: kvkeep beside SGLang's own file backend, pages of 1 MiB.

    make .venv-sglang/.installed && .venv-sglang/bin/python benchmarks/hicache.py

SGLang's own page functions drive each backend over SGLang's host pool, in calls of 128 pages, like
its controller. Three rounds with new keys, all contenders in turn; medians, slowest and fastest.
kvkeep's set returns when memory has the pages, the file backend's when the page cache has them;
"and flushed" waits until the disk has them.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests_sglang"))

import without_gpu  # type: ignore[import-not-found]  # noqa: F401 - before SGLang itself
from sglang.srt.mem_cache.hicache_storage import HiCacheFile
from sglang_pools import (  # type: ignore[import-not-found]
    Pages,
    config_of,
    hashes,
    pools,
    scribble,
    spans,
    storage_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable

CALL = 128  # pages; what SGLang moves at once
ROUNDS = 3


class Table:
    """Measured seconds by name."""

    def __init__(self) -> None:
        self._seconds: dict[str, list[float]] = {}

    def time(self, name: str, work: Callable[[], object]) -> None:
        began = time.perf_counter()
        done = work()
        self._seconds.setdefault(name, []).append(time.perf_counter() - began)
        assert done in {True, CALL}, f"{name}: {done}"

    def print(self, page_bytes: int) -> None:
        for name, seconds in self._seconds.items():
            middle = statistics.median(seconds)
            if name.startswith("exists"):
                print(f"{name:46} {middle / CALL * 1e6:8.2f} µs a key")
            else:
                low, mid, high = (
                    CALL * page_bytes / 1e9 / took for took in (max(seconds), middle, min(seconds))
                )
                print(f"{name:46} {mid:8.2f} GB/s  ({low:.2f} … {high:.2f})")


def measure(layout: str, directory: Path) -> None:
    """Measure all contenders on one layout of the host pool, in turn."""
    made = pools("mha", layout, "bf16", page=64, tokens=CALL * 64, heads=8, dim=128, layers=4)
    scribble(made.host)
    page = made.host.get_data_page(0)
    page_bytes = page.numel() * page.element_size()
    assert page_bytes == 1 << 20, page_bytes
    tiers = ["memory://2GiB?touch=yes", f"file://{directory}/kv?size=4GiB"]
    theirs = HiCacheFile(config_of(), str(directory / "theirs"))
    source, target = spans(made.host, 0, CALL), spans(made.host, CALL, CALL)
    table = Table()
    ours: Any = storage_of(made.host, tiers)
    for turn in range(ROUNDS):
        for way, storage in (("theirs", theirs), ("v0", ours), ("v1", ours)):
            pages = Pages(made, storage, v1=way == "v1")
            name = "SGLang's file backend" if way == "theirs" else f"kvkeep, {way}, memory"
            keys = hashes(CALL, f"{way} {turn}")
            table.time(f"set  {name}", partial(pages.set, keys, source))
            table.time(f"get  {name}", partial(pages.get, keys, target))
            table.time(f"exists  {name}", partial(storage.batch_exists, keys))
            ours.flush()
        keys = hashes(CALL, f"flushed {turn}")
        table.time(
            "set  kvkeep, v1, and flushed",
            lambda: pages.set(keys, source) and ours.flush(),  # noqa: B023 - called at once
        )
    for turn in range(ROUNDS):
        ours.close()
        ours = storage_of(made.host, tiers)
        pages = Pages(made, ours, v1=True)
        keys = hashes(CALL, f"v1 {turn}")
        table.time("get  kvkeep, v1, disk, after a restart", partial(pages.get, keys, target))
    ours.close()
    print(f"\n{layout}, {CALL} pages of {page_bytes >> 20} MiB a call")
    table.print(page_bytes)


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--directory", help="where files go (default: a temporary directory)")
    parser.add_argument("--layouts", nargs="+", default=["page_first"])
    arguments = parser.parse_args()
    for layout in arguments.layouts:
        with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
            measure(layout, Path(directory))


if __name__ == "__main__":
    main()
