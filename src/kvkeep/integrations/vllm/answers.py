"""`AnswerWatch`: tells the store of conversations, and which tokens of answers it is to keep."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvkeep.integrations.vllm.ends import AnswerEnds
from kvkeep.integrations.vllm.keys import keys_of
from kvkeep.store.blocks import BlockReturns, ReturnRecorder

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

    from kvkeep.core.returns import Ended
    from kvkeep.core.tokens import TokenArray
    from kvkeep.integrations.vllm.groups import Groups
    from kvkeep.integrations.vllm.requests import FollowedRequest
    from kvkeep.integrations.vllm.shared import SharedStore
    from kvkeep.store.blocks import ReturnNotes

__all__ = ["AnswerWatch"]


class AnswerWatch:
    """Follows the conversations of an engine, by its requests' tokens; tenants are cache salts.

    Where the workers' stores are in other processes, as with tensor parallelism, the scheduler
    learns, so all ranks keep the same tokens of answers; `take` has what their tiers must know.

    Answers are held back only where a model's layers are all alike: windows and states need more
    than a block to resume.

    Thread safety: none; it belongs to the scheduler's thread. Cost: 0.1 µs a token of a request,
    twice, and what `BlockReturns` costs.

    Arguments:
        unread: whether answers are stored that are never read again.
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
        unread: bool,
        waits: bool = False,
    ) -> None:
        self._size = groups.block_tokens
        self._ends = AnswerEnds(vllm_config)
        self.holds_back = not unread and len(groups.groups) == 1 and not groups.states
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
