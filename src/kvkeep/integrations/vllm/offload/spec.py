"""`KVKeepSpec`: vLLM's spec of offloading to tiers, also where there is no GPU."""

from __future__ import annotations

import copy
import logging
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.platforms import current_platform
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvkeep.core.errors import UnsupportedModel
from kvkeep.integrations.vllm.naming import machine_of
from kvkeep.integrations.vllm.offload.engine import KVKeepManager, OffloadEngine
from kvkeep.integrations.vllm.offload.mover import CPUMover
from kvkeep.integrations.vllm.offload.notes import WorkerNote, leave_note, take_notes
from kvkeep.integrations.vllm.started import join_logs

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingManager, OffloadingWorker
    from vllm.v1.kv_offload.config import OffloadingConfig


__all__ = ["KVKeepSpec", "canonical_of", "is_portable"]


_LOG = logging.getLogger("kvkeep.vllm")
_OPTION = "canonical_layout"
# Pages that would be copied in more pieces are copied whole. Where a page has all heads of a token
# side by side (NHD), each of several ranks has a piece for each token of a block.
_MOST_PIECES = 8


def canonical_of(engine: OffloadEngine, config: OffloadingConfig) -> OffloadingConfig | None:
    """Return ``config`` in the canonical layout; None: it is to stay as it is.

    It stays if ``canonical_layout`` is given, if vLLM expects layers that are not portable, and if
    weights or activations are quantised: ranks may choose the scales of their shares, so another
    number of ranks computes other numbers, by more than rounding.
    The size of a row is the same in both, because it is decided before there are pages.
    """
    if _OPTION in config.extra_config:
        return None
    if engine.config.model_config.quantization is not None:
        return None
    asked, transfer = copy.copy(engine.config), copy.copy(engine.config.kv_transfer_config)
    assert transfer is not None, "a connector made the spec"
    transfer.kv_connector_extra_config = {**config.extra_config, _OPTION: True}
    asked.kv_transfer_config = transfer
    canonical = build_offloading_config(asked, engine.caches)
    one_size = canonical.replicated_layout == config.replicated_layout
    if not canonical.parallel.is_parallelism_agnostic:
        return None
    return canonical if one_size or config.parallel.world_size == 1 else None


def is_portable(caches: CanonicalKVCaches) -> bool:
    """Return whether all pages are portable, and are copied in few pieces; log why not."""
    refs = [ref for group in caches.group_data_refs for ref in group]
    if any(ref.mapping is None or not ref.mapping.parallelism_agnostic for ref in refs):
        _LOG.info("vLLM cannot place pages of this layout: stored KV names the number of ranks")
        return False
    pieces: int = max(sum(run.num_fragments for run in ref.mapping.runs) for ref in refs)
    if pieces > _MOST_PIECES:
        _LOG.info(
            "A page would be copied in %d pieces to be of use to engines with another number of "
            'ranks: stored KV names the number of ranks; "%s": true in kv_connector_extra_config '
            "copies the pieces",
            pieces,
            _OPTION,
        )
    return pieces <= _MOST_PIECES


class KVKeepSpec(TieringOffloadingSpec):
    """vLLM's `TieringOffloadingSpec`, with four additions.

    Where the platform is no GPU, pages are copied by `CPUMover`; on a GPU, by vLLM. Each worker
    tells the tiers of its pages, so that records name the attention backend, and contain only the
    bytes that belong to a chunk. Rows are in vLLM's canonical layout, which is one for all
    numbers of ranks, wherever vLLM proves it for all layers. And KV that must not be kept gets no
    rows, see `KVKeepManager`.

    Options, in ``kv_connector_extra_config``, are vLLM's: ``cpu_bytes_to_use``,
    ``secondary_tiers``, and others. ``"canonical_layout": false`` turns that layout off; true
    refuses to start where vLLM cannot place the pages.

    Raises:
        InvalidValue: chunks of several blocks, in a model with windows or states; or the connector
            is not `KVKeepOffloadingConnector`.

    Attributes:
        engine: whose spec it is.
        notes: what all workers have told of their pages, in the scheduler.
    """

    _manager: OffloadingManager | None

    def __init__(self, config: OffloadingConfig) -> None:
        join_logs()
        self.engine = OffloadEngine.of_start()
        self.engine.require_whole_chunks(config)
        canonical = canonical_of(self.engine, config)
        self._direct = config if canonical is not None else None
        super().__init__(canonical or config)
        self.config: OffloadingConfig
        self._worker: OffloadingWorker | None = None
        self.notes: list[WorkerNote] = []

    def get_manager(self) -> OffloadingManager:
        """Return what decides about rows. The workers must have their pages by now.

        Raises:
            UnsupportedModel: workers would write their rows in different layouts.
            InvalidValue: a worker did not tell of its pages.
        """
        if not self._manager:
            self.notes = take_notes(self.config.engine_id, self.config.parallel.world_size)
            layouts = {note.canonical for note in self.notes}
            if len(layouts) > 1:
                raise UnsupportedModel(
                    "the workers' pages are in different layouts, some canonical and some not; "
                    'give "canonical_layout": false in kv_connector_extra_config'
                )
            if layouts == {False} and self._direct is not None:
                self.config = self._direct
            self._manager = KVKeepManager(super().get_manager(), self.engine)
        assert self._manager is not None
        return self._manager

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """Return what copies pages, and leave a note for the tiers."""
        if not self._worker:
            if self._direct is not None and not is_portable(kv_caches):
                self.config = self._direct
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
        """Tell the tiers of the pages."""
        names = [name for group in self.config.groups for name in group.layer_names]
        device = kv_caches.tensors[0].tensor.device
        machine = machine_of(self.engine.config, names, device)
        canonical = self.config.canonical_layout
        note = WorkerNote.of(machine, kv_caches, canonical=canonical)
        leave_note(self.config.engine_id, self.config.parallel.rank, note)
