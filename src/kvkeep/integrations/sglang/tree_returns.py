"""`TreeReturns`: when the conversations of a tree inside SGLang return."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from kvkeep.core.returns import Returns
from kvkeep.integrations.sglang.ends import FinishedAnswers

if TYPE_CHECKING:
    from collections.abc import Callable

    from sglang.srt.managers.schedule_batch import Req

    from kvkeep.core.keys import Namespace
    from kvkeep.core.prefix.node import Node
    from kvkeep.core.prefix.waits import RunningPrompt
    from kvkeep.integrations.sglang.symbols import SlotIndex

__all__ = ["TreeReturns"]


class TreeReturns:
    """Tells the policy `returns` when requests begin and end.

    A prompt that extends that of an earlier request is the return of that conversation. A request
    that was retracted goes on when it runs again: it began once, and ends once.

    Thread safety: none. Memory: a record for each request that SGLang knows, besides `Waits`. Cost:
    about 10 µs a request.
    """

    def __init__(self, index: SlotIndex, clock: Callable[[], float]) -> None:
        self._index = index
        self._ends = FinishedAnswers()
        self.returns = Returns()
        """What is learned."""
        self._waits = index.tree.keep_waits(self.returns, clock, index.page_size)
        self._running: WeakKeyDictionary[Req, RunningPrompt] = WeakKeyDictionary()

    def opened(self, req: Req, namespace: Namespace, hold: Node | None) -> None:
        """Record that the first tokens of a request are computed; ``hold`` is of its prefix."""
        if req in self._running:
            return
        index, tokens = self._index, req.full_untruncated_fill_ids
        node = index.tree.root(namespace) if hold is None else hold
        page = node.end

        def following() -> bytes:
            whole = page < index.pages_of(len(tokens))
            return index.symbols(tokens, page, page + 1) if whole else b""

        self._running[req] = self._waits.opened(
            node, len(req.origin_input_ids), namespace, following
        )

    def closed(self, req: Req, hold: Node, tokens: int) -> None:
        """Record the end of a request, of which ``tokens`` are stored up to ``hold``."""
        running = self._running.pop(req, None)
        if running is None or hold.parent is None:
            return
        answer = max(0, tokens - running.tokens)
        first = int(req.output_ids[0]) if len(req.output_ids) else None
        self._waits.closed(hold, running, answer, self._ends.of(req), first)
