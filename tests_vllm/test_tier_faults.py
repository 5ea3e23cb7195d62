"""What happens below vLLM's offloading when a place fails: vLLM's tier for files, and kvkeep's.

One engine writes to both, and the tests damage the files of one of them. What vLLM's tier does is
what it does today: a newer vLLM that does better fails here, and the page is written anew.
"""

from __future__ import annotations

import os
import resource
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from engines import Answer, prompt
from models import make_llama
from test_failures import records

from kvkeep.store.backends.disk import DiskBackend
from tiers import (
    FS,
    OURS,
    SideBySide,
    blank,
    blocks_of_fs,
    cached,
    cut,
    engines_apart,
    flip,
    fs_tier,
    outcome,
    seen,
    side_by_side,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.xdist_group("tier_faults")

SIZE, BUFFER = 16 << 20, 3 << 20
ASKED = [prompt(length, seed=90) for length in (97, 193, 300, 450)]
FULL = sum(len(one) // 32 * 32 for one in ASKED)


@dataclass
class World:
    model: str
    engine: SideBySide
    fs: Path
    kvkeep: Path
    cold: list[Answer]

    def files(self, system: str) -> list[Path]:
        return blocks_of_fs(self.fs) if system == FS else records(self.kvkeep)

    def whole(self, system: str) -> None:
        """See that all is stored, and found. Behind a gap nothing is read: the next load does."""
        until = time.monotonic() + 60
        while time.monotonic() < until:
            warm = self.engine.load(system, ASKED)
            assert outcome(self.cold, warm) == "right tokens"
            self.engine.written()
            if cached(warm) == FULL:
                return
            time.sleep(0.05)  # kvkeep's breaker pauses after failures
        pytest.fail(f"found of {FULL} tokens: {[answer.cached for answer in warm]}")

    def damaged(self, system: str, fault: Callable[[Path], object]) -> list[Answer]:
        """Do this to all files of a system, and ask; then put back what they were."""
        self.whole(system)
        self.engine.forget_buffer()
        before = {file: file.read_bytes() for file in self.files(system)}
        assert len(before) >= FULL // 32
        for file in before:
            fault(file)
        failed = self.engine["failed_tokens"]
        warm = self.engine.load(system, ASKED)
        if system == OURS:
            assert self.engine["failed_tokens"] > failed, "a loss that is not counted"
        self.engine.written()
        for file, raw in before.items():
            if system == FS:
                file.write_bytes(raw)
        return warm


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    place = tmp_path_factory.mktemp("faults")
    model = make_llama(place / "llama", seed=90)
    fs, kvkeep = place / "fs", place / "kv"
    limits = {"buffer": BUFFER, "load_timeout": 2.0}
    with side_by_side(
        model, [fs_tier(fs)], [f"file://{kvkeep}?size={SIZE}"], options=limits
    ) as one:
        cold = one.load("cold", ASKED)
        assert cached(cold) == 0
        one.written()
        yield World(model, one, fs, kvkeep, cold)


def test_a_flipped_bit_for_fs(world: World) -> None:
    warm = world.damaged(FS, flip)
    assert cached(warm) == FULL
    seen("a flipped bit", FS, outcome(world.cold, warm))


def test_a_flipped_bit(world: World) -> None:
    warm = world.damaged(OURS, flip)
    assert cached(warm) == 0
    seen("a flipped bit", OURS, outcome(world.cold, warm))


def test_zeros_for_fs(world: World) -> None:
    warm = world.damaged(FS, blank)
    assert cached(warm) == FULL
    seen("zeros where power was lost", FS, outcome(world.cold, warm))


def test_zeros(world: World) -> None:
    warm = world.damaged(OURS, blank)
    assert cached(warm) == 0
    seen("zeros where power was lost", OURS, outcome(world.cold, warm))


def test_a_file_cut_in_half_for_fs(world: World) -> None:
    warm = world.damaged(FS, cut)
    assert cached(warm) == 0
    seen("a file cut in half", FS, outcome(world.cold, warm))


def test_a_file_cut_in_half(world: World) -> None:
    warm = world.damaged(OURS, cut)
    assert cached(warm) == 0
    seen("a file cut in half", OURS, outcome(world.cold, warm))


def test_a_missing_file_for_fs(world: World) -> None:
    warm = world.damaged(FS, lambda file: file.unlink())
    assert cached(warm) == 0
    seen("a missing file", FS, outcome(world.cold, warm))


def test_a_missing_file(world: World) -> None:
    warm = world.damaged(OURS, lambda file: file.unlink())
    assert cached(warm) == 0
    seen("a missing file", OURS, outcome(world.cold, warm))


def unlinked_when_found(world: World, system: str, owner: Any, name: str) -> list[Answer]:
    """Remove half of the files after vLLM was told that they are there."""
    world.whole(system)
    world.engine.forget_buffer()
    load, files = getattr(owner, name), world.files(system)
    lock = threading.Lock()

    def late(*args: Any) -> Any:
        with lock:
            while len(files) > FULL // 64:
                files.pop().unlink(missing_ok=True)
        return load(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, late)
        warm = world.engine.load(system, ASKED)
    world.engine.written()
    assert 0 <= cached(warm) < FULL
    return warm


def test_files_that_go_while_they_are_loaded_for_fs(world: World) -> None:
    from vllm.v1.kv_offload.tiering.fs import manager

    warm = unlinked_when_found(world, FS, manager, "batch_load_block")
    seen("files that go while they are loaded", FS, outcome(world.cold, warm))


def test_files_that_go_while_they_are_loaded(world: World) -> None:
    failed = world.engine["failed_tokens"]
    warm = unlinked_when_found(world, OURS, DiskBackend, "get")
    assert world.engine["failed_tokens"] > failed
    seen("files that go while they are loaded", OURS, outcome(world.cold, warm))


@contextmanager
def full_disk() -> Iterator[None]:
    """No file of this process can become as large as a chunk: every write of one fails.

    Unlike a disk that is full of others' files, eviction does not help here.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40 << 10, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def asked_on_a_full_disk(world: World, seed: int) -> tuple[str, list[list[int]]]:
    new = [prompt(length, seed=seed) for length in (200, 300)]
    with full_disk():
        first = world.engine.load("cold", new)
        world.engine.written()
        again = world.engine.load("cold", new)
        world.engine.written()
    return outcome(first, again), new


def test_a_full_disk_for_fs(world: World) -> None:
    before = len(blocks_of_fs(world.fs))
    told, new = asked_on_a_full_disk(world, 91)
    assert len(blocks_of_fs(world.fs)) == before
    assert not list(world.fs.rglob("*.tmp"))
    assert cached(world.engine.load(FS, new)) == 0
    seen("a full disk", FS, told)


def test_a_full_disk(world: World) -> None:
    world.whole(OURS)
    before, drops = set(records(world.kvkeep)), world.engine.store.stats()[1].counters["drops"]
    told, _ = asked_on_a_full_disk(world, 92)
    assert set(records(world.kvkeep)) == before  # nothing is evicted in vain
    assert world.engine.store.stats()[1].counters["drops"] > drops
    world.engine.store.check()
    seen("a full disk", OURS, told)


def test_a_disk_that_hangs_for_fs(world: World) -> None:
    """A file that is a pipe without a writer is opened for ever, as one on a mount that hangs."""
    world.whole(FS)
    files = {file: file.read_bytes() for file in world.files(FS)}
    for file in files:
        file.unlink()
        os.mkfifo(file)

    def goes_on() -> None:
        writing = [os.open(file, os.O_RDWR | os.O_NONBLOCK) for file in files if file.exists()]
        for file, raw in files.items():
            file.unlink(missing_ok=True)
            file.write_bytes(raw)
        for fd in writing:
            os.close(fd)

    began = time.monotonic()
    world.engine.load("cold", ASKED)
    patience = 2 + 10 * (time.monotonic() - began)
    answered = world.engine.answered(FS, ASKED[-1], patience, goes_on)
    seen("a disk that hangs", FS, "right tokens" if answered else "the request hangs with it")


def test_a_disk_that_hangs(world: World) -> None:
    world.whole(OURS)
    world.engine.forget_buffer()
    get, go_on = DiskBackend.get, threading.Event()

    def hangs(self: DiskBackend, block: bytes, room: Any) -> Any:
        assert go_on.wait(120)
        return get(self, block, room)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DiskBackend, "get", hangs)
        began = time.monotonic()
        warm = world.engine.load(OURS, ASKED)
        assert not go_on.is_set()
        assert time.monotonic() - began < 60
        assert world.engine["late_tokens"] > 0
        go_on.set()
    seen("a disk that hangs", OURS, outcome(world.cold, warm))


def test_pipes_in_place_of_records(world: World) -> None:
    world.whole(OURS)
    world.engine.forget_buffer()
    files = {file: file.read_bytes() for file in world.files(OURS)}
    for file in files:
        file.unlink()
        os.mkfifo(file)
    warm = world.engine.load(OURS, ASKED)
    assert outcome(world.cold, warm) == "right tokens"
    world.engine.written()
    assert cached(warm) == 0


def two_ranks(model: str, fs: str, kvkeep: str) -> dict[str, list[object]]:
    """In a process of its own: ask an engine with two ranks, while one with one rank lives."""
    ranks = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    ours = [f"file://{kvkeep}?size={SIZE}"]
    with side_by_side(model, [fs_tier(fs)], ours, num_gpu_blocks_override=512, **ranks) as one:
        mine = one.load(OURS, ASKED[:2])
        one.written()
        again = one.load(OURS, ASKED[:2])
        theirs = one.load(FS, ASKED[:2])
        cold = one.load("cold", ASKED[:2])
    return {
        OURS: [outcome(cold, mine), cached(mine), outcome(cold, again), cached(again)],
        FS: [outcome(cold, theirs), cached(theirs)],
    }


def test_another_number_of_ranks(world: World) -> None:
    world.whole(FS)
    world.whole(OURS)
    found = engines_apart(
        "test_tier_faults:two_ranks", world.model, str(world.fs), str(world.kvkeep)
    )  # fmt: skip
    told, tokens = found[FS]
    some = sum(len(one) // 32 * 32 for one in ASKED[:2])
    assert tokens == some
    seen("KV of another number of ranks", FS, told)
    told, _, again, tokens = found[OURS]
    assert (again, tokens) == ("right tokens", some)
    seen("KV of another number of ranks", OURS, told)
    world.whole(FS)  # what one rank has written is still right for one rank
    world.whole(OURS)


def flooded(world: World, seed: int) -> None:
    """Compute three times what kvkeep's directory may hold."""
    asked = [prompt(1984, seed=seed + at) for at in range(3 * SIZE // (62 << 16) + 1)]
    for at in range(0, len(asked), 4):
        world.engine.load("cold", asked[at : at + 4])
        world.engine.written()


def test_more_than_the_disk_is_to_hold(world: World) -> None:
    def used(system: str) -> int:
        return sum(file.stat().st_size for file in world.files(system))

    before = used(FS)
    flooded(world, 1000)
    seen(
        "more than the disk is to hold", FS,
        "grows until the disk is full" if used(FS) - before > 2 * SIZE else "has a limit",
    )  # fmt: skip
    assert SIZE // 2 < used(OURS) <= SIZE
    seen("more than the disk is to hold", OURS, "evicts what was used least recently")
