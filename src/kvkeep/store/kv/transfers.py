"""Puts and gets of KV: between a caller's tensors and the blocks in tiers."""

from __future__ import annotations

import threading
import time
from contextlib import nullcontext
from itertools import accumulate
from typing import TYPE_CHECKING, Final, NamedTuple, Self

from kvkeep.store.blocks.stats import Put, closed_is_illegal, runs_of, seconds_of
from kvkeep.store.kv.kept import delete_from, find_stored, first_miss, pieces_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvkeep.store.kv.forms import KV, Form
    from kvkeep.store.kv.kept import Followers, StoredBlocks
    from kvkeep.store.kv.names import PromptBlocks
    from kvkeep.store.kv.paying import LoadChoice, LoadPiece
    from kvkeep.store.tiers import Miss, TieredStore

__all__ = ["Get", "KVTransfers", "LoadedKV"]

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
            if exact is not None:  # in blocks from here on, not in tokens
                exact = sum(first * size + end <= exact for end in accumulate(lengths))
            written = tiered.write(
                blocks, self._form.sizes(lengths), fill, wait=_WAIT_S if wait else None,
                exact=exact,
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
        until, since = None, time.time()
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
            miss = slower[0] if slower else first_miss(tiered, prompt, start, since)
            return LoadedKV(Get(None, 0, None, miss), slower=slower)
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
                kv = self._form.view(raw, lengths[at], skip=behind)
                wanted = sink(start + begin, start + ends[at], kv, read_from[-1])

        left = None if until is None else max(0.0, until - time.monotonic())
        with closed_is_illegal():
            count, exact = tiered.read(
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
        tokens = ends[count - 1] if count else 0
        miss = slower[0] if slower else None
        if wanted and not slower:
            miss = first_miss(tiered, prompt, start + tokens, since)
        if not count:
            return LoadedKV(Get(None, 0, None, miss), slower=slower)
        self._followers.note(names.unshared(blocks[:count]))
        parts = zip(read_from if sources else (), [lengths[0] - skip, *lengths[1:]], strict=False)
        kv = None if into is None else self._form.cut(into, 0, tokens)
        until_exact = None if exact == count else start + (ends[exact - 1] if exact else 0)
        return LoadedKV(Get(kv, tokens, until_exact, miss), runs_of(parts), slower)

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


class _KVAndTokens(NamedTuple):
    kv: KV | None
    tokens: int


class Get(_KVAndTokens):
    """The result of `KVStore.get`: ``(kv, tokens)``, and what is to be said of them.

    Attributes:
        kv: of ``tokens`` tokens; None if there are none, or a sink has them.
        tokens: how many were read.
        exact: how many leading tokens of the prompt are exact, if those before the get's ``start``
            are. None: all are. Hand it on: ``put(…, exact=result.exact)`` of the same request.
        miss: why the first block behind ``tokens`` did not come; None if nothing is missing.
    """

    exact: int | None
    miss: Miss | None

    def __new__(cls, kv: KV | None, tokens: int, exact: int | None, miss: Miss | None) -> Self:
        """Return the pair with its attributes."""
        result = super().__new__(cls, kv, tokens)
        result.exact, result.miss = exact, miss
        return result


class LoadedKV(NamedTuple):
    """The result of a get, and what is said of it.

    ``tiers`` are ``(tier, tokens)`` in order, the tiers the KV was read from; empty unless they
    were requested. ``slower`` says what was stored and not loaded because computing is faster.
    """

    result: Get
    tiers: tuple[tuple[str, int], ...] = ()
    slower: tuple[Miss, ...] = ()

    @property
    def tokens(self) -> int:
        """How many tokens were read."""
        return self.result.tokens
