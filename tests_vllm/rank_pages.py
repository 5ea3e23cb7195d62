"""Workers of one engine in this process, without a model: pages, vLLM's rows, and our mover.

vLLM itself says where pages belong (`register_kv_caches`); what they contain is given.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import (
    OffloadingConnectorWorker,
)
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
)
from vllm.v1.kv_offload.base import CanonicalKVCaches, GPULoadStoreSpec
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

from kvkeep.integrations.records import gather, scatter
from kvkeep.integrations.vllm.offload.notes import ChunkRows, WorkerNote
from kvkeep.integrations.vllm.offload.spec import CPUMover

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvkeep.store import BlockStore

ALIGNED = 4096


@dataclass(frozen=True)
class Shape:
    """A model's KV: ``heads`` 0 is MLA, whose latents all ranks have."""

    heads: int = 4
    layers: int = 2
    block: int = 16
    head: int = 8
    tokens_first: bool = False  # NHD: all heads of a token side by side
    blocks: int = 8

    def truth(self, seed: int = 0) -> torch.Tensor:
        """KV of the whole model: [layers, blocks, heads, block, 2 x head], float32."""
        rng = np.random.default_rng(seed)
        shape = (self.layers, self.blocks, max(1, self.heads), self.block, 2 * self.head)
        return torch.from_numpy(rng.standard_normal(shape, np.float32))

    def heads_of(self, rank: int, ranks: int) -> slice:
        """The heads that a rank has; ranks have the same one if there are more ranks than heads."""
        if self.heads == 0:
            return slice(0, 1)
        own = max(1, self.heads // ranks)
        first = rank * own if self.heads >= ranks else rank // (ranks // self.heads)
        return slice(first, first + own)


def pages_of(shape: Shape, rank: int, ranks: int) -> dict[str, torch.Tensor]:
    """A worker's empty pages, by layer: [blocks, heads, block, content]."""
    own = shape.heads_of(rank, ranks)
    count = own.stop - own.start
    pages = {}
    for layer in range(shape.layers):
        if shape.tokens_first:
            page = torch.zeros(shape.blocks, shape.block, count, 2 * shape.head).transpose(1, 2)
        else:
            page = torch.zeros(shape.blocks, count, shape.block, 2 * shape.head)
        pages[f"layer {layer}"] = page
    return pages


def registered(
    shape: Shape, rank: int, ranks: int, pages: dict[str, torch.Tensor]
) -> CanonicalKVCaches:
    """What vLLM tells a spec of these pages."""
    if shape.heads:
        own = max(1, shape.heads // ranks)
        spec: Any = FullAttentionSpec(
            block_size=shape.block, num_kv_heads=own, head_size=shape.head, dtype=torch.float32
        )
    else:
        spec = MLAAttentionSpec(
            block_size=shape.block, num_kv_heads=1, head_size=2 * shape.head, dtype=torch.float32
        )
    caches = KVCacheConfig(shape.blocks, [], [KVCacheGroupSpec(list(pages), spec)])
    parallel = SimpleNamespace(
        tensor_parallel_size=ranks, prefill_context_parallel_size=1, rank=rank, world_size=ranks,
        decode_context_parallel_size=1, cp_kv_cache_interleave_size=1,
    )  # fmt: skip
    model = SimpleNamespace(get_total_num_kv_heads=lambda: max(1, shape.heads))
    given: list[CanonicalKVCaches] = []
    canonical = SimpleNamespace(canonical_layout=True)
    offloading = SimpleNamespace(replicated_layout=False, config=canonical, get_worker=given.append)
    config: Any = SimpleNamespace(parallel_config=parallel, model_config=model)
    OffloadingConnectorWorker(offloading, config, caches).register_kv_caches(pages)
    return given[0]


class Workers:
    """The workers of an engine with so many ranks, over rows of one region; a context manager."""

    def __init__(
        self, shape: Shape, ranks: int, *, blocks: int = 1, rows: int = 8, canonical: bool = True
    ) -> None:
        self.shape, self.ranks, self._blocks = shape, ranks, blocks
        self.pages = [pages_of(shape, rank, ranks) for rank in range(ranks)]
        self.caches = [
            registered(shape, rank, ranks, pages) for rank, pages in enumerate(self.pages)
        ]
        part = sum(one.page_size_bytes for one in self.caches[0].tensors) * blocks
        row_bytes = -(-part * ranks // ALIGNED) * ALIGNED
        name = f"kvkeep-test-{secrets.token_hex(8)}"
        self.regions = [
            SharedOffloadRegion(name, rows, rank, row_bytes, part) for rank in range(ranks)
        ]
        self.rows = np.asarray(self.regions[0].create_kv_memoryview()).view(np.uint8)
        self.rows[:] = 0xEE  # what earlier chunks have left there
        self.movers = [
            CPUMover(caches, region, blocks=blocks, canonical=canonical)
            for caches, region in zip(self.caches, self.regions, strict=True)
        ]
        notes = [WorkerNote.of("cpu", caches, canonical=canonical) for caches in self.caches]
        self.layout = ChunkRows.of_notes(
            notes[:1] if canonical else notes, [0],
            row_bytes=row_bytes, rank_bytes=part, blocks=blocks,
        )  # fmt: skip
        self.record_bytes = self.layout.size(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        del self.rows
        for mover in self.movers:
            mover.shutdown()

    def compute(self, truth: torch.Tensor) -> None:
        """Fill all pages, as a model would."""
        for rank, pages in enumerate(self.pages):
            own = self.shape.heads_of(rank, self.ranks)
            for layer, page in enumerate(pages.values()):
                page[:] = truth[layer][:, own]

    def forget(self) -> None:
        """Fill all pages with something else."""
        for pages in self.pages:
            for page in pages.values():
                page[:] = -1.0

    def check(self, truth: torch.Tensor) -> None:
        """Compare all pages, bit by bit."""
        for rank, pages in enumerate(self.pages):
            own = self.shape.heads_of(rank, self.ranks)
            for layer, page in enumerate(pages.values()):
                assert torch.equal(page, truth[layer][:, own]), f"rank {rank}, layer {layer}"

    def _job(self, rows: Sequence[int]) -> tuple[GPULoadStoreSpec, CPULoadStoreSpec]:
        pages = list(range(self.shape.blocks))
        return GPULoadStoreSpec(pages, [len(pages)], [0]), CPULoadStoreSpec(list(rows))

    def to_rows(self, rows: Sequence[int]) -> None:
        """Every worker copies its pages into ``rows``."""
        pages, places = self._job(rows)
        for mover in self.movers:
            assert mover.submit_store(1, pages, places)
        for mover in self.movers:
            mover.wait({1})
            assert [one.success for one in mover.get_finished()] == [True]

    def from_rows(self, rows: Sequence[int]) -> None:
        """Every worker copies ``rows`` into its pages."""
        pages, places = self._job(rows)
        for mover in self.movers:
            assert mover.submit_load(1, places, pages)
            assert [one.success for one in mover.get_finished()] == [True]

    def save(self, store: BlockStore, names: Sequence[bytes], rows: Sequence[int]) -> None:
        """Store ``rows``, as `kvkeep.integrations.vllm.offload.jobs` does."""

        def fill(at: int, raw: memoryview) -> None:
            row = self.rows[rows[at]]
            gather((row[start : start + size] for start, size in self.layout.runs[0]), raw)

        assert store.write(names, [self.record_bytes] * len(rows), fill) == len(rows)

    def load(self, store: BlockStore, names: Sequence[bytes], rows: Sequence[int]) -> None:
        """Fill ``rows`` from the store."""

        def sink(at: int, raw: memoryview) -> None:
            row = self.rows[rows[at]]
            scatter(raw, (row[start : start + size] for start, size in self.layout.runs[0]))

        assert store.read(names, [self.record_bytes] * len(rows), sink) == len(rows)
