"""What the tests of feeds share: a receiver that mirrors, and waiting."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from kvkeep.serve.kv_events import AllBlocksCleared, BlockStored

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvkeep.serve.kv_events import KVEvent


class Mirror:
    """What each instance holds as far as it was told: (instance, rank) → hash → copies."""

    def __init__(self) -> None:
        self.held: dict[tuple[str, int], dict[Any, int]] = {}
        self.events: list[KVEvent] = []
        self.clears = 0

    def apply(self, instance: str, events: Sequence[KVEvent], rank: int = 0) -> None:
        held = self.held.setdefault((instance, rank), {})
        for event in events:
            self.events.append(event)
            if isinstance(event, AllBlocksCleared):
                held.clear()
            elif isinstance(event, BlockStored):
                for block in event.block_hashes:
                    held[block] = held.get(block, 0) + 1
            else:
                for block in event.block_hashes:
                    held[block] = held.get(block, 0) - 1
                    if held[block] <= 0:
                        del held[block]

    def clear(self, instance: str, rank: int | None = None) -> None:
        self.clears += 1
        self.held.pop((instance, rank or 0), None)

    def of(self, instance: str = "a", rank: int = 0) -> set[Any]:
        held = self.held.get((instance, rank), {})
        assert all(copies == 1 for copies in held.values()), "told twice"
        return set(held)


def eventually(holds: Any, seconds: float = 20.0) -> None:
    """Wait until ``holds()``."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, f"still not so after {seconds} s"
        time.sleep(0.005)
