"""`KVKeepSpec`: vLLM's spec of offloading to tiers, also where there is no GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.platforms import current_platform
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvkeep.integrations.vllm.naming import machine_of
from kvkeep.integrations.vllm.offload.engine import OffloadEngine
from kvkeep.integrations.vllm.offload.mover import CPUMover
from kvkeep.integrations.vllm.offload.notes import WorkerNote, leave_note, take_notes

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingManager, OffloadingWorker
    from vllm.v1.kv_offload.config import OffloadingConfig

__all__ = ["KVKeepSpec"]


class KVKeepSpec(TieringOffloadingSpec):
    """vLLM's `TieringOffloadingSpec`, with two additions.

    Where the platform is no GPU, pages are copied by `CPUMover`; on a GPU, by vLLM. And each worker
    tells the tier of its pages, so that records name the attention backend, and contain only the
    bytes that belong to a chunk.

    Options, in ``kv_connector_extra_config``, are vLLM's: ``cpu_bytes_to_use``,
    ``secondary_tiers``, and others.

    Attributes:
        notes: what the workers told, in the scheduler; None: not all did.
    """

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        self._engine = OffloadEngine.of_caller()
        self._worker: OffloadingWorker | None = None
        self.notes: list[WorkerNote] | None = None

    def get_manager(self) -> OffloadingManager:
        """Return what manages rows and tiers; take the workers' notes for `KVKeepTier` before."""
        if not self._manager:
            parallel = self.config.parallel
            self.notes = take_notes(self.config.engine_id, parallel.world_size)
        manager: OffloadingManager = super().get_manager()
        return manager

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """Return what copies pages, and leave a note for the tier."""
        if not self._worker:
            if current_platform.is_cuda_alike() or current_platform.is_xpu():
                self._worker = super().get_worker(kv_caches)
            else:
                self._worker = self._cpu_mover(kv_caches)
        self._leave_note(kv_caches)
        return self._worker

    def _cpu_mover(self, kv_caches: CanonicalKVCaches) -> CPUMover:
        canonical = self.config.canonical_layout
        if canonical:
            self._validate_canonical_refs(kv_caches)
        region = SharedOffloadRegion(
            engine_id=self.config.engine_id,
            num_chunks=self.num_chunks,
            rank=0 if self.replicated_layout else self.config.parallel.rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        try:
            return CPUMover(
                kv_caches, region, blocks=self.blocks_per_chunk, canonical=canonical
            )  # fmt: skip
        except BaseException:
            region.cleanup()
            raise

    def _leave_note(self, kv_caches: CanonicalKVCaches) -> None:
        if self._engine is None:
            return
        names = [name for group in self.config.groups for name in group.layer_names]
        device = kv_caches.tensors[0].tensor.device
        machine = machine_of(self._engine.config, names, device)
        note = WorkerNote.of(machine, kv_caches, canonical=self.config.canonical_layout)
        leave_note(self.config.engine_id, self.config.parallel.rank, note)
