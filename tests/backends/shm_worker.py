"""Processes that use one shared arena; tests kill them.

`work` is run in a forked process. Each line of its output is one `os.write`, so a line is whole.
"""

from __future__ import annotations

import os
import random
import sys
from typing import TYPE_CHECKING

from kvkeep.core.errors import OutOfRoom
from kvkeep.store.backends.shm import ShmBackend

if TYPE_CHECKING:
    from collections.abc import Callable

KEYS = 12
SIZES = (90, 5000, 70_000)
CAPACITY = 1 << 20


def block_of(who: int, key: int) -> bytes:
    return bytes([who]) * 16 + bytes([key]) * 32


def record(block: bytes, version: int) -> bytes:
    """Bytes that are unique to this block and version."""
    head = block + version.to_bytes(8, "little")
    return head + random.Random(head).randbytes(SIZES[version % 3] - len(head))


def version_of(data: bytes | memoryview) -> int:
    return int.from_bytes(data[48:56], "little")


def forked(job: Callable[[int], None]) -> tuple[int, int]:
    """Run ``job(fd)`` in a fork; return its process id and the descriptor that reads ``fd``."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return pid, reading
    code = 1
    try:
        os.close(reading)
        job(writing)
        code = 0
    except BaseException as error:  # noqa: BLE001 - reported to the parent
        os.write(writing, f"raised {error!r}\n".encode())
    finally:
        os._exit(code)


def lines_of(pid: int, reading: int) -> list[str]:
    """All output of a forked process, which has ended then."""
    data = bytearray()
    while more := os.read(reading, 1 << 16):
        data += more
    os.close(reading)
    os.waitpid(pid, 0)
    lines = data.decode().splitlines()
    assert not [line for line in lines if line.startswith("raised")], lines[-1]
    return lines


def work(directory: str, who: int, seed: int, steps: int, out: int) -> None:
    """Put, read, replace, delete and evict at random; report each change before and after it."""
    chance = random.Random(seed)
    say = lambda text: os.write(out, f"{text}\n".encode())  # noqa: E731
    backend = ShmBackend(CAPACITY, directory=directory)
    for step in range(steps):
        key = chance.randrange(KEYS)
        block = block_of(who, key)
        what = chance.random()
        if what < 0.5:
            version = seed % 100_000 * 100_000 + step + 1
            say(f"put {key} {version}")
            try:
                backend.put(block, memoryview(record(block, version)))
                say(f"done {key} {version}")
            except OutOfRoom as short:
                say(f"full {key}")
                for gone, _ in backend.evict(short.needed):
                    say(f"evicted {gone[0]} {gone[16]}")
        elif what < 0.6:
            say(f"put {key} 0")
            backend.delete([block])
            say(f"done {key} 0")
        else:  # any process's block
            other = block_of(chance.choice((1, 2)), key)
            lease = backend.lease(other)
            if lease is not None:
                data = bytes(lease.view)
                backend.touch([other])
                assert data == record(other, version_of(data)), "wrong bytes"
                assert data == bytes(lease.view), "changed under the lease"
                if chance.random() < 0.9:
                    lease.release()


if __name__ == "__main__":
    work(sys.argv[1], 1, 1, 200, 1)
