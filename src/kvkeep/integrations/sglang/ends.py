"""`FinishedAnswers`: how SGLang's requests ended, in the words of our own engine."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from sglang.srt.managers.schedule_batch import (
    FINISH_LENGTH,
    FINISH_MATCHED_STR,
    FINISH_MATCHED_TOKEN,
    FINISHED_MATCHED_REGEX,
)

from kvkeep.core.returns import Ended, stop_after

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

__all__ = ["FinishedAnswers"]

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
