"""`AnswerEnds`: how vLLM's requests ended, in the words of our own engine."""

from __future__ import annotations

import logging
from functools import cached_property
from typing import TYPE_CHECKING

from kvkeep.core.returns import Ended, stop_after

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

__all__ = ["AnswerEnds"]

_LOG = logging.getLogger("kvkeep.vllm")

# By name: vLLM renumbers statuses from release to release.
_STOPPED = "FINISHED_STOPPED"
_OTHERS = {"FINISHED_LENGTH_CAPPED": "length", "FINISHED_REPETITION": "repetition"}


class AnswerEnds:
    """Tells how requests ended, as the classes of `kvkeep.core.returns` need it.

    An answer that ended by itself says with which token, and which mark came before (`stop_after`):
    "stop 151645 after 151658" is a tool call of some models, "stop 151645" is not. Stop texts are
    found in vLLM's front end, which then aborts the request, as it does for a client that leaves:
    both are "unfinished" here.

    Thread safety: the scheduler's thread. Cost: at the first end vLLM's tokenizer is loaded, unless
    the scheduler has it already; then `stop_after`'s.
    """

    def __init__(self, vllm_config: VllmConfig) -> None:
        self._model = vllm_config.model_config

    def of(self, request: Request) -> Ended:
        """Return how a request ended, and the length of its answer."""
        answer = request.output_token_ids
        status = request.status.name
        stop = _OTHERS.get(status, "unfinished")
        if status == _STOPPED:
            stop = stop_after(answer, self._named) if len(answer) else "stop"
        return Ended(stop, len(answer))

    @cached_property
    def _named(self) -> frozenset[int]:
        """Tokens that were added to the vocabulary by name; none if the tokenizer cannot tell."""
        if self._model.skip_tokenizer_init:
            return frozenset()
        try:  # the import, too: vLLM moves its tokenizers from release to release
            from vllm.tokenizers import cached_tokenizer_from_config  # noqa: PLC0415

            tokenizer = cached_tokenizer_from_config(self._model)
            return frozenset(map(int, tokenizer.get_added_vocab().values()))
        except (OSError, ValueError, NotImplementedError, AttributeError, ImportError) as error:
            _LOG.warning("the tokenizer does not tell its added tokens: %.300s", str(error))
            return frozenset()
