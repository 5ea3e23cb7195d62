"""The cost of opening a directory of many records: time, memory, and the wait of a writer.

    python benchmarks/store_growth.py --sizes 10000,100000,1000000 --at /dev/shm

Records are hard links to one file. For each size it prints the seconds until the store is open and
until all blocks are known, the longest put and flush of another process meanwhile, its drops,
and the bytes of memory a block (tracemalloc, in a run of its own).
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tracemalloc

from kvkeep.core.eviction import LRU
from kvkeep.store import BlockStore
from kvkeep.store.backends.disk import DiskBackend
from kvkeep.store.tiers.index import Index
from kvkeep.store.tiers.tier import ORDERED

_LINKS = 30_000  # hard links that a file may have on most filesystems


def key(number: int) -> bytes:
    """A block key."""
    return hashlib.sha256(b"%d" % number).digest()


def open_store(path: str) -> BlockStore:
    """Return a store over the directory."""
    return BlockStore("m", tiers=["memory://8MiB", f"file://{path}?size=100GiB"])


def fill(path: str, count: int) -> None:
    """Create ``count`` records."""
    with open_store(path) as store:
        store.put([key(-1)], [b"x" * 100], wait=10)
    (space,) = [name for name in os.listdir(path) if len(name) == 32]
    record = f"{path}/{space}/{key(-1).hex()}"
    for number in range(count):
        if number % _LINKS == 0:
            source = f"{path}/{space}/{key(number).hex()}"
            shutil.copy(record, source)
        else:
            os.link(source, f"{path}/{space}/{key(number).hex()}")


def write_until(path: str, stop: str) -> None:
    """Put and flush until the file ``stop`` exists; print the longest times, and the drops."""
    worst, number = 0.0, 0
    with open_store(path) as store:
        print("ready", flush=True)
        while not os.path.exists(stop):
            started = time.monotonic()
            store.put([key(10**9 + number)], [b"y" * 5000], wait=60)
            store.flush(60)
            worst, number = max(worst, time.monotonic() - started), number + 1
            time.sleep(0.01)
        drops = store.stats()[1].counters["drops"]
    print(f"{number} {worst:.3f} {drops:.0f}", flush=True)


def measure(path: str, count: int) -> None:
    """Open, and print the figures."""
    stop = f"{path}.stop"
    command = [sys.executable, __file__, "--write", path, "--stop", stop]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        started = time.monotonic()
        store = open_store(path)
        opened = time.monotonic() - started
        while (store.stats()[1].blocks or 0) < count and time.monotonic() - started < 120:
            time.sleep(0.05)
        known = time.monotonic() - started
        with open(stop, "w", encoding="ascii"):
            pass
        puts, worst, drops = writer.stdout.readline().split()
    store.close()
    os.unlink(stop)
    print(
        f"{count:>9,} {opened:8.2f} {known:8.2f} {puts:>7} {worst:>9} {drops:>6} "
        f"{bytes_each(path, count):8.0f}",
        flush=True,
    )


def bytes_each(path: str, count: int) -> float:
    """Return the memory of an index of all records, divided by ``count``."""
    tracemalloc.start()
    try:
        index = Index(LRU, ordered=ORDERED, unit=4096)
        index.fill(DiskBackend(path).list())
        return tracemalloc.get_traced_memory()[0] / count
    finally:
        tracemalloc.stop()


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", default="10000,100000")
    parser.add_argument("--at", help="where to make the directories; a temporary one by default")
    parser.add_argument("--write", help=argparse.SUPPRESS)
    parser.add_argument("--stop", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.write:
        write_until(given.write, given.stop)
        return
    print("  records  open, s known, s    puts longest, s  drops  B/block")
    for count in map(int, given.sizes.split(",")):
        with tempfile.TemporaryDirectory(dir=given.at) as place:
            fill(f"{place}/store", count)
            measure(f"{place}/store", count)


if __name__ == "__main__":
    main()
