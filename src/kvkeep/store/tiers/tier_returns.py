"""`TierReturns`: follows the conversations of a store, and tells its tiers when they wait."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kvkeep.core.returns import Returns
from kvkeep.store.tiers.conversations import BlockWaits, Conversations
from kvkeep.store.tiers.index import Index

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from kvkeep.core.returns import Ended, Wait
    from kvkeep.store.tiers.conversations import Chain
    from kvkeep.store.tiers.front import FrontOrder

__all__ = ["TierReturns"]


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
        returns: Returns | None = None,
    ) -> None:
        returns = Returns() if returns is None else returns
        self.conversations = Conversations(returns, clock)
        # Memory that processes share has an order of its own.
        tiers = [order for order in orders if isinstance(order, Index)]
        self._tiers = [tier for tier in tiers if tier.awaits]
        self.waits = BlockWaits(returns, clock) if self._tiers else None
        for tier in self._tiers:
            assert self.waits is not None
            tier.attend(self.waits)

    def requested(self, chain: Chain) -> None:
        """Record a prompt that is read or stored; see `Conversations.requested`."""
        self._changed(self.conversations.requested(chain))

    def used(self, blocks: Sequence[bytes], stored: bool = False) -> None:
        """Record that a request used ``blocks``, before the catalogues are told.

        If it ``stored`` them, that may be after its end.
        """
        if self.waits is not None:
            self.waits.used(blocks, stored=stored)

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
            tier.waits_changed(blocks)
