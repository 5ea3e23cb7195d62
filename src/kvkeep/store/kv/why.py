"""Why tokens of a prompt are missing from a store, from the losses that its tiers recorded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvkeep.store.tiers import Loss, Miss

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvkeep.core.tokens import TokenArray
    from kvkeep.store.kv.names import Names

    LossesOf = Callable[[Sequence[bytes]], list[Loss | None]]

__all__ = ["misses_behind"]

_NEVER = Loss("", "never", None, "")


def misses_behind(
    names: Names,
    losses_of: LossesOf,
    row: TokenArray,
    start: int,
    before: Miss | None = None,
) -> tuple[Miss, ...]:
    """Return why ``row`` is missing behind its first ``start`` tokens, in order and without gaps.

    ``losses_of`` returns the last loss of each block, or None if it is stored. Stored blocks at the
    beginning are skipped; stored blocks behind a gap get the reason of the gap. ``before`` is the
    gap that ends at ``start``, if there is one.
    """
    size = names.block_tokens
    full = names.full(row)
    found = _MissList(start, before)
    gap, first = False, start // size
    for number, loss in enumerate(losses_of(full[first:]), start=first):
        begin, end = number * size, (number + 1) * size
        if loss is not None and not gap:
            # This block may contain the tail of a shorter prompt, stored now or lost.
            gap, ids = True, names.tails(full[:number], row[begin:end])
            _add_tail(found, ids, losses_of, begin, first=True, block_known=loss.what != "never")
        found.add(end, loss)
    rest = len(full) * size
    if rest < len(row):
        _add_tail(found, names.tails(full, row[rest:]), losses_of, rest, first=not gap)
        found.add(len(row), _NEVER)
    return tuple(found.misses)


def _add_tail(
    found: _MissList,
    tails: list[bytes],
    losses_of: LossesOf,
    begin: int,
    *,
    first: bool,
    block_known: bool = False,
) -> None:
    """Add the loss of the longest of ``tails`` of which anything is known; all begin at ``begin``.

    If the loss of the whole block is known, only a stored tail counts, as part of the prefix.
    ``first``: all blocks before it are stored.
    """
    losses = losses_of(tails)
    if first and None in losses:  # the longest stored tail can be used
        there = len(losses) - losses[::-1].index(None)
        found.add(begin + there, None)
    if block_known:
        return
    for count in range(len(losses), 0, -1):
        one = losses[count - 1]
        if one is None or one.what != "never":
            found.add(begin + count, one)
            return


class _MissList:
    """Misses in order; neighbours that differ only in time are merged."""

    def __init__(self, start: int, before: Miss | None) -> None:
        self.misses: list[Miss] = [] if before is None else [before]
        self._at = start

    def add(self, end: int, loss: Loss | None) -> None:
        """Add the loss of the tokens up to ``end``, None if they are stored.

        Stored tokens are skipped at the beginning; behind a miss they get its reason.
        """
        start, self._at = self._at, max(self._at, end)
        last = self.misses[-1] if self.misses else None
        if end <= start or (loss is None and last is None):
            return
        if loss is None:
            assert last is not None
            loss = Loss(last.tier, last.what, last.at, last.detail)
        tier, what, at, detail = loss
        if last is not None and (last.tier, last.what, last.detail) == (tier, what, detail):
            start = last.start
            at = max((time for time in (last.at, at) if time is not None), default=None)
            self.misses.pop()
        self.misses.append(Miss(start, end, tier, what, at, detail))
