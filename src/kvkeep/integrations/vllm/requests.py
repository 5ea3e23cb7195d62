"""The state of a request in the scheduler's side."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvkeep.integrations.vllm.adapters import Adapters
from kvkeep.integrations.vllm.keys import keys_of, whole_hashes
from kvkeep.integrations.vllm.messages import BlockSpan, Save

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.v1.request import Request

    from kvkeep.integrations.load_choice import LoadDecision
    from kvkeep.integrations.vllm.lookups import PendingLookup
    from kvkeep.integrations.vllm.options import RequestOptions

__all__ = ["FollowedRequest"]


@dataclass(slots=True)
class FollowedRequest:
    """A request, from its arrival until vLLM has finished it.

    Attributes:
        adapter: digest of its LoRA weights.
        public: the hashes of its leading blocks in a public prefix, in place of vLLM's.
        saved: number of leading blocks that were considered for saving.
        loaded: number of preemptions before the last load; -1: never loaded.
        hit: the blocks, from … to, last reported to vLLM as loadable.
        local: tokens in vLLM's own prefix cache at its last lookup.
        placed: the step in which the request got its pages; -1: none.
        judged: number of complete blocks when it was last decided which of them to save.
        held: the step until which none of its blocks are saved.
        ran: number of preemptions when it ran last; -1: it never did.
        states: the ends of blocks at which it had states that were saved or loaded.
        lookup: the pending lookup, if any.
        choice: what to load of what was last found, if that was compared with computing.
        found: the block up to which it was last found.
        began: whether it ever had pages.
    """

    request: Request
    options: RequestOptions
    adapter: bytes | None = None
    public: Sequence[bytes] = ()
    saved: int = 0
    judged: int = 0
    loaded: int = -1
    hit: tuple[int, int] = (0, 0)
    local: int = 0
    placed: int = -1
    held: int = 0
    ran: int = -1
    states: set[int] = field(default_factory=set)
    lookup: PendingLookup | None = None
    choice: LoadDecision | None = None
    found: int = 0
    began: bool = False

    def forget_store(self) -> None:
        """Forget what of the request is stored: everything was deleted."""
        self.lookup = None
        self.saved = self.judged = 0
        self.states.clear()

    def hashes(self, first: int, end: int) -> Sequence[bytes]:
        """Return the hashes of these blocks, with the digest of the LoRA weights mixed in."""
        hashes: Sequence[bytes] = self.request.block_hashes[first:end]
        public = self.public[first : first + len(hashes)]
        if public:
            hashes = [*public, *whole_hashes(hashes[len(public) :])]
        return hashes if self.adapter is None else Adapters.mixed(hashes, self.adapter)

    def saves(self, spans: list[BlockSpan]) -> list[Save]:
        """Return what to save of ``spans``. Public blocks are all tenants', so they have no ttl."""
        ttl = self.options.ttl
        if ttl is None or not self.public:
            return [Save(spans, ttl)] if spans else []
        saves = []
        for span in spans:
            shared = {*keys_of(self.hashes(0, len(self.public)), span.group)}
            public = [at for at, key in enumerate(span.keys) if key in shared]
            private = [at for at, key in enumerate(span.keys) if key not in shared]
            if public:
                saves.append(Save([span.only(public)]))
            if private:
                saves.append(Save([span.only(private)], ttl))
        return saves
