"""Copies between the engine's memory, page by page, and records.

A record is the pages of one block in all layers of a group, one after another. Layers whose pages
are adjacent in memory form one run, and are copied at once. The page of a layer with a state is its
state; vLLM pads it to the size of the other layers' pages, and the padding is not copied.

Pages on a GPU: copied within the GPU in vLLM's stream, then to the store.

    pages ─ in vLLM's stream ─▶ a copy on the GPU ─ in our own stream ─▶ the store's memory

The first copy is in vLLM's stream, so vLLM overwrites pages only after it: preemption and reuse
need no fence. Copies take memory of the GPU, so at most `_ASIDE_BYTES` exist at a time; blocks
beyond that are dropped. Loads copy from the store's page-locked memory straight into the
pages.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
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
    from kvkeep.integrations.vllm.messages import BlockSpan, Save

__all__ = ["DeviceCopies", "GroupPages", "pages_of"]


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


_ASIDE_BYTES = 512 << 20
_AT_ONCE = 64  # blocks of one copy


class DeviceCopies:
    """Moves pages of a GPU.

    Thread safety: vLLM's thread calls `mark` and `save`; loader threads call what `sinker` returns.
    """

    def __init__(
        self,
        pages: Sequence[GroupPages],
        write: Callable[[BlockSpan, Callable[[int, memoryview], None], Save], None],
        drop: Callable[[BlockSpan], None],
    ) -> None:
        self._pages = pages
        self._write = write
        self._drop = drop
        self._device = pages[0].device
        self._saver = ThreadPoolExecutor(1, "kvkeep save")
        self._out = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._lock = threading.Lock()
        self._aside = 0  # bytes

    def mark(self) -> torch.cuda.Event:
        """Return an event behind all work in vLLM's stream so far; loads wait for it."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def save(self, save: Save) -> None:
        """Copy pages within the GPU and return; later work in the stream may overwrite them."""
        for span in save.spans:
            for start in range(0, len(span.keys), _AT_ONCE):
                end = start + _AT_ONCE
                piece = type(span)(span.group, span.keys[start:end], span.pages[start:end])
                size = self._pages[span.group].record_bytes * len(piece.keys)
                with self._lock:
                    fits = self._aside + size <= _ASIDE_BYTES
                    self._aside += size if fits else 0
                if not fits:
                    self._drop(piece)
                    continue
                rows = torch.tensor(piece.pages, device=self._device)
                copies = [run.index_select(0, rows) for run in self._pages[span.group].tensors]
                self._saver.submit(self._carry, piece, copies, self.mark(), size, save)

    def _carry(
        self,
        span: BlockSpan,
        copies: list[torch.Tensor],
        made: torch.cuda.Event,
        size: int,
        save: Save,
    ) -> None:
        """In a thread: copy from the GPU into the store's memory."""

        def fill(at: int, raw: memoryview) -> None:
            record, start = torch.frombuffer(raw, dtype=torch.uint8), 0
            for copy in copies:
                end = start + copy.shape[1]
                record[start:end].copy_(copy[at], non_blocking=True)
                start = end
            self._out.synchronize()

        try:
            with torch.cuda.stream(self._out):
                self._out.wait_event(made)
                self._write(span, fill, save)
        finally:
            with self._lock:
                self._aside -= size

    def sinker(self, span: BlockSpan, begun: torch.cuda.Event) -> Callable[[int, memoryview], None]:
        """Return ``sink(i, raw)`` for one loader: it copies ``raw`` into page ``span.pages[i]``."""
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_event(begun)
        runs = self._pages[span.group].tensors

        def sink(at: int, raw: memoryview) -> None:
            record, start = torch.frombuffer(raw, dtype=torch.uint8), 0
            with torch.cuda.stream(stream):
                for run in runs:
                    end = start + run.shape[1]
                    run[span.pages[at]].copy_(record[start:end], non_blocking=True)
                    start = end
            stream.synchronize()

        return sink

    def drain(self) -> None:
        """Wait until all copies that were begun are in the store."""
        self._saver.submit(lambda: None).result()  # its one thread takes them in order

    def close(self) -> None:
        """Wait until all copies are in the store."""
        self._saver.shutdown(wait=True)
