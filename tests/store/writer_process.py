"""Processes that use one store, to be killed or to be watched.

Run as a script it opens nothing itself: each line of its input forks a process that was imported
already (torch takes seconds), and each line of its output is one that such a process wrote, or
``dead <pid> <status>``. A line is a job's name, a URL and whole numbers.
"""

from __future__ import annotations

import os
import random
import resource
import subprocess
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Self

from store_kv import counter, get, open_store, put, quiet

from kvkeep.store.tiers import Exclusive, Inclusive

UNIT = 4096
"""Bytes in whole numbers of which a directory counts its files."""
FAMILIES = 400
"""Prompts of different beginnings; each writer has its own, see `prompt`."""


def prompt(who: int, family: int, length: int) -> range:
    """Prompts of one family are prefixes of each other; no two families share a block."""
    start = (who * FAMILIES + family) * 1000
    return range(start, start + length)


def on_disk(root: Path) -> int:
    """Bytes of all files but FORMAT and the index, in whole units, without the store's help."""
    files: dict[int, int] = {}  # by inode: one may be renamed meanwhile
    for directory, _, names in os.walk(root):
        for name in names if directory not in {str(root), str(root / "index")} else ():
            with suppress(FileNotFoundError):
                there = os.lstat(os.path.join(directory, name))
                files[there.st_ino] = -(-there.st_size // UNIT) * UNIT
    return sum(files.values())


def say(*words: object) -> None:
    line = " ".join(map(str, words))
    os.write(1, f"{line}\n".encode())  # one call, so that lines of several processes stay whole


def promise(url: str, who: int, seed: int, exclusive: int, large: int) -> None:
    """Put prompts and flush until killed; tell what was begun, and what each flush promised."""
    chance = random.Random(seed)
    policy = Exclusive() if exclusive else Inclusive()
    store = open_store("memory://2MiB", url, policy=policy, block_tokens=512 if large else 4)
    say("open", who)
    since: list[str] = []
    while True:
        family = chance.randrange(FAMILIES)
        length = chance.randrange(1, 1000 if large else 40)
        say("begin", who, family, length)
        done = put(store, prompt(who, family, length), tail=True)
        assert done.tokens + done.skipped == length, "not all of it was kept"
        since.append(f"{family}:{length}")
        if chance.random() < 0.3:
            assert store.flush(20), "a flush that failed on a disk that works"
            assert not counter(store, "drops"), store.stats().tiers[1]
            say("promised", who, *since)
            since.clear()


def share(url: str, who: int, seed: int, steps: int, others: int) -> None:
    """Put own prompts and get everybody's; tell what came of it. A wrong byte raises."""
    chance = random.Random(seed)
    got = {"own": 0, "other": 0}
    with open_store("memory://64KiB", url) as store:
        for _ in range(steps):
            family, length = chance.randrange(12), 4 * chance.randrange(1, 10)
            if chance.random() < 0.5:
                put(store, prompt(who, family, length))
            else:
                whose = chance.randrange(others)
                tokens = get(store, prompt(whose, family, length))
                got["own" if whose == who else "other"] += tokens
        store.flush(20)
        quiet(store)
        store.check()
        counted = store.stats().tiers[1].counters
    names = ("evictions", "damaged", "errors", "refused", "drops")
    say("shared", who, got["own"], got["other"], *(int(counted[name]) for name in names))


def write(url: str, who: int, seed: int, families: int, length: int) -> None:
    """Put prompts one after another, each in pieces, so that who reads sees them grow."""
    with open_store("memory://4MiB", url) as store:
        for family in range(families):
            for end in range(4, length + 1, 4):
                put(store, prompt(who, family, end))
        assert store.flush(20)
    say("written", who)
    del seed


def limited(url: str, who: int, seed: int, most: int) -> None:
    """Files may have ``most`` bytes: large blocks cannot be written, small ones can."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    large, small = prompt(who, 0, 8192), prompt(who, 1, 8)
    with open_store("memory://16MiB", url, block_tokens=4096) as store:
        assert put(store, large, wait=True).tokens == 8192
        assert put(store, small, tail=True, wait=True).tokens == 8
        assert get(store, large) == 8192
        drops, writes = counter(store, "drops"), counter(store, "writes")
    with open_store("memory://16MiB", url, block_tokens=4096) as store:
        say("limited", who, int(drops), int(writes), get(store, large), get(store, small))
    del seed


JOBS = {"promise": promise, "share": share, "write": write, "limited": limited}


def main() -> None:
    running: set[int] = set()
    say("ready")
    for line in sys.stdin:
        job, *arguments = line.split()
        if job == "wait":  # for all that were started
            while running:
                pid, status = os.wait()
                running.discard(pid)
                say("dead", pid, status)
            say("all")
            continue
        url, *numbers = arguments
        if (pid := os.fork()) == 0:
            try:
                say("started", os.getpid())  # by itself: nothing that it says can come before this
                JOBS[job](url, *map(int, numbers))
            except BaseException as error:  # noqa: BLE001 - the test hears of it
                where = traceback.format_exc().replace("\n", " | ")
                say(f"raised {error!r} {where}")
                os._exit(1)
            os._exit(0)
        running.add(pid)


class Processes:
    """The other end: a process of which jobs are forked. Starting one takes no import."""

    def __init__(self) -> None:
        here, backends = Path(__file__).parent, Path(__file__).parent.parent / "backends"
        paths = [str(here), str(backends), os.environ.get("PYTHONPATH", "")]
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert self.line() == "ready"
        self.said: list[str] = []

    def line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        assert line, "the process that starts jobs is gone"
        return line

    def tell(self, *words: object) -> None:
        assert self.process.stdin is not None
        line = " ".join(map(str, words))
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def start(self, job: str, url: str, *numbers: int) -> int:
        """Fork a process that does the job; its id."""
        self.tell(job, url, *numbers)
        while not (line := self.line()).startswith("started"):
            self.said.append(line)
        return int(line.split()[1])

    def hear(self, word: str) -> None:
        """Wait for a line that begins so."""
        while True:
            self.said.append(self.line())
            assert not self.said[-1].startswith("raised"), self.said[-1]
            if self.said[-1].split()[0] == word:
                return

    def wait(self) -> list[list[str]]:
        """What all of them said until they ended, in words."""
        self.tell("wait")
        while (line := self.line()) != "all":
            self.said.append(line)
        said, self.said = self.said, []
        raised = [line for line in said if line.startswith("raised")]
        assert not raised, raised
        return [line.split() for line in said]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()


if __name__ == "__main__":
    main()
