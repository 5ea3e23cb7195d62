"""A store below another cache: what is read does not stay in memory, and costs no new memory."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import pytest

from kvkeep.core.errors import IllegalStep, InvalidValue
from kvkeep.store import BlockStore
from kvkeep.store.tiers import PassThrough
from kvkeep.store.tiers.buffer import SpareBuffers

if TYPE_CHECKING:
    from pathlib import Path

KEYS = [hashlib.sha256(b"%d" % at).digest() for at in range(40)]
BLOCKS = [bytes([at]) * 5000 for at in range(40)]


def test_blocks_are_read_and_do_not_stay_in_memory(tmp_path: Path) -> None:
    disk = f"file://{tmp_path}/kv?size=8MiB"
    with BlockStore("below", tiers=["memory://1MiB", disk]) as first:
        assert first.put(KEYS, BLOCKS, wait=30) == 40
    with BlockStore("below", tiers=["memory://1MiB", disk], policy=PassThrough()) as store:
        store.prepare_reads(5000)
        seen: list[bytes] = []
        for turn in range(1, 4):
            assert store.read(KEYS, [5000] * 40, lambda _, raw: seen.append(bytes(raw))) == 40
            assert seen == BLOCKS * turn
            memory, below = store.stats()
            assert memory.blocks == 0
        assert below.counters["hits"] == 120
        # What is put does stay until it is written, and longer.
        assert store.put([KEYS[0][::-1]], [BLOCKS[0]], wait=30) == 1
        assert store.stats()[0].blocks == 1
        store.check()
    assert repr(PassThrough()) == "PassThrough(admit_after=1)"


def test_each_key_is_looked_up(tmp_path: Path) -> None:
    disk = f"file://{tmp_path}/kv?size=8MiB"
    with BlockStore("below", tiers=["memory://1MiB", disk]) as store:
        store.put([KEYS[0], KEYS[2]], [BLOCKS[0], BLOCKS[2]], wait=30)
        assert store.lookup(KEYS[:4]) == 1
        assert store.lookup_each(KEYS[:4]) == [True, False, True, False]
        with BlockStore("below", tiers=["memory://1MiB", disk]) as other:
            store.put([KEYS[3]], [BLOCKS[3]], wait=30)  # which the other can only ask for
            assert other.lookup_each(KEYS[:4], deadline=10) == [True, False, True, True]
        with pytest.raises(InvalidValue, match="32 bytes"):
            store.lookup_each([b"short"])
    with pytest.raises(IllegalStep):
        store.lookup_each(KEYS[:1])


def test_buffers_are_used_again_up_to_a_limit() -> None:
    buffers = SpareBuffers(20_000)
    buffers.prepare(8000, 5)
    first, second, third = (buffers.take(8000) for _ in range(3))
    first[:] = bytes([1]) * 8000
    assert bytes(second[:8]) == bytes(8)
    buffers.give_back(first)
    buffers.give_back(second)
    assert buffers.take(8000) is second  # the last one is still in a cache
    assert buffers.take(8000) is first
    buffers.give_back(third)
    buffers.give_back(buffers.take(15_000))  # no room for both: the older sizes go
    assert buffers.take(8000) is not third
    buffers.give_back(memoryview(bytearray(30_000)))
    assert len(buffers.take(30_000)) == 30_000
