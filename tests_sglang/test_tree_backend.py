"""``--radix-cache-backend kvkeep``: registered by a plug-in, built by SGLang, or refused."""

from __future__ import annotations

import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache import registry
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.registry import TreeCacheBuildContext, create_tree_cache
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.runtime_context import get_memory
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
from tree_scheduler import memory

from kvkeep.core.errors import InvalidValue, UnsupportedModel
from kvkeep.core.eviction import POLICIES
from kvkeep.integrations.sglang.plugin import register
from kvkeep.integrations.sglang.tree import KVKeepTree

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text("utf-8"))


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_RADIX_CACHE_REGISTRY", {})
    register()


def context(backend: str | None, params: Any = None, **more: Any) -> TreeCacheBuildContext:
    server = {name: more.pop(name) for name in ("enable_lmcache",) if name in more}
    params = memory(4, 16) if params is None else params
    args = ServerArgs(model_path="dummy", page_size=4, radix_cache_backend=backend, **server)  # type: ignore[arg-type]
    set_global_server_args_for_scheduler(args)
    fields: dict[str, Any] = {
        "is_hybrid_swa": False, "is_hybrid_ssm": False, "enable_hierarchical_cache": False,
        "disable_radix_cache": False, "tp_worker": None, "model_config": None,
        "tp_size": 1, "tp_rank": 0, "tp_group": None,
    } | more  # fmt: skip
    return TreeCacheBuildContext(server_args=args, params=params, **fields)


def test_the_entry_point_registers_every_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_RADIX_CACHE_REGISTRY", {})
    points = PROJECT["project"]["entry-points"]["sglang.srt.plugins"]
    for name, value in points.items():
        EntryPoint(name, value, "sglang.srt.plugins").load()()
    names = {"kvkeep", *(f"kvkeep:{name}" for name in POLICIES)}
    assert set(registry.registered_radix_cache_backends()) == names
    register()  # SGLang may load plug-ins again
    assert set(registry.registered_radix_cache_backends()) == names


def test_sglang_builds_it() -> None:
    cache = create_tree_cache(context("kvkeep"))
    assert get_memory().radix_cache_backend == "kvkeep"
    assert isinstance(cache, KVKeepTree)
    assert cache.policy.name == "lru"
    assert isinstance(create_tree_cache(context(None)), UnifiedRadixCache)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_the_name_chooses_the_policy(policy: str) -> None:
    cache = create_tree_cache(context(f"kvkeep:{policy}"))
    assert isinstance(cache, KVKeepTree)
    assert cache.policy.name == policy
    cache.reset()
    assert cache.policy.name == policy


def test_the_server_chooses_the_policy() -> None:
    cache = create_tree_cache(context("kvkeep", memory(4, 16, eviction_policy="PRIORITY")))
    assert isinstance(cache, KVKeepTree)
    assert cache.policy.name == "priority"


@pytest.mark.parametrize(("more", "said"), [
    ({"eviction_policy": "mru"}, "no eviction policy 'mru'; there are lru"),
    ({"eviction_policy": "lru", "eviction_policy_config": {"a": 1}}, "take no settings"),
])  # fmt: skip
def test_policies_that_it_does_not_have(more: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidValue, match=said):
        create_tree_cache(context("kvkeep", memory(4, 16, **more)))


def test_ranks_would_not_agree_on_a_clock() -> None:
    with pytest.raises(InvalidValue, match=r"'returns' reads a clock.* 2 ranks.* of lru, prio"):
        create_tree_cache(context("kvkeep:returns", tp_size=2))
    with pytest.raises(InvalidValue, match="reads a clock"):
        create_tree_cache(context("kvkeep:returns", memory(4, 16, pp_size=2)))


@pytest.mark.parametrize(("more", "said"), [
    ({"is_hybrid_swa": True}, "SWA"), ({"is_hybrid_ssm": True}, "Mamba"),
    ({"enable_hierarchical_cache": True}, "HiCache"), ({"enable_lmcache": True}, "lmcache"),
])  # fmt: skip
def test_servers_that_it_does_not_serve(more: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedModel, match=said):
        create_tree_cache(context("kvkeep", **more))


@pytest.mark.parametrize(("more", "said"), [
    ({"enable_session_radix_cache": True}, "session"),
    ({"decoder_swa_bounded_replay": True}, "windows"),
    ({"swa_gates_prefix_match": False}, "windows"),
])  # fmt: skip
def test_requests_for_what_only_sglangs_tree_has(more: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedModel, match=said):
        create_tree_cache(context("kvkeep", memory(4, 16, **more)))


def test_memory_that_it_does_not_know() -> None:
    class Shared(PagedTokenToKVPoolAllocator):  # type: ignore[misc]
        pass

    params = memory(4, 16)
    params.token_to_kv_pool_allocator = Shared(64, 4, torch.bfloat16, "cpu", None, False)
    with pytest.raises(UnsupportedModel, match="memory of a Shared"):
        create_tree_cache(context("kvkeep", params))
    params = memory(4, 16)
    params.page_size = 8
    with pytest.raises(UnsupportedModel, match="pages of 8 in memory with pages of 4"):
        create_tree_cache(context("kvkeep", params))


def test_caching_can_be_turned_off() -> None:
    params = memory(4, 16)
    params.disable = True
    cache = create_tree_cache(context("kvkeep", params, disable_radix_cache=True))
    assert not isinstance(cache, KVKeepTree)
    assert not cache.supports_prefix_sharing()
