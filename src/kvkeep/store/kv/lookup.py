"""Which blocks of a prompt are stored."""

from __future__ import annotations

from itertools import accumulate, groupby
from typing import TYPE_CHECKING, NamedTuple

from kvkeep.store.blocks.stats import closed_is_illegal
from kvkeep.store.kv.paying import LoadPiece

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvkeep.core.tokens import TokenArray
    from kvkeep.store.kv.forms import Form
    from kvkeep.store.kv.names import Names, PromptBlocks
    from kvkeep.store.tiers import TieredStore

__all__ = ["StoredBlocks", "find_stored", "pieces_of"]


class StoredBlocks(NamedTuple):
    """Consecutive stored blocks of a prompt, the last of which may be a tail.

    Attributes:
        ids: block ids.
        levels: index of the fastest tier that holds each block.
        lengths: tokens of each block.
    """

    ids: list[bytes]
    levels: list[int]
    lengths: list[int]

    def up_to(self, tokens: int) -> StoredBlocks:
        """Return the leading blocks that have at most ``tokens`` tokens together."""
        count = sum(end <= tokens for end in accumulate(self.lengths))
        return StoredBlocks(self.ids[:count], self.levels[:count], self.lengths[:count])


def find_stored(
    tiered: TieredStore, prompt: PromptBlocks, until: float | None = None
) -> StoredBlocks:
    """Return the stored blocks of ``prompt``, from the block of its ``start`` to the first gap.

    Shared tiers are queried about blocks that are not known here, until ``until`` on
    `time.monotonic` at most.
    """
    row, start, names = prompt
    size = names.block_tokens
    full = names.full(row)
    first = start // size
    with closed_is_illegal():
        levels = tiered.locate(full[first:], until)
    end = first + len(levels)
    found = StoredBlocks(full[first:end], levels, [size] * len(levels))
    tail = _longest_tail(tiered, names, full[:end], row[end * size :], until)
    if tail is not None:
        block, tokens = tail
        if level := tiered.locate([block], until):
            found.ids.append(block)
            found.levels.extend(level)
            found.lengths.append(tokens)
    return found


def pieces_of(
    found: StoredBlocks, prompt: PromptBlocks, form: Form, tiers: Sequence[str]
) -> list[LoadPiece]:
    """Return ``found`` as pieces to load, one for each run of a tier, from the start on."""
    begin = prompt.start - prompt.start % prompt.names.block_tokens
    at, pieces = prompt.start, list[LoadPiece]()
    for level, run in groupby(zip(found.levels, found.lengths, strict=True), lambda one: one[0]):
        begin += sum(tokens for _, tokens in run)
        if begin > at:
            tier = tiers[level]
            pieces.append(LoadPiece(begin, tier, {tier: form.raw_bytes(begin - at)}))
            at = begin
    return pieces


def _longest_tail(
    tiered: TieredStore, names: Names, blocks: list[bytes], rest: TokenArray, until: float | None
) -> tuple[bytes, int] | None:
    """Return the id and tokens of the longest known tail behind ``blocks``, or None.

    Shared tiers are queried about the tail of the whole ``rest`` only: one name, not one a token.
    """
    rest = rest[: names.block_tokens]
    if not len(rest):
        return None
    ids = names.tails(blocks, rest)
    if len(ids) == names.block_tokens:
        ids.pop()  # the id of a full block, which is not stored
    elif tiered.locate(ids[-1:], until):
        return ids[-1], len(ids)
    for count in range(len(ids), 0, -1):
        if tiered.knows(ids[count - 1]):
            return ids[count - 1], count
    return None
