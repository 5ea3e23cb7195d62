"""`KVKeepConnector`: the KV connector that vLLM calls, in its scheduler and in its workers."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)

from kvkeep.integrations.vllm.groups import Groups
from kvkeep.integrations.vllm.kept import join_logs
from kvkeep.integrations.vllm.messages import StepPlan
from kvkeep.integrations.vllm.options import ConnectorOptions
from kvkeep.integrations.vllm.outer import require_outer
from kvkeep.integrations.vllm.stats import KVKeepPromMetrics, KVKeepStats
from kvkeep.integrations.vllm.versions import HIT_SOURCE

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
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from kvkeep.integrations.vllm.scheduler import SchedulerSide
    from kvkeep.integrations.vllm.worker import WorkerSide

__all__ = ["KVKeepConnector"]


class KVKeepConnector(KVConnectorBase_V1, SupportsHMA):
    """A cache behind vLLM's prefix cache: blocks computed once are loaded, not computed again.

    All transfers are asynchronous. Whole pages are stored as opaque bytes under vLLM's own block
    hashes. What cannot be loaded is computed: no request fails because of the store.

    vLLM makes one connector in the scheduler and one in each worker.

    Options, in ``kv_connector_extra_config``, are those of
    `kvkeep.integrations.vllm.options.ConnectorOptions`; a request's, in
    ``kv_transfer_params["kvkeep"]``, those of `RequestOptions` there.

    Raises:
        InvalidValue: an option is wrong, or the configuration of an outer connector breaks a
            promise.
        UnsupportedModel: the model has KV of a kind that cannot be stored.
    """

    _cache_hit_source = HIT_SOURCE

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        join_logs()
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        require_outer(transfer)  # before the scheduler reads kv_load_failure_policy
        options = ConnectorOptions.parse(transfer.kv_connector_extra_config)
        groups = Groups.of(vllm_config, kv_cache_config)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        # Each side is imported only where it runs; vLLM's front end has neither.
        if role is KVConnectorRole.SCHEDULER:
            from kvkeep.integrations.vllm.scheduler import SchedulerSide  # noqa: PLC0415

            self._scheduler = SchedulerSide(vllm_config, options, groups)
        else:
            from kvkeep.integrations.vllm.worker import WorkerSide  # noqa: PLC0415

            self._worker = WorkerSide(vllm_config, kv_cache_config, options, groups)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Refuse wrong options; vLLM asks before it loads weights, where it has CUDA graphs."""
        ConnectorOptions.parse(extra_config)
        return False

    @property
    def requires_kv_delivery(self) -> bool:
        """False: blocks that are not saved are computed again."""
        return False

    @property
    def _scheduling(self) -> SchedulerSide:
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
        """Open the store for the engine's memory."""
        self._moving.register(kv_caches)

    def unregister_kv_caches(self) -> None:
        """Before vLLM sleeps, since 0.33: end all copies of pages. vLLM keeps their addresses."""
        self._moving.end_copies()

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Start the loads of this step."""
        self._moving.start(self._plan)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: vLLM schedules a request only after its whole load."""

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: AttentionMetadata,
        **kwargs: Any,
    ) -> None:
        """Do nothing: blocks are saved with all their layers, in `wait_for_save`."""

    def wait_for_save(self) -> None:
        """Save the blocks that this step completed."""
        self._moving.save(self._plan)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Return the requests whose loads have ended."""
        return self._moving.finished(finished_req_ids, self._plan)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the pages that a load did not fill."""
        return self._moving.take_errors()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Return what the scheduler has to know of this step and of loads and lookups."""
        return self._moving.news(self._plan)

    # --- the scheduler's side --------------------------------------------------------------------

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """Take vLLM's pool of pages."""
        self._scheduling.bind_pool(gpu_block_pool)

    def on_new_request(self, request: Request) -> None:
        """Start to follow a request. vLLM reads its parameters, which must be an object or none."""
        self._scheduling.follow(request)
        if not isinstance(request.kv_transfer_params, Mapping):
            request.kv_transfer_params = None

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return the number of tokens to load behind the computed ones; None: call again."""
        tokens = self._scheduling.matched(request, num_computed_tokens)
        return tokens, bool(tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Plan the load of a request that has pages now."""
        self._scheduling.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Return the plan of this step for the workers."""
        return self._scheduling.plan(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Take the news of workers."""
        self._scheduling.receive(connector_output)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forget a request. vLLM may free its pages: they are copied before others are written."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As `request_finished`, for several groups of layers."""
        self._scheduling.finished(request, block_ids)
        return False, None

    def reset_cache(self) -> bool:
        """Delete the namespace: everything that engines with these weights and settings stored.

        What running requests have computed, and compute from it, is not stored any more.
        vLLM also calls this before it sleeps, and in a pause that clears caches.
        """
        return self._scheduling.clear()

    # --- both ------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Return the counts since the last call."""
        if self._worker is not None:
            return self._worker.figures()
        return self._scheduling.counts.take()

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> KVConnectorStats | None:
        """Return counts that came from another process."""
        return KVKeepStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics | None:
        """Return kvkeep's metrics for vLLM's Prometheus page."""
        return KVKeepPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """Write queued blocks, for at most ten seconds; release all resources."""
        if self._worker is not None:
            self._worker.close()
        if self._scheduler is not None:
            self._scheduler.close()


# MultiConnector looks up the class of statistics from another process by name, in vLLM's registry
# only; without this entry the first statistics would end the server's output handler.
with suppress(ValueError):  # the entry point has registered it
    KVConnectorFactory.register_connector(
        KVKeepConnector.__name__, "kvkeep.integrations.vllm", KVKeepConnector.__name__
    )
