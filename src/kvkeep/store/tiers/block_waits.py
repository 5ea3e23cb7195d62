"""`BlockWaits`: which conversations wait at the blocks of tiers, for the policy `returns`.

The policy orders blocks by `Entry.wait`. All tiers of a store look the waits of a block up here, so
a block that moves from one tier to another is worth as much there.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Final

from kvkeep.core.returns import Returns, Wait, bucket_of

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Hashable, Sequence

    from kvkeep.core.returns import Ended
    from kvkeep.core.returns.learner import Tenant

__all__ = ["BlockWaits", "SharedReturns"]

_WAITS: Final = 4  # of conversations that share a block: those worth most
_MOST_BLOCKS: Final = 1 << 17


class SharedReturns(Returns):
    """`Returns` that a store and the policies of its tiers share.

    Thread safety: all methods, by a lock under which no other one is taken.
    """

    def __init__(self, most: int = 65_536) -> None:
        super().__init__(most)
        self._lock = threading.RLock()

    def began(
        self,
        ended: Ended,
        tokens: int,
        now: float,
        *,
        before: Wait | None = None,
        tenant: Hashable = None,
    ) -> Wait:
        with self._lock:
            return super().began(ended, tokens, now, before=before, tenant=tenant)

    def returned(self, wait: Wait, now: float) -> None:
        with self._lock:
            super().returned(wait, now)

    def lost(self, wait: Wait, now: float) -> None:
        with self._lock:
            super().lost(wait, now)

    def tenant(self, name: Hashable) -> Tenant:
        with self._lock:
            return super().tenant(name)

    def learn(self, now: float) -> None:
        with self._lock:
            if self.due:  # else the policy of another tier was faster
                super().learn(now)

    def worth(self, kind: int, bucket: int) -> float:
        with self._lock:
            return super().worth(kind, bucket)


class BlockWaits:
    """The waits of the blocks used last, ``most`` of them, whatever tier holds them.

    A block that several conversations wait behind has the waits of up to four, those worth most.
    A request that has not ended counts as a wait of the most general class.

    Thread safety: all methods. Cost: about a microsecond a block. Memory: up to 400 bytes a block,
    and nothing before the first request.
    """

    def __init__(
        self, returns: SharedReturns, clock: Callable[[], float], most: int = _MOST_BLOCKS
    ) -> None:
        self.returns = returns
        self.clock = clock
        self._most = most
        self._lock = threading.Lock()
        self._at: OrderedDict[bytes, tuple[Wait, ...]] = OrderedDict()

    def __len__(self) -> int:
        """Return the number of blocks with waits."""
        return len(self._at)

    def used(self, blocks: Sequence[bytes], new: Container[bytes] = ()) -> None:
        """Record that a request, which runs now, used ``blocks``.

        Those in ``new`` it stored: if a conversation waits there already, it was that request's.
        """
        waits = self._at
        used = [block for block in blocks if block not in new or not _awaited(waits.get(block))]
        if used:
            running = Wait(0, self.clock(), 0, (), self.returns.tenant(None))
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
            while len(at) > self._most:
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

    def worth(self, wait: Wait) -> float:
        """Return what keeping KV for the end of ``wait`` is worth now; see `Returns.worth`."""
        bucket = bucket_of(self.clock() - wait.since)
        return self.returns.worth(wait.kind, bucket) * 2.0**wait.tenant.octaves


def _awaited(waits: tuple[Wait, ...] | None) -> bool:
    """Whether a conversation is among ``waits``."""
    return waits is not None and any(wait.turns and not wait.over for wait in waits)
