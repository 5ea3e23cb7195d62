"""`Prefetch`: a prompt's KV being read into memory in the background."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvkeep.store.blocks.stats import runs_of, seconds_of
from kvkeep.store.kv.lookup import find_stored

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvkeep.store.kv.forms import Form
    from kvkeep.store.kv.names import PromptBlocks
    from kvkeep.store.tiers import BlockPrefetch, TieredStore

__all__ = ["Prefetch", "start_prefetch"]


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
