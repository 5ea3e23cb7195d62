"""`TierReturns`: follows the conversations of a store, and tells its tiers when they wait."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Final

from kvkeep.core.returns import Returns, Wait, bucket_of
from kvkeep.store.tiers.catalogue import Catalogue
from kvkeep.store.tiers.conversations import Conversations

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Hashable, Sequence

    from kvkeep.core.returns import Ended
    from kvkeep.core.returns.learner import Tenant
    from kvkeep.store.tiers.conversations import Chain
    from kvkeep.store.tiers.front import FrontOrder

__all__ = ["BlockWaits", "SharedReturns", "TierReturns"]


class TierReturns:
    """What a store knows of its conversations: when they return, and what of answers is read.

    Tiers whose policy orders by waits learn of them at the end of each request. Where no one
    reports ends of requests, nothing is followed and nothing costs anything.

    Thread safety: all methods; catalogues are told outside of all locks.

    Arguments:
        orders: all catalogues of the store, fastest first, before any block is added to them.
        clock: returns seconds.
        returns: the learner.

    Attributes:
        conversations: those that wait.
        waits: at which blocks they do; None if no tier orders by them.
    """

    def __init__(
        self,
        orders: Sequence[FrontOrder],
        clock: Callable[[], float] = time.monotonic,
        *,
        returns: SharedReturns | None = None,
    ) -> None:
        returns = SharedReturns() if returns is None else returns
        self.conversations = Conversations(returns, clock)
        # Memory that processes share has an order of its own.
        tiers = [order.waiting for order in orders if isinstance(order, Catalogue)]
        self._tiers = [tier for tier in tiers if tier.awaits]
        self.waits = BlockWaits(returns, clock) if self._tiers else None
        for tier in self._tiers:
            assert self.waits is not None
            tier.attend(self.waits)

    def requested(self, chain: Chain) -> None:
        """Record a prompt that is read or stored; see `Conversations.requested`."""
        self._changed(self.conversations.requested(chain))

    def used(self, blocks: Sequence[bytes], new: Container[bytes] = ()) -> None:
        """Record that a request used ``blocks``, before the catalogues are told.

        Those in ``new`` it stored, maybe after its end.
        """
        if self.waits is not None:
            self.waits.used(blocks, new)

    def ended(
        self,
        chain: Chain,
        prompt: int,
        ended: Ended,
        tenant: Hashable = None,
        beside: Sequence[bytes] = (),
    ) -> None:
        """Record the end of a request; see `Conversations.ended`.

        ``beside`` are records of ``chain`` beside its whole blocks.
        """
        wait, left = self.conversations.ended(chain, prompt, ended, tenant)
        self._changed(left)
        self._begin(wait, chain.blocks, beside)

    def _begin(self, wait: Wait, blocks: Sequence[bytes], beside: Sequence[bytes] = ()) -> None:
        if self.waits is not None:
            waiting = [*blocks, *beside]
            self.waits.begin(waiting, wait)
            self._changed(waiting)

    # --- of conversations that are followed elsewhere ------------------------------------------

    def began(
        self,
        blocks: Sequence[bytes],
        ended: Ended,
        tokens: int,
        since: float,
        *,
        before: Wait | None = None,
        tenant: Hashable = None,
    ) -> Wait:
        """Record a conversation that waits at ``blocks``; see `Returns.began`."""
        learner = self.conversations.returns
        wait = learner.began(ended, tokens, since, before=before, tenant=tenant)
        self._begin(wait, blocks)
        return wait

    def over(self, blocks: Sequence[bytes], wait: Wait, now: float, *, came: bool) -> None:
        """Record that a wait is over, as its conversation ``came`` or is followed no longer.

        It left ``blocks`` behind.
        """
        learner = self.conversations.returns
        (learner.returned if came else learner.lost)(wait, now)
        self._changed(blocks)

    def _changed(self, blocks: Sequence[bytes]) -> None:
        for tier in self._tiers if blocks else ():
            tier.changed(blocks)


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
