"""`PromptRecords`: finds the records of prompts, says why they are missing, and deletes them."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from dataclasses import replace
from functools import partial
from itertools import pairwise, repeat
from typing import TYPE_CHECKING, Final

from kvkeep.store.blocks.stats import Lookup, runs_of, seconds_of
from kvkeep.store.kv.paying import LoadPiece
from kvkeep.store.kv.positions import BASE, PositionFinder
from kvkeep.store.tiers import Loss, Miss

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from kvkeep.store.kv.forms import RecordForms
    from kvkeep.store.kv.positions import Position, PositionPiece, PromptIds
    from kvkeep.store.tiers import BlockPrefetch, Removed, TieredStore

    LossesOf = Callable[[Sequence[bytes]], list[Loss | None]]

__all__ = [
    "Followers",
    "Prefetch",
    "PromptRecords",
    "first_miss",
    "load_pieces",
    "tokens_by_tier",
]

_NEVER: Final = Loss("", "never", None, "")
_MOST_LINKS: Final = 1 << 15
_PIN_TRIES: Final = 8
"""Positions that a pin tries, ever shorter ones, until one is not larger than pins may be."""


class PromptRecords:
    """Finds the records of prompts, and acts on them; for each method see `KVStore`.

    The tiers are an argument, because users of a shared store have tiers of their own to close.

    Thread safety: all methods.
    """

    def __init__(self, forms: RecordForms, followers: Followers) -> None:
        self._forms = forms
        self._followers = followers

    def lookup(self, tiered: TieredStore, prompt: PromptIds) -> Lookup:
        """Return the length of the stored prefix, and in which tiers it is."""
        since, tiers = time.time(), tiered.names
        finder = PositionFinder(tiered, prompt)
        position = finder.longest()
        stored = finder.stored if self._forms.base is not None else 0
        tokens = 0 if position is None else position.tokens
        if stored > tokens:
            ends = range(tokens - tokens % prompt.size + prompt.size, stored + 1, prompt.size)
            miss: Miss | None = self._state_miss(tiered, prompt, tokens, ends, since)
        else:
            miss = first_miss(tiered, prompt, tokens, since)
        if position is None:
            return Lookup(0, (), stored, miss)
        named = [tiers[level] for level in position.levels]
        if self._forms.whole:
            lengths = [*repeat(prompt.size, tokens // prompt.size), tokens % prompt.size]
            return Lookup(tokens, runs_of(zip(named, lengths, strict=False)), miss=miss)
        parts = tokens_by_tier(zip(position.pieces, named, strict=True), tokens, 0)
        return Lookup(tokens, runs_of(parts), max(stored, tokens), miss)

    def pieces(self, tiered: TieredStore, prompt: PromptIds) -> list[LoadPiece]:
        """Return what is stored of the prompt from its ``start`` on, in pieces to load."""
        position = PositionFinder(tiered, prompt).longest()
        return load_pieces(position, prompt, tiered.names)

    def why(self, tiered: TieredStore, prompt: PromptIds, since: float | None) -> tuple[Miss, ...]:
        """Return why tokens from the prompt's ``start`` on are missing."""
        losses_of = partial(tiered.losses_of, since=since)
        start, size, length = prompt.start, prompt.size, len(prompt)
        if self._forms.whole:
            return _misses_behind(prompt, losses_of, start)
        if start == length:
            return ()
        first, stored = start // size, length
        if self._forms.base is not None:
            losses = losses_of(prompt.full[first:])
            blocks = first + next((at for at, loss in enumerate(losses) if loss), len(losses))
            tails = [] if blocks * size == length else losses_of(prompt.tails(blocks))
            tail = max((count for count, loss in enumerate(tails, start=1) if not loss), default=0)
            stored = max(start, blocks * size + tail)
        # Up to `stored`, the missing records are those that only resuming needs.
        ends = [*range((first + 1) * size, stored + 1, size)]
        if start < stored and stored % size:
            ends.append(stored)
        gap = None
        if stored > start:
            gap = replace(self._state_miss(tiered, prompt, start, ends, since), stop=stored)
        if stored == length:
            return () if gap is None else (gap,)
        return _misses_behind(prompt, losses_of, stored, gap)

    def _state_miss(
        self,
        tiered: TieredStore,
        prompt: PromptIds,
        start: int,
        ends: Sequence[int],
        since: float | None,
    ) -> Miss:
        """Return why no state or window at ``ends`` lets a model go on; base records are there."""
        ids = [prompt.state(end) for end in ends] if self._forms.states is not None else []
        for group in range(len(self._forms.windows)):
            ids += [prompt.window(group, end) for end in ends]
        losses = [loss for loss in tiered.losses_of(ids, since) if loss and loss.at]
        never = Loss("", "never", None, "state")
        return Miss(
            start,
            max(ends, default=start),
            *max(losses, key=lambda loss: loss.at or 0.0, default=never),
        )

    def touch(self, tiered: TieredStore, prompt: PromptIds) -> None:
        """Count a use of the records that are known to be stored."""
        if self._forms.whole:
            tiered.used(prompt.full)
            return
        position = PositionFinder(tiered, prompt, ask=False).longest()
        if position is not None:
            tiered.used([piece.id for piece in position.pieces])

    def beside(self, tiered: TieredStore, prompt: PromptIds) -> list[bytes]:
        """Return the ids of records that a prompt has beside its full blocks."""
        if self._forms.whole:
            return [prompt.end(len(prompt))] if len(prompt) % prompt.size else []
        position = PositionFinder(tiered, prompt, ask=False).longest()
        pieces = [] if position is None else position.pieces
        return [one.id for one in pieces if one.group != BASE or one.stop % prompt.size]

    def prefetch(self, tiered: TieredStore, prompt: PromptIds) -> Prefetch:
        """Start to read the records into memory; return at once."""
        whole = self._forms.whole
        start = prompt.start - prompt.start % prompt.size if whole else 0
        asked = prompt.behind(start).copied()
        lengths: list[int] = []

        def plan() -> tuple[list[bytes], list[int]]:  # in a thread: a lookup may query slow tiers
            position = PositionFinder(tiered, asked).longest()
            if position is None:
                return [], []
            pieces = position.pieces
            counts = [p.stop - p.start if p.group == BASE else 0 for p in pieces]
            counts[-1] += position.tokens - start - sum(counts)
            lengths.extend(counts)
            return [piece.id for piece in pieces], [piece.raw_bytes for piece in pieces]

        return Prefetch(tiered.prefetch(plan), start, lengths, whole=not whole)

    def pin(self, tiered: TieredStore, prompt: PromptIds, seconds: float) -> int:
        """Pin the stored prefix; return its tokens."""
        for _ in range(_PIN_TRIES):
            position = PositionFinder(tiered, prompt).longest()
            if position is None:
                break
            ids = [piece.id for piece in position.pieces]
            if self._forms.whole:
                count = tiered.pins.pin(ids, seconds)
                return position.pieces[count - 1].stop if count else 0
            count = tiered.pins.pin_all(ids, seconds)
            if count == len(ids):
                return position.tokens
            # A shorter position may fit: in any case, none behind the last base record that did.
            fits = [p.stop for p in position.pieces[:count] if p.group == BASE]
            prompt = prompt.cut(min(max(fits, default=0), position.tokens - 1))
        return 0

    def unpin(self, tiered: TieredStore, prompt: PromptIds) -> int:
        """End the pin of the prompt from its ``start`` on; return the tokens that were pinned."""
        every, start = prompt.behind(0), prompt.start
        if self._forms.whole:
            position = PositionFinder(tiered, every).longest()
            first = -(-start // prompt.size)
            pieces = [] if position is None else position.pieces[first:]
            count = tiered.pins.unpin([piece.id for piece in pieces])
            return sum(piece.stop - piece.start for piece in pieces[:count])
        ids = list(every.every(0))
        pinned = tiered.pins.pinned(ids)
        tokens = self._longest_pinned(tiered, every, pinned) if pinned else 0
        tiered.pins.unpin(list(prompt.every(start)) if start else ids)
        return max(0, tokens - start)

    def _longest_pinned(self, tiered: TieredStore, prompt: PromptIds, pinned: set[bytes]) -> int:
        """Return the longest position whose records are all ``pinned``; longer ones may follow."""
        for _ in range(_PIN_TRIES):
            position = PositionFinder(tiered, prompt).longest()
            if position is None:
                break
            if all(piece.id in pinned for piece in position.pieces):
                return position.tokens
            prompt = prompt.cut(position.tokens - 1)
        return 0

    def remove(self, tiered: TieredStore, prompt: PromptIds) -> Removed:
        """Delete all records with a token from the prompt's ``start`` on."""
        tiered.check_open()
        return self._followers.delete(prompt.private().every(prompt.start), tiered.remove)


def load_pieces(
    position: Position | None, prompt: PromptIds, tiers: Sequence[str]
) -> list[LoadPiece]:
    """Return a position as pieces that are loaded whole or not; ``tiers`` name all levels.

    Of blocks of all layers these are the runs of blocks in one tier; else the position as a whole.
    """
    if position is None or not position.pieces:
        return []
    start, runs = prompt.start, list[LoadPiece]()
    tier_bytes: dict[str, int] = {}
    for piece, level in zip(position.pieces, position.levels, strict=True):
        size, tier = piece.raw_bytes, tiers[level]
        if piece.group == BASE and piece.start < start:
            size = size * (piece.stop - start) // (piece.stop - piece.start)
        if prompt.forms.whole and tier not in tier_bytes:
            tier_bytes = {tier: 0}
            runs.append(LoadPiece(0, tier, tier_bytes))
        tier_bytes[tier] = tier_bytes.get(tier, 0) + size
        if runs:
            runs[-1] = runs[-1]._replace(stop=piece.stop)
    most = max(tier_bytes, key=tier_bytes.__getitem__)
    return runs or [LoadPiece(position.tokens, most, tier_bytes)]


def tokens_by_tier(
    found: Iterable[tuple[PositionPiece, str]], tokens: int, start: int
) -> Iterator[tuple[str, int]]:
    """Yield ``(tier, tokens)`` for tokens ``start`` … ``tokens - 1`` of a position.

    Counted are the records of layers that keep every token. If there are none, the last record
    stands for all.
    """
    last = ""
    for piece, name in found:
        last = name
        if piece.group == BASE and piece.stop > start:
            yield name, piece.stop - max(piece.start, start)
            start = piece.stop
    if last and start < tokens:
        yield last, tokens - start


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


def _misses_behind(
    prompt: PromptIds, losses_of: LossesOf, start: int, before: Miss | None = None
) -> tuple[Miss, ...]:
    """Return why tokens are missing behind the first ``start``, in order and without gaps.

    ``losses_of`` returns the last loss of each block, or None if it is stored. Stored blocks at the
    beginning are skipped; stored blocks behind a gap get the reason of the gap. ``before`` is the
    gap that ends at ``start``, if there is one.
    """
    size, full, length = prompt.size, prompt.full, len(prompt)
    found = _MissList(start, before)
    gap, first = False, start // size
    for number, loss in enumerate(losses_of(full[first:]), start=first):
        begin, end = number * size, (number + 1) * size
        if loss is not None and not gap:
            # This block may contain the tail of a shorter prompt, stored now or lost.
            gap, ids = True, prompt.tails(number)
            _add_tail(found, ids, losses_of, begin, first=True, block_known=loss.what != "never")
        found.add(end, loss)
    rest = len(full) * size
    if rest < length:
        _add_tail(found, prompt.tails(len(full)), losses_of, rest, first=not gap)
        found.add(length, _NEVER)
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


class Followers:
    """Remembers which blocks follow which, so that a removal can delete them too.

    Block ids are hashes, from which the order cannot be read. The latest `_MOST_LINKS` links of
    prompts that this store put or read are kept.

    Thread safety: all methods. Cost: about 0.1 µs a block, and up to 500 bytes a link.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next: OrderedDict[bytes, set[bytes]] = OrderedDict()
        self._links = 0

    def note(self, blocks: Sequence[bytes]) -> None:
        """Record that a prompt consists of ``blocks``, in this order."""
        known = self._next
        new = [
            (before, block)
            for before, block in pairwise(blocks)
            if block not in known.get(before, ())
        ]
        if not new:
            return
        with self._lock:
            for before, block in new:
                behind = known.setdefault(before, set())
                self._links += block not in behind
                behind.add(block)
            while self._links > _MOST_LINKS:
                self._links -= len(known.popitem(last=False)[1])

    def delete(self, blocks: Iterable[bytes], delete: Callable[[list[bytes]], Removed]) -> Removed:
        """Call ``delete`` for blocks and those known to follow them."""
        ids = list(blocks)
        return delete([*ids, *self._take(ids)])

    def _take(self, blocks: Iterable[bytes]) -> list[bytes]:
        """Return all blocks known to follow ``blocks``, directly or not, and forget these links."""
        found: dict[bytes, None] = {}
        ahead = list(blocks)
        with self._lock:
            while ahead:
                behind = self._next.pop(ahead.pop(), None)
                if behind is None:
                    continue
                self._links -= len(behind)
                ahead += behind
                found.update(dict.fromkeys(behind))
        return list(found)


class Prefetch:
    """Handle of a background read of a prompt's KV from slower tiers into memory.

    After the store is closed, `done` and `cancel` still work; everything else raises
    `IllegalStep`.

    Thread safety: all methods.
    """

    __slots__ = ("_blocks", "_lengths", "_whole", "start")

    def __init__(
        self, blocks: BlockPrefetch, start: int, lengths: Sequence[int], *, whole: bool = False
    ) -> None:
        self._blocks = blocks
        self._lengths = lengths  # filled by the background thread, once it looked the blocks up
        self._whole = whole  # only all records together are of use
        self.start = start
        """The first token of the first requested block."""

    @property
    def done(self) -> bool:
        """Whether no more blocks will arrive: all are in memory, or the rest cannot be read."""
        return self._blocks.done

    @property
    def tokens(self) -> int:
        """Length of the prompt's prefix that is in memory now, in tokens.

        Of snapshots, 0 until all records of the position are there.
        """
        return self._count(self._blocks.ready)

    @property
    def sources(self) -> tuple[tuple[str, int], ...]:
        """``(tier, tokens)`` of the blocks in memory now, in order from `start`."""
        names = self._blocks.sources
        parts = zip(names, self._lengths, strict=False)
        return runs_of((name, tokens) for name, tokens in parts if tokens)

    def wait(self, timeout: float | None = None) -> int:
        """Wait until `done`, at most ``timeout`` seconds, and return `tokens`."""
        timeout = None if timeout is None else seconds_of("timeout", timeout)
        return self._count(self._blocks.wait(timeout))

    def cancel(self) -> None:
        """Start no more reads. Reads that have begun still complete."""
        self._blocks.cancel()

    def _count(self, ready: int) -> int:
        if self._whole and ready < len(self._lengths):
            return 0
        return self.start + sum(self._lengths[:ready]) if ready else 0
