"""`SnapshotPages`: snapshots in the memory of pages, rows and states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvkeep.store import Snapshot

if TYPE_CHECKING:
    from torch import Tensor

    from kvkeep.core.cache import Sequence
    from kvkeep.core.groups.tensors import GroupedTensors, LayerPages
    from kvkeep.core.pages.tables import PageArray
    from kvkeep.core.tokens import TokenArray

__all__ = ["SnapshotPages", "SnapshotWrite"]


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
