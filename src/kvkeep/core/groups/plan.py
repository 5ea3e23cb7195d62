"""`GroupPlan`: how the layers of a model share the pages of one pool."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvkeep.core.errors import InvalidValue, whole
from kvkeep.core.geometry.units import format_bytes, parse_bytes
from kvkeep.core.pages.layout import GroupLayout, StateSpec, WindowSpec

if TYPE_CHECKING:
    from typing import SupportsIndex

    from kvkeep.core.geometry import KVGeometry
    from kvkeep.core.geometry.groups import LayerGroup

__all__ = ["GroupPlan", "LayerPlace"]

_STATE_PAGES = 256
"""Pages of a state in a model in which no layer keeps every token: padding stays below 1 %."""


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """Where the KV of one layer lies: ``offset`` bytes into a pool page.

    ``window`` is the number of the layer's window group and ``page`` the place of the pool page in
    a row of it; None and 0 for a layer whose KV is in the base pages.
    """

    window: int | None
    page: int
    offset: int


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """The sizes of pages, rows and states of a model, in one pool of pages of equal size.

    A pool page holds ``page_size`` tokens of all layers that keep every token (full and latent). A
    row of a window holds the same tokens of its layers: as many layers to a pool page as fit whole.
    A state lies in pool pages one after another, cut anywhere. So less than a page is lost of each
    row and state. A model without a layer that keeps every token has small pages, which hold
    nothing but stand for its tokens.

    Attributes:
        geometry: of the model, on one tensor-parallel rank.
        page_size: tokens of a page.
        page_bytes: bytes of a pool page.
        layout: for `PagedCache`; None if every layer keeps every token.
    """

    geometry: KVGeometry
    page_size: int
    page_bytes: int = field(init=False)
    layout: GroupLayout | None = field(init=False)

    def __post_init__(self) -> None:
        size = whole("page_size", self.page_size, 1)
        windows = self._windows()
        base = sum(self._piece(group) * len(group.layers) for group in self._base())
        state = self.geometry.bytes_per_state
        least = max((self._piece(group) for group in windows), default=-(-state // _STATE_PAGES))
        page_bytes = max(base, least)
        object.__setattr__(self, "page_bytes", page_bytes)
        rows = tuple(
            WindowSpec(
                span=group.span or 0,
                pages=-(-len(group.layers) // (page_bytes // self._piece(group))),
                chunked=group.kind == "chunk",
            )
            for group in windows
        )
        grid = math.lcm(*(group.grid for group in self.geometry.groups))
        states = StateSpec(-(-state // page_bytes), grid) if state else None
        layout = GroupLayout(size, rows, states) if rows or states else None
        object.__setattr__(self, "layout", layout)

    def _base(self) -> list[LayerGroup]:
        return [one for one in self.geometry.groups if one.shape is not None and one.span is None]

    def _windows(self) -> list[LayerGroup]:
        return [one for one in self.geometry.groups if one.span is not None]

    def _piece(self, group: LayerGroup) -> int:
        """Return the bytes of a page of tokens in one layer of ``group``."""
        assert group.shape is not None
        geometry = self.geometry
        return self.page_size * group.shape.bytes_per_token(geometry.dtype, geometry.tp)

    def place(self, layer: int) -> LayerPlace:
        """Return where the KV of ``layer`` lies.

        Raises:
            InvalidValue: the layer has no attention.
        """
        offset = 0
        for group in self._base():
            if layer in group.layers:
                return LayerPlace(None, 0, offset + group.layers.index(layer) * self._piece(group))
            offset += len(group.layers) * self._piece(group)
        for window, group in enumerate(self._windows()):
            if layer in group.layers:
                piece = self._piece(group)
                page, at = divmod(group.layers.index(layer), self.page_bytes // piece)
                return LayerPlace(window, page, at * piece)
        raise InvalidValue(f"layer is {layer}, which has no attention in {self.geometry}")

    def state_offset(self, layer: int, name: str) -> int:
        """Return where the tensor ``name`` of the state of ``layer`` begins, in bytes of a state.

        Raises:
            InvalidValue: the layer has no such tensor.
        """
        offset, tp = 0, self.geometry.tp
        for group in self.geometry.groups:
            for one in group.layers if group.state else ():
                for tensor in group.state:
                    if (one, tensor.name) == (layer, name):
                        return offset
                    offset += tensor.bytes_per_layer(tp)
        raise InvalidValue(f"layer {layer} has no state {name!r} in {self.geometry}")

    def pages_for(self, tokens: SupportsIndex) -> int:
        """Return the pool pages of a running sequence of ``tokens``, without its checkpoints."""
        length = whole("tokens", tokens, 0)
        pages = -(-length // self.page_size)
        if self.layout is None:
            return pages
        for group, row in zip(self._windows(), self.layout.windows, strict=True):
            pages += group.kept(length, self.page_size) // self.page_size * row.pages
        return pages + self.layout.state_pages

    def pages_in(self, budget: str | SupportsIndex) -> int:
        """Return how many pool pages fit into ``budget``: bytes, or text such as ``"24GiB"``.

        Raises:
            InvalidValue: the budget is no amount of memory, or smaller than one page.
        """
        pages = parse_bytes(budget) // self.page_bytes
        if not pages:
            raise InvalidValue(
                f"a budget of {budget!r} holds no page; one needs {format_bytes(self.page_bytes)}"
            )
        return pages
