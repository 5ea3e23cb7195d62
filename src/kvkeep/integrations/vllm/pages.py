"""Copies between the engine's memory, page by page, and records.

A record is the pages of one block in all layers of a group, one after another. Layers whose pages
are adjacent in memory form one run, and are copied at once. The page of a layer with a state is its
state; vLLM pads it to the size of the other layers' pages, and the padding is not copied.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    MambaSpec,
    UniformTypeKVCacheSpecs,
    group_kernel_blocks,
)

from kvkeep.core.errors import UnsupportedModel
from kvkeep.integrations.records import gather, scatter

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

    from kvkeep.integrations.records import Bytes
    from kvkeep.integrations.vllm.groups import Groups

__all__ = ["GroupPages", "pages_of"]


@dataclass(frozen=True, slots=True)
class _Run:
    """A range of ``width`` bytes in every block; blocks are ``stride`` bytes apart."""

    storage: torch.UntypedStorage
    offset: int
    stride: int
    width: int

    def joined(self, other: _Run) -> _Run | None:
        """Return the run of both, if ``other`` directly follows in every block."""
        beside = self.storage.data_ptr() == other.storage.data_ptr() and self.stride == other.stride
        if not beside or self.offset + self.width != other.offset:
            return None
        if self.width + other.width > self.stride:
            return None
        return _Run(self.storage, self.offset, self.stride, self.width + other.width)

    def tensor(self, blocks: int, device: torch.device) -> torch.Tensor:
        """Return a view of uint8 [blocks, width]."""
        return torch.tensor([], dtype=torch.uint8, device=device).set_(
            self.storage, self.offset, (blocks, self.width), (self.stride, 1)
        )


class GroupPages:
    """The pages of one group's layers.

    Copies release the interpreter lock. Thread safety: any, on different pages.
    """

    def __init__(self, runs: Sequence[torch.Tensor]) -> None:
        self.tensors = list(runs)
        self.record_bytes = sum(run.shape[1] for run in runs)
        self.device = self.tensors[0].device
        self._arrays: list[Bytes] = []
        if self.device.type == "cpu":
            self._arrays = [run.numpy() for run in runs]

    def filler(self, pages: Sequence[int]) -> Callable[[int, memoryview], None]:
        """Return ``fill(i, raw)``, which copies page ``pages[i]`` into the record ``raw``."""
        arrays = self._arrays

        def fill(at: int, raw: memoryview) -> None:
            gather((array[pages[at]] for array in arrays), raw)

        return fill

    def sinker(self, pages: Sequence[int]) -> Callable[[int, memoryview], None]:
        """Return ``sink(i, raw)``, which copies the record ``raw`` into page ``pages[i]``."""
        arrays = self._arrays

        def sink(at: int, raw: memoryview) -> None:
            scatter(raw, (array[pages[at]] for array in arrays))

        return sink


def pages_of(
    groups: Groups, kv_cache_config: KVCacheConfig, kv_caches: Mapping[str, torch.Tensor]
) -> tuple[list[GroupPages], str]:
    """Return the pages of each group, and a description of their layout in memory.

    Raises:
        UnsupportedModel: a page is not one piece of memory.
    """
    blocks = kv_cache_config.num_blocks
    found: list[GroupPages] = []
    described: list[str] = [str(kv_cache_config.kv_cache_layout)]
    for group, spec in zip(groups.groups, kv_cache_config.kv_cache_groups, strict=True):
        runs: list[_Run] = []
        for name in group.layers:
            layer = spec.kv_cache_spec
            if isinstance(layer, UniformTypeKVCacheSpecs):
                layer = layer.kv_cache_specs[name]
            tensor = kv_caches[name]
            run = _run_of(name, tensor, blocks, _page_bytes(layer))
            described.append(
                f"{name}:{tuple(tensor.shape[1:])}:{tensor.stride()[1:]}:{tensor.dtype}"
            )
            if isinstance(layer, MambaSpec):  # what the bytes are
                described.append(f"{layer.shapes}:{layer.dtypes}:{layer.mamba_type.name}")
            joined = runs[-1].joined(run) if runs else None
            if joined is None:
                runs.append(run)
            else:
                runs[-1] = joined
        device = kv_caches[group.layers[0]].device
        found.append(GroupPages([run.tensor(blocks, device) for run in runs]))
    return found, " ".join(described)


def _page_bytes(layer: KVCacheSpec) -> int:
    """Return the bytes of a page, without the padding that makes pages of all layers equal."""
    if isinstance(layer, MambaSpec):
        return int(layer.state_content_size_bytes)
    assert isinstance(layer, AttentionSpec)
    return int(layer.unpadded_page_size_bytes)


def _run_of(name: str, cache: torch.Tensor, blocks: int, page_bytes: int) -> _Run:
    view = group_kernel_blocks(cache, blocks)
    size = view.element_size()
    inner = list(zip(view.shape[1:], view.stride()[1:], strict=True))
    extent = (1 + sum((count - 1) * step for count, step in inner)) * size
    held = view[0].numel() * size
    if extent != held or held != page_bytes:
        raise UnsupportedModel(
            f"a block of layer {name} is not one piece of memory ({held} bytes over {extent}, "
            f"{page_bytes} are a page); set VLLM_KV_CACHE_LAYOUT=LBHNC"
        )
    return _Run(view.untyped_storage(), view.storage_offset() * size, view.stride(0) * size, held)
