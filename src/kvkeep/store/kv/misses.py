"""Why tokens of a prompt are missing."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from kvkeep.store.tiers import Loss, Miss

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvkeep.store.kv.positions import PromptIds
    from kvkeep.store.tiers import TieredStore

    LossesOf = Callable[[Sequence[bytes]], list[Loss | None]]

__all__ = ["first_miss", "misses_behind", "state_miss"]

_NEVER: Final = Loss("", "never", None, "")


def first_miss(tiered: TieredStore, prompt: PromptIds, at: int, since: float) -> Miss | None:
    """Return why the block with token ``at`` cannot be read; None behind the prompt's end.

    ``since`` is when its search began, in Unix seconds. Cost: some µs, or 1 µs for each token of a
    block that the prompt does not fill.
    """
    stop = min(len(prompt), (at // prompt.size + 1) * prompt.size)
    if at >= stop:
        return None
    (loss,) = tiered.losses_of([prompt.end(stop)], since)
    if loss is None:  # it is there, and was not read in time
        loss = Loss("", "late", time.time(), "no answer")
    return Miss(at, stop, *loss)


def state_miss(
    tiered: TieredStore, prompt: PromptIds, start: int, ends: Sequence[int], since: float | None
) -> Miss:
    """Return why no state or window at ``ends`` lets a model go on; base records are there."""
    forms = prompt.forms
    ids = [prompt.state(end) for end in ends] if forms.states is not None else []
    for group in range(len(forms.windows)):
        ids += [prompt.window(group, end) for end in ends]
    losses = [loss for loss in tiered.losses_of(ids, since) if loss and loss.at]
    never = Loss("", "never", None, "state")
    loss = max(losses, key=lambda loss: loss.at or 0.0, default=never)
    return Miss(start, max(ends, default=start), *loss)


def misses_behind(tiered: TieredStore, prompt: PromptIds, since: float | None) -> tuple[Miss, ...]:
    """Return why tokens are missing from the prompt's ``start`` on, in order and without gaps.

    Stored blocks at the beginning are skipped; stored blocks behind a gap get its reason.
    """
    losses_of: LossesOf = partial(tiered.losses_of, since=since)
    start, size, length, forms = prompt.start, prompt.size, len(prompt), prompt.forms
    if forms.whole:
        return _base_misses(prompt, losses_of, start)
    if start == length:
        return ()
    first, stored = start // size, length
    if forms.base is not None:
        losses = losses_of(prompt.full[first:])
        blocks = first + next((at for at, loss in enumerate(losses) if loss), len(losses))
        tails = [] if blocks * size == length else losses_of(prompt.tails(blocks))
        tail = max((count for count, loss in enumerate(tails, start=1) if not loss), default=0)
        stored = max(start, blocks * size + tail)
    gap = None
    if stored > start:  # up to `stored`, the missing records are those that only resuming needs
        ends = [*range((first + 1) * size, stored + 1, size)]
        if stored % size:
            ends.append(stored)
        gap = replace(state_miss(tiered, prompt, start, ends, since), stop=stored)
    if stored == length:
        return () if gap is None else (gap,)
    return _base_misses(prompt, losses_of, stored, gap)


def _base_misses(
    prompt: PromptIds, losses_of: LossesOf, start: int, before: Miss | None = None
) -> tuple[Miss, ...]:
    """Return why blocks of layers that keep every token are missing behind the first ``start``.

    ``losses_of`` returns the last loss of each block, or None if it is stored. ``before`` is the
    gap that ends at ``start``, if there is one. Neighbours that differ only in time are merged.
    """
    misses = [] if before is None else [before]
    at = start
    for stop, loss in _losses(prompt, losses_of, start):
        begin, at = at, max(at, stop)
        last = misses[-1] if misses else None
        if stop <= begin or (loss is None and last is None):
            continue  # stored tokens at the beginning
        if last is not None:
            reason = last.tier, last.what, last.detail
            if loss is None or reason == (loss.tier, loss.what, loss.detail):
                times = [time for time in (last.at, loss and loss.at) if time is not None]
                misses[-1] = replace(last, stop=stop, at=max(times, default=None))
                continue
        assert loss is not None
        misses.append(Miss(begin, stop, *loss))
    return tuple(misses)


def _losses(
    prompt: PromptIds, losses_of: LossesOf, start: int
) -> Iterator[tuple[int, Loss | None]]:
    """Yield the ends of blocks and of the tails that count, each with its loss."""
    size, full, gap = prompt.size, prompt.full, False
    first = start // size
    for number, loss in enumerate(losses_of(full[first:]), start=first):
        if loss is not None and not gap:
            # This block may contain the tail of a shorter prompt, stored now or lost.
            gap, tails = True, losses_of(prompt.tails(number))
            yield from _tail(tails, number * size, usable=True, lost=loss.what == "never")
        yield (number + 1) * size, loss
    if (rest := len(full) * size) < len(prompt):
        tails = losses_of(prompt.tails(len(full)))
        yield from _tail(tails, rest, usable=not gap, lost=True)
        yield len(prompt), _NEVER


def _tail(
    losses: list[Loss | None], begin: int, *, usable: bool, lost: bool
) -> Iterator[tuple[int, Loss | None]]:
    """Yield the longest stored tail of a block that begins at ``begin``, if it is ``usable``.

    ``lost``: yield the longest tail of which anything is known, too.
    """
    counts = range(len(losses), 0, -1)
    if usable:
        yield from [(begin + n, None) for n in counts if losses[n - 1] is None][:1]
    if lost:
        ends = [(begin + n, losses[n - 1]) for n in counts]
        yield from [end for end in ends if end[1] is None or end[1].what != "never"][:1]
