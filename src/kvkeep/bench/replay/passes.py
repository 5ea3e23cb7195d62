"""`Passes`: what an engine does with windows and states, but for computing."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from kvkeep.core.groups import GroupLayout, StateSpec, WindowSpec

if TYPE_CHECKING:
    from kvkeep.core.cache import PagedCache, Sequence
    from kvkeep.core.groups import SequenceGroups

__all__ = ["PASS_TOKENS", "Passes", "by_pages"]

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
        guess_tokens=-(-layout.guess_tokens // size),
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
            groups.copies()
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
