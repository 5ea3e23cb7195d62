"""Writes files into a directory with a write budget until it is killed; says each it finished."""

from __future__ import annotations

import os
import sys

from kvkeep.store.backends import OverBudget, WriteBudget
from kvkeep.store.backends.disk import DiskBackend

RECORD = bytes(8192)


def main(path: str, amount: int, seconds: int) -> None:
    backend = DiskBackend(path, sync="never", io="buffered")
    backend.limit_writes(WriteBudget(amount, seconds))
    os.write(1, b"open\n")
    while True:
        try:
            backend.put(os.urandom(48), memoryview(RECORD))
        except OverBudget:
            continue
        os.write(1, b"put\n")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
