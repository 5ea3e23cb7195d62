"""The engine that vLLM makes a spec or a tier for.

vLLM gives both an `OffloadingConfig`, which names the model and no more. What else decides the
bytes of KV is in the configuration of the engine, and only the connector that makes the spec has
it: so it is taken from there, up the stack, while the constructor runs.
"""

from __future__ import annotations

import inspect
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.kv_cache_interface import FullAttentionSpec

from kvkeep.core.errors import InvalidValue

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.kv_offload.config import OffloadingConfig
    from vllm.v1.request import Request

__all__ = ["OffloadEngine"]

_LOG = logging.getLogger("kvkeep.vllm")
_DEEPEST = 64


@dataclass(frozen=True, slots=True)
class OffloadEngine:
    """An engine's configuration, and the connector through which it uses its tiers."""

    connector: Any
    config: VllmConfig
    caches: KVCacheConfig

    @classmethod
    def of_caller(cls) -> OffloadEngine | None:
        """Return the engine whose connector is being made up the stack; None if there is none."""
        frame = inspect.currentframe()
        for _ in range(_DEEPEST):
            if frame is None:
                break
            made = frame.f_locals.get("self")
            if isinstance(made, KVConnectorBase_V1):
                config = getattr(made, "_vllm_config", None)
                caches = getattr(made, "_kv_cache_config", None)
                if config is not None and caches is not None:
                    return cls(made, config, caches)
            frame = frame.f_back
        return None

    def whole_groups(self, config: OffloadingConfig) -> frozenset[int]:
        """Return the groups whose layers see all tokens."""
        specs = self.caches.kv_cache_groups
        return frozenset(
            group.group_id
            for group in config.groups
            if isinstance(specs[group.group_id].kv_cache_spec, FullAttentionSpec)
        )

    def require_whole_chunks(self, config: OffloadingConfig) -> None:
        """Check that vLLM fills all blocks of a chunk that it stores.

        Where some layers do not see all tokens, a chunk may have blocks behind their window. vLLM
        0.32 stores the others alone, and later loads all of them for a request that needs all:
        what the row held before becomes KV.

        Raises:
            InvalidValue: chunks of several blocks, in a model with windows or states.
        """
        blocks = config.cache.blocks_per_chunk
        if blocks > 1 and len(self.whole_groups(config)) < len(config.groups):
            raise InvalidValue(
                f"blocks_per_chunk is {blocks} for a model with windows or states: vLLM stores "
                "parts of chunks there, and loads them as whole ones, which gives wrong tokens. "
                "Leave blocks_per_chunk and block_size out of kv_connector_extra_config"
            )

    def request(self, request_id: str) -> Request | None:
        """Return a request that the connector follows; None if this vLLM does not tell."""
        scheduler = getattr(self.connector, "connector_scheduler", None)
        followed = getattr(scheduler, "_req_status", {}).get(request_id)
        return getattr(followed, "req", None)
