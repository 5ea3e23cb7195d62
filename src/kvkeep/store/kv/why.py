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
    found = _FateList(start)
    first = start // size
    for number, happened in enumerate(fates_of(full[first:]), start=first):
        begin, end = number * size, (number + 1) * size
        if happened is not None and not found.fates:
            # A tail of a shorter prompt, within this block, may be stored or may have been.
            ids = names.tails(full[:number], row[begin:end])
            _add_tail(found, ids, fates_of, begin, block_known=happened.what != "never")
        found.add(end, happened)
    rest = len(full) * size
    if rest < len(row):
        _add_tail(found, names.tails(full, row[rest:]), fates_of, rest)
        found.add(len(row), _NEVER)
    return tuple(found.fates)


def _add_tail(
    found: _FateList,
    tails: list[bytes],
    fates_of: FatesOf,
    begin: int,
    *,
    block_known: bool = False,
) -> None:
    """Add the fate of the longest of ``tails`` of which anything is known; all begin at ``begin``.

    If the fate of the whole block is known, only a stored tail counts, as part of the prefix.
    """
    happened = fates_of(tails)
    if not found.fates and None in happened:  # the longest stored tail can be used
        there = len(happened) - happened[::-1].index(None)
        found.add(begin + there, None)
    if block_known:
        return
    for count in range(len(happened), 0, -1):
        one = happened[count - 1]
        if one is None or one.what != "never":
            found.add(begin + count, one)
            return


class _FateList:
    """Fates in order; neighbours that differ only in time are merged."""

    def __init__(self, start: int) -> None:
        self.fates: list[Fate] = []
        self._at = start

    def add(self, end: int, happened: Happened | None) -> None:
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
