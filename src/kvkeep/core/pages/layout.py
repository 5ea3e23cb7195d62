"""`GroupLayout`: which layers keep what, besides the pages that hold every token."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np

from kvkeep.core.errors import InvalidValue, switch, told, whole

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["GroupLayout", "StateSpec", "WindowSpec"]

_LONGEST: Final = 1 << 62
"""A span in tokens beyond any sequence, which arrays of positions can hold."""


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
        switch("chunked", self.chunked)

    def first_token(self, position: int) -> int:
        """Return the first token that is attended to when computing goes on at ``position``."""
        if self.chunked:
            return position // self.span * self.span
        return max(0, position - self.span + 1)

    def first_needed(self, position: int, page_size: int) -> int:
        """Return the first page whose row is read when computing goes on at token ``position``."""
        return self.first_token(position) // page_size

    def first_token_each(self, start: int, stop: int, page_size: int) -> npt.NDArray[np.int64]:
        """Return `first_token` at the beginnings of the pages ``start`` … ``stop``."""
        positions = np.arange(start, stop + 1, dtype=np.int64) * page_size
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
        guess_tokens: a new part of a prompt at least this long gets checkpoints at its quarters,
            where memory is free.
        answer_tokens: tokens between two checkpoints of an answer.
        grid: the distance of positions at which a sequence may resume, in pages.

    Raises:
        InvalidValue: there is no group at all, a number is below one, or a group is of another
            type.
    """

    page_size: int
    windows: tuple[WindowSpec, ...] = ()
    state: StateSpec | None = None
    guess_tokens: int = 1024
    answer_tokens: int = 256
    grid: int = field(init=False)

    def __post_init__(self) -> None:
        whole("page_size", self.page_size, 1)
        whole("guess_tokens", self.guess_tokens, 1)
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

    @property
    def widths(self) -> tuple[int, ...]:
        """Pool pages of a row of each window."""
        return tuple(window.pages for window in self.windows)

    @property
    def state_pages(self) -> int:
        """Pool pages of a state; 0 without states."""
        return 0 if self.state is None else self.state.pages
