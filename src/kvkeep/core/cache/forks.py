"""`Forks`: finds the sequences that share unpublished pages, by the first of these pages.

Two sequences share an unpublished page only because one was forked from the other while the page
was in its table. They then share all pages before it, too: only the last page of a table is ever
replaced by a copy, and `Sequence.truncate` removes pages from the end. So the sequences that share
any unpublished page with a given one have the same *first* unpublished page, and a publish visits
these alone, however many other forks are running.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvkeep.core.cache.sequence import Sequence

__all__ = ["Forks"]


class Forks:
    """Groups of sequences with the same first unpublished page, two or more in each.

    A sequence reports when that page changes. Thread safety: none; under the cache's lock. Cost: a
    dictionary lookup a call, and one for each member when a group is taken or made.
    """

    __slots__ = ("_groups",)

    def __init__(self) -> None:
        self._groups: dict[int, dict[Sequence, None]] = {}

    def __bool__(self) -> bool:
        """Whether any sequences share an unpublished page."""
        return bool(self._groups)

    def join(self, page: int, sequence: Sequence, other: Sequence) -> None:
        """Note that ``other`` was forked from ``sequence``; ``page`` is the first unpublished."""
        self._groups.setdefault(page, {sequence: None})[other] = None

    def leave(self, page: int, sequence: Sequence) -> None:
        """Note that ``page`` is no longer the first unpublished page of ``sequence``."""
        group = self._groups.get(page)
        if group is not None:
            del group[sequence]
            if len(group) == 1:
                del self._groups[page]

    def take(self, page: int) -> Iterable[Sequence]:
        """Remove and return the group of ``page``, which is being published; then `regroup` it."""
        return self._groups.pop(page, ())

    def regroup(self, sequences: Iterable[Sequence]) -> None:
        """Group sequences that shared a page by their present first unpublished pages."""
        groups: dict[int, dict[Sequence, None]] = {}
        for sequence in sequences:
            page = sequence.first_unpublished
            if page is not None:
                groups.setdefault(page, {})[sequence] = None
        self._groups.update((page, group) for page, group in groups.items() if len(group) > 1)

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Assert that the groups are those of all running ``sequences``."""
        found: dict[int, set[Sequence]] = {}
        for sequence in sequences:
            page = sequence.first_unpublished
            if page is not None:
                found.setdefault(page, set()).add(sequence)
        shared = {page: group for page, group in found.items() if len(group) > 1}
        assert shared == {page: set(group) for page, group in self._groups.items()}
        pages: dict[int, int] = {}  # each unpublished page → first page of its group
        for first, group in found.items():
            for sequence in group:
                for page in sequence.unpublished:
                    assert pages.setdefault(page, first) == first, "a page in two groups"
