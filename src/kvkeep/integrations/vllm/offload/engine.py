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

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
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

    def request(self, request_id: str) -> Request | None:
        """Return a request that the connector follows; None if this vLLM does not tell."""
        scheduler = getattr(self.connector, "connector_scheduler", None)
        followed = getattr(scheduler, "_req_status", {}).get(request_id)
        return getattr(followed, "req", None)
