"""vLLM's own offloading on the CPU: its manager, and a mover in place of the one for GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import CanonicalKVCaches, GPULoadStoreSpec
    from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec


class CPUOffload(CPUOffloadingSpec):
    """One block a chunk."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        assert self.blocks_per_chunk == 1
        return Mover(kv_caches, self.num_chunks)


class Mover(OffloadingWorker):
    """Copies pages at once, in the calling thread."""

    def __init__(self, caches: CanonicalKVCaches, chunks: int) -> None:
        self._caches = [cache.tensor.view(torch.int8) for cache in caches.tensors]
        self._kept = [torch.empty(chunks, *cache.shape[1:], dtype=torch.int8)
                      for cache in self._caches]  # fmt: skip
        self._done: list[TransferResult] = []

    def submit_store(self, job: int, source: GPULoadStoreSpec, target: CPULoadStoreSpec) -> bool:
        return self._copy(job, self._caches, source, self._kept, target)

    def submit_load(self, job: int, source: CPULoadStoreSpec, target: GPULoadStoreSpec) -> bool:
        return self._copy(job, self._kept, source, self._caches, target)

    def _copy(self, job: int, source: Any, at: Any, target: Any, to: Any) -> bool:
        for one, other in zip(source, target, strict=True):
            other[torch.as_tensor(to.block_ids)] = one[torch.as_tensor(at.block_ids)]
        self._done.append(TransferResult(job, True, 0, 0.0))
        return True

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, jobs: set[int]) -> None:
        pass
