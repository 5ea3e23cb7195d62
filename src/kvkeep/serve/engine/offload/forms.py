"""`Forms` and `Buffers`: KV in page order and in token order, and host memory for the copies."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvkeep.core.errors import InvalidValue
from kvkeep.store import Snapshot

if TYPE_CHECKING:
    from torch import Tensor

    from kvkeep.core.cache import Sequence
    from kvkeep.core.groups.tensors import GroupedTensors, LayerPages
    from kvkeep.core.pages.pool import PageArray
    from kvkeep.core.pages.tensors import Layout, PagedTensors
    from kvkeep.core.tokens import TokenArray

__all__ = ["Buffers", "Forms", "SnapshotPages", "SnapshotWrite"]


class Forms:
    """Converts between blocks of pages, as `PagedTensors.read` gives them, and a store's KV.

    A store's KV is [layers, 2, tokens, heads, dim] ("NHD"), [layers, 2, heads, tokens, dim]
    ("HND"), or [layers, tokens, width] of a latent. Bits are moved, never changed. Thread safety:
    all. Raises `InvalidValue` for a geometry whose K and V have different widths.
    """

    def __init__(self, tensors: PagedTensors, layout: Layout) -> None:
        geometry = tensors.geometry
        self._latent = geometry.latent_dim is not None
        if not self._latent and geometry.value_dim != geometry.head_dim:
            raise InvalidValue(
                f"keys have {geometry.head_dim} elements and values {geometry.value_dim}; a store "
                "takes only KV whose keys and values are alike"
            )
        self._at = 1 if self._latent else 2  # dimension of pages, or of tokens
        self._layers = geometry.layers
        self._heads = geometry.rank_heads
        self._width = geometry.head_dim
        self._page_size = tensors.page_size
        self._dtype = tensors.dtype
        self._pages_are_hnd = tensors.layout == "HND"
        self._tokens_are_hnd = layout == "HND" and not self._latent

    def by_token(self, block: Tensor, tokens: int) -> Tensor:
        """Return the first ``tokens`` tokens of ``block`` in new memory.

        ``block`` is uint8 [pages, page_bytes]. Cost: one copy with strides.
        """
        pages = self._by_layer(block)
        whole = torch.empty(pages.shape, dtype=self._dtype)
        whole.copy_(pages)
        kv = whole.flatten(self._at, self._at + 1).narrow(self._at, 0, tokens)
        return (kv.transpose(2, 3) if self._tokens_are_hnd else kv).contiguous()

    def part(self, kv: Tensor, start: int, stop: int) -> Tensor:
        """Return tokens ``start`` … ``stop - 1`` of a store's ``kv``, as a view."""
        at = 3 if self._tokens_are_hnd and kv.dim() == 5 else self._at
        return kv.narrow(at, start, stop - start)

    def by_page(self, kv: Tensor, tokens: int, block: Tensor) -> None:
        """Write the first ``tokens`` tokens of a store's ``kv`` to ``block``, from its first page.

        The rest of the last page is set to zero. Raises `InvalidValue` for another shape or dtype
        than this geometry's.
        """
        if self._tokens_are_hnd and kv.dim() == 5:
            kv = kv.transpose(2, 3)
        pages = self._by_layer(block)
        at = self._at
        given, wanted = list(kv.shape), list(pages.shape)
        alike = given[:at] + given[at + 1 :] == wanted[:at] + wanted[at + 2 :]
        if not alike or given[at] < tokens or kv.dtype != self._dtype:
            raise InvalidValue(
                f"KV is {given}, {kv.dtype}; {tokens} tokens for pages of {wanted}, {self._dtype} "
                "are needed"
            )
        full, rest = divmod(tokens, self._page_size)
        if full:
            many = kv.narrow(at, 0, tokens - rest)
            split = (*given[:at], full, self._page_size, *given[at + 1 :])
            pages.narrow(at, 0, full).copy_(many.view(split))
        if rest:
            last = pages.select(at, full)
            last.narrow(at, 0, rest).copy_(kv.narrow(at, tokens - rest, rest))
            last.narrow(at, rest, self._page_size - rest).zero_()

    def _by_layer(self, block: Tensor) -> Tensor:
        """View as [layers, 2, pages, page_size, heads, dim], or [layers, pages, …] of a latent."""
        shape = [len(block), self._layers]
        elements = block.view(self._dtype)
        if self._latent:
            return elements.view(*shape, self._page_size, self._width).permute(1, 0, 2, 3)
        if self._pages_are_hnd:
            pages = elements.view(*shape, 2, self._heads, self._page_size, self._width)
            return pages.permute(1, 2, 0, 4, 3, 5)
        pages = elements.view(*shape, 2, self._page_size, self._heads, self._width)
        return pages.permute(1, 2, 0, 3, 4, 5)


class Buffers:
    """Up to ``count`` reusable blocks of host memory, each uint8 [pages, page_bytes].

    Allocated at first use and kept, because allocation is slow; ``pinned`` for copies from and to a
    GPU. Thread safety: all methods.
    """

    def __init__(self, count: int, pages: int, page_bytes: int, *, pinned: bool) -> None:
        self._shape = (pages, page_bytes)
        self._pinned = pinned
        self._left = count  # blocks not allocated yet
        self._free: list[Tensor] = []
        self._changed = threading.Condition()

    def take(self, timeout: float = 0.0) -> Tensor | None:
        """Return a free block, waiting ``timeout`` seconds for one; None if none becomes free."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._free or self._left, timeout):
                return None
            if self._free:
                return self._free.pop()
            self._left -= 1
        return torch.empty(self._shape, dtype=torch.uint8, pin_memory=self._pinned)

    def give(self, block: Tensor) -> None:
        """Return ``block`` to the free blocks."""
        with self._changed:
            self._free.append(block)
            self._changed.notify()


@dataclass(frozen=True, slots=True, eq=False)
class SnapshotWrite:
    """A snapshot of ``tokens`` to be written, and its bytes.

    ``prefix`` are the keys of all blocks up to it, ``keys`` those that are stored with it.
    """

    tokens: TokenArray
    snapshot: Snapshot
    tenant: str
    prefix: list[bytes]
    keys: list[bytes]
    size: int


class SnapshotPages:
    """Reads snapshots from the memory of groups, and writes them there.

    Tensors of a snapshot are [tokens, heads, dim], [heads, tokens, dim] with ``hnd``, or
    [tokens, width] of a latent.
    """

    def __init__(self, groups: GroupedTensors, *, hnd: bool) -> None:
        self._groups = groups
        self._hnd = hnd
        self._size = groups.plan.page_size

    def size_of(self, position: int, start: int) -> int:
        """Return about how many bytes the snapshot at ``position`` takes, from ``start`` on."""
        geometry = self._groups.plan.geometry
        kept = geometry.bytes_for(position, page_size=self._size)
        return kept - geometry.bytes_for(start, page_size=self._size) + geometry.bytes_per_state

    def read(self, sequence: Sequence, start: int, position: int) -> Snapshot:
        """Copy what computing needs to go on at ``position``, base pages from ``start`` on."""
        groups = sequence.groups
        assert groups is not None
        layers: dict[int, tuple[Tensor, ...]] = {}
        for part in self._groups.parts:
            pages = self._pages_of(sequence, part)
            first = start if part.window is None else min(groups.begins[part.window], position)
            for at, layer in enumerate(part.layers):
                layers[layer] = tuple(
                    self._read(memory, pages, first, position) for memory in _memories(part, at)
                )
        state: dict[tuple[int, str], Tensor] = {}
        if groups.state is not None:
            found = self._groups.read_state(groups.state)
            state = {key: tensor.cpu() for key, tensor in found.items()}
        return Snapshot(position, start, layers, state)

    def write(self, sequence: Sequence, snapshot: Snapshot, first: int) -> None:
        """Write a snapshot to the pages and rows of ``sequence``, base pages from ``first`` on."""
        groups, position = sequence.groups, snapshot.tokens
        assert groups is not None
        for part in self._groups.parts:
            pages = self._pages_of(sequence, part)
            begin = first if part.window is None else groups.begins[part.window]
            for at, layer in enumerate(part.layers):
                memories = _memories(part, at)
                for memory, tensor in zip(memories, snapshot.layers[layer], strict=True):
                    self._write(memory, pages, begin, position, tensor)
        if groups.state is not None:
            self._groups.write_state(groups.state, snapshot.state)

    @staticmethod
    def _pages_of(sequence: Sequence, part: LayerPages) -> PageArray:
        if part.window is None:
            return sequence.pages
        assert sequence.groups is not None
        return sequence.groups.tables[part.window][:, part.page]

    def _read(self, memory: Tensor, pages: PageArray, start: int, stop: int) -> Tensor:
        """Return tokens ``start`` … ``stop - 1`` of one layer, in new CPU memory."""
        size = self._size
        index = pages[start // size : -(-stop // size)]
        begin = start // size * size
        whole = memory[torch.from_numpy(index.astype("int64")).to(memory.device)]
        tokens = whole.flatten(0, 1)[start - begin : stop - begin]
        if self._hnd and tokens.dim() == 3:
            tokens = tokens.transpose(0, 1)
        return tokens.contiguous().cpu()

    def _write(
        self, memory: Tensor, pages: PageArray, start: int, stop: int, tensor: Tensor
    ) -> None:
        """Write the last tokens of ``tensor``, those from ``start`` to ``stop``."""
        size = self._size
        if self._hnd and tensor.dim() == 3:
            tensor = tensor.transpose(0, 1)
        start = max(start, stop - len(tensor))
        tensor = tensor[len(tensor) - (stop - start) :].to(memory.device)
        at = start
        while at < stop:  # the first and last page in part, those between as a whole
            page, offset = divmod(at, size)
            if offset or stop - at < size:
                end = min(stop, (page + 1) * size)
                memory[int(pages[page]), offset : offset + end - at] = tensor[
                    at - start : end - start
                ]
            else:
                end = stop // size * size
                index = torch.from_numpy(pages[page : end // size].astype("int64"))
                many = tensor[at - start : end - start]
                memory[index.to(memory.device)] = many.reshape(-1, size, *many.shape[1:])
            at = end


def _memories(part: LayerPages, at: int) -> tuple[Tensor, ...]:
    """Return K and V, or the latent, of one layer: [pages, page_size, heads, dim]."""
    tensors = part.tensors
    memories: tuple[Tensor, ...] = (tensors.k(at), tensors.v(at))
    if tensors.layout == "HND":
        memories = tuple(memory.transpose(1, 2) for memory in memories)
    latent = tensors.geometry.latent_dim is not None
    return (memories[0].squeeze(2),) if latent else memories
