"""`BlockWaits`: which conversations wait at which blocks."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvkeep.core.returns import Returns, Wait
    from kvkeep.store.tiers.tier_shares import IndexedBlock

__all__ = ["BlockWaits"]

_WAITS: Final = 4  # of conversations that share a block: those worth most
_MOST_BLOCKS: Final = 1 << 17


class BlockWaits:
    """The waits of the blocks used last, 131,072 of them, whatever tier holds them.

    A block that several conversations wait behind has the waits of up to four, those worth most.
    A request that has not ended counts as a wait of the most general class.

    Thread safety: all methods. Cost: about a microsecond a block. Memory: up to 400 bytes a block,
    and nothing before the first request.
    """

    def __init__(self, returns: Returns, clock: Callable[[], float]) -> None:
        self.returns = returns
        self.clock = clock
        self._lock = threading.Lock()
        self._at: OrderedDict[bytes, tuple[Wait, ...]] = OrderedDict()

    def __len__(self) -> int:
        """Return the number of blocks with waits."""
        return len(self._at)

    def used(self, blocks: Sequence[bytes], *, stored: bool = False) -> None:
        """Record that a request, which runs now, used ``blocks``.

        If it ``stored`` them, conversations that wait there already were that request's.
        """
        waits = self._at
        used = [block for block in blocks if not stored or not _awaited(waits.get(block))]
        if used:
            running = self.returns.unknown(self.clock())
            self._add(used, running)

    def begin(self, blocks: Sequence[bytes], wait: Wait) -> None:
        """Record that the conversation of ``wait`` waits at ``blocks``: all of its last request."""
        self._add(blocks, wait)

    def _add(self, blocks: Sequence[bytes], wait: Wait) -> None:
        at, alone = self._at, (wait,)
        with self._lock:
            for block in blocks:
                others = at.pop(block, None)
                if others is None:
                    at[block] = alone
                    continue
                # Requests that ran may run still; they used the block just now as well.
                live = [other for other in others if other.turns and not other.over]
                if len(live) >= _WAITS:
                    live.remove(min(live, key=self.worth))
                at[block] = (*live, wait)
            while len(at) > _MOST_BLOCKS:
                at.popitem(last=False)

    def best(self, block: bytes) -> tuple[Wait | None, int]:
        """Return the wait at ``block`` that is worth most, and how many there are."""
        waits = self._at.get(block, ())
        if len(waits) == 1 and not waits[0].over:
            return waits[0], 1
        live = [wait for wait in waits if not wait.over]
        if len(live) <= 1:
            return (live[0] if live else None), len(live)
        return max(reversed(live), key=self.worth), len(live)

    def outlives(self, entry: IndexedBlock) -> bool:
        """Take over another wait at a victim's block if it is worth more by now; whether it is."""
        wait, others = self.best(entry.block)
        known = entry.wait
        if wait is None or wait is known or others < 2:
            return False
        if known is not None and not known.over and self.worth(wait) <= self.worth(known):
            return False
        entry.wait, entry.followers = wait, others
        return True

    def worth(self, wait: Wait) -> float:
        """Return what keeping KV for the end of ``wait`` is worth now; see `Returns.worth`."""
        return self.returns.worth(wait, self.clock())


def _awaited(waits: tuple[Wait, ...] | None) -> bool:
    """Whether a conversation is among ``waits``."""
    return waits is not None and any(wait.turns and not wait.over for wait in waits)
