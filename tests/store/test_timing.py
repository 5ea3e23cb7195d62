"""How long puts and gets took, in the log."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from store_kv import GQA, disk, get, open_store, put, quiet

from kvkeep.store import BlockStore

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

TOKENS = range(18)
BYTES = GQA.bytes_per_token


def texts(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.levelno == logging.DEBUG]


def test_each_put_and_get_is_logged_at_debug(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with open_store("memory://1MiB", disk(tmp_path / "d")) as store:
        put(store, TOKENS, wait=True)
        assert not texts(caplog)
        with caplog.at_level(logging.DEBUG, "kvkeep.store"):
            put(store, TOKENS)
            get(store, TOKENS)
            get(store, range(50, 54))
            quiet(store)
            front = store._tiered.memory
            front.remove([item.block for item in front.backend.list()][2:])
            get(store, TOKENS, 2)
    again, all_of_it, nothing, both = texts(caplog)
    assert again.startswith("put 0 of 18 tokens, 0 bytes in 0.")
    assert f"get 16 of 18 tokens, {16 * BYTES} bytes in 0." in all_of_it
    assert all_of_it.endswith("GB/s, memory 16")
    assert nothing.endswith("0.00 GB/s, nowhere")
    assert both.startswith(f"get 14 of 16 tokens, {14 * BYTES} bytes in 0.")
    assert "memory" in both
    assert "file" in both


def test_blocks_are_logged_as_blocks(caplog: pytest.LogCaptureFixture) -> None:
    keys = [bytes([number]) * 32 for number in range(3)]
    with (
        BlockStore("ns", tiers=["memory://1MiB"]) as store,
        caplog.at_level(logging.DEBUG, "kvkeep.store"),
    ):
        store.put(keys[:2], [b"a" * 100, b"b" * 50])
        store.get(keys, [memoryview(bytearray(size)) for size in (100, 50, 10)])
    first, second = texts(caplog)
    assert first.startswith("put 2 of 2 blocks, 150 bytes in 0.")
    assert first.endswith(", memory 2")
    assert second.startswith("get 2 of 3 blocks, 150 bytes in 0.")
    assert second.endswith(", memory 2")
