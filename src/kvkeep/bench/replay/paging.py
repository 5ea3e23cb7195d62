"""`Paging`: how the tokens of a trace become pages of a cache."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from kvkeep.core.errors import InvalidValue, whole
from kvkeep.core.groups import GroupLayout, StateSpec, WindowSpec

if TYPE_CHECKING:
    from kvkeep.bench.replay.workload import Ids
    from kvkeep.core.cache import PagedCache, Sequence
    from kvkeep.core.groups import SequenceGroups

__all__ = ["PADDING", "PASS_TOKENS", "Paging", "Passes", "by_pages"]

PASS_TOKENS = 2048
"""Tokens that a pass computes at most."""


def by_pages(layout: GroupLayout) -> GroupLayout | None:
    """Return the layout of a cache in which one token stands for a page; both agree about pages.

    None if chunks neither divide a page nor consist of pages.
    """
    size = layout.page_size

    def span(window: WindowSpec) -> int:
        if window.chunked:
            return max(1, window.span // size)
        return -(-(window.span - 1) // size) + 1

    if any(one.chunked and one.span % size and size % one.span for one in layout.windows):
        return None
    return GroupLayout(
        1,
        tuple(replace(window, span=span(window)) for window in layout.windows),
        None if layout.state is None else StateSpec(layout.state.pages, layout.grid),
        tail_tokens=-(-layout.tail_tokens // size),
        answer_tokens=-(-layout.answer_tokens // size),
    )


class Passes:
    """Drives the sequences of a cache with groups of layers through their passes.

    Attributes:
        most_pages: the most pool pages that one sequence used at a time.
        most_stored: the most pool pages that rows and states of the tree took.
    """

    def __init__(self, cache: PagedCache, layout: GroupLayout, pass_tokens: int) -> None:
        self._cache = cache
        self._layout = layout
        self._pass = pass_tokens
        self.most_pages = 0
        self.most_stored = 0

    def run(
        self, sequence: Sequence, stop: int, *, checkpoints: bool = True, publish: bool = True
    ) -> None:
        """Compute up to token ``stop``, which the sequence has.

        With ``checkpoints``, passes end where they are stored. Raises `OutOfPages`, between passes.
        """
        groups = sequence.groups
        assert groups is not None
        sequence.copies()
        groups.copies()
        while groups.position < stop:
            stops = groups.stops if checkpoints else []
            end = min([stop, groups.position + self._pass, *stops])
            groups.reach(end)
            self.most_pages = max(self.most_pages, self._used(sequence, groups))
            if end in stops:
                groups.checkpoint(end)
            if publish:
                sequence.publish(end)

    def _used(self, sequence: Sequence, groups: SequenceGroups) -> int:
        size = self._layout.page_size
        used = -(-groups.position // size) + self._layout.state_pages
        for rows in groups.tables:
            used += int((rows[:, 0] >= 0).sum()) * rows.shape[1]
        return used

    def reserved(self, pages: int, *, state: bool) -> int:
        """Return the most pool pages of rows at a time of a sequence of ``pages`` pages.

        Those of its windows and of the pass under way; if ``state``, also those of its state.
        """
        size, total = self._layout.page_size, self._layout.state_pages if state else 0
        for window in self._layout.windows:
            kept = -(-window.span // size) + 1 + -(-self._pass // size)
            total += window.pages * min(pages, kept)
        return total

    def look(self) -> None:
        """Update `most_stored`; called after each request."""
        found = self._cache.stats().groups
        assert found is not None
        self.most_stored = max(self.most_stored, found.pages)

    def figures(self) -> dict[str, Any]:
        """Return what became of rows and checkpoints, for `Outcome.groups`."""
        found = self._cache.stats().groups
        assert found is not None
        counts = asdict(found)
        return {
            "pages": self._cache.num_pages,
            "most_pages_stored": self.most_stored,
            "most_pages_of_a_request": self.most_pages,
            **{
                name: counts[name]
                for name in (
                    "checkpoints", "checkpoints_stored", "checkpoints_evicted",
                    "checkpoints_without_room", "resumes_given_up", "rows_stored", "rows_evicted",
                )
            },
        }  # fmt: skip


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
