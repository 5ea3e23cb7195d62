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
from vllm.v1.kv_offload.base import OffloadingManager

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

    @property
    def unsettled_steps(self) -> int:
        """In how many of the next steps rows may still be written for jobs of before a reset.

        vLLM gives all rows away at a reset. Its workers end their copies, and make those that are
        due, in the next step; but a tier fills rows in the scheduler, as soon as that step is
        planned. vLLM 0.33 holds loads of tiers back until then, earlier versions do not.
        """
        if hasattr(OffloadingManager, "on_reset_flushed"):
            return 0
        scheduler = getattr(self.connector, "connector_scheduler", None)
        if not getattr(scheduler, "_jobs", True):
            return 0  # no copy was on its way
        batches: int = self.config.max_concurrent_batches
        return batches

    def forget_stored_pages(self) -> bool:
        """Forget which pages held what requests have offloaded; return whether this vLLM does.

        After a reset vLLM (0.31 to 0.33) offloads anew all that its requests have computed, from
        the pages that it noted when they got them. Pages that have left a window since then may be
        those of other requests: their KV would be stored under wrong keys.
        """
        scheduler = getattr(self.connector, "connector_scheduler", None)
        try:
            config = scheduler.config  # type: ignore[union-attr]
            requests: Any = getattr(scheduler, "_req_status", None)
            for status in requests.values():
                for group, state in zip(config.kv_group_configs, status.group_states, strict=True):
                    if group.sliding_window_size_in_chunks is None:
                        continue
                    pages = state.block_ids
                    stored = min(state.next_stored_chunk_idx * config.blocks_per_chunk, len(pages))
                    pages[:stored] = [0] * stored  # vLLM's mark of a page that is not needed
        except (AttributeError, TypeError) as error:
            _LOG.warning("kvkeep does not know this version of vLLM after a reset: %s", error)
            return False
        return True

    def request(self, request_id: str) -> Request | None:
        """Return a request that the connector follows; None if this vLLM does not tell."""
        scheduler = getattr(self.connector, "connector_scheduler", None)
        followed = getattr(scheduler, "_req_status", {}).get(request_id)
        return getattr(followed, "req", None)
