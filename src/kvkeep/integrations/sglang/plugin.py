"""`register`: makes SGLang know ``--radix-cache-backend kvkeep``.

SGLang calls it in each of its processes, as an entry point in the group ``sglang.srt.plugins``.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from kvkeep.core.errors import InvalidValue, UnsupportedModel
from kvkeep.core.eviction import POLICIES, ReturnAware
from kvkeep.core.eviction import policy as named_policy
from kvkeep.integrations.sglang.settings import server_setting

if TYPE_CHECKING:
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.registry import TreeCacheBuildContext

__all__ = ["register"]


def register() -> None:
    """Register kvkeep's tree under all its names; names that are registered stay as they are."""
    from sglang.srt.mem_cache.registry import (  # noqa: PLC0415 - imports torch
        register_radix_cache_backend,
        registered_radix_cache_backends,
    )

    there = set(registered_radix_cache_backends())
    for name, policy in backend_names().items():
        if name not in there:
            register_radix_cache_backend(name, partial(build_tree, policy=policy))


BACKEND = "kvkeep"
"""The name for ``--radix-cache-backend``; ``kvkeep:returns`` and its like name a policy."""


def backend_names() -> dict[str, str | None]:
    """Return the names to register, and the eviction policy of each; None: the server's."""
    return {BACKEND: None, **{f"{BACKEND}:{name}": name for name in POLICIES}}


def build_tree(context: TreeCacheBuildContext, policy: str | None = None) -> BasePrefixCache:
    """Return a `KVKeepTree` for SGLang's scheduler, or SGLang's own cache if caching is off.

    ``policy`` is an eviction policy of kvkeep; None takes ``--radix-eviction-policy``.

    Raises:
        UnsupportedModel: the model, or something that the server is asked for, needs SGLang's tree.
        InvalidValue: kvkeep has no such policy.
    """
    params = context.params
    if context.disable_radix_cache:
        from sglang.srt.mem_cache.registry import (  # noqa: PLC0415 - heavy
            default_radix_cache_factory,
        )

        return default_radix_cache_factory(context)
    if reasons := [*_model_reasons(context), *_server_reasons(context), *_memory_reasons(params)]:
        raise UnsupportedModel(
            f"--radix-cache-backend {BACKEND} does not serve {'; '.join(reasons)}. Leave the "
            "option away to use SGLang's own tree"
        )
    from kvkeep.integrations.sglang.tree import KVKeepTree  # noqa: PLC0415 - heavy

    return KVKeepTree(params, partial(named_policy, _policy(context, policy)))


def _policy(context: TreeCacheBuildContext, asked: str | None) -> str:
    params = context.params
    if params.eviction_policy_config:
        raise InvalidValue(
            f"--radix-eviction-policy-config is {params.eviction_policy_config}; the policies of "
            f"{BACKEND} take no settings"
        )
    name = params.eviction_policy.lower() if asked is None else asked
    known = list(POLICIES)
    if name not in known:
        raise InvalidValue(
            f"{BACKEND} has no eviction policy {name!r}; there are {', '.join(known)}. Name one "
            f"with --radix-cache-backend {BACKEND}:NAME"
        )
    ranks = max(context.tp_size, params.pp_size, params.attn_cp_size)
    alike = [name for name, make in POLICIES.items() if make is not ReturnAware]  # without a clock
    if ranks > 1 and name not in alike:
        raise InvalidValue(
            f"the eviction policy {name!r} reads a clock, on which {ranks} ranks would not agree; "
            f"it is for servers of one rank. Take one of {', '.join(alike)}"
        )
    return name


def _model_reasons(context: TreeCacheBuildContext) -> list[str]:
    reasons = []
    if context.is_hybrid_swa:
        reasons.append("models with sliding windows in a pool of their own (SWA)")
    if context.is_hybrid_ssm:
        reasons.append("models with Mamba or linear-attention states")
    return reasons


def _server_reasons(context: TreeCacheBuildContext) -> list[str]:
    reasons = []
    params = context.params
    if context.enable_hierarchical_cache:
        reasons.append(
            "--enable-hierarchical-cache (HiCache and its storage backends work with SGLang's tree)"
        )
    if params.enable_session_radix_cache:
        reasons.append("--enable-session-radix-cache")
    reasons += [
        f"--{name.replace('_', '-')}"
        for name in ("enable_lmcache", "enable_flexkv", "enable_unified_cache_external_linker")
        if server_setting(name, "memory")
    ]
    if server_setting("disaggregation_decode_retraction_backup", "disagg") == "host_pool":
        reasons.append("--disaggregation-decode-retraction-backup host_pool")
    if params.decoder_swa_bounded_replay or not params.swa_gates_prefix_match:
        reasons.append("windows that each request keeps for itself")
    return reasons


def _memory_reasons(params: CacheInitParams) -> list[str]:
    from sglang.srt.mem_cache.allocator import (  # noqa: PLC0415 - heavy
        PagedTokenToKVPoolAllocator,
        TokenToKVPoolAllocator,
    )

    allocator: Any = params.token_to_kv_pool_allocator
    # A class derived from these may share its pages with something that must hear of evictions.
    if type(allocator) not in (TokenToKVPoolAllocator, PagedTokenToKVPoolAllocator):
        return [f"memory of a {type(allocator).__name__}"]
    if allocator.page_size != params.page_size:
        return [f"pages of {params.page_size} in memory with pages of {allocator.page_size}"]
    return []
