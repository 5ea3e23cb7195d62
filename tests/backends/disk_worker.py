"""Processes that write into one directory; tests kill them.

Run as a script it opens nothing itself: each line of its input forks a process that was imported
already, and each line of its output is one that such a process wrote, or ``dead <pid>``.
"""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

from kvkeep.core.errors import OutOfRoom
from kvkeep.store.backends.buffers import aligned
from kvkeep.store.backends.disk import DiskBackend

KEYS = 12
SIZES = (90, 5000, 70_000)  # of one unit, of more, and large enough for direct I/O
GONE = 0


def block_of(who: int, key: int) -> bytes:
    return bytes([who]) * 16 + bytes([key]) * 32


def record(block: bytes, version: int) -> bytes:
    """Bytes that are unique to this block and version."""
    head = block + version.to_bytes(8, "little")
    return head + random.Random(head).randbytes(SIZES[version % 3] - len(head))


def version_of(data: bytes | memoryview) -> int:
    return int.from_bytes(data[48:56], "little")


def index_of(root: str | Path) -> list[Path]:
    """The index, without its log."""
    return [path for path in Path(root, "index").iterdir() if len(path.name) == 16]


def say(line: str) -> None:
    os.write(1, f"{line}\n".encode())  # one call, so that lines of several processes stay whole


def work(path: str, capacity: int, who: int, seed: int, steps: int) -> None:
    """Put, replace, delete, quarantine and flush at random; report before and after each change."""
    chance = random.Random(seed)
    backend = DiskBackend(path, capacity)
    for _ in range(steps):
        key, what = chance.randrange(KEYS), chance.random()
        block = block_of(who, key)
        version = chance.randrange(1, 1 << 60) if what < 0.7 else GONE
        say(f"begin {who} {key} {version}")
        try:
            if version:
                data = record(block, version)
                buffer = aligned(len(data))
                buffer[:] = data
                backend.put(block, buffer)
            elif what < 0.97:
                backend.delete([block])
            else:
                backend.quarantine(block, "a test")
        except OutOfRoom:
            say(f"full {who} {key} {version}")
            other = chance.randrange(KEYS)
            say(f"begin {who} {other} {GONE}")
            backend.delete([block_of(who, other)])
            say(f"done {who} {other} {GONE}")
        else:
            say(f"done {who} {key} {version}")
        if chance.random() < 0.05:
            backend.flush()


def fork_in_use(path: str, capacity: int, who: int, seed: int, steps: int) -> None:
    """Fork while threads put through one backend; child and threads continue to use it."""
    backend = DiskBackend(path, capacity)

    def put(thread: int) -> None:
        for step in range(steps):
            data = aligned(5000)
            block = block_of(who, thread) if step % 2 else block_of(thread, who)
            data[:48] = block
            backend.put(block, data)

    threads = [threading.Thread(target=put, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    children = []
    for number in range(100, 104):
        if (child := os.fork()) == 0:
            put(number)
            backend.flush()
            os._exit(0)
        children.append(child)
    for child in children:
        assert os.waitpid(child, 0)[1] == 0
    for thread in threads:
        thread.join()
    del seed


def sweep(path: str, capacity: int, who: int, seed: int, steps: int) -> None:
    """List the directory with an index made anew, while other processes write."""
    for _ in range(steps):
        for index in index_of(path):
            index.unlink(missing_ok=True)
        for _record in DiskBackend(path, capacity).list():
            time.sleep(0.0002)
    del who, seed


def stop(path: str, capacity: int, who: int, within: int, steps: int) -> None:
    """Stop within a change, or while a record of two units is written."""
    if within:
        (file,) = index_of(path)
        with closing(sqlite3.connect(file, isolation_level=None)) as index:
            index.execute("BEGIN IMMEDIATE")
            index.execute("DELETE FROM records")
            say(f"stopped {who}")
            os.kill(os.getpid(), signal.SIGSTOP)

    def stopping(*_: object) -> int:
        say(f"stopped {who}")
        os.kill(os.getpid(), signal.SIGSTOP)
        raise AssertionError("it is killed")

    os.pwrite = stopping
    DiskBackend(path, capacity).put(block_of(who, 0), memoryview(bytes(5000)))
    del steps


JOBS = {"work": work, "fork": fork_in_use, "sweep": sweep, "stop": stop}


def main() -> None:
    running: set[int] = set()
    say("ready")
    for line in sys.stdin:
        job, *arguments = line.split()
        if job == "wait":  # for all that were started
            while running:
                pid, status = os.wait()
                running.discard(pid)
                say(f"dead {pid} {status}")
            say("all")
            continue
        path, *numbers = arguments
        if (pid := os.fork()) == 0:
            try:
                JOBS[job](path, *map(int, numbers))
            except BaseException as error:  # noqa: BLE001 - the test hears of it
                say(f"raised {error!r}")
                os._exit(1)
            os._exit(0)
        running.add(pid)
        say(f"started {pid}")


if __name__ == "__main__":
    main()
