"""kill -9 at a hundred random instants of writing: nothing wrong, nothing promised is lost."""

from __future__ import annotations

import os
import random
import signal
import time
from typing import TYPE_CHECKING

import pytest
from store_kv import counter, disk, get, open_store, records
from writer_process import UNIT, Processes, on_disk, prompt

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvkeep.store import KVStore

LONGEST = 0.1
"""Seconds that a writer writes, at most."""


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    with Processes() as one:
        yield one


def kill(
    pid: int,
    processes: Processes,
    chance: random.Random,
    *,
    heard: bool = False,
    longest: float = LONGEST,
) -> None:
    """At a random instant: one of seven while it opens its store, the others while it writes."""
    opening = not heard and chance.random() < 1 / 7
    if not opening and not heard:
        processes.hear("open")
    time.sleep(chance.uniform(0, longest / 4 if opening else longest))
    os.kill(pid, signal.SIGKILL)


class Promises:
    """What writers said that a flush had promised, and what they had begun."""

    def __init__(self) -> None:
        self.kept: set[tuple[int, int]] = set()
        self.begun: set[tuple[int, int]] = set()
        self.last: list[tuple[int, int]] = []
        """What the last writer began and was promised, in this order."""

    def hear(self, said: list[list[str]]) -> None:
        self.last = []
        for what, *words in said:
            if what == "begin":
                self.last.append((int(words[1]), int(words[2])))
            elif what == "promised":
                pairs = [tuple(map(int, word.split(":"))) for word in words[1:]]
                self.kept.update(pairs)
        self.begun.update(self.last)


@pytest.mark.parametrize("policy", ["inclusive", "exclusive"])
@pytest.mark.parametrize("large", [0, 1], ids=["small blocks", "large blocks"])
def test_what_flush_promised_survives(
    processes: Processes, tmp_path: Path, policy: str, large: int
) -> None:
    """Every prompt of every promise is there whole; what was not promised is right or not there."""
    chance = random.Random(f"{policy} {large}")
    promises, exclusive = Promises(), int(policy == "exclusive")
    url = disk(tmp_path / "d", size="1GiB", sync="flush")
    for turn in range(15):
        pid = processes.start("promise", url, 0, chance.randrange(1 << 30), exclusive, large)
        if turn % 3 == 0:  # on a busy machine they would all be killed too soon
            processes.hear("promised")
        kill(pid, processes, chance, heard=turn % 3 == 0)
        promises.hear(processes.wait())
        with reader(url, large) as store:
            for family, length in promises.last:
                found = get(store, prompt(0, family, length))
                assert found == length or (family, length) not in promises.kept
            assert_sound(store, tmp_path / "d")
    assert len(promises.kept) > 5, "they were killed before they did anything"
    with reader(url, large) as store:  # later writers took nothing of the earlier ones'
        for family, length in promises.kept:
            assert get(store, prompt(0, family, length)) == length


@pytest.mark.parametrize("policy", ["inclusive", "exclusive"])
def test_a_small_budget_is_kept(processes: Processes, tmp_path: Path, policy: str) -> None:
    """Killed while it evicts: never above the budget, no wrong byte, and there is room again."""
    chance = random.Random(policy)
    promises, budget = Promises(), 40 * UNIT
    url = disk(tmp_path / "d", size=str(budget), sync="flush")
    found = 0
    for _ in range(20):
        seed = chance.randrange(1 << 30)
        pid = processes.start("promise", url, 0, seed, int(policy == "exclusive"), 0)
        kill(pid, processes, chance, longest=2 * LONGEST)  # so that it has to evict
        assert on_disk(tmp_path / "d") <= budget
        promises.hear(processes.wait())
        with reader(url, 0) as store:
            for family, length in promises.last:
                found += get(store, prompt(0, family, length))
            assert_sound(store, tmp_path / "d")
    assert found
    assert len(promises.begun) * 3 > budget / UNIT, "nothing had to go"


def reader(url: str, large: int) -> KVStore:
    """A store as the writers', with memory for one prompt, which takes nothing from the disk."""
    return open_store("memory://2MiB", url, block_tokens=512 if large else 4)


def assert_sound(store: KVStore, root: Path) -> None:
    """Nothing torn, nothing left over, nothing failed."""
    for name in ("damaged", "refused", "errors", "misses", "late"):
        assert not counter(store, name), name
    assert os.listdir(root / "tmp") == []
    assert store.stats().tiers[1].blocks == len(records(root))
    store.check()
