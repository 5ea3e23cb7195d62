"""`AnswerWatch`: tells the store of conversations, and which tokens of answers it is to keep."""

from __future__ import annotations

import logging
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from kvkeep.core.returns import Ended, stop_after
from kvkeep.integrations.vllm.keys import keys_of
from kvkeep.store.blocks import BlockReturns, ReturnRecorder

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

    from kvkeep.core.tokens import TokenArray
    from kvkeep.integrations.vllm.groups import Groups
    from kvkeep.integrations.vllm.requests import FollowedRequest
    from kvkeep.integrations.vllm.shared import SharedStore
    from kvkeep.store.blocks import ReturnNotes

__all__ = ["AnswerEnds", "AnswerWatch"]


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


class AnswerWatch:
    """Follows the conversations of an engine, by its requests' tokens; tenants are cache salts.

    Where the workers' stores are in other processes, as with tensor parallelism, the scheduler
    learns, so all ranks keep the same tokens of answers; `take` has what their tiers must know.

    Answers are held back only where a model's layers are all alike: windows and states need more
    than a block to resume.

    Thread safety: none; it belongs to the scheduler's thread. Cost: 0.1 µs a token of a request,
    twice, and what `BlockReturns` costs.

    Arguments:
        waits: whether tiers order by waits.

    Attributes:
        holds_back: whether part of an answer may not be saved before its end.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        groups: Groups,
        shared: SharedStore | None,
        *,
        waits: bool = False,
    ) -> None:
        self._size = groups.block_tokens
        self._ends = AnswerEnds(vllm_config)
        self.holds_back = len(groups.groups) == 1 and not groups.states
        self._recorder = ReturnRecorder(self._size) if shared is None and waits else None
        self._returns = self._recorder or (
            BlockReturns(self._size) if shared is None else shared.store.returns(self._size)
        )
        self._groups = groups

    def requested(self, followed: FollowedRequest) -> None:
        """Record that a request begins to run."""
        row = _tokens(followed.request)
        if row is not None:
            keys = self._keys(followed, len(row))
            salt = followed.request.cache_salt
            self._returns.requested(row, keys, tenant=salt, public=len(followed.public))

    def blocks(self, followed: FollowedRequest, complete: int) -> int:
        """Return how many of a running request's ``complete`` leading blocks may be saved now.

        Cost: 5 µs.
        """
        request, size = followed.request, self._size
        answer = complete * size - request.num_prompt_tokens
        if answer <= 0:
            return complete
        worth = self._returns.worth(answer, tenant=request.cache_salt)
        return complete if worth >= answer else (request.num_prompt_tokens + worth) // size

    def ended(self, followed: FollowedRequest) -> tuple[int, int]:
        """Record the end of a request; return what of it to keep: blocks, of how many complete.

        Both are 0 for a request that did not answer.
        """
        request, size = followed.request, self._size
        row = _tokens(request)
        if row is None or not request.output_token_ids:
            return 0, 0
        ended, prompt = self._ends.of(request), request.num_prompt_tokens
        answer = len(row) - prompt
        # The last token was never an input of the model; after a preemption, others may wait to be.
        computed = min(len(row) - 1, request.num_computed_tokens)
        complete = min(computed // size, len(request.block_hashes))
        kept = complete
        if self.holds_back:
            worth = self._worth(request, ended, answer)
            if worth < answer:
                kept = min(complete, (prompt + worth) // size)
        keys = self._keys(followed, len(row))
        beside = [
            key
            for at in range(1, len(self._groups.groups))
            for key in keys_of(followed.hashes(0, len(keys)), at)
        ]
        self._returns.ended(
            row,
            keys,
            prompt=prompt,
            ended=ended,
            tenant=request.cache_salt,
            public=len(followed.public),
            beside=beside,
        )
        return kept, complete

    def take(self) -> ReturnNotes:
        """Return what the tiers of workers in other processes must know, since the last call."""
        return [] if self._recorder is None else self._recorder.take()

    def _worth(self, request: Request, ended: Ended, answer: int) -> int:
        first = int(request.output_token_ids[0])
        return self._returns.worth(answer, ended=ended, first=first, tenant=request.cache_salt)

    def _keys(self, followed: FollowedRequest, tokens: int) -> list[bytes]:
        return keys_of(followed.hashes(0, tokens // self._size), 0)


def _tokens(request: Request) -> TokenArray | None:
    """Return the tokens of a request; None if its prompt is embeddings."""
    if request.prompt_token_ids is None:
        return None
    return np.fromiter(request.all_token_ids, np.int32, request.num_tokens)
