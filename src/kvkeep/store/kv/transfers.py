"""Puts and gets of KV: between a caller's tensors and the blocks in tiers."""

from __future__ import annotations

import threading
import time
from contextlib import nullcontext
from itertools import accumulate
from typing import TYPE_CHECKING, Final, NamedTuple

from kvkeep.store.blocks.stats import Put, closed_is_illegal, runs_of, seconds_of
from kvkeep.store.kv.kept import delete_from, find_stored, pieces_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvkeep.core.tokens import TokenArray
    from kvkeep.store.kv.forms import KV, Form
    from kvkeep.store.kv.kept import Followers, StoredBlocks
    from kvkeep.store.kv.names import Names, PromptBlocks
    from kvkeep.store.kv.paying import LoadChoice, LoadPiece
    from kvkeep.store.tiers import Miss, TieredStore

__all__ = ["KVTransfers", "LoadedKV", "tails_of"]

_WAIT_S: Final = 60.0
"""Seconds that each slower tier has to write blocks for which a put waits."""


class KVTransfers:
    """Copies KV, in the form of one store, into blocks and out of them.

    Thread safety: all methods. Replacements of any prompts wait for each other.
    """

    def __init__(self, form: Form, followers: Followers) -> None:
        self._form = form
        self._followers = followers
        self._replacing = threading.Lock()

    def put(
        self,
        tiered: TieredStore,
        prompt: PromptBlocks,
        kv: KV,
        *,
        stop: int,
        wait: bool,
        tail: bool,
        replace: bool,
        exact: int | None = None,
    ) -> Put:
        """See `KVStore.put`; ``kv`` is that of the prompt from its ``start`` on.

        Tokens from ``stop`` on are not stored, because they are never read again.
        """
        row, start, names = prompt
        self._form.check(kv, len(row) - start)
        unread = len(row) - stop
        if unread:
            row, kv = row[:stop], self._form.cut(kv, 0, stop - start)
        size = names.block_tokens
        first = -(-start // size)  # the first block of which kv has all tokens
        full = names.full(row)
        blocks, lengths = full[first:], [size] * max(0, len(full) - first)
        end = len(full) * size
        if tail and start <= end < len(row):
            blocks.append(names.tails(full, row[end:])[-1])
            lengths.append(len(row) - end)
        failed: tuple[str, ...] = ()

        def fill(at: int, raw: memoryview) -> None:
            begin = (first + at) * size - start
            self._form.write(self._form.cut(kv, begin, begin + lengths[at]), raw, lengths[at])

        with self._replacing if replace else nullcontext(), closed_is_illegal():
            if replace:
                old = prompt._replace(start=first * size)
                failed = delete_from(tiered, old, self._followers, tiered.supersede).failed
            self._followers.note(names.unshared([*full[:first], *blocks]))
            before, known = full[:first], None
            if exact is None:
                begun = inexact_from(tiered, names, row, full)
            else:
                known = sum(first * size + end <= exact for end in accumulate(lengths))
                begun = exact // size if exact < len(row) else None
                if begun is not None:  # remembered for puts that do not say it
                    tiered.inexact.add([names.head(row, begun, full)])
            if begun is not None and begun < first:
                before = [*before, names.head(row, begun, full)]
            elif begun is not None:
                tiered.inexact.add(blocks[begun - first : begun - first + 1])
            written = tiered.write(
                blocks, self._form.sizes(lengths), fill, wait=_WAIT_S if wait else None,
                before=before, exact=known,
            )  # fmt: skip
        kept = sum(lengths[at] for at in written.kept)
        skipped = sum(lengths[at] for at in written.already)
        dropped = sum(lengths) - kept - skipped
        partial = len(row) - start - sum(lengths)
        return Put(kept, skipped, dropped, partial, failed, unread)

    def get(
        self,
        tiered: TieredStore,
        prompt: PromptBlocks,
        out: KV | None,
        *,
        sink: Callable[[int, int, KV, str], bool] | None,
        tuples: bool,
        deadline: float | None,
        sources: bool,
        choose: Callable[[list[LoadPiece]], LoadChoice] | None = None,
    ) -> LoadedKV:
        """See `KVStore.get`; ``sources``: whether the tiers are to be named.

        ``choose`` decides how much of what is stored to load; None: all of it.
        """
        row, start, names = prompt
        if out is not None:
            self._form.check_room(out, len(row) - start)
        until = None
        if deadline is not None:
            until = time.monotonic() + seconds_of("deadline", deadline)
        found, choice = find_stored(tiered, prompt, until), None
        if choose is not None:
            choice = choose(pieces_of(found, prompt, self._form, tiered.names))
            found, until = self._cut(tiered, found, choice, start % names.block_tokens, until)
        blocks, levels, lengths = found
        skip = start % names.block_tokens if lengths else 0
        total = sum(lengths) - skip
        slower = () if choice is None else choice.misses
        if total <= 0:
            return LoadedKV(None, 0, slower=slower)
        into = out
        if into is None and sink is None:
            into = self._form.empty(total, tuples=tuples)
        ends = [end - skip for end in accumulate(lengths)]
        read_from: list[str] = []
        wanted = True

        def take(at: int, raw: memoryview) -> None:
            nonlocal wanted
            begin, behind = ends[at - 1] if at else 0, 0 if at else skip
            if into is not None:
                part = self._form.cut(into, begin, ends[at])
                self._form.read(raw, lengths[at], part, skip=behind)
            if sink is not None:
                self._note_inexact(tiered, prompt, blocks, at)
                kv = self._form.view(raw, lengths[at], skip=behind)
                wanted = sink(start + begin, start + ends[at], kv, read_from[-1])

        left = None if until is None else max(0.0, until - time.monotonic())
        with closed_is_illegal():
            count = tiered.read(
                blocks,
                self._form.sizes(lengths),
                take,
                levels=levels,
                deadline=left,
                cancelled=lambda: not wanted,
                sources=read_from,
            )
        if choice is not None and count < len(blocks) and until and time.monotonic() >= until:
            at = start + ends[count - 1] if count else start
            slower = (choice.overtaken(at, tiered.names[levels[count]]), *slower)
        if not count:
            return LoadedKV(None, 0, slower=slower)
        self._followers.note(names.unshared(blocks[:count]))
        if sink is None:
            for at in range(count):
                self._note_inexact(tiered, prompt, blocks, at)
        parts = zip(read_from if sources else (), [lengths[0] - skip, *lengths[1:]], strict=False)
        tokens = ends[count - 1]
        kv = None if into is None else self._form.cut(into, 0, tokens)
        return LoadedKV(kv, tokens, runs_of(parts), slower)

    @staticmethod
    def _note_inexact(
        tiered: TieredStore, prompt: PromptBlocks, blocks: Sequence[bytes], at: int
    ) -> None:
        """Remember the head of a block that is not exact: other prompts may begin with it."""
        if tiered.inexact and blocks[at] in tiered.inexact:
            row, start, names = prompt
            first = start // names.block_tokens
            tiered.inexact.add([names.head(row, first + at, names.full(row))])

    def _cut(
        self,
        tiered: TieredStore,
        found: StoredBlocks,
        choice: LoadChoice,
        skip: int,
        until: float | None,
    ) -> tuple[StoredBlocks, float | None]:
        """Return the blocks to load, and until when; read a few others if that may teach."""
        kept = found.up_to(choice.tokens - choice.start + skip)
        at = len(kept.ids)
        if at < len(found.ids):
            sizes = self._form.sizes(found.lengths[at:])
            tiered.relearn(found.ids[at:], sizes, found.levels[at])
        if choice.patience_s is not None:
            due = time.monotonic() + choice.patience_s
            until = due if until is None else min(until, due)
        return kept, until


def inexact_from(
    tiered: TieredStore, names: Names, row: TokenArray, full: list[bytes]
) -> int | None:
    """Return the first block of which a caller may have begun with KV that is not exact.

    A caller that was given a block, or a tail, may use its first tokens in another prompt, whose
    block has another id. So the first token of each such block is remembered, too. None: there is
    no such block. Cost: a hash for each block, if anything was given that is not exact.
    """
    if not tiered.inexact:
        return None
    count = -(-len(row) // names.block_tokens)
    return next((at for at in range(count) if names.head(row, at, full) in tiered.inexact), None)


def tails_of(tiered: TieredStore, names: Names, row: TokenArray, full: list[bytes]) -> list[bytes]:
    """Return the ids of all tails of a prompt, if a caller was given a tail that is not exact.

    The block that contains its tokens has another id. Cost: 1 µs a token, else none.
    """
    if not tiered.inexact.tails:
        return []
    size = names.block_tokens
    return [
        tail
        for start in range(0, len(row), size)
        for tail in names.tails(
            full[max(0, start // size - 1) : start // size], row[start : start + size], start=start
        )
    ]


class LoadedKV(NamedTuple):
    """KV of the first ``tokens`` tokens from a prompt's ``start`` on.

    ``tiers`` are ``(tier, tokens)`` in order, the tiers the KV was read from; empty unless they
    were requested. ``slower`` says what was stored and not loaded because computing is faster.
    """

    kv: KV | None
    tokens: int
    tiers: tuple[tuple[str, int], ...] = ()
    slower: tuple[Miss, ...] = ()
