"""Putting KV: cut into blocks, and written where it is new."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from typing import TYPE_CHECKING, Final

from kvkeep.store.blocks.stats import Put, closed_is_illegal
from kvkeep.store.kv.removal import delete_from

if TYPE_CHECKING:
    from kvkeep.store.kv.forms import KV, Form
    from kvkeep.store.kv.names import PromptBlocks
    from kvkeep.store.kv.removal import Followers
    from kvkeep.store.tiers import TieredStore

__all__ = ["KVWriter"]

_WAIT_S: Final = 60.0
"""Seconds that each slower tier has to write blocks for which a put waits."""


class KVWriter:
    """Writes the KV of prompts in the form of one store.

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
        wait: bool,
        tail: bool,
        replace: bool,
    ) -> Put:
        """See `KVStore.put`; ``kv`` is that of the prompt from its ``start`` on."""
        row, start, names = prompt
        self._form.check(kv, len(row) - start)
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
            self._followers.note([*full[:first], *blocks])
            written = tiered.write(
                blocks, self._form.sizes(lengths), fill, wait=_WAIT_S if wait else None
            )
        kept = sum(lengths[at] for at in written.kept)
        skipped = sum(lengths[at] for at in written.already)
        dropped = sum(lengths) - kept - skipped
        partial = len(row) - start - sum(lengths)
        return Put(kept, skipped, dropped, partial, failed)
