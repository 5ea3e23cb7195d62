"""Getting KV: stored blocks copied into tensors."""

from __future__ import annotations

import time
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from kvkeep.store.blocks.stats import closed_is_illegal, runs_of, seconds_of
from kvkeep.store.kv.lookup import find_stored

if TYPE_CHECKING:
    from kvkeep.store.kv.forms import KV, Form
    from kvkeep.store.kv.names import PromptBlocks
    from kvkeep.store.kv.removal import Followers
    from kvkeep.store.tiers import TieredStore

__all__ = ["KVReader", "LoadedKV"]


class LoadedKV(NamedTuple):
    """KV of the first ``tokens`` tokens from a prompt's ``start`` on.

    ``tiers`` are ``(tier, tokens)`` in order, the tiers the KV was read from; empty unless they
    were requested.
    """

    kv: KV | None
    tokens: int
    tiers: tuple[tuple[str, int], ...] = ()


class KVReader:
    """Reads the KV of prompts in the form of one store. Thread safety: all methods."""

    def __init__(self, form: Form, followers: Followers) -> None:
        self._form = form
        self._followers = followers

    def get(
        self,
        tiered: TieredStore,
        prompt: PromptBlocks,
        out: KV | None,
        *,
        tuples: bool,
        deadline: float | None,
        sources: bool,
    ) -> LoadedKV:
        """See `KVStore.get`; ``sources``: whether the tiers are to be named."""
        row, start, names = prompt
        if out is not None:
            self._form.check_room(out, len(row) - start)
        until = None
        if deadline is not None:
            until = time.monotonic() + seconds_of("deadline", deadline)
        blocks, levels, lengths = find_stored(tiered, prompt, until)
        skip = start % names.block_tokens if lengths else 0
        total = sum(lengths) - skip
        if total <= 0:
            return LoadedKV(None, 0)
        into = self._form.empty(total, tuples=tuples) if out is None else out
        ends = [end - skip for end in accumulate(lengths)]

        def take(at: int, raw: memoryview) -> None:
            begin = ends[at - 1] if at else 0
            part = self._form.cut(into, begin, ends[at])
            self._form.read(raw, lengths[at], part, skip=0 if at else skip)

        left = None if until is None else max(0.0, until - time.monotonic())
        read_from: list[str] | None = [] if sources else None
        with closed_is_illegal():
            count = tiered.read(
                blocks,
                self._form.sizes(lengths),
                take,
                levels=levels,
                deadline=left,
                sources=read_from,
            )
        if not count:
            return LoadedKV(None, 0)
        self._followers.note(blocks[:count])
        parts = zip(read_from or (), [lengths[0] - skip, *lengths[1:]], strict=False)
        return LoadedKV(self._form.cut(into, 0, ends[count - 1]), ends[count - 1], runs_of(parts))
