"""`KVReporter`: counts puts and gets, and reports them to hooks and the log."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvkeep.store.blocks.stats import StoreCounters

if TYPE_CHECKING:
    from kvkeep.store.blocks.stats import Put
    from kvkeep.store.blocks.timing import Timing
    from kvkeep.store.kv.loaded import LoadedKV
    from kvkeep.store.kv.snapshots import LoadedSnapshot

__all__ = ["KVReporter"]


class KVReporter:
    """Counts the tokens of a store's puts and gets, and reports each operation.

    ``began`` is what `Timing.begin` returned. Thread safety: all methods.
    """

    def __init__(self, token_bytes: int, timing: Timing) -> None:
        self._token_bytes = token_bytes
        self._timing = timing
        self.counters = StoreCounters()

    def put(self, began: float, given: int, put: Put, tier: str) -> None:
        """Report a put of ``given`` tokens; ``tier`` is the first one."""
        self.counters.count(
            puts=1, put_tokens=put.tokens, skipped_tokens=put.skipped, dropped_tokens=put.dropped
        )
        if began:
            tiers = [(tier, put.tokens)] if put.tokens else []
            size = put.tokens * self._token_bytes
            self._timing.end(began, "put", asked=given, moved=put.tokens, size=size, tiers=tiers)

    def get(self, began: float, requested: int, loaded: LoadedKV | LoadedSnapshot) -> None:
        """Report a get of ``requested`` tokens."""
        tokens = loaded.tokens
        self.counters.count(gets=1, asked_tokens=requested, hit_tokens=tokens)
        if began:
            size = tokens * self._token_bytes
            self._timing.end(
                began, "get", asked=requested, moved=tokens, size=size, tiers=loaded.tiers
            )
