"""`Paging`: how the tokens of a trace become pages of a cache."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from kvkeep.bench.replay.passes import by_pages
from kvkeep.core.errors import InvalidValue, whole

if TYPE_CHECKING:
    from kvkeep.bench.replay.workload import Ids
    from kvkeep.core.groups import GroupLayout

__all__ = ["PADDING", "Paging"]

PADDING = 2**31 - 1
"""A token that is in no prompt and never stored."""
_UNIT = 2  # tokens of the cache per unit, by units: one page


@dataclass(frozen=True, slots=True)
class Paging:
    """The layout of a workload's tokens in pages.

    By units (``page_tokens`` None): each unit is a page, the last one of a prompt as well, full or
    not. Published hit rates of traces of block ids are counted this way. By tokens: a prompt has
    all its tokens, pages of ``page_tokens`` are stored when they are full, the last token of a
    prompt is always computed, and an answer takes its pages while it is generated, as in an engine.

    ``groups`` are replayed by tokens, in pages of their size. Where units consist of pages, one
    token of the cache stands for a page: nothing is reused in part, so the result is the same.
    """

    unit_tokens: int
    page_tokens: int | None = None
    groups: GroupLayout | None = None
    scale: int = field(init=False, default=1)
    """Tokens of the trace for which one token of the cache stands, by tokens."""

    def __post_init__(self) -> None:
        if self.groups is not None:
            object.__setattr__(self, "page_tokens", self.groups.page_size)
            if self.unit_tokens % self.groups.page_size == 0 and by_pages(self.groups) is not None:
                object.__setattr__(self, "scale", self.groups.page_size)
        if self.page_tokens is not None:
            whole("page_tokens", self.page_tokens, 1, 65_536)

    @property
    def size(self) -> int:
        """Tokens of the cache per page."""
        return _UNIT if self.page_tokens is None else self.page_tokens // self.scale

    @property
    def tokens(self) -> int:
        """Tokens of the trace per page."""
        return self.unit_tokens if self.page_tokens is None else self.page_tokens

    @property
    def layout(self) -> int | GroupLayout:
        """What `PagedCache` is made with."""
        if self.groups is None:
            return self.size
        return (by_pages(self.groups) or self.groups) if self.scale > 1 else self.groups

    @property
    def unit_size(self) -> int:
        """Tokens of the cache per unit."""
        return _UNIT if self.page_tokens is None else self.unit_tokens // self.scale

    def pages(self, capacity_tokens: int) -> int:
        """Return the pages in a capacity. Raises `InvalidValue` if there is none."""
        whole("capacity", capacity_tokens, 1)
        pages = capacity_tokens // self.tokens
        if not pages:
            raise InvalidValue(
                f"a capacity of {capacity_tokens} tokens is less than a page of {self.tokens}"
            )
        return pages

    def prompt(self, ids: Ids, tokens: int) -> Ids:
        """Return the tokens to give to `PagedCache.open`."""
        if self.page_tokens is None:
            # `open` never returns the last token as cached; this one fills no page, so no policy
            # sees it.
            return np.append(np.repeat(ids, _UNIT), np.int32(PADDING))
        if self.unit_size == 1:
            return ids
        return np.repeat(ids, self.unit_size)[: self.length(tokens)]

    def length(self, tokens: int) -> int:
        """Return the tokens of the cache in a prompt of ``tokens``, without padding."""
        if self.page_tokens is None:
            return -(-tokens // self.unit_tokens) * _UNIT
        return -(-tokens // self.scale)

    def whole_units(self, tokens: int) -> int:
        """Return the tokens of the cache in the whole units of a prompt of ``tokens``."""
        return tokens // self.unit_tokens * self.unit_size

    def found(self, cached: int, tokens: int) -> tuple[int, int]:
        """Return the tokens and the units of a prompt of which the cache has ``cached`` tokens."""
        units = cached // self.unit_size
        if self.page_tokens is None:
            return min(units * self.unit_tokens, tokens), units
        return cached * self.scale, units

    def answer(self, ids: Ids) -> Ids:
        """Return the tokens to append after the whole units of the prompt."""
        return ids if self.unit_size == 1 else np.repeat(ids, self.unit_size)
