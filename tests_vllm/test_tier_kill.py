"""Engines that are killed while they save, and two on one store: what is read is right, or a miss.

The processes here are vLLM's scheduler without its model (`test_tier_pages.Driver`), with kvkeep's
tier or vLLM's own for files. Each row that a later process calls a hit is compared.
"""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import pytest
from engines import FORKS, beside
from test_failures import records
from test_tier_pages import Driver, spec_of

from kvkeep.core.keys import Namespace
from kvkeep.integrations.vllm import tier as tier_module
from kvkeep.integrations.vllm.tier import KVKeepSpec
from tiers import FS, OURS, blocks_of_fs, fs_tier, seen

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection

ROUNDS = int(os.environ.get("KVKEEP_TIER_KILLS", "8"))
"""Engines that are killed; 100 are a minute or two."""
CHUNKS = 3
SIZE = 64 << 20


class FsDriver(Driver):
    """As `Driver`, with vLLM's tier for files."""

    def __init__(self, spec: KVKeepSpec) -> None:
        self.manager: Any = spec.get_manager()
        (self.tier,) = self.manager.secondary_tiers
        self.rows = np.asarray(self.manager.primary_tier.get_kv_memoryview()).view(np.uint8)
        self.hits = self.misses = self._number = 0


def opened(system: str, root: str) -> Driver:
    spec = spec_of("kill", f"file://{root}?size={SIZE}", load_timeout=20.0)
    if system == OURS:
        return Driver(spec)
    extra = {**spec.config.extra_config, "secondary_tiers": [fs_tier(root)]}
    with spec.engine.starting():
        return FsDriver(KVKeepSpec(dataclasses.replace(spec.config, extra_config=extra)))


def save_for_ever(system: str, root: str, first: int) -> None:
    """Store one prompt after another from number ``first`` on; tell the number of each."""
    engine, number = opened(system, root), first
    while True:
        engine.finish(engine.begin(number, CHUNKS))
        engine.settle()
        if system == FS or engine.tier._store.store.flush(30):
            os.write(1, b"kept %d %s\n" % (number, root.encode()))
        number += 1


def nursery(says: Connection, hears: Connection) -> None:
    """Fork a process that is imported already for each line that it hears; tell its id."""
    os.dup2(says.fileno(), 1)
    tier_module.namespace_of_rows = lambda *_: Namespace(model="pages")
    while line := hears.recv():
        system, root, first = line.split()
        child = os.fork()
        if not child:
            try:
                save_for_ever(system, root, int(first))
            finally:
                os._exit(1)
        os.write(1, b"born %d\n" % child)


class Nursery:
    def __enter__(self) -> Self:
        hears, self._tells = FORKS.Pipe(duplex=False)
        self._process, self._says = beside("test_tier_kill:nursery", hears)
        hears.close()
        self._lines = open(self._says.fileno(), closefd=False)
        self.said: list[list[str]] = []
        self.born: list[int] = []
        return self

    def __exit__(self, *_: object) -> None:
        for child in self.born:
            self.kill(child)  # if its test has failed before it did
        self._process.kill()
        self._process.join()
        self._lines.close()
        self._says.close()
        self._tells.close()
        for child in self.born:
            Path(f"/dev/shm/vllm_offload_kill-{child}.mmap").unlink(missing_ok=True)

    def start(self, system: str, root: Path, first: int) -> int:
        self._tells.send(f"{system} {root} {first}")
        child = int(self.hear("born")[1])
        self.born.append(child)
        return child

    def hear(self, what: str) -> list[str]:
        """Read until a line begins so."""
        while words := self._lines.readline().split():
            self.said.append(words)
            if words[0] == what:
                return words
        pytest.fail("the processes have ended")

    def kept(self, root: Path) -> list[int]:
        """The prompts that were kept in ``root``, by what was heard."""
        return sorted({int(at) for what, at, *of in self.said if of == [str(root)]})

    def kill(self, child: int) -> None:
        """Kill a child, and return when it is dead: the nursery does not wait for it."""
        os.kill(child, signal.SIGKILL)
        while Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            time.sleep(0.001)


@pytest.fixture(scope="module")
def nest() -> Iterator[Nursery]:
    with Nursery() as one:
        yield one


@pytest.fixture(autouse=True)
def same_space(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_module, "namespace_of_rows", lambda *_: Namespace(model="pages"))


def found(engine: Driver, number: int) -> int:
    """The chunks of a prompt that are there; the wrong bytes of one are an error. Stores none."""
    before = engine.hits
    engine.manager.prepare_store = lambda *_: None
    engine.finish(engine.begin(number, CHUNKS))
    engine.settle()
    return engine.hits - before


def killed_while_it_saves(nest: Nursery, system: str, root: Path) -> None:
    chance = random.Random(system)
    for turn in range(ROUNDS):
        first = 10_000 * turn
        child = nest.start(system, root, first)
        if turn % 4:  # else it is killed while it opens, or soon after
            nest.hear("kept")
        time.sleep(chance.uniform(0, 0.1))
        nest.kill(child)
        reader = opened(system, str(root))
        last = max([first, *nest.kept(root)])
        there = [found(reader, number) for number in range(first, last + 20)]
        assert turn % 4 == 0 or sum(there)
        reader.close()
    last = nest.start(system, root, 10_000 * ROUNDS)
    nest.hear("kept")  # with it, all that those before have said
    nest.kill(last)
    reader, kept = opened(system, str(root)), nest.kept(root)
    lost = [number for number in kept if found(reader, number) < 2 * CHUNKS]
    reader.close()
    assert len(kept) >= ROUNDS // 2
    assert not lost, f"{len(lost)} of {len(kept)} prompts that were kept"


def test_killed_while_it_saves(nest: Nursery, tmp_path: Path) -> None:
    killed_while_it_saves(nest, OURS, tmp_path / "kv")
    reader = opened(OURS, str(tmp_path / "kv"))
    reader.tier._store.store.check()
    counters = reader.tier._store.store.stats()[1].counters
    assert not any(counters[name] for name in ("damaged", "refused", "errors")), counters
    reader.close()
    assert os.listdir(tmp_path / "kv/tmp") == []
    seen("kill -9 while it saves", OURS, "nothing wrong, nothing left over")


def test_killed_while_it_saves_for_fs(nest: Nursery, tmp_path: Path) -> None:
    killed_while_it_saves(nest, FS, tmp_path / "fs")
    left = blocks_of_fs(tmp_path / "fs")[0].with_suffix(".bin_1.tmp")
    left.write_bytes(bytes(100))  # what one that was killed between two calls leaves
    opened(FS, str(tmp_path / "fs")).close()
    seen(
        "kill -9 while it saves", FS,
        "nothing wrong, temporary files stay" if left.exists() else "nothing wrong, nothing left",
    )  # fmt: skip


@pytest.mark.parametrize("system", [OURS, FS])
def test_two_engines_on_one_store(nest: Nursery, tmp_path: Path, system: str) -> None:
    """They store the same prompts at once, while a third reads; then one of them is killed."""
    root = tmp_path / "kv"
    children = [nest.start(system, root, 0), nest.start(system, root, 0)]
    nest.hear("kept")
    reader = opened(system, str(root))
    for turn in range(12):
        nest.hear("kept")
        if turn == 6:
            nest.kill(children[0])
        for number in nest.kept(root)[-4:]:
            assert found(reader, number) == 2 * CHUNKS
    reader.close()
    nest.kill(children[1])
    assert records(root) if system == OURS else blocks_of_fs(root)
    seen("two engines on one store", system, "right tokens")
