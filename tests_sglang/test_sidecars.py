"""Several pools at once, beside SGLang's own file backend: both say the same of the same."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheFile,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    count_pool_hits,
)
from sglang.srt.mem_cache.memory_pool_host import LogicalHostPool
from sglang_pools import (
    Pools,
    config_of,
    hashes,
    page_bytes,
    pools,
    scribble,
    spans,
    states,
    storage_of,
)

if TYPE_CHECKING:
    from pathlib import Path

ALL, TRAILING = PoolHitPolicy.ALL_PAGES, PoolHitPolicy.TRAILING_PAGES
MEMORY = ["memory://16MiB"]


@pytest.mark.parametrize("seed", range(24))
def test_the_prefixes_that_can_be_restored(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    names = hashes(rng.randint(1, 12))
    host, window, state = (
        pools("mha", "page_first").host,
        pools("mha", "layer_first").host,
        states(),
    )
    ours = storage_of(host, MEMORY)
    theirs = HiCacheFile(config_of(), str(tmp_path))
    for one in (ours, theirs):
        one.register_mem_host_pool_v2(host, PoolName.KV)
        one.register_mem_host_pool_v2(window, PoolName.SWA)
        one.register_mem_host_pool_v2(state, PoolName.MAMBA)
    stored = {
        PoolName.KV: names[: rng.randint(0, len(names) + 3)],
        PoolName.SWA: [name for name in names if rng.random() < 0.8],
        PoolName.MAMBA: [name for name in names if rng.random() < 0.5],
    }
    for pool, kept in stored.items():
        size = {PoolName.KV: host, PoolName.SWA: window, PoolName.MAMBA: state}[pool].page_size
        transfer = PoolTransfer(pool, host_indices=torch.arange(len(kept) * size), keys=kept)
        for one in (ours, theirs):
            assert one.batch_set_v2([transfer]) == {pool: [True] * len(kept)}
    for policy in (ALL, TRAILING):
        asked = [
            PoolTransfer(PoolName.SWA, keys=["x"] * rng.randint(0, 4), hit_policy=policy),
            PoolTransfer(PoolName.MAMBA, keys=["x"], hit_policy=TRAILING),
        ]
        for transfers in (asked, asked[:1], asked[::-1], [], None):
            assert ours.batch_exists_v2(names, transfers) == theirs.batch_exists_v2(
                names, transfers
            )
    ours.close()


def test_bytes_of_all_pools_come_back() -> None:
    host, index, state = pools("mla", "page_first").host, pools("mla", "layer_first").host, states()
    scribble(host, 1), scribble(index, 2), scribble(state, 3)
    storage = storage_of(host, MEMORY, mla=True)
    for name, pool in (("kv", host), ("indexer", index), ("mamba", state)):
        storage.register_mem_host_pool_v2(pool, PoolName(name))
    names = hashes(4)
    want = [state.get_data_page(at).clone() for at in (0, 1)]
    rows = [page_bytes(index, page) for page in range(4)]
    saved = storage.batch_set_v2(transfers(names, index, 0, [0, 1]))
    assert saved == {PoolName.INDEXER: [True] * 4, PoolName.MAMBA: [True] * 2}
    scribble(index, 4), scribble(state, 5)
    loaded = storage.batch_get_v2(transfers(names, index, 8, [30, 31]))
    assert count_pool_hits(loaded) == {"indexer": 4, "mamba": 2}
    assert [page_bytes(index, page) for page in range(8, 12)] == rows
    assert all(state.get_data_page(30 + at).equal(want[at]) for at in (0, 1))
    # The same hashes name nothing in a pool that kept nothing under them.
    assert storage.batch_exists(names) == 0
    storage.close()


def transfers(names: list[str], index: object, first: int, slots: list[int]) -> list[PoolTransfer]:
    return [
        PoolTransfer(PoolName.INDEXER, host_indices=spans(index, first, 4), keys=names),
        PoolTransfer(
            PoolName.MAMBA, host_indices=torch.tensor(slots), keys=names[-2:], hit_policy=TRAILING
        ),
    ]


def test_a_pool_that_only_numbers_pages_keeps_marks() -> None:
    anchor, side = LogicalHostPool(256, 16), pools("mla", "page_first").host
    storage = storage_of(anchor, MEMORY, mla=True)
    storage.register_mem_host_pool_v2(side, PoolName.DEEPSEEK_V4_C4)
    names = hashes(3)
    side_pages = PoolTransfer(PoolName.DEEPSEEK_V4_C4, spans(side, 0, 3), keys=names)
    assert storage.batch_exists_v2(names, [side_pages]).kv_hit_pages == 0
    assert storage.batch_set_v1(names, spans(anchor, 0, 3)) == [True] * 3
    assert storage.batch_exists_v2(names, [side_pages]).kv_hit_pages == 0
    storage.batch_set_v2([side_pages])
    assert storage.batch_exists_v2(names, [side_pages]).restorable_prefix_pages == [1, 2, 3]
    assert storage.batch_get_v1(names, spans(anchor, 4, 3)) == [True] * 3
    storage.close()


def test_pools_that_nobody_registered_have_nothing() -> None:
    made: Pools = pools("mha", "page_first")
    storage = storage_of(made.host, MEMORY)
    names = hashes(2)
    assert storage.batch_set_v1(names, spans(made.host, 0, 2)) == [True, True]
    stranger = PoolTransfer(PoolName.SWA, spans(made.host, 0, 2), keys=names)
    assert storage.batch_get_v2([stranger]) == {PoolName.SWA: [False, False]}
    assert storage.batch_set_v2([stranger]) == {PoolName.SWA: [False, False]}
    assert storage.batch_exists_v2(names, [stranger]).kv_hit_pages == 0
    assert storage.batch_get_v2([PoolTransfer(PoolName.KV)]) == {PoolName.KV: []}
    wrong = PoolTransfer(PoolName.KV, spans(made.host, 0, 1), keys=names)
    assert storage.batch_get_v2([wrong]) == {PoolName.KV: [False, False]}
    storage.close()
