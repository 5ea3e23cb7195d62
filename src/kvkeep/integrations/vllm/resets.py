"""`Resets`: after a reset of vLLM's caches, KV of before it is not stored any more.

A trainer puts other weights into a running engine, and then resets its caches. Requests that run on
have KV of the old weights, and compute more from it. vLLM's own prefix cache keeps such KV as well,
if requests held pages during the reset. Both must not be stored under hashes that say nothing of
weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.request import Request

__all__ = ["Resets"]


class Resets:
    """Tells which requests have KV of before the last reset.

    Such a request is stale until it ends or begins again from token 0 with KV that is newer.

    Thread safety: none; it belongs to the scheduler's thread. Cost: constant for each call, except
    `reset`, which looks at all requests.
    """

    def __init__(self) -> None:
        self._pool: BlockPool | None = None
        self._begun: dict[str, Request] = {}
        self._stale: set[str] = set()
        self._old_cache: object | None = None  # vLLM's prefix cache, if it has KV of before

    def bind(self, pool: BlockPool) -> None:
        """Take vLLM's pool of pages, which has its prefix cache."""
        self._pool = pool

    def begin(self, request: Request, local: int) -> None:
        """Note that a request begins, or begins again, behind ``local`` tokens of vLLM's cache."""
        self._begun[request.request_id] = request
        if local and self._old_cache is not None and self._cache() is self._old_cache:
            self._stale.add(request.request_id)
        else:
            self._stale.discard(request.request_id)

    def end(self, request_id: str) -> None:
        """Forget a request."""
        self._begun.pop(request_id, None)
        self._stale.discard(request_id)

    def is_stale(self, request_id: str) -> bool:
        """Return whether KV of the request may be of before the last reset, so is not stored."""
        return request_id in self._stale

    def reset(self) -> None:
        """Note a reset: requests with computed or loaded tokens are stale from now on."""
        self._begun = {
            name: request for name, request in self._begun.items() if not request.is_finished()
        }
        self._stale = {
            name for name, request in self._begun.items() if request.num_computed_tokens > 0
        }
        self._old_cache = None if self._emptied() else self._cache()

    def _emptied(self) -> bool:
        """Return whether vLLM has emptied its own cache: it does if no request holds pages."""
        if self._pool is None:
            return not self._stale
        used: int = self._pool.num_gpu_blocks - self._pool.get_num_free_blocks()
        return used == 1  # vLLM's null block

    def _cache(self) -> object:
        """Return vLLM's index of its prefix cache, which is another object after a reset."""
        return getattr(self._pool, "cached_block_hash_to_block", self)
