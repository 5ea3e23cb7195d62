"""`TreeReturns`: when the conversations of a tree inside SGLang return."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from sglang.srt.managers.schedule_batch import (
    FINISH_LENGTH,
    FINISH_MATCHED_STR,
    FINISH_MATCHED_TOKEN,
    FINISHED_MATCHED_REGEX,
)

from kvkeep.core.returns import Ended, Returns, stop_after

if TYPE_CHECKING:
    from collections.abc import Callable

    from sglang.srt.managers.schedule_batch import Req

    from kvkeep.core.keys import Namespace
    from kvkeep.core.prefix.node import Node
    from kvkeep.core.prefix.waits import RunningPrompt
    from kvkeep.integrations.sglang.symbols import SlotIndex

__all__ = ["FinishedAnswers", "TreeReturns"]


_LOG = logging.getLogger("kvkeep.sglang")


class FinishedAnswers:
    """Tells how requests ended, as the classes of `kvkeep.core.returns` need it.

    An answer that ended with a token says with which one, and which mark came before
    (`stop_after`): "stop 151645 after 151658" is a tool call of some models, "stop 151645" is not.
    An aborted request is "unfinished".

    Thread safety: the scheduler's thread. Cost: `stop_after`'s.
    """

    def __init__(self) -> None:
        self._tokenizer: object = None
        self._named: frozenset[int] = frozenset()

    def of(self, req: Req) -> Ended:
        """Return how a finished request ended, and the length of its answer."""
        reason, answer = req.finished_reason, req.output_ids_through_stop
        stop = "unfinished"
        if isinstance(reason, FINISH_MATCHED_TOKEN) and len(answer):
            stop = stop_after(answer, self._names(req.tokenizer))
        elif isinstance(reason, FINISH_MATCHED_STR | FINISHED_MATCHED_REGEX):
            stop = "stop text"
        elif isinstance(reason, FINISH_LENGTH):
            stop = "length"
        return Ended(stop, len(answer))

    def _names(self, tokenizer: Any) -> frozenset[int]:
        """Return the tokens that were added to the vocabulary by name, as far as it tells."""
        if tokenizer is not self._tokenizer:
            self._tokenizer = tokenizer
            try:
                self._named = frozenset(map(int, tokenizer.get_added_vocab().values()))
            except (AttributeError, NotImplementedError) as error:
                _LOG.warning("the tokenizer does not tell its added tokens: %.300s", str(error))
                self._named = frozenset()
        return self._named


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
