"""`KVKeepConnector`: what vLLM calls, on both of its sides."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvkeep.integrations.vllm.groups import Groups
from kvkeep.integrations.vllm.messages import StepPlan
from kvkeep.integrations.vllm.options import ConnectorOptions
from kvkeep.integrations.vllm.outer import require_outer
from kvkeep.integrations.vllm.stats import KVKeepPromMetrics, KVKeepStats

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorMetadata,
        KVConnectorWorkerMetadata,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
        KVConnectorPromMetrics,
        KVConnectorStats,
    )
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from kvkeep.integrations.vllm.scheduler import SchedulerSide
    from kvkeep.integrations.vllm.worker import WorkerSide

__all__ = ["KVKeepConnector"]

_LOG = logging.getLogger("kvkeep.vllm")


class KVKeepConnector(KVConnectorBase_V1, SupportsHMA):
    """A cache behind vLLM's: blocks that were computed once are loaded, not computed again.

    Everything is asynchronous. Whole pages move, opaque, under vLLM's own block hashes. What cannot
    be loaded, for whatever reason, is computed: a request never fails because of the store.

    vLLM makes two: one in the scheduler, one in each worker.
    """

    _cache_hit_source = CacheHitSource.HOST

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        require_outer(transfer)  # before the scheduler reads it
        options = ConnectorOptions.parse(transfer.kv_connector_extra_config)
        groups = Groups.of(vllm_config, kv_cache_config)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        # Either side is imported where it is: the front end has none.
        if role is KVConnectorRole.SCHEDULER:
            from kvkeep.integrations.vllm.scheduler import SchedulerSide  # noqa: PLC0415

            self._scheduler = SchedulerSide(
                vllm_config,
                options,
                groups,
                loads=transfer.is_kv_consumer,
                saves=transfer.is_kv_producer,
            )
        else:
            from kvkeep.integrations.vllm.worker import WorkerSide  # noqa: PLC0415

            self._worker = WorkerSide(vllm_config, kv_cache_config, options, groups)

    @property
    def requires_kv_delivery(self) -> bool:
        """No: what is not saved is computed again."""
        return False

    @property
    def _deciding(self) -> SchedulerSide:
        assert self._scheduler is not None, "this is the worker's side"
        return self._scheduler

    @property
    def _moving(self) -> WorkerSide:
        assert self._worker is not None, "this is the scheduler's side"
        return self._worker

    @property
    def _plan(self) -> StepPlan:
        plan = self._get_connector_metadata()
        assert isinstance(plan, StepPlan)
        return plan

    # --- the worker's side -----------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """The engine's memory is there."""
        self._moving.register(kv_caches)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Begin the loads of this step."""
        self._moving.start(self._plan)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: a request is computed when all of its load is there."""

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: AttentionMetadata,
        **kwargs: Any,
    ) -> None:
        """Nothing yet: blocks are saved with all their layers."""

    def wait_for_save(self) -> None:
        """Save what this step completed."""
        self._moving.save(self._plan)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Loads that are done."""
        return self._moving.finished(finished_req_ids, self._plan)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Pages that were to be loaded and are not."""
        return self._moving.take_errors()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """What was found for the scheduler."""
        return self._moving.answers()

    # --- the scheduler's side --------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        """Follow it."""
        self._deciding.follow(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens that can be loaded beyond those that vLLM has; None: to be asked again."""
        tokens = self._deciding.matched(request, num_computed_tokens)
        return tokens, bool(tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """There are pages to load into."""
        self._deciding.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """What the workers are to do with this step."""
        return self._deciding.plan(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """What the workers found."""
        self._deciding.heard(connector_output)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forget it. Its pages may go: whatever was to be saved is copied."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self,
        request: Request,
        block_ids: tuple[list[int], ...],
    ) -> tuple[bool, dict[str, Any] | None]:
        """As `request_finished`."""
        self._deciding.finished(request)
        return False, None

    def reset_cache(self) -> bool:
        """Delete the namespace: all that engines with these weights and settings stored."""
        return self._deciding.clear()

    # --- both ------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """What was counted since the last call."""
        if self._worker is not None:
            return self._worker.counts.take()
        return self._deciding.counts.take()

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> KVConnectorStats | None:
        """Counts that crossed a process."""
        return KVKeepStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics | None:
        """Metrics of kvkeep on vLLM's Prometheus page."""
        return KVKeepPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """Write what waits, ``flush_timeout`` seconds at most, and give everything back."""
        if self._worker is not None:
            self._worker.close()
        if self._scheduler is not None:
            self._scheduler.close()
