"""`GroupedTensors`: the memory of base pages, rows and states, on any torch device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvkeep.core.errors import InvalidValue, require, whole
from kvkeep.core.geometry import KVGeometry, format_bytes
from kvkeep.core.groups.sequence import RowCopy, StateCopy

require("torch", "torch")
import torch  # noqa: E402 - after `require`, which says what to install

from kvkeep.core.pages.tensors import PagedTensors, zero_pages  # noqa: E402 - as above

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import SupportsIndex

    from torch import Tensor

    from kvkeep.core.groups.plan import GroupPlan, LayerPart
    from kvkeep.core.pages import PageCopy
    from kvkeep.core.pages.pool import PageArray
    from kvkeep.core.pages.tensors import Layout

__all__ = ["GroupedTensors", "LayerPages", "StatePart"]


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


@dataclass(frozen=True, slots=True)
class StatePart:
    """One tensor of a state, without a batch dimension: ``nbytes`` from its byte ``offset`` on."""

    layer: int
    name: str
    offset: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class GroupedTensors:
    """KV and states of all layers of a hybrid model in one pool of pages, zero at first.

    Thread safety: none. On CUDA everything is queued on the current stream, in the order of calls.

    Args:
        plan: sizes and places.
        num_pages: pages of the pool, as of the `PagedCache`.
        device: a torch device, or its name.
        layout: the order inside a page in each layer, as of `PagedTensors`.
        check_ids: as of `PagedTensors`.

    Attributes:
        parts: the layers with attention, by the pool pages in which their KV lies.
        state_parts: the tensors of a state, one after another.
    """

    def __init__(
        self,
        plan: GroupPlan,
        num_pages: SupportsIndex,
        device: str | torch.device = "cpu",
        *,
        layout: Layout = "NHD",
        check_ids: bool = True,
    ) -> None:
        self.plan = plan
        self.num_pages = whole("num_pages", num_pages, 1)
        with torch.inference_mode(mode=False):  # else it could not be written outside of it
            self._memory = zero_pages(self.num_pages, plan.page_bytes, device)
            wide = torch.int64 if plan.page_bytes % 8 == 0 else torch.uint8
            self._words = self._memory.view(wide)
        self.layout = layout
        self._check_ids = check_ids
        self.device = self._memory.device
        self.parts = tuple(
            LayerPages(part.window, part.page, part.layers, self._tensors(part))
            for part in plan.parts
        )
        self.state_parts = tuple(self._state_parts())

    def copy(self, copies: Iterable[PageCopy | RowCopy | StateCopy]) -> None:
        """Make copies, in order.

        They are those of `Sequence.copies`, `SequenceGroups.copies`, `SequenceGroups.checkpoint`
        and `SequenceGroups.mark`.
        """
        for copy in copies:
            if isinstance(copy, StateCopy):
                self.write(copy.dst, self.read(copy.src))
                continue
            window = copy.window if isinstance(copy, RowCopy) else None
            src, dst = np.atleast_1d(copy.src).tolist(), np.atleast_1d(copy.dst).tolist()
            for part in self.parts:
                if part.window == window:
                    part.tensors.copy([(src[part.page], dst[part.page], copy.tokens)])

    def read_state(self, pages: PageArray) -> dict[tuple[int, str], Tensor]:
        """Return copies of the tensors of a state, by layer and name, without a batch dimension.

        ``pages`` are `SequenceGroups.state`. Cost: the bytes of a state, twice.
        """
        content = self.read(pages).flatten()
        state: dict[tuple[int, str], Tensor] = {}
        for one in self.state_parts:
            part = content[one.offset : one.offset + one.nbytes].clone()  # aligned for any dtype
            state[one.layer, one.name] = part.view(one.dtype).view(one.shape)
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
        for one in self.state_parts:
            given = state.get((one.layer, one.name))
            if given is None or given.dtype != one.dtype or tuple(given.shape) != one.shape:
                said = "missing" if given is None else f"{tuple(given.shape)} of {given.dtype}"
                raise InvalidValue(
                    f"the state {one.name!r} of layer {one.layer} is {said}; {one.shape} of "
                    f"{one.dtype} is needed"
                )
            tensor = given.detach().to(self.device).contiguous()
            flat[one.offset : one.offset + one.nbytes] = tensor.view(-1).view(torch.uint8)
        self.write(pages, content)

    def read(self, pages: PageArray, *, out: Tensor | None = None) -> Tensor:
        """Return whole pool pages, of a row or a state: uint8 [pages, page_bytes], a copy.

        It is in new memory, or in ``out``, which has this shape and is on the device.
        """
        # Not with brackets, which take several times as long on a CPU.
        if out is None:
            return self._words.index_select(0, self._index(pages)).view(torch.uint8)
        torch.index_select(self._words, 0, self._index(pages), out=out.view(self._words.dtype))
        return out

    def write(self, pages: PageArray, content: Tensor) -> None:
        """Write whole pool pages from `read`."""
        wanted = (len(pages), self.plan.page_bytes)
        if content.dtype != torch.uint8 or tuple(content.shape) != wanted:
            raise InvalidValue(
                f"content is {tuple(content.shape)} of {content.dtype}; uint8 {wanted} is needed"
            )
        words = content.to(self.device).contiguous().view(self._words.dtype)
        self._words.index_copy_(0, self._index(pages), words)

    def _tensors(self, part: LayerPart) -> PagedTensors:
        """Return the memory of the layers of a part."""
        geometry, shape = self.plan.geometry, part.shape
        own = KVGeometry(
            len(part.layers), shape.kv_heads, shape.head_dim, geometry.dtype,
            value_dim=None if shape.latent_dim is not None else shape.value_dim,
            latent_dim=shape.latent_dim, tp=geometry.tp,
        )  # fmt: skip
        end = part.offset + own.bytes_per_page(self.plan.page_size)
        return PagedTensors(
            own, self.num_pages, self.plan.page_size,
            device=self.device, memory=self._memory[:, part.offset : end],
            layout=self.layout, check_ids=self._check_ids,
        )  # fmt: skip

    def _state_parts(self) -> Iterable[StatePart]:
        offset, tp = 0, self.plan.geometry.tp
        for group in self.plan.geometry.groups:
            for layer in group.layers if group.state else ():
                for tensor in group.state:
                    nbytes = tensor.bytes_per_layer(tp)
                    dtype, shape = getattr(torch, tensor.dtype), tensor.rank_shape(tp)
                    yield StatePart(layer, tensor.name, offset, nbytes, dtype, shape)
                    offset += nbytes

    def _index(self, pages: PageArray) -> Tensor:
        return torch.from_numpy(pages.astype(np.int64)).to(self.device)

    def __repr__(self) -> str:
        return (
            f"GroupedTensors({self.num_pages} pages of {format_bytes(self.plan.page_bytes)} on "
            f"{self.device})"
        )
