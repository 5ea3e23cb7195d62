"""KV with heads that one number of ranks wrote, and others read: bit for bit, whole pages only."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch
from sglang.srt import runtime_context
from sglang.srt.disaggregation.common.staging_buffer import compute_head_slice_params
from sglang.srt.mem_cache.hicache_storage import PoolTransfer
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang_pools import (
    DTYPES,
    PAGE,
    Pages,
    config_of,
    controller,
    hashes,
    pools,
    scribble,
    server,
    spans,
    states,
    storage_of,
)

from kvkeep.integrations.sglang import transport
from kvkeep.integrations.sglang.pages import head_parts

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvkeep.integrations.sglang import KVKeepStorage

PAGES = 5
NAMES = hashes(PAGES)
LAYERS, DIM = 3, 16
RANKS = (1, 2, 4)


def truth(heads: int, dtype: str = "bf16") -> torch.Tensor:
    """KV of all heads [K and V, page, layer, token, head, width], as bits."""
    bits = {2: torch.int16, 4: torch.int32}[DTYPES[dtype].itemsize]
    shape = (2, PAGES, LAYERS, PAGE, heads, DIM)
    generator = torch.Generator().manual_seed(7)
    return torch.randint(-(1 << 14), 1 << 14, shape, dtype=bits, generator=generator)


def heads_of(rank: int, ranks: int, heads: int) -> slice:
    """The heads of a rank, by the function with which SGLang sends KV to one rank that has all."""
    _, count, start, _ = compute_head_slice_params(ranks, 1, rank, 0, heads)
    return slice(start, start + count) if ranks > 1 else slice(0, heads)


def shown(host: Any, first: int, bits: torch.dtype) -> torch.Tensor:
    """Pages of a pool in the order of `truth`, as a view of its memory."""
    assert host.layout == "page_head"
    held = host.kv_buffer[:, first : first + PAGES].view(bits)  # [KV, page, head, token, layer, …]
    return held.permute(0, 1, 4, 3, 2, 5)


@dataclass
class Rank:
    """A rank's storage and host pool."""

    storage: KVKeepStorage
    pools: Any
    held: slice

    def fill(self, wanted: torch.Tensor) -> None:
        shown(self.pools.host, 0, wanted.dtype).copy_(wanted[:, :, :, :, self.held])

    def matches(self, wanted: torch.Tensor, first: int, pages: int = PAGES) -> bool:
        found = shown(self.pools.host, first, wanted.dtype)
        return torch.equal(found[:, :pages], wanted[:, :pages, :, :, self.held])

    def save(self, *, v1: bool = True) -> bool:
        return Pages(self.pools, self.storage, v1=v1).set(NAMES, spans(self.pools.host, 0, PAGES))

    def load(self, first: int, *, v1: bool = True) -> int:
        return Pages(self.pools, self.storage, v1=v1).get(
            NAMES, spans(self.pools.host, first, PAGES)
        )


@contextmanager
def engine(
    tiers: list[str], ranks: int, heads: int, dtype: str = "bf16", **more: Any
) -> Iterator[list[Rank]]:
    """The ranks of an engine, in a process that has the server's settings."""
    made = []
    try:
        for rank in range(ranks):
            pool = pools("mha", "page_head", dtype, heads=max(1, heads // ranks), layers=LAYERS)
            scribble(pool.host, seed=100 + rank)
            storage = storage_of(pool.host, tiers, tp_rank=rank, tp_size=ranks, **more)
            made.append(Rank(storage, pool, heads_of(rank, ranks, heads)))
        yield made
    finally:
        for rank in made:
            rank.storage.close()


@contextmanager
def gpu_server(path: Path, heads: int, **settings: Any) -> Iterator[None]:
    """A server's settings as on a GPU; on a CPU SGLang does not give two ranks the same head."""
    config = {"num_attention_heads": 8, "num_key_value_heads": heads, "hidden_size": 128}
    with (
        server(path / "model", config=config, **settings),
        runtime_context.get_device().override(device="cuda"),
    ):
        yield


def shared(path: Path) -> list[str]:
    return ["memory://16MiB", f"file://{path}/kv?size=64MiB"]


def stored_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in records(path))


def records(path: Path) -> list[Path]:
    return sorted((path / "kv").glob("?" * 32 + "/" + "?" * 64))


@pytest.mark.parametrize("wrote", RANKS)
@pytest.mark.parametrize(
    ("heads", "dtype", "v1", "more"),
    [
        pytest.param(4, "bf16", True, {}, id="4 heads"),
        pytest.param(4, "fp32", False, {}, id="4 heads, tensors"),
        pytest.param(2, "fp16", True, {}, id="2 heads"),
        pytest.param(1, "bf16", False, {}, id="1 head, tensors"),
        pytest.param(8, "bf16", True, {"tp_lcm_size": 4}, id="8 heads, parts of 2"),
    ],
)
def test_all_ranks_read_what_any_number_of_ranks_wrote(  # noqa: PLR0917 - parameters
    tmp_path: Path, wrote: int, heads: int, dtype: str, v1: bool, more: dict[str, int]
) -> None:
    wanted = truth(heads, dtype)
    with gpu_server(tmp_path, heads):
        with engine(shared(tmp_path), wrote, heads, dtype, **more) as writers:
            for rank in writers:
                assert rank.storage.batch_exists(NAMES) == 0
                rank.fill(wanted)
            assert all(rank.save(v1=v1) for rank in writers)
        size = stored_bytes(tmp_path)
        kv = wanted.numel() * wanted.element_size()
        assert kv < size < 1.5 * kv, "each head is stored once"
        for read in RANKS:
            with engine(shared(tmp_path), read, heads, dtype, **more) as readers:
                for rank in readers:
                    assert rank.storage.batch_exists(NAMES) == PAGES
                    assert rank.load(8, v1=v1) == PAGES
                    assert rank.matches(wanted, 8)
                    assert not rank.matches(wanted, 9)
                    assert rank.save(v1=not v1)  # nothing new
        assert stored_bytes(tmp_path) == size


def test_several_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "_SLICE_BYTES", 1)
    wanted = truth(4)
    with gpu_server(tmp_path, 4):
        for _ in range(2):
            with engine(shared(tmp_path), 2, 4) as ranks:
                for rank in ranks:
                    rank.fill(wanted)
                    assert rank.save()
                    assert rank.load(8) == PAGES
                    assert rank.matches(wanted, 8)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_two_engines_at_once_on_one_store(tmp_path: Path, dtype: str) -> None:
    """A page is there for a rank when all of its heads are."""
    wanted = truth(4, dtype)
    tiers = shared(tmp_path)
    with (
        gpu_server(tmp_path, 4),
        engine(tiers, 1, 4, dtype) as one,
        engine(tiers, 2, 4, dtype) as two,
        engine(tiers, 4, 4, dtype) as four,
    ):
        for rank in (*one, *two, *four):
            rank.fill(wanted)
        written: set[int] = set()
        for writer in (four[2], two[0], four[3]):
            assert writer.save()
            assert writer.storage.flush()
            written |= set(range(*writer.held.indices(4)))
            for reader in (*one, *two, *four):
                whole = set(range(*reader.held.indices(4))) <= written
                assert reader.storage.batch_exists(NAMES) == (PAGES if whole else 0)
                assert reader.load(8) == (PAGES if whole else 0)
                assert reader.matches(wanted, 8) == whole


def test_a_damaged_head_is_missing_where_it_is_needed(tmp_path: Path) -> None:
    wanted = truth(4)
    tiers = shared(tmp_path)
    with gpu_server(tmp_path, 4):
        with engine(tiers, 2, 4) as writers:
            for rank in writers:
                rank.fill(wanted)
                assert rank.save()
        part = wanted[:, 2, :, :, 3].transpose(1, 2).contiguous().numpy().tobytes()
        for file in records(tmp_path):
            raw = bytearray(file.read_bytes())
            if (at := raw.find(part[:256])) >= 0:
                raw[at + 100] ^= 1
                file.write_bytes(raw)
                break
        else:
            pytest.fail("no file has head 3 of page 2")
        for ranks in (4, 2, 1):
            with engine(tiers, ranks, 4) as readers:
                for rank in readers:
                    needs = rank.held.stop == 4
                    # The first that reads it finds the damage; then nobody has it.
                    assert rank.load(8) == (2 if needs else PAGES)
                    assert rank.matches(wanted, 8, 2 if needs else PAGES)
        with engine(tiers, 1, 4) as (rank,):
            rank.fill(wanted)
            assert rank.save()
        with engine(tiers, 4, 4) as readers:
            for rank in readers:
                assert rank.load(8) == PAGES
                assert rank.matches(wanted, 8)


def test_ranks_with_the_same_head_that_do_not_see_each_other_both_write(tmp_path: Path) -> None:
    wanted = truth(2)
    for tiers, nodes, both in (
        (["memory://16MiB"], 1, True),
        (shared(tmp_path / "a"), 2, True),
        (shared(tmp_path / "b"), 1, False),
    ):
        with gpu_server(tmp_path, 2, nnodes=nodes), engine(tiers, 4, 2) as ranks:
            rank = ranks[1]
            rank.fill(wanted)
            assert rank.save()
            assert rank.storage.batch_exists(NAMES) == (PAGES if both else 0)
            assert rank.load(8) == (PAGES if both else 0)


def test_ranks_of_one_start_share_heads_where_weights_are_unknown(tmp_path: Path) -> None:
    wanted = truth(2)
    with (
        gpu_server(tmp_path, 2, load_format="dummy"),
        engine(shared(tmp_path), 4, 2, revision="") as ranks,
    ):
        for rank in ranks:
            rank.fill(wanted)
            assert rank.save()
            assert rank.storage.flush()
        for rank in ranks:
            assert rank.load(8) == PAGES
            assert rank.matches(wanted, 8)


def test_parts_of_other_widths_do_not_mix(tmp_path: Path) -> None:
    wanted = truth(8)
    with gpu_server(tmp_path, 8):
        for lcm in (None, 2, 4):
            with engine(shared(tmp_path), 2, 8, tp_lcm_size=lcm) as ranks:
                for rank in ranks:
                    assert rank.storage.batch_exists(NAMES) == 0
                    rank.fill(wanted)
                    assert rank.save()


def test_pages_without_room_for_all_heads_are_not_stored(tmp_path: Path) -> None:
    wanted = truth(4)
    part = PAGE * LAYERS * DIM * 2 * 2
    with gpu_server(tmp_path, 4), engine([f"memory://{part * 3}B"], 1, 4) as (rank,):
        rank.fill(wanted)
        assert not rank.save()
        assert rank.load(8) == rank.storage.batch_exists(NAMES) == 0


def test_statistics_count_pages(tmp_path: Path) -> None:
    with gpu_server(tmp_path, 4), engine(["memory://16MiB"], 1, 4, metrics=True) as (rank,):
        assert rank.save()
        assert rank.load(8) == PAGES
        stats = rank.storage.get_stats()
        assert (stats.backup_pgs, stats.prefetch_pgs) == ([PAGES], [PAGES])


def test_states_beside_heads_belong_to_a_rank(tmp_path: Path) -> None:
    wanted = truth(4)
    with gpu_server(tmp_path, 4):
        with engine(shared(tmp_path), 1, 4) as (rank,):
            rank.fill(wanted)
            rank.storage.register_mem_host_pool_v2(states(), "mamba")
            transfer = PoolTransfer("mamba", host_indices=torch.arange(PAGES), keys=NAMES)
            assert rank.storage.batch_set_v2([transfer]) == {"mamba": [True] * PAGES}
            assert rank.save()
            assert rank.storage.batch_exists_v2(NAMES, [transfer]).kv_hit_pages == PAGES
        with engine(shared(tmp_path), 2, 4) as ranks:
            for rank in ranks:
                rank.storage.register_mem_host_pool_v2(states(), "mamba")
                assert rank.storage.batch_exists_v2(NAMES).kv_hit_pages == PAGES
                assert rank.storage.batch_exists_v2(NAMES, [transfer]).kv_hit_pages == 0


def test_through_the_threads_of_controllers(tmp_path: Path) -> None:
    """Two ranks back up a prompt by SGLang's own threads; one rank prefetches it."""
    wanted = truth(4)
    prompt = list(range(500, 500 + PAGES * PAGE))
    tiers = shared(tmp_path)
    with gpu_server(tmp_path, 4, tp_size=2):
        for rank in range(2):
            made = pools("mha", "page_head", heads=2)
            shown(made.host, 0, wanted.dtype).copy_(wanted[:, :, :, :, rank * 2 : rank * 2 + 2])
            with controller(made, tiers, (rank, 2), interface_v1=1, tp_lcm_size=4) as one:
                assert one.storage_config.should_split_heads
                indices = made.host.alloc(len(prompt))
                one.write_storage(indices, prompt, get_storage_hash_str(prompt, page_size=PAGE))
                assert one.ack_backup_queue.get(timeout=60).completed_tokens == len(prompt)
    with gpu_server(tmp_path, 4):
        made = pools("mha", "page_head", heads=4)
        scribble(made.host, 3)
        with controller(made, tiers, interface_v1=1, tp_lcm_size=4) as one:
            one.prefetch("a request", prompt)
            operation = one.prefetch_hit_queue.get(timeout=60)
            assert operation.storage_hit_count == len(prompt)
            operation.host_indices = made.host.alloc(len(prompt))
            one.prefetch_buffer.put(operation)
            while not one.ack_prefetch_queue.get(timeout=60).completed_req:
                pass
            first = int(operation.host_indices[0]) // PAGE
            assert torch.equal(shown(made.host, first, wanted.dtype), wanted)


# What keeps the rank in the name, and the beginning of the reason.
KEPT: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "nothing": ({}, {}, ""),
    "layout": ({"layout": "page_first"}, {}, ""),
    "pool": ({"kind": "mla"}, {}, ""),
    "fp8": ({"dtype": "fp8"}, {}, "KV of torch.uint8 may"),
    "uneven": ({}, {"tp_size": 3}, "3 ranks with 2 KV heads each do not"),
    "other heads": ({"heads": 4}, {}, "2 ranks with 4 KV heads each do not"),
    "quantised": ({"quantization": "fp8"}, {}, "ranks of quantised models"),
    "windows": ({"windows": True}, {}, "layers with sliding windows"),
    "draft": ({"draft": True}, {}, "a draft model's layers"),
    "context": ({}, {"attn_cp_size": 2}, "ranks of context parallelism"),
    "CPU": ({"heads": 1, "cpu": True}, {"tp_size": 8, "tp_rank": 5}, "on a CPU, SGLang adds heads"),
    "no server": ({"server": False}, {}, "the model's configuration is not known"),
}


@pytest.mark.parametrize("one", KEPT)
def test_elsewhere_the_rank_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, one: str
) -> None:
    caplog.set_level(logging.INFO, "kvkeep.sglang")
    given, ranks, reason = KEPT[one]
    config = config_of(**({"tp_rank": 1, "tp_size": 2} | ranks))
    kind, layout = given.get("kind", "mha"), given.get("layout", "page_head")
    if kind == "mla":
        layout = "page_first"
    host = pools(kind, layout, given.get("dtype", "bf16"), heads=given.get("heads", 2)).host
    if given.get("draft"):
        host.layer_num += 1
    with gpu_server(tmp_path, 4):
        model = runtime_context.process_model_config()
        model.quantization = given.get("quantization")
        model.is_hybrid_swa = given.get("windows", False)
        if given.get("cpu"):
            with runtime_context.get_device().override(device="cpu"):
                parts = head_parts(config, host)
        elif given.get("server", True):
            parts = head_parts(config, host)
    if not given.get("server", True):
        parts = head_parts(config, host)
    if one == "nothing":
        assert parts is not None
        assert parts.names == ["heads 2-2 of 4", "heads 3-3 of 4"]
    else:
        assert parts is None
        assert (f": {reason}" in caplog.text) == bool(reason)
