"""The speed of the store beside that of the machine: a copy, `dd`, a bare socket.

KV of Llama 3.1 8B's shape in bfloat16: a block of 256 tokens is 32 MiB. In each round everything
is measured once, so that a neighbour on the machine slows all of it; ratios are of one round, and
the figure is their median, with the smallest and the largest.

    python benchmarks/store.py                  # about three minutes
    python benchmarks/store.py --quick          # fewer rounds, less data
    python benchmarks/store.py --only disk      # one part: memory, disk, lookup, valkey, open,
                                                # slow
    python benchmarks/store.py --dir /mnt/nvme  # the disk to measure (the temporary directory's)
    python benchmarks/store.py --json

The disk is written and read with direct I/O, by `dd` as well, so the page cache holds none of it:
what is read is cold. `dd` writes zeros from one thread. Other systems: `beside_peers.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from faults import FaultyBackend
from figures import Figure
from kvkeep.core.geometry import KVGeometry
from kvkeep.core.keys import SPACE_BYTES, chain_keys
from kvkeep.store import KVStore
from kvkeep.store.backends.buffers import aligned
from kvkeep.store.backends.disk import DiskBackend
from kvkeep.store.backends.memory import MemoryBackend

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

LLAMA = KVGeometry(32, 8, 128, "bfloat16")
SMALL = KVGeometry(1, 1, 8, "bfloat16")
BLOCK = 256
BLOCK_BYTES = BLOCK * LLAMA.bytes_per_token
PARTS = ("memory", "disk", "lookup", "valkey", "open", "slow")


class Bench:
    """Options and collected figures."""

    def __init__(self, directory: Path, *, rounds: int, blocks: int) -> None:
        self.directory = directory
        self.rounds = rounds
        self.blocks = blocks
        self.figures: list[Figure] = []

    def speeds(
        self, part: str, name: str, mine: list[float], theirs: list[float], *, beside: str,
        goal: float | None, size: int,
    ) -> None:  # fmt: skip
        """Convert the seconds of each round, kvkeep's and the machine's, to GB/s and ratios."""
        ratios = sorted(floor / own for own, floor in zip(mine, theirs, strict=True))
        value = size / statistics.median(mine) / 1e9
        self.figures.append(
            Figure(name, "GB/s", value, beside, statistics.median(ratios), ratios[0],
                   ratios[-1], goal, part=part)
        )  # fmt: skip

    @property
    def size(self) -> int:
        """Bytes of a prompt's KV."""
        return self.blocks * BLOCK_BYTES


def seconds(work: Callable[[], object]) -> float:
    """Return the seconds of ``work``."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def prompt(blocks: int, seed: int) -> tuple[np.ndarray[tuple[int], np.dtype[np.int32]], Tensor]:
    """Return tokens, and KV of the right size."""
    tokens = np.random.default_rng(seed).integers(0, 128_000, blocks * BLOCK, np.int32)
    kv = torch.empty(32, 2, blocks * BLOCK, 8, 128, dtype=torch.bfloat16)
    return tokens, kv.normal_(generator=torch.Generator().manual_seed(seed))


def memory(bench: Bench) -> None:
    """Measure put and get of the memory tier beside one copy of the same size."""
    tokens, kv = prompt(bench.blocks, 1)
    target, out = torch.zeros_like(kv), torch.zeros_like(kv)
    copies: list[float] = []
    puts: list[float] = []
    gets: list[float] = []
    with KVStore(LLAMA, model="bench@1", tiers=[f"memory://{bench.size + (64 << 20)}B"]) as store:
        store.put(tokens, kv)  # the arena's memory is taken from the system at its first use
        for _ in range(bench.rounds):
            store.clear()
            copies.append(seconds(lambda: target.copy_(kv)))
            puts.append(seconds(lambda: store.put(tokens, kv)))
            gets.append(seconds(lambda: store.get(tokens, out=out)))
        assert torch.equal(out, kv)
    one = "one torch copy"
    bench.speeds("memory", "put", puts, copies, beside=one, goal=0.8, size=bench.size)
    bench.speeds("memory", "get, into the caller's memory", gets, copies, beside=one, goal=0.8,
                 size=bench.size)  # fmt: skip


def dd(source: str, target: str, flag: str, blocks: int) -> float:
    """Return the seconds that `dd` reports."""
    command = ["dd", f"if={source}", f"of={target}", "bs=32M", f"count={blocks}", flag]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env={**os.environ, "LC_ALL": "C"}
    )
    return float(done.stderr.rsplit("copied, ", 1)[1].split(" s,")[0])


def disk(bench: Bench) -> None:
    """Measure put and flush, and get by a newly opened store, beside `dd` with direct I/O."""
    tokens, kv = prompt(bench.blocks, 2)
    out = torch.zeros_like(kv)
    url = f"file://{bench.directory}/store?size=64GiB&sync=never"
    raw = str(bench.directory / "dd")
    times: dict[str, list[float]] = {"put": [], "get": [], "write": [], "read": []}
    for turn in range(bench.rounds + 1):  # the first is to warm up
        front = warm(2 * bench.size)
        with KVStore(LLAMA, model="bench@1", tiers=[front, url]) as store:
            put = seconds(lambda: (store.put(tokens, kv), store.flush()))
        write = dd("/dev/zero", raw, "oflag=direct", bench.blocks)
        front = warm(2 * bench.size)
        with KVStore(LLAMA, model="bench@1", tiers=[front, url]) as store:
            get = seconds(lambda: store.get(tokens, out=out))
            assert torch.equal(out, kv)
            read = dd(raw, "/dev/null", "iflag=direct", bench.blocks)
            store.clear()
        if turn:
            for kind, took in (("put", put), ("get", get), ("write", write), ("read", read)):
                times[kind].append(took)
    bench.speeds(
        "disk",
        "put and flush",
        times["put"],
        times["write"],
        beside="dd oflag=direct",
        goal=0.8,
        size=bench.size,
    )
    bench.speeds(
        "disk",
        "get, cold",
        times["get"],
        times["read"],
        beside="dd iflag=direct",
        goal=0.8,
        size=bench.size,
    )


def warm(size: int) -> MemoryBackend:
    """Return a store whose memory tier was touched, as in a running process."""
    backend = MemoryBackend(size)
    pages = backend.arena.buffer[::4096]
    pages[:] = bytes(len(pages))
    return backend


def lookup(bench: Bench) -> None:
    """Measure the lookup of a stored prompt of 32,768 tokens, and its hashing alone."""
    tokens = np.random.default_rng(3).integers(0, 128_000, 32_768, np.int32)
    kv = torch.zeros(1, 2, len(tokens), 1, 8, dtype=torch.bfloat16)
    asked: list[float] = []
    hashed: list[float] = []
    with KVStore(SMALL, model="bench@1", tiers=["memory://64MiB"]) as store:
        store.put(tokens, kv)
        for _ in range(bench.rounds * 20):
            asked.append(seconds(lambda: store.lookup(tokens)) * 1e6)
            hashed.append(seconds(lambda: chain_keys(bytes(32), tokens.tobytes(), BLOCK * 4)) * 1e6)
        assert store.lookup(tokens).tokens == len(tokens)
    share = [own / all_of_it for own, all_of_it in zip(hashed, asked, strict=True)]
    bench.figures.append(
        Figure("32,768 tokens, all stored", "µs", statistics.median(asked), goal=400,
               better="less", part="lookup")
    )  # fmt: skip
    bench.figures.append(
        Figure("  of it hashing", "share", statistics.median(share), goal=0.5, part="lookup")
    )


@contextmanager
def redis_server() -> Iterator[tuple[str, int]]:
    """Start a Redis server without persistence; end it by its process id."""
    program = shutil.which("valkey-server") or shutil.which("redis-server")
    if program is None:
        raise FileNotFoundError("neither valkey-server nor redis-server is installed")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [program, "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=tempfile.gettempdir())
    try:
        for _ in range(500):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.01)
        yield "127.0.0.1", port
    finally:
        process.terminate()
        process.wait(10)


def raw_set(wire: socket.socket, name: bytes, value: memoryview) -> None:
    """SET over a bare socket."""
    wire.sendall(b"*3\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n" % (len(name), name, len(value)))
    wire.sendall(value)
    wire.sendall(b"\r\n")
    assert wire.recv(64) == b"+OK\r\n"


def raw_get(wire: socket.socket, name: bytes, out: memoryview) -> None:
    """GET over a bare socket, into existing memory."""
    wire.sendall(b"*2\r\n$3\r\nGET\r\n$%d\r\n%s\r\n" % (len(name), name))
    known = 0
    while known < len(out):
        known += wire.recv_into(out[known:])


def valkey(bench: Bench) -> None:
    """Measure put and get of blocks on a server beside a bare socket's SET and GET."""
    from kvkeep.store.backends import TierURL  # noqa: PLC0415
    from kvkeep.store.backends.valkey import ValkeyBackend  # noqa: PLC0415

    value, room = aligned(BLOCK_BYTES), aligned(BLOCK_BYTES)
    value[:] = np.random.default_rng(4).bytes(BLOCK_BYTES)
    size = b"$%d\r\n" % BLOCK_BYTES
    answer = memoryview(bytearray(BLOCK_BYTES + len(size) + 2))
    times: dict[str, list[float]] = {"set": [], "raw set": [], "get": [], "raw get": []}
    with redis_server() as (host, port), socket.create_connection((host, port)) as wire:
        wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with closing(ValkeyBackend.from_url(TierURL(f"valkey://{host}:{port}"))) as backend:
            blocks = [bytes(SPACE_BYTES) + bytes([number]) * 32 for number in range(4)]
            for turn in range(bench.rounds + 1):
                works: tuple[Callable[[bytes], object], ...] = (
                    lambda block: backend.put(block, value),
                    lambda block: raw_set(wire, block, value),
                    lambda block: backend.get(block, lambda _: room),
                    lambda block: raw_get(wire, block, answer),
                )
                for work, took in zip(works, times.values(), strict=True):
                    once = seconds(lambda: [work(block) for block in blocks])  # noqa: B023
                    if turn:
                        took.append(once)
            assert room == value
    beside, total = "a bare socket", 4 * BLOCK_BYTES
    bench.speeds(
        "valkey", "put", times["set"], times["raw set"], beside=beside, goal=0.6, size=total
    )
    bench.speeds(
        "valkey", "get", times["get"], times["raw get"], beside=beside, goal=0.6, size=total
    )


def opening(bench: Bench) -> None:
    """Measure the opening of a directory with 100,000 blocks."""
    count = 100_000 if bench.rounds > 3 else 10_000
    place = bench.directory / "many"
    with closing(DiskBackend(str(place), capacity=64 << 30)) as backend:
        record = aligned(256)
        backend.put(bytes(48), record)
        (example,) = (path for path in place.rglob("*") if path.is_file() and len(path.name) == 64)
        rng = np.random.default_rng(5)
        for _ in range(count - 1):
            (example.parent / rng.bytes(32).hex()).write_bytes(b"x" * 256)
    took = []
    for _ in range(3):
        started = time.perf_counter()
        tiers = ["memory://16MiB", f"file://{place}?size=64GiB"]
        with KVStore(SMALL, model="bench@1", tiers=tiers) as store:
            took.append(time.perf_counter() - started)
            assert store.stats().tiers[1].blocks == count
    shutil.rmtree(place)
    bench.figures.append(
        Figure(f"{count:,} blocks", "s", statistics.median(took), goal=1.0, better="less",
               part="open")
    )  # fmt: skip


def slow(bench: Bench) -> None:
    """Measure a put while the disk behind memory hangs, beside one with a healthy disk."""
    tokens, kv = prompt(2, 6)
    took: dict[str, list[float]] = {"healthy": [], "hung": []}
    for turn in range(bench.rounds + 1):
        for kind, times in took.items():
            place = bench.directory / f"{kind}{turn}"
            backend = FaultyBackend(DiskBackend(str(place), capacity=1 << 30))
            if kind == "hung":
                backend.hang("put")
            store = KVStore(LLAMA, model="bench@1", tiers=[warm(4 * BLOCK_BYTES), backend])
            once = seconds(lambda: store.put(tokens, kv))  # noqa: B023
            backend.heal()
            store.close()
            shutil.rmtree(place)
            if turn:
                times.append(once)
    bench.speeds("slow", "put while the disk hangs", took["hung"], took["healthy"],
                 beside="with a healthy disk", goal=0.8, size=2 * BLOCK_BYTES)  # fmt: skip


RUN: dict[str, Callable[[Bench], None]] = {
    "memory": memory, "disk": disk, "lookup": lookup, "valkey": valkey, "open": opening,
    "slow": slow,
}  # fmt: skip


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="figures for machines")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, less data")
    parser.add_argument("--only", choices=PARTS, action="append", help="one part; may be repeated")
    parser.add_argument("--dir", type=Path, help="where the disk to measure is")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.dir) as directory:
        bench = Bench(
            Path(directory), rounds=3 if options.quick else 7, blocks=4 if options.quick else 16
        )
        for part in options.only or PARTS:
            print(f"measuring {part} …", file=sys.stderr)
            try:
                RUN[part](bench)
            except FileNotFoundError as missing:
                print(f"  {part} is left out: {missing}", file=sys.stderr)
    if options.json:
        lines = [asdict(one) | {"met": one.met} for one in bench.figures]
        print(json.dumps(lines, indent=1))
        return
    part = ""
    for one in bench.figures:
        if one.part != part:
            part = one.part
            print(part)
        print(one.line())


if __name__ == "__main__":
    main()
