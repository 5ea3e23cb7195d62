"""How long puts and gets took: one record each, for hooks and for the log."""

from __future__ import annotations

import logging
from dataclasses import FrozenInstanceError, replace
from typing import TYPE_CHECKING

import pytest
from store_kv import GQA, disk, get, open_store, put, quiet

from kvkeep.core.errors import InvalidValue
from kvkeep.store import BlockStore, Operation

if TYPE_CHECKING:
    from pathlib import Path

TOKENS = range(18)
BYTES = GQA.bytes_per_token


def test_each_put_and_get_is_told(tmp_path: Path) -> None:
    told: list[Operation] = []
    with open_store("memory://1MiB", disk(tmp_path / "d")) as store:
        stop = store.watch(told.append)
        put(store, TOKENS, wait=True)
        get(store, TOKENS)
        get(store, range(100, 110))
        quiet(store)
        front = store._tiered.memory
        front.remove([item.block for item in front.backend.list()][2:])
        get(store, TOKENS, 2)
        stop()
        stop()
        get(store, TOKENS)
    rows = [(one.what, one.asked, one.moved, one.bytes, one.tiers) for one in told]
    assert rows[:3] == [
        ("put", 18, 16, 16 * BYTES, (("memory", 16),)),
        ("get", 18, 16, 16 * BYTES, (("memory", 16),)),
        ("get", 10, 0, 0, ()),
    ]
    assert rows[3][:4] == ("get", 16, 14, 14 * BYTES)
    assert sum(count for _, count in rows[3][4]) == 14
    assert {name for name, _ in rows[3][4]} == {"memory", "file"}
    assert len(told) == 4
    for one in told:
        assert one.seconds > 0
        assert one.bandwidth == one.bytes / 1e9 / one.seconds
    assert replace(told[0], seconds=0.0).bandwidth == 0.0, "a clock that stands still"
    with pytest.raises(FrozenInstanceError):
        told[0].moved = 5  # type: ignore[misc]


def test_the_log_has_the_same_at_debug(caplog: pytest.LogCaptureFixture) -> None:
    with open_store() as store:
        put(store, TOKENS)
        assert not caplog.records
        with caplog.at_level(logging.DEBUG, "kvkeep.store"):
            put(store, TOKENS)
            get(store, TOKENS)
            get(store, range(50, 54))
    texts = [one.getMessage() for one in caplog.records if one.name == "kvkeep.store"]
    assert texts[0].startswith("put 0 of 18 tokens, 0 bytes in 0.")
    assert f"get 16 of 18 tokens, {16 * BYTES} bytes in 0." in texts[1]
    assert texts[1].endswith("GB/s, memory 16")
    assert texts[2].endswith("0.00 GB/s, nowhere")


def test_a_hook_that_raises_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    told: list[Operation] = []

    def broken(operation: Operation) -> None:
        raise ValueError(operation.what)

    with open_store() as store:
        store.watch(broken)
        store.watch(told.append)
        put(store, TOKENS)
        assert get(store, TOKENS) == 16
    assert [one.what for one in told] == ["put", "get"]
    assert "a hook of KVStore.watch or BlockStore.watch failed" in caplog.text


def test_blocks_are_told_as_blocks() -> None:
    told: list[Operation] = []
    keys = [bytes([number]) * 32 for number in range(3)]
    with BlockStore("ns", tiers=["memory://1MiB"]) as store:
        store.watch(told.append)
        store.put(keys[:2], [b"a" * 100, b"b" * 50])
        store.get(keys, [memoryview(bytearray(size)) for size in (100, 50, 10)])
    assert [(one.what, one.asked, one.moved, one.bytes, one.tiers) for one in told] == [
        ("put", 2, 2, 150, (("memory", 2),)),
        ("get", 3, 2, 150, (("memory", 2),)),
    ]


def test_a_hook_that_cannot_be_called_is_refused_at_once() -> None:
    with open_store() as store, pytest.raises(InvalidValue, match="hook is None; a function of"):
        store.watch(None)  # type: ignore[arg-type]
