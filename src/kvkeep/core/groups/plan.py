"""What a model keeps beside plain pages: `GroupLayout` in pages, `GroupPlan` in bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np

from kvkeep.core.errors import InvalidValue, told, whole
from kvkeep.core.geometry.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from typing import SupportsIndex

    import numpy.typing as npt

    from kvkeep.core.geometry import AttentionShape, KVGeometry, LayerGroup

__all__ = ["GroupLayout", "GroupPlan", "LayerPart", "StateSpec", "WindowSpec"]

_LONGEST: Final = 1 << 62
"""A span in tokens beyond any sequence, which arrays of positions can hold."""
_STATE_PAGES: Final = 256
"""Pages of a state in a model in which no layer keeps every token: padding stays below 1 %."""


@dataclass(frozen=True, slots=True)
class WindowSpec:
    """Layers that attend to the last tokens only.

    ``span`` is the window in tokens, the token itself included; with ``chunked`` it is the length
    of the chunks, and a token attends to those before it in its chunk. The KV of one page of tokens
    in these layers is a *row* of ``pages`` pool pages, which need not be neighbours.
    """

    span: int
    pages: int = 1
    chunked: bool = False

    def __post_init__(self) -> None:
        whole("the span of a window, in tokens,", self.span, 1)
        whole("the pages of a row", self.pages, 1)
        if not isinstance(self.chunked, bool):
            raise InvalidValue(f"chunked is {told(self.chunked)}; True or False is needed")

    def first_token(self, position: int) -> int:
        """Return the first token that is attended to when computing goes on at ``position``."""
        if self.chunked:
            return position // self.span * self.span
        return max(0, position - self.span + 1)

    def first_needed(self, position: int, page_size: int) -> int:
        """Return the first page whose row is read when computing goes on at token ``position``."""
        return self.first_token(position) // page_size

    def first_tokens(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return `first_token` of each position."""
        span = min(self.span, _LONGEST)
        if self.chunked:
            return positions // span * span
        return np.maximum(0, positions - span + 1)


@dataclass(frozen=True, slots=True)
class StateSpec:
    """Layers that keep one state a sequence, whatever its length.

    All states of one position together take ``pages`` pool pages. Computing may resume at multiples
    of ``grid`` tokens: elsewhere the kernels of some models round differently.
    """

    pages: int
    grid: int = 1

    def __post_init__(self) -> None:
        whole("the pages of a state", self.pages, 1)
        whole("the grid of a state, in tokens,", self.grid, 1)


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """What a model keeps besides the base pages, in units of pool pages.

    Attributes:
        page_size: tokens of a page.
        windows: groups of layers with a window or chunks.
        state: stands for all layers with a state; None if there are none.
        tail_tokens: how far before the end of a prompt the checkpoint lies at which a next prompt
            resumes that does not repeat the end. For models with states.
        answer_tokens: tokens between two checkpoints of an answer.
        grid: the distance of positions at which a sequence may resume, in pages.

    Raises:
        InvalidValue: there is no group at all, a number is below one, or a group is of another
            type.
    """

    page_size: int
    windows: tuple[WindowSpec, ...] = ()
    state: StateSpec | None = None
    tail_tokens: int = 512
    answer_tokens: int = 256
    grid: int = field(init=False)

    def __post_init__(self) -> None:
        whole("page_size", self.page_size, 1)
        whole("tail_tokens", self.tail_tokens, 1)
        whole("answer_tokens", self.answer_tokens, 1)
        windows: object = self.windows
        if not isinstance(windows, list | tuple) or not all(
            isinstance(window, WindowSpec) for window in windows
        ):
            raise InvalidValue(
                f"windows is {told(windows)}; a tuple of WindowSpec(span=…, pages=…) is needed"
            )
        object.__setattr__(self, "windows", tuple(windows))
        state: object = self.state
        if not isinstance(state, StateSpec | None):
            raise InvalidValue(
                f"state is {told(state)}; StateSpec(pages=…, grid=…) or None is needed"
            )
        if not self.windows and self.state is None:
            raise InvalidValue("no groups are given; leave groups out for a plain model")
        tokens = 1 if self.state is None else self.state.grid
        object.__setattr__(self, "grid", math.lcm(tokens, self.page_size) // self.page_size)

    def floor(self, pages: int) -> int:
        """Return the largest resumable position up to ``pages``, in pages, on the grid alone."""
        return pages // self.grid * self.grid

    def needed(self, page: int) -> list[int]:
        """Return, for each window, the first page whose row is needed to resume at ``page``."""
        return [spec.first_needed(page * self.page_size, self.page_size) for spec in self.windows]

    @property
    def widths(self) -> tuple[int, ...]:
        """Pool pages of a row of each window."""
        return tuple(window.pages for window in self.windows)

    @property
    def state_pages(self) -> int:
        """Pool pages of a state; 0 without states."""
        return 0 if self.state is None else self.state.pages


@dataclass(frozen=True, slots=True)
class LayerPart:
    """Layers whose KV lies in the same pool pages, one after another from byte ``offset`` on.

    ``window`` is the number of their window group and ``page`` the place of the pool page in a row
    of it; None and 0 for layers whose KV is in the base pages. All of them have one ``shape``.
    """

    window: int | None
    page: int
    offset: int
    layers: tuple[int, ...]
    shape: AttentionShape


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
        parts: where the KV of the layers with attention lies.
    """

    geometry: KVGeometry
    page_size: int
    page_bytes: int = field(init=False)
    layout: GroupLayout | None = field(init=False)
    parts: tuple[LayerPart, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        size, geometry = whole("page_size", self.page_size, 1), self.geometry
        parts: list[LayerPart] = []
        rows: list[WindowSpec] = []
        base, state = 0, geometry.bytes_per_state
        least = -(-state // _STATE_PAGES)
        windows: list[tuple[LayerGroup, AttentionShape, int]] = []
        for group in geometry.groups:
            if group.shape is None:
                continue
            piece = size * group.shape.bytes_per_token(geometry.dtype, geometry.tp)  # of a layer
            if group.span is not None:
                windows.append((group, group.shape, piece))
            else:
                parts.append(LayerPart(None, 0, base, group.layers, group.shape))
                base += piece * len(group.layers)
        page_bytes = max(base, max((piece for *_, piece in windows), default=least))
        for group, shape, piece in windows:
            fit = page_bytes // piece
            cuts = [group.layers[at : at + fit] for at in range(0, len(group.layers), fit)]
            parts += [
                LayerPart(len(rows), page, 0, layers, shape) for page, layers in enumerate(cuts)
            ]
            rows.append(WindowSpec(group.span or 0, len(cuts), group.kind == "chunk"))
        grid = math.lcm(*(group.grid for group in geometry.groups))
        states = StateSpec(-(-state // page_bytes), grid) if state else None
        layout = GroupLayout(size, tuple(rows), states) if rows or states else None
        object.__setattr__(self, "page_bytes", page_bytes)
        object.__setattr__(self, "layout", layout)
        object.__setattr__(self, "parts", tuple(parts))

    def pages_for(self, tokens: SupportsIndex) -> int:
        """Return the pool pages of a running sequence of ``tokens``, without its checkpoints."""
        length = whole("tokens", tokens, 0)
        pages = -(-length // self.page_size)
        if self.layout is None:
            return pages
        windows = [group for group in self.geometry.groups if group.span is not None]
        for group, row in zip(windows, self.layout.windows, strict=True):
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
