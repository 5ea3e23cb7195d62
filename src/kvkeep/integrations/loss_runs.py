"""Why the blocks of a prompt are not in a store, in runs: for explanations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from kvkeep.core.errors import IllegalStep
from kvkeep.store import Miss

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvkeep.store import BlockStore
    from kvkeep.store.tiers import Loss

__all__ = ["LossRun", "loss_runs", "misses_of"]

_MOST_ASKED: Final = 256  # blocks of a prompt


class LossRun(NamedTuple):
    """Keys up to ``end`` were lost for the same reason; None: nothing is known."""

    end: int
    loss: Loss | None


def loss_runs(
    store: BlockStore, keys: Sequence[bytes], since: float | None = None
) -> list[LossRun]:
    """Return why ``keys``, which were not found, are missing; empty if the store is closed.

    ``since``: see `BlockStore.losses`. Of more than 256 keys, some stand for the ones before them.
    Queries no tier. Cost: a few µs a key, a millisecond at most.
    """
    step = max(1, -(-len(keys) // _MOST_ASKED))
    ends = [*range(step, len(keys), step), len(keys)] if keys else []
    try:
        losses = store.losses([keys[end - 1] for end in ends], since=since)
    except IllegalStep:
        return []
    runs: list[LossRun] = []
    for end, loss in zip(ends, losses, strict=True):
        if runs and _same(runs[-1].loss, loss):
            runs.pop()
        runs.append(LossRun(end, loss))
    return runs


def misses_of(
    runs: Iterable[LossRun], first: int, block_tokens: int, unknown: Loss | None = None
) -> list[Miss]:
    """Return the tokens of a prompt that are missing, and why; block ``first`` has the first key.

    Blocks of which nothing is known are missing for the reason ``unknown``; None: they are left
    out.
    """
    found: list[Miss] = []
    start = first
    for end, known in runs:
        stop, loss = first + end, known or unknown
        if loss is not None:
            tokens = start * block_tokens, stop * block_tokens
            found.append(Miss(*tokens, loss.tier, loss.what, loss.at, loss.detail))
        start = stop
    return found


def _same(one: Loss | None, other: Loss | None) -> bool:
    if one is None or other is None:
        return one is other
    return (one.tier, one.what, one.detail) == (other.tier, other.what, other.detail)
