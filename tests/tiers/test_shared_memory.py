"""Stores whose memory is shared by the processes of a node, alone and above a directory."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import TYPE_CHECKING

import pytest

from kvkeep import InvalidValue
from kvkeep.cli import main
from kvkeep.core.keys import SPACE_BYTES
from kvkeep.store.backends.shm import ShmBackend
from kvkeep.store.blocks import BlockStore
from kvkeep.store.tiers import Exclusive

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shm:// needs Linux")
SIZE = 60_000
TAKES = 61_440  # with the header, in whole units


def keys_of(prompt: int, count: int = 8) -> list[bytes]:
    return [bytes([prompt]) * 31 + bytes([number]) for number in range(count)]


def data(key: bytes) -> bytes:
    return (key * SIZE)[:SIZE]


def opened(tmp_path: Path, *below: str, size: int = 16 * TAKES, options: str = "") -> BlockStore:
    url = f"shm://{size}?dir={tmp_path}{options}"
    return BlockStore("tenant", tiers=[url, *below])


def put(store: BlockStore, keys: list[bytes]) -> int:
    return store.put(keys, [data(key) for key in keys])


def read(store: BlockStore, keys: list[bytes]) -> int:
    """How many leading blocks were read; each must be right."""

    def sink(at: int, raw: memoryview) -> None:
        assert raw == data(keys[at])

    return store.read(keys, [SIZE] * len(keys), sink)


def in_fork(job: Callable[[], object]) -> int:
    """Run ``job`` in another process; return its exit status."""
    pid = os.fork()
    if not pid:
        code = 1
        try:
            job()
            code = 0
        finally:
            os._exit(code)
    return os.waitpid(pid, 0)[1]


def test_what_one_stores_another_reads(tmp_path: Path) -> None:
    keys = keys_of(1)
    with opened(tmp_path) as one, opened(tmp_path) as two:
        assert put(one, keys) == 8
        assert two.knows(keys) == two.lookup(keys) == 8
        assert read(two, keys) == 8
        assert put(two, keys) == 8
        (front,) = two.stats()
        assert front.name == "shm"
        assert front.blocks == 8
        assert front.used_bytes == 8 * TAKES
        assert front.counters["writes"] == 0
        assert front.counters["already"] == front.counters["hits"] == 8
        one.check()
        two.check()


def test_it_survives_every_process(tmp_path: Path) -> None:
    """Also one that is killed in the middle of its work."""
    keys = keys_of(1)

    def job() -> None:
        store = opened(tmp_path)
        assert put(store, keys) == 8
        os.kill(os.getpid(), signal.SIGKILL)

    assert in_fork(job) == signal.SIGKILL
    with opened(tmp_path) as store:
        assert store.knows(keys) == 8
        assert read(store, keys) == 8
        store.check()


def test_the_oldest_prompt_makes_room_its_end_first(tmp_path: Path) -> None:
    """Uses of one process keep a prompt from eviction by another."""
    with opened(tmp_path) as one, opened(tmp_path) as two:
        put(one, keys_of(1))
        put(one, keys_of(2))
        assert read(two, keys_of(1)) == 8
        assert put(one, keys_of(3, 4)) == 4
        assert two.knows(keys_of(1)) == 8, "the other process used it last"
        assert two.knows(keys_of(2)) == 4, "its end goes first"
        assert put(two, keys_of(4, 14)) == 14
        assert one.knows(keys_of(3, 4)) == 2
        assert one.stats()[0].counters["evictions"] == 4
        one.check()


def test_pins_and_quotas_are_those_of_all(tmp_path: Path) -> None:
    with opened(tmp_path) as one, opened(tmp_path) as two:
        put(one, keys_of(1))
        assert one.pin(keys_of(1), 60.0) == 8
        for prompt in range(2, 6):
            put(two, keys_of(prompt))
        assert two.knows(keys_of(1)) == 8
        assert one.pin(keys_of(5), 60.0) == 0, "all pins together cover half at most"
        assert two._tiered.pins.unpin(two._blocks(keys_of(1))) == 8
        put(two, keys_of(6, 16))
        assert one.knows(keys_of(1)) == 0
        space = one._space
        assert len(space) == SPACE_BYTES
        one._tiered.set_quota(space, 4 * TAKES)
        put(two, keys_of(7, 4))
        assert two.knows(keys_of(7, 4)) == 4
        assert put(two, keys_of(8, 4)) == 4
        held = sum(map(two.knows, ([key] for p in range(1, 9) for key in keys_of(p, 16))))
        assert held <= 4
        two.check()


def test_blocks_expire(tmp_path: Path) -> None:
    with opened(tmp_path, options="&ttl=200ms") as store, opened(tmp_path) as other:
        put(store, keys_of(1))
        assert store.knows(keys_of(1)) == 8
        time.sleep(0.3)
        assert store.knows(keys_of(1)) == store.lookup(keys_of(1)) == 0
        assert read(store, keys_of(1)) == 0
        assert other.knows(keys_of(1)) == 8, "the time to live is that of each process"


def test_above_a_directory(tmp_path: Path) -> None:
    """Written through, and read back into shared memory for all."""
    file = f"file://{tmp_path}/blocks?size=64MiB"
    (tmp_path / "shm").mkdir()
    with opened(tmp_path / "shm", file) as one, opened(tmp_path / "shm", file) as two:
        for prompt in range(4):
            put(one, keys_of(prompt))
            assert one.flush()
        assert two.lookup(keys_of(0)) == 8
        assert read(two, keys_of(0)) == 8
        assert two.stats()[1].counters["hits"] == 8
        assert one._tiered.memory.catalogue.leading(one._blocks(keys_of(0))) == 8
        assert one.remove(keys_of(0)).complete
        assert two._tiered.memory.catalogue.leading(one._blocks(keys_of(0))) == 0
        one.check()


def test_demotion(tmp_path: Path) -> None:
    """What leaves shared memory is found in the directory, whoever put it there."""
    file = f"file://{tmp_path}/blocks?size=64MiB"
    (tmp_path / "shm").mkdir()
    url = f"shm://{16 * TAKES}?dir={tmp_path}/shm"
    stores = [BlockStore("tenant", tiers=[url, file], policy=Exclusive()) for _ in range(2)]
    prompts = [keys_of(prompt, 1) for prompt in range(32)]
    for number, keys in enumerate(prompts):
        assert stores[number % 2].put(keys, [data(keys[0])], wait=20.0) == 1
    assert sum(store.stats()[0].counters["demotions"] for store in stores) >= 16
    assert [stores[number % 2].lookup(keys) for number, keys in enumerate(prompts)] == [1] * 32
    assert read(stores[0], prompts[0]) == 1
    assert stores[0].stats()[1].counters["hits"] == 1
    until = time.monotonic() + 20.0
    while stores[0]._tiered.memory.leaving_bytes and time.monotonic() < until:
        time.sleep(0.01)  # the read made the other store demote
    for store in stores:
        store.check()
        assert store._tiered.memory.leaving_bytes == 0
        store.close()


def test_below_memory(tmp_path: Path) -> None:
    """As a tier like any other: records with headers and checksums."""
    tiers = ["memory://4MiB", f"shm://4MiB?dir={tmp_path}&codec=lossless"]
    with BlockStore("tenant", tiers=tiers) as store:
        put(store, keys_of(1))
        assert store.flush()
    with BlockStore("tenant", tiers=tiers) as store:
        assert store.lookup(keys_of(1)) == 8
        assert read(store, keys_of(1)) == 8
        assert store.stats()[1].counters["hits"] == 8


def test_raw_and_sealed_records_do_not_mix(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A store in front would take an encoded record of the same length for raw KV."""
    lower = ["memory://4MiB", f"shm://?dir={tmp_path}"]
    with opened(tmp_path) as store:
        put(store, keys_of(1))
        with pytest.raises(InvalidValue, match="is in front of other stores"):
            BlockStore("tenant", tiers=lower)
        assert main(["store", "verify", f"shm://?dir={tmp_path}", "--repair"]) == 2
        assert "no checksums" in capsys.readouterr().err
        assert store.knows(keys_of(1)) == 8
        store.clear()
        with BlockStore("tenant", tiers=lower) as sealed:
            put(sealed, keys_of(2))
            assert sealed.flush()
            with pytest.raises(InvalidValue, match="is a lower tier of other stores"):
                opened(tmp_path)
            assert main(["store", "verify", f"shm://?dir={tmp_path}"]) == 0


def test_a_stopped_neighbour_is_a_counted_miss(tmp_path: Path) -> None:
    """A process that is stopped while it holds the lock fails no call."""
    keys = keys_of(1)
    with opened(tmp_path) as store:
        put(store, keys)
        store._tiered.memory.backend._rows.lock.timeout = 0.1  # type: ignore[attr-defined]
        pid = os.fork()
        if not pid:
            other = ShmBackend(None, directory=str(tmp_path))
            other._rows.__enter__()
            os.kill(os.getpid(), signal.SIGSTOP)
            os._exit(0)
        os.waitpid(pid, os.WUNTRACED)
        assert store.lookup(keys) == 8
        assert read(store, keys) == 0
        assert put(store, keys_of(2)) == 0
        assert store.stats()[0].counters["errors"] > 0
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        assert read(store, keys) == 8
        assert put(store, keys_of(2)) == 8
        store.check()


def test_options(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match="policy=2q is for memory of one process"):
        opened(tmp_path, options="&policy=2q")
    with pytest.raises(InvalidValue, match="no option speed"):
        opened(tmp_path, options="&speed=9")
    assert not os.listdir(tmp_path) or opened(tmp_path).close()


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"shm://1GiB?dir={tmp_path}"
    assert main(["store", "ls", url]) == 2
    assert "no arena is there" in capsys.readouterr().err
    assert not os.listdir(tmp_path), "looking makes no arena"
    with opened(tmp_path) as store:
        put(store, keys_of(1))
        assert main(["store", "ls", url]) == 0
        assert "8" in capsys.readouterr().out
        assert main(["store", "ls", url, "--blocks"]) == 0
        assert store._space.hex() in capsys.readouterr().out
        assert main(["store", "rm", url, "--all", "--yes"]) == 0
        assert store.knows(keys_of(1)) == 0
