"""What the scheduler's side knows of a request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvkeep.integrations.vllm.adapters import Adapters

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.v1.request import Request

    from kvkeep.integrations.vllm.lookups import PendingLookup
    from kvkeep.integrations.vllm.options import RequestOptions

__all__ = ["FollowedRequest"]


@dataclass(slots=True)
class FollowedRequest:
    """A request, from its arrival until vLLM has finished it.

    Attributes:
        adapter: digest of its LoRA weights.
        saved: blocks that were considered for saving.
        loaded: its number of preemptions when it was last loaded; -1: never.
        hit: the blocks, from … to, that were last promised to vLLM.
        local: tokens that vLLM had itself when it last asked.
        placed: the step in which it got its pages; -1: none.
        held: the step until which none of its blocks are saved.
        lookup: the lookup it waits for.
        had: for the trace, the tokens that vLLM had itself when it first began.
        promised: for the trace, the tokens that were to be loaded then.
        began: for the trace, when that was, by `time.time`.
    """

    request: Request
    options: RequestOptions
    adapter: bytes | None = None
    saved: int = 0
    loaded: int = -1
    hit: tuple[int, int] = (0, 0)
    local: int = 0
    placed: int = -1
    held: int = 0
    lookup: PendingLookup | None = None
    had: int = 0
    promised: int = 0
    began: float | None = None

    def hashes(self, first: int, end: int) -> Sequence[bytes]:
        """Return the hashes of its blocks, with the digest of its LoRA weights mixed in."""
        hashes: Sequence[bytes] = self.request.block_hashes[first:end]
        return hashes if self.adapter is None else Adapters.mixed(hashes, self.adapter)
