"""`KVKeepOffloadingConnector`: vLLM's connector of offloading, which tells tiers of their engine.

vLLM gives a spec and its tiers an `OffloadingConfig`, which names the model and no more, and the
hashes of a request's blocks. What else decides the bytes of KV is in the configuration of the
engine and in the requests, and only a connector has both.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_offload.base import LookupResult
from vllm.v1.kv_offload.tiering.manager import TieringOffloadingManager

from kvkeep.core.errors import InvalidValue
from kvkeep.integrations.vllm.content import RequestContent, Resets
from kvkeep.integrations.vllm.kept import join_logs
from kvkeep.integrations.vllm.stats import Counts
from kvkeep.integrations.vllm.transfer import NO_ENGINE, OFFLOADING, offload_parts

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.kv_offload.base import (
        OffloadKey,
        PrepareStoreOutput,
        ReqContext,
        RequestOffloadingContext,
    )
    from vllm.v1.kv_offload.config import OffloadingConfig
    from vllm.v1.request import Request

__all__ = ["KVKeepManager", "KVKeepOffloadingConnector", "OffloadEngine"]

_STARTING: ContextVar[OffloadEngine | None] = ContextVar("the engine that starts", default=None)


class ArrivedRequest(NamedTuple):
    """A request that arrives, and its ``kv_transfer_params``, which may be anything."""

    request: Request
    params: object


@dataclass(slots=True)
class OffloadEngine:
    """An engine's configuration, and its requests as its connector sees them.

    Attributes:
        arrival: the request that arrives just now.
        resets: which requests have KV of before a reset.
        counts: of its tier.
        content: which requests are kept.
        clear: deletes the namespace of its tier, at a reset; None: nothing does.
    """

    config: VllmConfig
    caches: KVCacheConfig
    arrival: ArrivedRequest | None = None
    resets: Resets = field(default_factory=Resets)
    counts: Counts = field(default_factory=Counts)
    clear: Callable[[], object] | None = None
    content: RequestContent = field(init=False)

    def __post_init__(self) -> None:
        self.content = RequestContent(self.config, self.counts)

    @contextmanager
    def starting(self) -> Iterator[None]:
        """While the connector is made: let its spec find this engine by `of_start`."""
        token = _STARTING.set(self)
        try:
            yield
        finally:
            _STARTING.reset(token)

    @classmethod
    def of_start(cls) -> OffloadEngine:
        """Return the engine whose connector is being made.

        Raises:
            InvalidValue: the connector is not kvkeep's.
        """
        engine = _STARTING.get()
        if engine is None:
            raise InvalidValue(NO_ENGINE)
        return engine

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


class KVKeepOffloadingConnector(OffloadingConnector):
    """vLLM's `OffloadingConnector`, for engines with a `KVKeepTier`.

    Its options are vLLM's; ``spec_name`` must be ``KVKeepSpec``.

    Raises:
        InvalidValue: an option of a `KVKeepTier` is wrong, or one that it needs is missing.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        join_logs()
        offload_parts(vllm_config.kv_transfer_config.kv_connector_extra_config)
        self._engine = OffloadEngine(vllm_config, kv_cache_config)
        with self._engine.starting():
            super().__init__(vllm_config, role, kv_cache_config)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Refuse wrong options; vLLM asks before it loads weights, where it has CUDA graphs."""
        offload_parts(extra_config)
        return bool(super().requires_piecewise_for_cudagraph(extra_config))

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """Take vLLM's pool of pages."""
        super().bind_gpu_block_pool(gpu_block_pool)
        self._engine.resets.bind(gpu_block_pool)

    def on_new_request(self, request: Request) -> None:
        """Start to follow a request. vLLM reads its parameters, which must be an object or none."""
        params = request.kv_transfer_params
        if not isinstance(params, Mapping):
            request.kv_transfer_params = None
        self._engine.arrival = ArrivedRequest(request, params)
        try:
            super().on_new_request(request)
        finally:
            self._engine.arrival = None

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return the number of tokens to load; called when a request begins, or begins again."""
        self._engine.resets.begin(request, num_computed_tokens)
        found: tuple[int | None, bool] = super().get_num_new_matched_tokens(
            request, num_computed_tokens
        )
        return found


class KVKeepManager(TieringOffloadingManager):
    """vLLM's manager of rows, without the requests whose KV must not be kept.

    These are requests that `RequestContent` does not keep, and those of before a reset. After one,
    vLLM (0.31 to 0.33) offloads anew what running requests have computed, also from pages that
    have left a window and are other requests' by then.
    """

    def __init__(self, made: TieringOffloadingManager, engine: OffloadEngine) -> None:
        super().__init__(made.primary_tier, made.secondary_tiers)
        self._engine = engine
        self._unkept: set[str] = set()

    def on_new_request(self, req_context: ReqContext, **more: Any) -> RequestOffloadingContext:
        """Decide whether the request is kept, and tell the tiers of it."""
        arrival = self._engine.arrival
        if arrival is not None and not self._engine.content.is_kept(arrival.request):
            self._unkept.add(req_context.req_id)
        return super().on_new_request(req_context, **more)

    def lookup(self, key: OffloadKey, req_context: ReqContext, **more: Any) -> LookupResult:
        """Return whether a chunk is stored; MISS for a request that is not kept."""
        if req_context.req_id in self._unkept:
            return LookupResult.MISS
        return super().lookup(key, req_context, **more)

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        """Choose rows for chunks; none for a request whose KV must not be kept."""
        name = req_context.req_id
        if name in self._unkept or self._engine.resets.is_stale(name):
            keys = ()
        return super().prepare_store(keys, req_context)

    def on_request_finished(self, req_context: ReqContext, **more: Any) -> None:
        """Forget a request."""
        self._unkept.discard(req_context.req_id)
        self._engine.resets.end(req_context.req_id)
        super().on_request_finished(req_context, **more)

    def reset_cache(self) -> None:
        """Give all rows away and clear tiers; KV of running requests is not stored any more."""
        self._engine.resets.reset()
        super().reset_cache()
        if self._engine.clear is not None:
            self._engine.clear()


# MultiConnector looks up the class of statistics from another process by name.
with suppress(ValueError):  # the entry point has registered it
    KVConnectorFactory.register_connector(OFFLOADING, "kvkeep.integrations.vllm.tier", OFFLOADING)
