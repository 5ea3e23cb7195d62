"""`GroupedTensors`: the memory of base pages, rows and states, on any torch device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvkeep.core.errors import InvalidValue, require, whole
from kvkeep.core.geometry import KVGeometry, LayerGroup, format_bytes
from kvkeep.core.groups.copies import RowCopy, StateCopy

require("torch", "torch")
import torch  # noqa: E402 - after `require`, which says what to install

from kvkeep.core.pages.tensors import PagedTensors, zero_pages  # noqa: E402 - as above

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import SupportsIndex

    from torch import Tensor

    from kvkeep.core.groups.plan import GroupPlan
    from kvkeep.core.pages.table import PageArray

__all__ = ["GroupedTensors", "LayerPages"]


@dataclass(frozen=True, slots=True, eq=False)
class LayerPages:
    """Layers whose KV lies in the same pool pages, and the memory of these.

    ``tensors`` numbers the layers from 0 in the order of ``layers``. Its page table is that of the
    sequence where ``window`` is None, else column ``page`` of the table of that window.
    """

    window: int | None
    page: int
    layers: tuple[int, ...]
    tensors: PagedTensors


class GroupedTensors:
    """KV and states of all layers of a hybrid model in one pool of pages, zero at first.

    Thread safety: none. On CUDA everything is queued on the current stream, in the order of calls.

    Args:
        plan: sizes and places.
        num_pages: pages of the pool, as of the `PagedCache`.
        device: a torch device, or its name.

    Attributes:
        parts: the layers with attention, by the pool pages in which their KV lies.
    """

    def __init__(
        self, plan: GroupPlan, num_pages: SupportsIndex, device: str | torch.device = "cpu"
    ) -> None:
        self.plan = plan
        self.num_pages = whole("num_pages", num_pages, 1)
        with torch.inference_mode(mode=False):  # else it could not be written outside of it
            self._memory = zero_pages(self.num_pages, plan.page_bytes, device)
        self.device = self._memory.device
        self.parts = tuple(self._parts())
        self._of_layer = {
            layer: (part, at) for part in self.parts for at, layer in enumerate(part.layers)
        }

    @property
    def nbytes(self) -> int:
        """Bytes of all pages."""
        return self.num_pages * self.plan.page_bytes

    def of(self, layer: int) -> tuple[LayerPages, int]:
        """Return where the KV of ``layer`` lies, and its number there.

        Raises:
            InvalidValue: the layer has no attention.
        """
        if layer not in self._of_layer:
            raise InvalidValue(f"layer is {layer}; attention have {sorted(self._of_layer)}")
        return self._of_layer[layer]

    def copy(self, copies: Iterable[RowCopy | StateCopy]) -> None:
        """Make copies, in order: of `SequenceGroups.copies` and `SequenceGroups.checkpoint`."""
        for copy in copies:
            src, dst = copy.src.tolist(), copy.dst.tolist()
            if isinstance(copy, StateCopy):
                self._memory[self._index(copy.dst)] = self._memory[self._index(copy.src)]
                continue
            for part in self.parts:
                if part.window == copy.window:
                    part.tensors.copy([(src[part.page], dst[part.page], copy.tokens)])

    def read_state(self, pages: PageArray) -> dict[tuple[int, str], Tensor]:
        """Return copies of the tensors of a state, by layer and name, without a batch dimension.

        ``pages`` are `SequenceGroups.state`. Cost: the bytes of a state, twice.
        """
        content = self._memory[self._index(pages)].flatten()
        state: dict[tuple[int, str], Tensor] = {}
        for key, offset, size, dtype, shape in self._tensors():
            part = content[offset : offset + size].clone()  # aligned for any dtype
            state[key] = part.view(dtype).view(shape)
        return state

    def write_state(self, pages: PageArray, state: Mapping[tuple[int, str], Tensor]) -> None:
        """Write the tensors of a state, by layer and name.

        Raises:
            InvalidValue: a tensor is missing, or has another shape or dtype; nothing is written.
        """
        content = torch.zeros(
            (len(pages), self.plan.page_bytes), dtype=torch.uint8, device=self.device
        )
        flat = content.view(-1)
        for key, offset, size, dtype, shape in self._tensors():
            given = state.get(key)
            if given is None or given.dtype != dtype or tuple(given.shape) != shape:
                said = "missing" if given is None else f"{tuple(given.shape)} of {given.dtype}"
                raise InvalidValue(
                    f"the state {key[1]!r} of layer {key[0]} is {said}; {shape} of {dtype} is "
                    "needed"
                )
            tensor = given.detach().to(self.device).contiguous()
            flat[offset : offset + size] = tensor.view(-1).view(torch.uint8)
        self._memory[self._index(pages)] = content

    def read(self, pages: PageArray) -> Tensor:
        """Return whole pool pages, of a row or a state: uint8 [pages, page_bytes], a copy."""
        return self._memory[self._index(pages)]

    def write(self, pages: PageArray, content: Tensor) -> None:
        """Write whole pool pages from `read`."""
        wanted = (len(pages), self.plan.page_bytes)
        if content.dtype != torch.uint8 or tuple(content.shape) != wanted:
            raise InvalidValue(
                f"content is {tuple(content.shape)} of {content.dtype}; uint8 {wanted} is needed"
            )
        self._memory[self._index(pages)] = content.to(self.device)

    def _parts(self) -> Iterable[LayerPages]:
        geometry, plan = self.plan.geometry, self.plan
        for group in geometry.groups:
            assert group.shape is not None or group.kind == "state"
            places: dict[tuple[int | None, int], list[int]] = {}
            for layer in group.layers if group.shape is not None else ():
                place = plan.place(layer)
                places.setdefault((place.window, place.page), []).append(layer)
            for (window, page), layers in places.items():
                yield LayerPages(window, page, tuple(layers), self._part(group, tuple(layers)))

    def _part(self, group: LayerGroup, layers: tuple[int, ...]) -> PagedTensors:
        """Return the memory of some layers of a group, which lie one after another in a page."""
        geometry, shape = self.plan.geometry, group.shape
        assert shape is not None
        own = KVGeometry(
            len(layers), shape.kv_heads, shape.head_dim, geometry.dtype,
            value_dim=None if shape.latent_dim is not None else shape.value_dim,
            latent_dim=shape.latent_dim, tp=geometry.tp,
        )  # fmt: skip
        offset = self.plan.place(layers[0]).offset
        size = own.bytes_per_page(self.plan.page_size)
        return PagedTensors(
            own, self.num_pages, self.plan.page_size,
            device=self.device, memory=self._memory[:, offset : offset + size],
        )  # fmt: skip

    def _tensors(
        self,
    ) -> Iterable[tuple[tuple[int, str], int, int, torch.dtype, tuple[int, ...]]]:
        """Yield key, offset, bytes, dtype and shape of each tensor of a state."""
        tp = self.plan.geometry.tp
        for group in self.plan.geometry.groups:
            for layer in group.layers if group.state else ():
                for tensor in group.state:
                    dtype = getattr(torch, tensor.dtype)
                    key, shape = (layer, tensor.name), tensor.rank_shape(tp)
                    offset = self.plan.state_offset(*key)
                    yield key, offset, tensor.bytes_per_layer(tp), dtype, shape

    def _index(self, pages: PageArray) -> Tensor:
        return torch.from_numpy(pages.astype(np.int64)).to(self.device)

    def __repr__(self) -> str:
        return (
            f"GroupedTensors({self.num_pages} pages of {format_bytes(self.plan.page_bytes)} on "
            f"{self.device})"
        )
