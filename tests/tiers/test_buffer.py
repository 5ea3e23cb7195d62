"""The buffer in front of tiers without memory: its size, and the warning that it was too small."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest

from faults import FaultyBackend
from kvkeep.core.geometry import KVGeometry
from kvkeep.store import BlockStore, KVStore
from kvkeep.store.backends.memory import MemoryBackend
from kvkeep.store.tiers import PROMPT_TOKENS, buffer_bytes, front

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1 << 20
TOKEN_BYTES = (
    128 << 10
)  # of a model with 8 billion parameters: 32 layers, 8 KV heads of 128, 16 bit
BLOCK_TOKENS = 256


@pytest.fixture
def free(monkeypatch):
    """``free(bytes)``: so much memory is free."""

    def set_to(*amounts: int) -> None:
        monkeypatch.setattr(front, "free_memory", lambda: iter([(one, "") for one in amounts]))

    return set_to


def test_it_has_room_for_four_prompts(free):
    free(1 << 50)
    assert buffer_bytes(PROMPT_TOKENS * TOKEN_BYTES) == 2048 * MIB
    free()  # not known
    assert buffer_bytes(PROMPT_TOKENS * TOKEN_BYTES) == 2048 * MIB


def test_a_store_has_it_by_what_a_token_takes(free, tmp_path: Path):
    free(1 << 50)
    for token_bytes, expected in ((0, 256 * MIB), (TOKEN_BYTES, 2048 * MIB)):
        with BlockStore("a", tiers=[f"file://{tmp_path}/d"], token_bytes=token_bytes) as store:
            front = store.stats()[0]
            assert (front.name, front.capacity) == ("buffer", expected)


def test_a_store_of_kv_has_it_by_its_geometry(free, tmp_path: Path):
    free(1 << 50)
    geometry = KVGeometry(32, 8, 128, "bfloat16")
    with KVStore(geometry, model="m@1", tiers=[f"file://{tmp_path}/d"]) as store:
        front = store.stats().tiers[0]
        assert (front.name, front.capacity) == ("buffer", 2048 * MIB)


def keys(count: int) -> list[bytes]:
    return [bytes([number]) * 32 for number in range(count)]


@pytest.fixture
def slow():
    """A tier that writes nothing until it is told to."""
    with MemoryBackend(1024 * MIB) as inner:
        backend = FaultyBackend(inner)
        backend.hang("put")
        yield backend
        backend.heal()


def test_a_prompt_of_4096_tokens_of_an_8B_model_is_stored_whole(free, slow, caplog):
    """It takes 512 MiB; by default all of it waits until the tier has written it."""
    free(1 << 50)
    blocks = keys(PROMPT_TOKENS // BLOCK_TOKENS)
    size = BLOCK_TOKENS * TOKEN_BYTES
    slow.timeout = 60.0
    with BlockStore("a", tiers=[slow], token_bytes=TOKEN_BYTES) as store:
        kept = store.write(blocks, [size] * len(blocks), lambda at, raw: raw[:1].__setitem__(0, at))
        assert kept == len(blocks)
        front, tier = store.stats()
        assert (front.counters["drops"], tier.counters["drops"]) == (0, 0)
        assert tier.queued_bytes > 0.9 * 512 * MIB - 2 * size
        slow.heal()
        assert store.flush(60)
        assert store.stats()[1].blocks == len(blocks)
    assert caplog.records == []


def test_what_is_dropped_for_lack_of_memory_is_said_once(slow, caplog):
    size = 4 * MIB
    tiers = ["memory://16MiB", slow]
    slow.timeout = 60.0
    with BlockStore("a", tiers=tiers) as store:
        for number in range(3):
            blocks = keys(8)
            blocks = [bytes([number]) + key[1:] for key in blocks]
            assert store.write(blocks, [size] * 8, lambda _at, _raw: None) < 8
        slow.heal()
        assert store.flush(60)
    (record,) = [one for one in caplog.records if one.name == "kvkeep.tiers"]
    assert record.levelno == logging.WARNING
    text = record.getMessage()
    assert "the tiers below memory" in text
    assert "the 16 MiB that may wait there" in text
    assert text.endswith("put memory://32MiB in front of the tiers")


def test_other_drops_are_not_its_business(slow, caplog):
    caplog.set_level(logging.WARNING)
    slow.heal()
    slow.fail("put")
    with BlockStore("a", tiers=["memory://16MiB", slow]) as store:
        store.write(keys(8), [1000] * 8, lambda _at, _raw: None)
        store.flush(10)
    assert not any("KV was dropped" in one.getMessage() for one in caplog.records)


# --- free memory -----------------------------------------------------------------------------
