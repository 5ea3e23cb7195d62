"""Prompts longer than what is to keep them: the beginning is kept, the rest said to be dropped."""

from __future__ import annotations

import threading

import pytest
import torch

from kvkeep.core.geometry import KVGeometry
from kvkeep.store import BlockStore, KVStore
from kvkeep.store.tiers import Exclusive, Inclusive

GEOMETRY = KVGeometry(2, 1, 8, "bfloat16")
BLOCK = 16
BYTES = BLOCK * GEOMETRY.bytes_per_token + 4096  # a record in memory, at most
TOKENS = list(range(40 * BLOCK))
KV = torch.arange(2 * 2 * len(TOKENS) * 8).reshape(2, 2, -1, 1, 8).to(torch.bfloat16)


@pytest.fixture
def make_store(tmp_path):
    def make(*tiers, **more):
        tiers = [tier.format(dir=tmp_path) for tier in tiers]
        return KVStore(GEOMETRY, model="m@1", tiers=tiers, block_tokens=BLOCK, **more)

    return make


@pytest.mark.parametrize("policy", [Inclusive, Exclusive])
@pytest.mark.parametrize(
    ("below", "quotas"),
    [
        ((), None),
        ((), {"": f"{5 * BYTES}B"}),
        (("file://{dir}/disk?size=1MiB",), None),
    ],
)
def test_what_put_says_is_kept_is_found(make_store, policy, below, quotas):
    with make_store(f"memory://{12 * BYTES}B", *below, policy=policy(), quotas=quotas) as store:
        for _ in range(2):  # the second time, some of it is there already
            put = store.put(TOKENS, KV, wait=True)
            kept = put.tokens + put.skipped
            assert kept + put.dropped == len(TOKENS)
            found, count = store.get(TOKENS)
            assert count >= kept > 0
            assert torch.equal(found, KV[:, :, :count])
        store.check()


def test_a_put_holds_nothing_when_it_is_over(make_store):
    with make_store(f"memory://{12 * BYTES}B") as store:
        assert store.put(TOKENS, KV).dropped
        other = [token + 1 for token in TOKENS]
        assert store.put(other, KV).tokens
        assert store.get(other)[1] > 0


def test_a_put_holds_what_a_read_has_moved_up(tmp_path):
    """The tier below deletes its copy later, so a put must not count on that."""
    size, room = 16000, 20
    keys = [bytes([number]) * 32 for number in range(60)]
    blocks = [bytes([number]) * size for number in range(60)]
    tiers = [f"memory://{room * 16384}B", f"file://{tmp_path}/disk?size=4MiB"]
    with BlockStore("ns", tiers=tiers, policy=Exclusive()) as store:
        (tier,) = store._tiered.tiers
        moved = [store._space + key for key in keys[:4]]
        for at in (*range(4), *range(60 - room, 60)):  # the last ones push the first ones down
            assert store.put(keys[at : at + 1], blocks[at : at + 1], wait=20.0) == 1
        assert store._tiered.holders(moved) == [[1]] * 4
        busy, later = threading.Event(), threading.Event()
        for _ in range(16):
            tier.writing.submit(busy.wait)
        assert store.get(keys[:4], [bytearray(size) for _ in range(4)]) == 4

        def fill(at, raw):
            if not busy.is_set():
                busy.set()
                assert tier.settled(20.0)
                for _ in range(16):  # what is evicted from now on is not written in time
                    tier.writing.submit(later.wait)
            raw[:] = blocks[at]

        count = 2 * room
        stored = store.write(keys[:count], [size] * count, fill, wait=1.0)
        later.set()
        into = [bytearray(size) for _ in range(count)]
        assert store.get(keys[:count], into) >= stored >= 4
        assert [bytes(buffer) for buffer in into[:stored]] == blocks[:stored]
        store.check()
