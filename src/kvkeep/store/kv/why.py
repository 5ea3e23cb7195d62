"""Why tokens of a prompt are not in a store: from what its tiers remember of blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvkeep.store.tiers import Loss, Miss

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvkeep.core.tokens import TokenArray
    from kvkeep.store.kv.names import Names

    FatesOf = Callable[[Sequence[bytes]], list[Loss | None]]

__all__ = ["fates_behind"]

_NEVER = Loss("", "never", None, "")


def fates_behind(names: Names, fates_of: FatesOf, row: TokenArray, start: int) -> tuple[Miss, ...]:
    """What became of ``row`` behind its first ``start`` tokens, in order and without gaps.

    ``fates_of`` says of blocks what happened to each, None where it is there. What is there at the
    beginning is passed over, what is there behind a gap shares the fate before it.
    """
    size = names.block_tokens
    full = names.full(row)
    story = _Story(start)
    first = start // size
    for number, happened in enumerate(fates_of(full[first:]), start=first):
        begin, end = number * size, (number + 1) * size
        if happened is not None and not story.fates:
            # A prompt that ended within it may be here, or have been.
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
    """Tell of the longest of ``tails``, all from token ``begin`` on, of which anything is known.

    Where more is ``known``, only of one that is there and can be used.
    """
    happened = fates_of(tails)
    if not story.fates and None in happened:  # the longest one that is there can be used
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
    """Fates one behind the other; neighbours of which only the time differs become one."""

    def __init__(self, start: int) -> None:
        self.fates: list[Miss] = []
        self._at = start

    def tell(self, end: int, happened: Loss | None) -> None:
        """It goes on to token ``end``; None: what is there, and of use only at the beginning."""
        start, self._at = self._at, max(self._at, end)
        last = self.fates[-1] if self.fates else None
        if end <= start or (happened is None and last is None):
            return
        if happened is None:
            assert last is not None
            happened = Loss(last.tier, last.what, last.at, last.detail)
        tier, what, at, detail = happened
        if last is not None and (last.tier, last.what, last.detail) == (tier, what, detail):
            start = last.start
            at = max((time for time in (last.at, at) if time is not None), default=None)
            self.fates.pop()
        self.fates.append(Miss(start, end, tier, what, at, detail))
