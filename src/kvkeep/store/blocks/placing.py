"""In which tiers blocks lie, and why others are not there."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvkeep.store.tiers import Loss, TieredStore

__all__ = ["last_losses", "tier_runs"]


def tier_runs(tiered: TieredStore, blocks: Sequence[bytes]) -> list[tuple[int, str]]:
    """Return the tiers that ``blocks`` would be read from, in runs: the end of each, and a name."""
    memory, tiers = tiered.memory, tiered.tiers
    runs: list[tuple[int, str]] = []
    at = 0
    while at < len(blocks):
        name, end = memory.name, at + 1
        if blocks[at] in memory:
            end = at + max(1, memory.catalogue.leading(blocks[at:]))
        elif tiers:
            (held,) = tiered.holders(blocks[at : at + 1])
            tier = tiers[min(held[0], len(tiers)) - 1] if held and held[0] else tiers[-1]
            name, there = tier.name, 1
            if held and tier.serves_all:
                there = tier.catalogue.leading(blocks[at:])
            while end < at + there and blocks[end] not in memory:
                end += 1
        if runs and runs[-1][1] == name:
            runs.pop()
        runs.append((end, name))
        at = end
    return runs


def last_losses(
    tiered: TieredStore, blocks: Sequence[bytes], since: float | None
) -> list[Loss | None]:
    """Return why each block was lost last, or cannot be read now; None: nothing is known.

    ``since``: see `BlockStore.losses`.
    """
    found: list[Loss | None] = []
    for block, loss in zip(blocks, tiered.losses_of(blocks, since), strict=True):
        # A block that was stored again since then has an entry still.
        last = tiered.losses.of(block) if loss is None else loss
        found.append(None if last is None or last.what == "never" else last)
    return found
