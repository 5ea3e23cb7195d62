"""`KVKeepSpec`: vLLM's spec of offloading to tiers, also where there is no GPU."""

from __future__ import annotations

import copy
import logging
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvkeep.core.errors import UnsupportedModel
from kvkeep.integrations.vllm.kept import join_logs
from kvkeep.integrations.vllm.naming import machine_of
from kvkeep.integrations.vllm.offload.engine import KVKeepManager, OffloadEngine
from kvkeep.integrations.vllm.offload.notes import WorkerNote, leave_note, take_notes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from vllm.v1.kv_offload.base import (
        CanonicalKVCacheRef,
        CanonicalKVCaches,
        GPULoadStoreSpec,
        OffloadingManager,
    )
    from vllm.v1.kv_offload.config import OffloadingConfig
    from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

    from kvkeep.integrations.records import Bytes

__all__ = ["CPUMover", "KVKeepSpec", "canonical_of", "is_portable"]


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


@dataclass(frozen=True, slots=True)
class _Fragment:
    """Bytes of a page in ``tensor``, and where they are in the row's block."""

    tensor: int
    page: int
    row: int
    size: int
    ranks: int = 1  # that have the same bytes, and take turns to write them
    turn: int = 0


class CPUMover(OffloadingWorker):
    """vLLM's worker of offloading for the CPU: rows are those of its `SharedOffloadRegion`.

    A page is copied whole, byte by byte; in the canonical layout, piece by piece into its place in
    the page of all ranks. Loads are copied when they are submitted: a CPU has no copy engine, and
    vLLM's next step would only wait for them. Stores are copied by a thread while the model
    computes; vLLM does not write to their pages before `wait` has returned.

    Thread safety: none; the worker's thread.

    Arguments:
        caches: the worker's pages.
        region: vLLM's memory, which is released by `shutdown`.
        blocks: in a chunk, which is a row.
        canonical: whether rows are in the layout of all ranks together.
    """

    def __init__(
        self,
        caches: CanonicalKVCaches,
        region: SharedOffloadRegion,
        *,
        blocks: int,
        canonical: bool = False,
    ) -> None:
        self._region = region
        self._blocks = blocks
        self._pages: list[Bytes] = [
            tensor.tensor.numpy().view(np.uint8) for tensor in caches.tensors
        ]
        refs = caches.group_data_refs
        self._groups = [list(_fragments(group, canonical=canonical)) for group in refs]
        sizes = [tensor.page_size_bytes for tensor in caches.tensors]
        if canonical:
            sizes = [
                max(ref.mapping.canonical_page_size_bytes for ref in _refs_to(refs, at))
                for at in range(len(sizes))
            ]
        self._sizes = sizes  # of a block in a row
        view = region.create_next_canonical_view if canonical else region.create_next_worker_view
        self._rows: list[Bytes] = [view(size * blocks).numpy().view(np.uint8) for size in sizes]
        self._saver = ThreadPoolExecutor(1, "kvkeep copy")
        self._saving: dict[int, Future[TransferResult]] = {}
        self._loaded: deque[TransferResult] = deque()

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: CPULoadStoreSpec
    ) -> bool:
        """Begin to copy pages into rows."""
        copies = list(self._copies(src_spec, dst_spec.block_ids))
        self._saving[job_id] = self._saver.submit(self._save, job_id, copies)
        return True

    def submit_load(
        self, job_id: int, src_spec: CPULoadStoreSpec, dst_spec: GPULoadStoreSpec
    ) -> bool:
        """Copy rows into pages."""
        began, moved = time.perf_counter(), 0
        for group, page, row, block in self._copies(dst_spec, src_spec.block_ids):
            for one in self._groups[group]:
                start = block * self._sizes[one.tensor] + one.row
                self._pages[one.tensor][page, one.page : one.page + one.size] = self._rows[
                    one.tensor
                ][row, start : start + one.size]
                moved += one.size
        self._loaded.append(TransferResult(job_id, True, moved, time.perf_counter() - began))
        return True

    def _save(self, job_id: int, copies: Sequence[tuple[int, int, int, int]]) -> TransferResult:
        began, moved = time.perf_counter(), 0
        for group, page, row, block in copies:
            for one in self._groups[group]:
                if one.ranks > 1 and (row * self._blocks + block) % one.ranks != one.turn:
                    continue
                start = block * self._sizes[one.tensor] + one.row
                self._rows[one.tensor][row, start : start + one.size] = self._pages[one.tensor][
                    page, one.page : one.page + one.size
                ]
                moved += one.size
        return TransferResult(job_id, True, moved, time.perf_counter() - began)

    def _copies(
        self, pages: GPULoadStoreSpec, rows: np.ndarray
    ) -> Iterator[tuple[int, int, int, int]]:
        """Yield ``(group, page, row, block in the row)``.

        The first page of a group may belong into the middle of its row.
        """
        ids, first_page, first_row = pages.block_ids.tolist(), 0, 0
        numbers = rows.tolist()
        for group, (count, begin) in enumerate(
            zip(pages.group_sizes, pages.block_indices, strict=True)
        ):
            skipped = begin % self._blocks
            for at in range(count):
                row, block = divmod(skipped + at, self._blocks)
                yield group, ids[first_page + at], numbers[first_row + row], block
            first_page += count
            first_row += -(-(skipped + count) // self._blocks) if count else 0
        assert (first_page, first_row) == (len(ids), len(numbers)), "pages and rows do not match"

    def get_finished(self) -> list[TransferResult]:
        """Return the copies that have ended since the last call."""
        ended = list(self._loaded)
        self._loaded.clear()
        saved = [job_id for job_id, one in self._saving.items() if one.done()]
        return ended + [self._saving.pop(job_id).result() for job_id in saved]

    def wait(self, job_ids: set[int]) -> None:
        """Wait until these copies have ended."""
        for job_id in job_ids:
            if job_id in self._saving:
                self._saving[job_id].result()

    def shutdown(self) -> None:
        """Wait for all copies, and release the memory."""
        self._saver.shutdown(wait=True)
        self._pages, self._rows = [], []
        self._region.cleanup()


def _refs_to(
    refs: Sequence[Sequence[CanonicalKVCacheRef]], tensor: int
) -> list[CanonicalKVCacheRef]:
    return [ref for group in refs for ref in group if ref.tensor_idx == tensor]


def _fragments(refs: Sequence[CanonicalKVCacheRef], *, canonical: bool) -> Iterator[_Fragment]:
    """Yield the pieces of the pages of one group's layers."""
    for ref in refs:
        if not canonical:
            yield _Fragment(ref.tensor_idx, 0, 0, ref.page_size_bytes)
            continue
        mapping = ref.mapping
        assert mapping is not None, "vLLM certified the layout"
        for run in mapping.runs:
            for at in range(run.num_fragments):
                yield _Fragment(
                    ref.tensor_idx,
                    run.local_offset + at * run.local_stride,
                    run.canonical_offset + at * run.canonical_stride,
                    run.fragment_size,
                    mapping.num_writers,
                    mapping.writer_index,
                )
