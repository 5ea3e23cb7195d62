"""What differs between the versions of vLLM beside which kvkeep runs: 0.31 to 0.33.

Every guard is here, so that the last version that needs one shows what can go.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.core.kv_cache_utils import resolve_dcp_kv_block_size, resolve_kv_cache_block_sizes

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    HIT_SOURCE: CacheHitSource | None = CacheHitSource.HOST
except ImportError:  # before 0.32 vLLM does not count hits by their source
    HIT_SOURCE = None

__all__ = ["HIT_SOURCE", "block_tokens", "hashed_tokens"]


def block_tokens(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> set[int]:
    """Return the tokens of a block over all ranks, of each group of layers."""
    dcp = vllm_config.parallel_config.decode_context_parallel_size
    return {
        resolve_dcp_kv_block_size(group.kv_cache_spec, dcp)
        for group in kv_cache_config.kv_cache_groups
    }


def hashed_tokens(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> int | None:
    """Return the tokens that one of vLLM's block hashes covers; None: those of a block."""
    if hasattr(kv_cache_config, "hash_block_size"):
        hashed: int | None = kv_cache_config.hash_block_size
        return hashed
    # Before 0.32 vLLM resolves them beside the configuration, with this function.
    return int(resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)[1])
