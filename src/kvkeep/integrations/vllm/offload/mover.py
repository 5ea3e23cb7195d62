"""`CPUMover`: copies between pages and vLLM's rows, where both are in memory of the CPU."""

from __future__ import annotations

import logging
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from vllm.v1.kv_offload.base import (
        CanonicalKVCacheRef,
        CanonicalKVCaches,
        GPULoadStoreSpec,
    )
    from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
    from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

    from kvkeep.integrations.records import Bytes

__all__ = ["CPUMover"]

_LOG = logging.getLogger("kvkeep.vllm")


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
