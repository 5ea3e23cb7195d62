"""`KeptPrompts`: which records a store keeps of a prompt; `WholeBlocks`: blocks of all layers."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from functools import partial
from itertools import accumulate, groupby, pairwise
from typing import TYPE_CHECKING, NamedTuple

from kvkeep.store.blocks.stats import Lookup, closed_is_illegal, runs_of, seconds_of
from kvkeep.store.kv.paying import LoadPiece
from kvkeep.store.tiers import Loss, Miss

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvkeep.core.tokens import TokenArray
    from kvkeep.store.codecs import BlockShape
    from kvkeep.store.kv.forms import Form
    from kvkeep.store.kv.names import Names, PromptBlocks
    from kvkeep.store.tiers import BlockPrefetch, Removed, TieredStore

    LossesOf = Callable[[Sequence[bytes]], list[Loss | None]]

__all__ = [
    "Followers",
    "KeptPrompts",
    "Prefetch",
    "StoredBlocks",
    "WholeBlocks",
    "delete_from",
    "delete_ids",
    "find_stored",
    "first_miss",
    "misses_behind",
    "pieces_of",
]

_NEVER = Loss("", "never", None, "")
_MOST_LINKS = 1 << 15


class KeptPrompts(ABC):
    """Finds the records of prompts, and acts on them; for each method see `PromptStore`.

    The tiers are an argument, because users of a shared store have tiers of their own to close.

    Thread safety: all methods.

    Attributes:
        block_shape: the shape of a record's raw bytes, for codecs.
    """

    block_shape: BlockShape

    @abstractmethod
    def lookup(self, tiered: TieredStore, prompt: PromptBlocks, tiers: Sequence[str]) -> Lookup:
        """Return the length of the stored prefix; ``tiers`` are the names of all levels."""

    @abstractmethod
    def pieces(
        self, tiered: TieredStore, prompt: PromptBlocks, tiers: Sequence[str]
    ) -> list[LoadPiece]:
        """Return what is stored of the prompt from its ``start`` on, in pieces to load."""

    @abstractmethod
    def why(
        self, tiered: TieredStore, prompt: PromptBlocks, since: float | None
    ) -> tuple[Miss, ...]:
        """Return why tokens from the prompt's ``start`` on are missing."""

    @abstractmethod
    def touch(self, tiered: TieredStore, prompt: PromptBlocks) -> None:
        """Count a use of the records that are known to be stored."""

    @abstractmethod
    def beside(self, tiered: TieredStore, prompt: PromptBlocks, full: list[bytes]) -> list[bytes]:
        """Return the ids of records that a prompt has beside its blocks, which are ``full``."""

    @abstractmethod
    def prefetch(self, tiered: TieredStore, prompt: PromptBlocks) -> Prefetch:
        """Start to read the records into memory."""

    @abstractmethod
    def pin(self, tiered: TieredStore, prompt: PromptBlocks, seconds: float) -> int:
        """Pin the stored prefix; return its tokens."""

    @abstractmethod
    def unpin(self, tiered: TieredStore, prompt: PromptBlocks) -> int:
        """End the pin of the prompt from its ``start`` on; return the tokens that were pinned."""

    @abstractmethod
    def remove(self, tiered: TieredStore, prompt: PromptBlocks) -> Removed:
        """Delete all records with a token from the prompt's ``start`` on."""


class WholeBlocks(KeptPrompts):
    """Blocks with the KV of all layers."""

    def __init__(self, form: Form, followers: Followers) -> None:
        self.block_shape = form.block_shape
        self._form = form
        self._followers = followers

    def lookup(self, tiered: TieredStore, prompt: PromptBlocks, tiers: Sequence[str]) -> Lookup:
        since = time.time()
        found = find_stored(tiered, prompt)
        names = map(tiers.__getitem__, found.levels)
        tokens = sum(found.lengths)
        miss = first_miss(tiered, prompt, tokens, since)
        return Lookup(tokens, runs_of(zip(names, found.lengths, strict=True)), miss=miss)

    def pieces(
        self, tiered: TieredStore, prompt: PromptBlocks, tiers: Sequence[str]
    ) -> list[LoadPiece]:
        return pieces_of(find_stored(tiered, prompt), prompt, self._form, tiers)

    def why(
        self, tiered: TieredStore, prompt: PromptBlocks, since: float | None
    ) -> tuple[Miss, ...]:
        row, start, names = prompt
        return misses_behind(names, partial(tiered.losses_of, since=since), row, start)

    def touch(self, tiered: TieredStore, prompt: PromptBlocks) -> None:
        tiered.used(prompt.names.full(prompt.row))

    def beside(self, tiered: TieredStore, prompt: PromptBlocks, full: list[bytes]) -> list[bytes]:
        row, _, names = prompt
        rest = row[len(full) * names.block_tokens :]
        return names.tails(full, rest)[-1:]

    def prefetch(self, tiered: TieredStore, prompt: PromptBlocks) -> Prefetch:
        return start_prefetch(tiered, self._form, prompt)

    def pin(self, tiered: TieredStore, prompt: PromptBlocks, seconds: float) -> int:
        found = find_stored(tiered, prompt)
        return sum(found.lengths[: tiered.pins.pin(found.ids, seconds)])

    def unpin(self, tiered: TieredStore, prompt: PromptBlocks) -> int:
        found = find_stored(tiered, prompt._replace(start=0))
        first = -(-prompt.start // prompt.names.block_tokens)
        return sum(found.lengths[first:][: tiered.pins.unpin(found.ids[first:])])

    def remove(self, tiered: TieredStore, prompt: PromptBlocks) -> Removed:
        return delete_from(tiered, prompt, self._followers, tiered.remove)


def first_miss(tiered: TieredStore, prompt: PromptBlocks, at: int, since: float) -> Miss | None:
    """Return why the block with token ``at`` cannot be read; None behind the prompt's end.

    ``since`` is when its search began, in Unix seconds. Cost: some µs, or 1 µs for each token of a
    block that the prompt does not fill.
    """
    row, _, names = prompt
    number = at // names.block_tokens
    stop = min(len(row), (number + 1) * names.block_tokens)
    if at >= stop:
        return None
    begin = number * names.block_tokens
    full = names.full(row[:stop])
    block = full[number] if number < len(full) else names.tails(full, row[begin:stop])[-1]
    (loss,) = tiered.losses_of([block], since)
    if loss is None:  # it is there, and was not read in time
        loss = Loss("", "late", time.time(), "no answer")
    return Miss(at, stop, *loss)


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


def delete_from(
    tiered: TieredStore,
    prompt: PromptBlocks,
    followers: Followers,
    delete: Callable[[list[bytes]], Removed],
) -> Removed:
    """Delete every block with a token from ``prompt.start`` on, and the blocks known to follow.

    ``delete`` is ``tiered.remove`` or ``tiered.supersede``.
    """
    tiered.check_open()
    return delete_ids(_ids_from(prompt), followers, delete)


def delete_ids(
    ids: list[bytes], followers: Followers, delete: Callable[[list[bytes]], Removed]
) -> Removed:
    """Delete blocks, and the blocks known to follow them."""
    return delete([*ids, *followers.take(ids)])


def _ids_from(prompt: PromptBlocks) -> list[bytes]:
    """Return the ids of all blocks of a prompt that have a token from its ``start`` on.

    These are its full blocks and every tail, also those that shorter prompts put within a full
    block. Cost: about 1 µs a token.
    """
    row, start, names = prompt
    size = names.block_tokens
    full = names.full(row)
    ids: list[bytes] = []
    for number in range(start // size, -(-len(row) // size)):
        begin = number * size
        before = full[max(0, number - 1) : number]
        tails = names.tails(before, row[begin : begin + size], start=begin)
        ids += tails[max(0, start - begin) :]  # the tail of a whole block is that block
    return ids


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

    def take(self, blocks: Iterable[bytes]) -> list[bytes]:
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


def start_prefetch(tiered: TieredStore, form: Form, prompt: PromptBlocks) -> Prefetch:
    """Begin to read the stored blocks of ``prompt`` into memory; return at once."""
    lengths: list[int] = []

    def plan() -> tuple[list[bytes], list[int]]:  # in a thread: a lookup may query slow tiers
        found = find_stored(tiered, prompt)
        lengths.extend(found.lengths)
        return found.ids, form.sizes(found.lengths)

    first = prompt.start - prompt.start % prompt.names.block_tokens
    return Prefetch(tiered.prefetch(plan), first, lengths)
