"""`SnapshotRecords`: the records of prompts whose groups of layers are kept apart."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from kvkeep.store.blocks.stats import Lookup, runs_of
from kvkeep.store.kv.finding import PositionFinder
from kvkeep.store.kv.kept import KeptPrompts
from kvkeep.store.kv.positions import BASE, PositionNames
from kvkeep.store.kv.prefetch import Prefetch
from kvkeep.store.kv.removal import delete_ids
from kvkeep.store.kv.snapshots import piece_of, tokens_by_tier
from kvkeep.store.kv.why import misses_behind
from kvkeep.store.tiers import Loss, Miss

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvkeep.store.kv.names import PromptBlocks
    from kvkeep.store.kv.paying import LoadPiece
    from kvkeep.store.kv.positions import Position
    from kvkeep.store.kv.records import RecordForms
    from kvkeep.store.kv.removal import Followers
    from kvkeep.store.tiers import Removed, TieredStore

__all__ = ["SnapshotRecords"]

_PIN_TRIES: Final = 8
"""Positions that a pin tries, ever shorter ones, until one is not larger than pins may be."""


class SnapshotRecords(KeptPrompts):
    """Records of each group of layers. A prompt resumes where all of them agree."""

    def __init__(self, forms: RecordForms, followers: Followers) -> None:
        self.block_shape = forms.block_shape
        self._forms = forms
        self._followers = followers

    def _finder(
        self, tiered: TieredStore, prompt: PromptBlocks, *, ask: bool = True
    ) -> PositionFinder:
        return PositionFinder(tiered, PositionNames(self._forms, prompt), ask=ask)

    def lookup(self, tiered: TieredStore, prompt: PromptBlocks, tiers: Sequence[str]) -> Lookup:
        finder = self._finder(tiered, prompt)
        position = finder.longest()
        stored = finder.stored if self._forms.base is not None else 0
        if position is None:
            return Lookup(0, (), stored)
        named = [tiers[level] for level in position.levels]
        parts = tokens_by_tier(zip(position.pieces, named, strict=True), position.tokens, 0)
        return Lookup(position.tokens, runs_of(parts), max(stored, position.tokens))

    def pieces(
        self, tiered: TieredStore, prompt: PromptBlocks, tiers: Sequence[str]
    ) -> list[LoadPiece]:
        names = PositionNames(self._forms, prompt)
        position = PositionFinder(tiered, names, start=prompt.start).longest()
        return [] if position is None else [piece_of(position, prompt.start, tiers)]

    def why(
        self, tiered: TieredStore, prompt: PromptBlocks, since: float | None
    ) -> tuple[Miss, ...]:
        row, start, names = prompt
        losses_of = partial(tiered.losses_of, since=since)
        if start == len(row):
            return ()
        ids = PositionNames(self._forms, prompt)
        size = names.block_tokens
        first, stored = start // size, len(row)
        if self._forms.base is not None:
            losses = losses_of(ids.full[first:])
            blocks = first + next((at for at, loss in enumerate(losses) if loss), len(losses))
            tails = [] if blocks * size == len(row) else losses_of(ids.tails(blocks))
            tail = max((count for count, loss in enumerate(tails, start=1) if not loss), default=0)
            stored = max(start, blocks * size + tail)
        # Up to `stored`, the missing records are those that only resuming needs.
        ends = [*range((first + 1) * size, stored + 1, size)]
        if start < stored and stored % size:
            ends.append(stored)
        found = [loss for loss in losses_of(self._beside(ids, ends)) if loss and loss.at]
        last = max(found, key=lambda loss: loss.at or 0.0, default=Loss("", "never", None, "state"))
        gap = Miss(start, stored, *last) if stored > start else None
        if stored == len(row):
            return () if gap is None else (gap,)
        return misses_behind(names, losses_of, row, stored, gap)

    def _beside(self, ids: PositionNames, ends: Sequence[int]) -> list[bytes]:
        """Return the ids of the states and windows that end at some positions."""
        found = [ids.state(end) for end in ends] if self._forms.states is not None else []
        for group in range(len(self._forms.windows)):
            found += [ids.window(group, end) for end in ends]
        return found

    def touch(self, tiered: TieredStore, prompt: PromptBlocks) -> None:
        position = self._finder(tiered, prompt, ask=False).longest()
        if position is not None:
            tiered.used([piece.id for piece in position.pieces])

    def beside(self, tiered: TieredStore, prompt: PromptBlocks, full: list[bytes]) -> list[bytes]:
        ids = PositionNames(self._forms, prompt, full)
        position = PositionFinder(tiered, ids, ask=False).longest()
        if position is None:
            return []
        size = ids.size
        return [one.id for one in position.pieces if one.group != BASE or one.stop % size]

    def prefetch(self, tiered: TieredStore, prompt: PromptBlocks) -> Prefetch:
        lengths: list[int] = []

        def plan() -> tuple[list[bytes], list[int]]:  # in a thread: a lookup may query slow tiers
            position = self._finder(tiered, prompt).longest()
            pieces = [] if position is None else position.pieces
            lengths.extend(_lengths(position))
            return [piece.id for piece in pieces], [piece.raw_bytes for piece in pieces]

        return Prefetch(tiered.prefetch(plan), 0, lengths, whole=True)

    def pin(self, tiered: TieredStore, prompt: PromptBlocks, seconds: float) -> int:
        for _ in range(_PIN_TRIES):
            position = self._finder(tiered, prompt).longest()
            if position is None:
                break
            ids = [piece.id for piece in position.pieces]
            count = tiered.pins.pin_all(ids, seconds)
            if count == len(ids):
                return position.tokens
            # A shorter position may fit: in any case, none behind the last base record that did.
            fits = [p.stop for p in position.pieces[:count] if p.group == BASE]
            most = min(max(fits, default=0), position.tokens - 1)
            prompt = prompt._replace(row=prompt.row[:most])
        return 0

    def unpin(self, tiered: TieredStore, prompt: PromptBlocks) -> int:
        ids, start = list(PositionNames(self._forms, prompt).every(0)), prompt.start
        pinned = tiered.pins.pinned(ids)
        whole = prompt._replace(start=0)
        tokens = self._longest_pinned(tiered, whole, pinned) if pinned else 0
        if start:
            ids = list(PositionNames(self._forms, prompt).every(start))
        tiered.pins.unpin(ids)
        return max(0, tokens - start)

    def _longest_pinned(self, tiered: TieredStore, prompt: PromptBlocks, pinned: set[bytes]) -> int:
        """Return the longest position whose records are all ``pinned``; longer ones may follow."""
        for _ in range(_PIN_TRIES):
            position = self._finder(tiered, prompt).longest()
            if position is None:
                break
            if all(piece.id in pinned for piece in position.pieces):
                return position.tokens
            prompt = prompt._replace(row=prompt.row[: position.tokens - 1])
        return 0

    def remove(self, tiered: TieredStore, prompt: PromptBlocks) -> Removed:
        tiered.check_open()
        ids = list(PositionNames(self._forms, prompt).every(prompt.start))
        return delete_ids(ids, self._followers, tiered.remove)


def _lengths(position: Position | None) -> list[int]:
    """Return for each record of a position the tokens that it adds; in all, its tokens."""
    if position is None:
        return []
    lengths = [p.stop - p.start if p.group == BASE else 0 for p in position.pieces]
    lengths[-1] += position.tokens - sum(lengths)
    return lengths
