"""What must never be mixed is not: all that makes a page another page parts the keys."""

from __future__ import annotations

import shutil
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import huggingface_hub
import numpy as np
import pytest
import torch
from sglang.srt import runtime_context
from sglang.srt.mem_cache.hicache_storage import PoolTransfer
from sglang_pools import config_of, hashes, pools, server, spans, states, storage_of

from kvkeep.integrations.sglang.naming import pool_digests
from kvkeep.integrations.sglang.settings import settings_digest

if TYPE_CHECKING:
    from pathlib import Path

    from kvkeep.integrations.sglang import KVKeepStorage

PLAIN = ("mha", "page_first", "bf16", 16)
# Each differs from the plain one in what it says; many of them have pages of the same length.
OTHERS: dict[str, tuple[tuple[str, str, str, int], dict[str, Any]]] = {
    "the same": (PLAIN, {}),
    "dtype": (("mha", "page_first", "fp16", 16), {}),
    "a wider dtype": (("mha", "page_first", "fp32", 16), {}),
    "layout": (("mha", "layer_first", "bf16", 16), {}),
    "a third layout": (("mha", "page_first_direct", "bf16", 16), {}),
    "page size": (("mha", "page_first", "bf16", 32), {}),
    "kind": (("mla", "page_first", "bf16", 16), {"mla": True}),
    "revision": (PLAIN, {"revision": "r2"}),
    "model": (PLAIN, {"model": "n"}),
    "tenant": (PLAIN, {"tenant": "acme"}),
    "rank": (PLAIN, {"tp_rank": 1, "tp_size": 2}),
    "the other rank": (PLAIN, {"tp_rank": 0, "tp_size": 2}),
    "a stage": (PLAIN, {"pp_rank": 1, "pp_size": 2}),
    "a part of the context": (PLAIN, {"attn_cp_rank": 1, "attn_cp_size": 2}),
}


def storage(tiers: list[str], name: str) -> KVKeepStorage:
    shape, more = OTHERS[name]
    return storage_of(pools(*shape).host, tiers, **more)


def test_nothing_is_found_by_who_would_read_it_wrongly(tmp_path: Path) -> None:
    tiers = ["memory://16MiB", f"file://{tmp_path}/kv?size=64MiB"]
    for name in OTHERS:
        kept = storage(tiers, name)
        assert kept.batch_set_v1(hashes(2, name), spans(kept.mem_pool_host, 0, 2)) == [True, True]
        kept.close()
    for name in OTHERS:
        kept = storage(tiers, name)
        found = {other for other in OTHERS if kept.batch_exists(hashes(2, other))}
        assert found == {name}, f"{name} finds what {found} kept"
        kept.close()


@pytest.mark.parametrize("one", ["the same", "dtype", "layout", "rank", "revision"])
def test_after_a_restart_what_was_kept_is_found(tmp_path: Path, one: str) -> None:
    tiers = ["memory://16MiB", f"file://{tmp_path}/kv?size=64MiB"]
    for turn in range(2):
        kept = storage(tiers, one)
        assert kept.batch_exists(hashes(3)) == 3 * turn
        kept.batch_set_v1(hashes(3), spans(kept.mem_pool_host, 0, 3))
        kept.close()


def test_latent_kv_is_the_same_on_all_ranks_and_written_by_one(tmp_path: Path) -> None:
    tiers = ["memory://16MiB", f"file://{tmp_path}/kv?size=64MiB"]
    ranks = [
        storage_of(pools("mla", "page_first").host, tiers, mla=True, tp_rank=rank, tp_size=2)
        for rank in range(2)
    ]
    for rank in ranks:
        host = rank.mem_pool_host
        host.kv_buffer.copy_(torch.randn(host.kv_buffer.shape))
    names = hashes(4)
    assert ranks[1].batch_set_v1(names, spans(ranks[1].mem_pool_host, 0, 4)) == [True] * 4
    assert ranks[1].set(names[0], ranks[1].mem_pool_host.get_data_page(0))
    assert ranks[1].batch_exists(names) == 0  # that rank writes nothing
    assert ranks[0].batch_set_v1(names, spans(ranks[0].mem_pool_host, 0, 4)) == [True] * 4
    assert ranks[0].flush()
    assert ranks[1].batch_exists(names) == 4
    assert ranks[1].batch_get_v1(names, spans(ranks[1].mem_pool_host, 8, 4)) == [True] * 4
    assert ranks[1].mem_pool_host.kv_buffer[128:192].equal(ranks[0].mem_pool_host.kv_buffer[:64])
    for rank in ranks:
        rank.close()


def test_states_belong_to_a_rank_beside_latent_kv_too(tmp_path: Path) -> None:
    tiers = ["memory://16MiB", f"file://{tmp_path}/kv?size=64MiB"]
    names = hashes(2)
    for rank in range(2):
        kept = storage_of(pools("mla", "page_first").host, tiers, mla=True, tp_rank=rank, tp_size=2)
        kept.register_mem_host_pool_v2(states(), "mamba")
        transfer = PoolTransfer("mamba", host_indices=torch.arange(2), keys=names)
        assert kept.batch_get_v2([transfer]) == {"mamba": [False, False]}
        assert kept.batch_set_v2([transfer]) == {"mamba": [True, True]}
        assert kept.batch_get_v2([transfer]) == {"mamba": [True, True]}
        kept.close()


def test_pools_of_one_server_have_keys_of_their_own() -> None:
    hosts = [pools("mha", "page_first").host, pools("mha", "layer_first").host, states()]
    digests = {
        digest
        for name in ("kv", "swa", "draft")
        for host in hosts
        for digest in pool_digests(config_of(), name, host, 1)
    }
    assert len(digests) == 9


def weights(path: Path, seed: int) -> None:
    from safetensors.numpy import save_file

    path.mkdir(exist_ok=True)
    values = np.random.default_rng(seed).standard_normal((64, 64), dtype=np.float32)
    save_file({"layer.weight": values}, path / "model.safetensors")
    (path / "config.json").write_text('{"rope_theta": 10000}')


def test_a_directory_of_weights_is_its_own_revision(tmp_path: Path) -> None:
    tiers = ["memory://16MiB", f"file://{tmp_path}/kv?size=64MiB"]
    model = tmp_path / "model"
    weights(model, 1)

    def kept() -> KVKeepStorage:
        return storage_of(pools(*PLAIN).host, tiers, model=str(model), revision="")

    def found() -> int:
        one = kept()
        count = one.batch_exists(hashes(2))
        one.close()
        return count

    first = kept()
    assert first.batch_set_v1(hashes(2), spans(first.mem_pool_host, 0, 2)) == [True, True]
    first.close()
    assert found() == 2
    weights(model, 2)
    assert found() == 0
    weights(model, 1)
    assert found() == 2
    (model / "config.json").write_text('{"rope_theta": 500000}')
    assert found() == 0


def test_what_the_hub_downloaded_is_a_directory_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    tiers = ["memory://16MiB", f"file://{tmp_path}/kv?size=64MiB"]
    home = tmp_path / "hub" / "models--org--model"
    found = []
    for seed in (1, 2, 1):  # the branch moves on, and back
        commit = f"{seed:040x}"
        (home / "refs").mkdir(parents=True, exist_ok=True)
        (home / "refs" / "main").write_text(commit)
        (home / "snapshots" / commit).mkdir(parents=True, exist_ok=True)
        weights(home / "snapshots" / commit, seed)
        kept = storage_of(pools(*PLAIN).host, tiers, model="org/model", revision="")
        found.append(kept.batch_exists(hashes(2)))
        kept.batch_set_v1(hashes(2), spans(kept.mem_pool_host, 0, 2))
        kept.close()
    assert found == [0, 0, 2]


def test_where_nobody_knows_the_revision_nothing_is_found_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tiers = ["memory://16MiB", f"file://{tmp_path}/kv?size=64MiB"]
    for _ in range(2):
        kept = storage_of(pools(*PLAIN).host, tiers, model="org/model", revision="")
        assert "Name the revision" in caplog.text
        assert kept.batch_exists(hashes(2)) == 0
        kept.batch_set_v1(hashes(2), spans(kept.mem_pool_host, 0, 2))
        assert kept.batch_exists(hashes(2)) == 2
        kept.close()


def test_ranks_of_one_start_share_latent_kv_even_then(tmp_path: Path) -> None:
    tiers = ["memory://16MiB", f"file://{tmp_path}/kv?size=64MiB"]
    ranks = [
        storage_of(pools("mla", "page_first").host, tiers, mla=True, tp_rank=rank, tp_size=2,
                   revision="")
        for rank in range(2)
    ]  # fmt: skip
    ranks[0].batch_set_v1(hashes(2), spans(ranks[0].mem_pool_host, 0, 2))
    assert ranks[0].flush()
    assert ranks[1].batch_exists(hashes(2)) == 2
    for rank in ranks:
        rank.close()


def test_another_file_beside_the_weights_is_another_model(tmp_path: Path) -> None:
    """Which of them the server loads is not known here."""
    model = tmp_path / "model"
    weights(model, 1)
    tiers = ["memory://16MiB", f"file://{tmp_path}/kv?size=64MiB"]
    found = []
    for change in ("none", "none", "extra.safetensors", "adapter_model.safetensors", "code.py"):
        if change.endswith(".safetensors"):
            shutil.copy(model / "model.safetensors", model / change)
        elif change.endswith(".py"):
            (model / change).write_text("x = 1")
        kept = storage_of(pools(*PLAIN).host, tiers, model=str(model), revision="")
        found.append(kept.batch_exists(hashes(2)))
        kept.batch_set_v1(hashes(2), spans(kept.mem_pool_host, 0, 2))
        kept.close()
    assert found == [0, 2, 0, 0, 0]
    # Pickled weights, which are not read: nothing that another start would find.
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    for _ in range(2):
        kept = storage_of(pools(*PLAIN).host, tiers, model=str(model), revision="")
        assert kept.batch_exists(hashes(2)) == 0
        kept.batch_set_v1(hashes(2), spans(kept.mem_pool_host, 0, 2))
        kept.close()


def test_weights_replaced_after_they_were_loaded(tmp_path: Path) -> None:
    tiers = ["memory://16MiB", f"file://{tmp_path}/kv?size=64MiB"]
    model = tmp_path / "model"
    weights(model, 1)
    began = time.time()
    weights(model, 2)  # the server loaded the first ones before
    kept = storage_of(pools(*PLAIN).host, tiers, model=str(model), revision="", began=began)
    assert kept.batch_set_v1(hashes(2), spans(kept.mem_pool_host, 0, 2)) == [True, True]
    kept.close()
    kept = storage_of(pools(*PLAIN).host, tiers, model=str(model), revision="")
    assert kept.batch_exists(hashes(2)) == 0
    kept.close()


def test_an_adapter_trained_anew_at_the_same_path(tmp_path: Path) -> None:
    """SGLang names it by its name and path alone."""
    tiers = ["memory://16MiB", f"file://{tmp_path}/kv?size=64MiB"]
    adapter = tmp_path / "adapter"

    def found(alpha: int, seed: int) -> int:
        weights(adapter, seed)
        (adapter / "model.safetensors").rename(adapter / "adapter_model.safetensors")
        (adapter / "config.json").unlink()
        (adapter / "adapter_config.json").write_text(f'{{"r": 4, "lora_alpha": {alpha}}}')
        reference = SimpleNamespace(lora_name="a", lora_path=str(adapter))
        with (
            server(tmp_path / "model"),
            runtime_context.get_lora().override(lora_paths=[reference]),
        ):
            kept = storage_of(pools(*PLAIN).host, tiers)
            count = kept.batch_exists(hashes(2))
            kept.batch_set_v1(hashes(2), spans(kept.mem_pool_host, 0, 2))
            kept.close()
        return count

    assert [found(8, 1), found(8, 1), found(8, 2), found(16, 1), found(8, 1)] == [0, 2, 0, 0, 2]


# Of each group one that decides and, where there is one, one that does not.
DECIDING = {
    "model": ("kv_cache_dtype", "quantization", "dtype", "context_length",
              "json_model_override_args", "load_format", "model_loader_extra_config",
              "rl_quant_profile", "model_impl"),
    "exec.features": ("enable_tf32_matmul",),
    "exec.kernel": ("attention_backend", "prefill_attention_backend", "bf16_gemm_backend"),
    "exec.moe": ("moe_runner_backend", "enable_eplb"),
    "exec.deterministic": ("enable_deterministic_inference",),
    "exec.graph": ("enable_torch_compile",),
    "lora": ("enable_lora", "lora_backend"),
    "mm": ("mm_process_config",),
}  # fmt: skip
NEUTRAL = {
    "model": ("download_dir", "weight_loader_disable_mmap"),
    "exec.features": ("watermark_key",),
    "exec.kernel": ("sampling_backend",),
    "exec.graph": ("cuda_graph_max_bs_decode",),
    "mm": ("media_url_max_file_size_mb",),
}


def test_settings_of_the_server_decide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with server(tmp_path):
        before = settings_digest()
        assert before == settings_digest()
        for table, decides in ((DECIDING, True), (NEUTRAL, False)):
            for path, names in table.items():
                first, *rest = path.split(".")
                bag = getattr(runtime_context, f"get_{first}")()
                for name in rest:
                    bag = getattr(bag, name)
                for name in names:
                    with bag.override(**{name: "something else"}):
                        assert (settings_digest() != before) == decides, f"{path}.{name}"
        monkeypatch.setenv("SGLANG_DSA_FUSE_TOPK", "false")
        assert settings_digest() != before
        monkeypatch.delenv("SGLANG_DSA_FUSE_TOPK")
        monkeypatch.setenv("SGLANG_IS_IN_CI", "true")
        assert settings_digest() == before


def test_both_kinds_of_fp8_are_bytes_to_a_pool_and_two_things_to_us(tmp_path: Path) -> None:
    digests = set()
    for dtype in ("fp8_e4m3", "fp8_e5m2"):
        with server(tmp_path, kv_cache_dtype=dtype):
            host = pools("mha", "page_first", "fp8").host
            assert host.dtype == torch.uint8
            digests.update(pool_digests(config_of(), "kv", host, 1))
    assert len(digests) == 2


def test_the_server_says_which_commit(tmp_path: Path) -> None:
    tiers = ["memory://16MiB", f"file://{tmp_path}/kv?size=64MiB"]
    found = {}
    for commit in ("a" * 40, "b" * 40, "a" * 40):
        with (
            server(tmp_path, revision=commit),
            runtime_context.get_model().override(model_path="org/model"),
        ):
            kept = storage_of(pools(*PLAIN).host, tiers, revision="")
            found[commit] = kept.batch_exists(hashes(2))
            kept.batch_set_v1(hashes(2), spans(kept.mem_pool_host, 0, 2))
            kept.close()
    assert found == {"a" * 40: 2, "b" * 40: 0}
