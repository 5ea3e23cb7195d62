"""`TreeExplainer`: why prompts missed `KVKeepTree`."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from kvkeep.core.events import Closed, Opened
from kvkeep.observe.explain import Explainer
from kvkeep.observe.explain.inbox import Inbox
from kvkeep.observe.explain.sentences import shown

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvkeep.core.events import Event
    from kvkeep.core.keys import Namespace
    from kvkeep.core.tokens import TokenArray

__all__ = ["EXPLAIN_LOG", "TreeExplainer"]

EXPLAIN_LOG = logging.getLogger("kvkeep.sglang.explain")
"""At DEBUG a line for each request, at INFO the first causes."""
_SUMMARY_EVERY = 1000
_CAUSES = 3
_MOST_LINES = 10_000


class TreeExplainer:
    """Tells an `Explainer` what a tree does, and logs the answers.

    SGLang locks a prefix before it computes the rest, and says whose prefix it was when the first
    tokens are computed. What other requests of the same batch stored in between could not be
    reused; so a request is explained as of its lock.

    Thread safety: of the tree's calls none, like the tree's; of `explainer` any. Cost: 20 µs a
    request of 8,192 tokens in the scheduler's thread, and in others what `Explainer` says.

    Attributes:
        explainer: explains requests by their ids, and sums them up.
    """

    def __init__(self, number: Callable[[], int], page_size: int, policy: str) -> None:
        self.explainer = Explainer(page_size, policy)
        self._number = number
        self._lines: Inbox[str] = Inbox(self._log, "kvkeep-explain-log", _MOST_LINES)
        self._running: dict[int, tuple[str, float]] = {}
        self._logged = 0

    def see(self, event: Event) -> None:
        """Follow an event of the tree: a hook."""
        if not isinstance(event, Opened):  # those are told when they lock, by `locked`
            self.explainer.see(event)

    def locked(self, namespace: Namespace, tokens: int, cached: int) -> int:
        """Note that a prefix was locked for a prompt; return a number for it."""
        number = self._number()
        # An eviction right before an opening is taken to make room for it. SGLang evicts for a
        # request after it has locked, so what was evicted before it was gone already.
        self.explainer.see(Closed(number, 0, 0))
        self.explainer.see(Opened(number, namespace, tokens, cached))
        return number

    def opened(
        self,
        rid: str,
        tokens: TokenArray,
        namespace: Namespace,
        *,
        cached: int,
        number: int,
    ) -> None:
        """Note whose prompt it is, and all its tokens. Explains a retracted request anew."""
        self._running[number] = rid, time.time()
        self.explainer.opened(rid, tokens, namespace, cached=cached, sequence=number)

    def ended(self, number: int, generated: int = 0, outcome: str = "given_up") -> str:
        """Note the end of a request, and log why its tokens were computed.

        Returns its id; "" for a number that is not of a running request, which changes nothing.
        """
        rid, began = self._running.pop(number, ("", 0.0))
        if rid:
            seconds = time.time() - began
            self.explainer.ended(
                rid, outcome=outcome, generated=generated, ttft_s=None, seconds=seconds
            )
            self._lines.put(rid)
        return rid

    def reset(self) -> None:
        """Note that all requests were given up."""
        for number in tuple(self._running):
            self.ended(number)

    def _log(self, rid: str) -> None:
        said = self.explainer.explain(rid)
        if said is not None:
            EXPLAIN_LOG.debug("request %s: %s", shown(rid), said.sentence)
        self._logged += 1
        if self._logged % _SUMMARY_EVERY == 0 and EXPLAIN_LOG.isEnabledFor(logging.INFO):
            for cause in self.explainer.summary(_SUMMARY_EVERY).causes[:_CAUSES]:
                EXPLAIN_LOG.info("the last %d requests: %s", _SUMMARY_EVERY, cause.sentence)

    def close(self) -> None:
        """Log what is not logged yet, and end the threads. Remembered requests can be explained."""
        self._lines.close()
        self._lines.work_off()
        self.explainer.close()
