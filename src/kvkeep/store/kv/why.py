"""Why tokens of a prompt are missing from a store, by what its tiers remember of their blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvkeep.store.tiers import Fate, Happened

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvkeep.core.tokens import TokenArray
    from kvkeep.store.kv.names import Names

    FatesOf = Callable[[Sequence[bytes]], list[Happened | None]]

__all__ = ["fates_behind"]

_NEVER = Happened("", "never", None, "")


def fates_behind(names: Names, fates_of: FatesOf, row: TokenArray, start: int) -> tuple[Fate, ...]:
    """Return the fates of ``row`` behind its first ``start`` tokens, in order and without gaps.

    ``fates_of`` returns what happened to each block, or None if it is stored. Stored blocks at the
    beginning are passed over; stored blocks behind a gap share the fate before them.
    """
    size = names.block_tokens
    full = names.full(row)
    story = _Story(start)
    first = start // size
    for number, happened in enumerate(fates_of(full[first:]), start=first):
        begin, end = number * size, (number + 1) * size
        if happened is not None and not story.fates:
            # A tail of a shorter prompt, within this block, may be stored or may have been.
            ids = names.tails(full[:number], row[begin:end])
            _tell_tail(story, ids, fates_of, begin, known=happened.what != "never")
        story.tell(end, happened)
    rest = len(full) * size
    if rest < len(row):
        _tell_tail(story, names.tails(full, row[rest:]), fates_of, rest)
        story.tell(len(row), _NEVER)
    return tuple(story.fates)


def _tell_tail(
    story: _Story, tails: list[bytes], fates_of: FatesOf, begin: int, *, known: bool = False
) -> None:
    """Add the fate of the longest of ``tails`` of which anything is known; all begin at ``begin``.

    If more is ``known``, only a stored tail counts, which shortens what is missing.
    """
    happened = fates_of(tails)
    if not story.fates and None in happened:  # the longest stored tail can be used
        there = len(happened) - happened[::-1].index(None)
        story.tell(begin + there, None)
    if known:
        return
    for count in range(len(happened), 0, -1):
        one = happened[count - 1]
        if one is None or one.what != "never":
            story.tell(begin + count, one)
            return


class _Story:
    """Fates in order; neighbours that differ only in time are merged."""

    def __init__(self, start: int) -> None:
        self.fates: list[Fate] = []
        self._at = start

    def tell(self, end: int, happened: Happened | None) -> None:
        """Add what happened up to token ``end``; None: stored, and usable only at the beginning."""
        start, self._at = self._at, max(self._at, end)
        last = self.fates[-1] if self.fates else None
        if end <= start or (happened is None and last is None):
            return
        if happened is None:
            assert last is not None
            happened = Happened(last.tier, last.what, last.at, last.detail)
        tier, what, at, detail = happened
        if last is not None and (last.tier, last.what, last.detail) == (tier, what, detail):
            start = last.start
            at = max((time for time in (last.at, at) if time is not None), default=None)
            self.fates.pop()
        self.fates.append(Fate(start, end, tier, what, at, detail))
