"""vLLM's own spec with a mover for CPUs, and nothing else of kvkeep: a stand-in for a GPU."""

from __future__ import annotations

from typing import Any

from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvkeep.integrations.vllm.offload.mover import CPUMover


class WholeRows(TieringOffloadingSpec):
    def get_worker(self, kv_caches: Any) -> Any:
        if not self._worker:
            region = SharedOffloadRegion(
                self._engine_id, self.num_chunks, self.config.parallel.rank,
                self.kv_bytes_per_chunk, self.cpu_page_size_per_worker,
            )  # fmt: skip
            self._worker = CPUMover(kv_caches, region, blocks=self.blocks_per_chunk)
        return self._worker
