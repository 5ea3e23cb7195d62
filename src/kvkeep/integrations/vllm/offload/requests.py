"""What the tier knows of a request."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from kvkeep.integrations.vllm.content import Adapters
from kvkeep.integrations.vllm.groups import keys_of, whole_hashes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from concurrent.futures import Future

    from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext
    from vllm.v1.request import Request

    from kvkeep.integrations.vllm.options import RequestOptions

__all__ = ["PendingQuery", "QueryAnswer", "TierRequest", "group_of"]

_GROUP_BYTES = 4


def group_of(key: bytes) -> int:
    """Return vLLM's number of the group of an offload key."""
    return int.from_bytes(key[-_GROUP_BYTES:], "big")


class QueryAnswer(NamedTuple):
    """The blocks that a query found, and whether the tiers took all of its time."""

    found: Sequence[bytes]
    late: bool


@dataclass(slots=True)
class PendingQuery:
    """A query of shared tiers about blocks, since a time (monotonic seconds)."""

    blocks: frozenset[bytes]
    since: float
    future: Future[QueryAnswer]


@dataclass(slots=True)
class TierRequest:
    """A request, from its arrival until vLLM has finished it.

    Attributes:
        options: its own options.
        request: vLLM's; None: one of another engine, that vLLM's tiers serve.
        kept: whether its KV is stored and loaded.
        adapter: digest of its LoRA weights.
        public: by group, the hashes of its chunks in a public prefix, by vLLM's.
        step: the step for which ``found`` holds.
        found: results of lookups in that step.
        failed: chunks that could not be loaded: misses from then on, or vLLM asks for ever.
        answered: blocks that shared tiers have, by their answers.
        asked: blocks that they were asked about.
        queries: queries without an answer so far.
        loads: number of its loads that have not ended.
        computed: whether vLLM has begun to compute it.
        over: whether vLLM has finished it.
        patience: seconds for a load of what was last found, after which computing is faster.
        compute_s: the seconds to compute that; 0 if unknown.
        slower: the tier, and the tokens, of what was found and is computed, as that is faster.
        refused: the group and the names of the first chunks of that.
    """

    options: RequestOptions
    request: Request | None = None
    kept: bool = True
    adapter: bytes | None = None
    public: Mapping[int, Mapping[bytes, bytes]] = field(default_factory=dict)
    step: int = -1
    found: dict[OffloadKey, LookupResult] = field(default_factory=dict)
    failed: set[OffloadKey] = field(default_factory=set)
    answered: set[bytes] = field(default_factory=set)
    asked: set[bytes] = field(default_factory=set)
    queries: list[PendingQuery] = field(default_factory=list)
    loads: int = 0
    computed: bool = False
    over: bool = False
    patience: float = math.inf
    compute_s: float = 0.0
    slower: tuple[str, int] | None = None
    refused: tuple[int, Sequence[bytes]] = (0, ())
    _keys: dict[int, list[OffloadKey]] = field(default_factory=dict)
    _seen: int = 0

    @property
    def waits(self) -> bool:
        """Whether vLLM waits for the tier before it computes the request."""
        return bool(self.loads or self.queries)

    def names(self, keys: Sequence[bytes], group: int) -> list[bytes]:
        """Return the keys in the store of chunks of one group. Cost: 0.1 µs each."""
        hashes: Sequence[bytes] = [key[:-_GROUP_BYTES] for key in keys]
        public = self.public.get(group)
        if public:
            whole = zip(hashes, whole_hashes(hashes), strict=True)
            hashes = [public.get(theirs, own) for theirs, own in whole]
        if self.adapter is not None:
            hashes = Adapters.mixed(hashes, self.adapter)
        return keys_of(hashes, group)

    def own(self, names: Sequence[bytes], group: int) -> list[bytes]:
        """Return those of ``names`` that are not public: the ones that a tenant may delete."""
        public: Sequence[bytes] = list(self.public.get(group, {}).values())
        if self.adapter is not None:
            public = Adapters.mixed(public, self.adapter)
        shared = {*keys_of(public, group)}
        return [name for name in names if name not in shared]

    def chunks(self, ctx: ReqContext, group: int, chunk_tokens: int) -> list[OffloadKey]:
        """Return all chunks of ``group`` that vLLM has named for this request, in order.

        Empty if this vLLM does not tell them before it asks for each.
        """
        positions: Mapping[OffloadKey, int] = getattr(ctx, "_offload_key_positions", {})
        if len(positions) > self._seen:
            for key, end in islice(positions.items(), self._seen, None):
                number = group_of(key)
                keys = self._keys.setdefault(number, [])
                if end == (len(keys) + 1) * chunk_tokens:  # not inside a chunk
                    keys.append(key)
            self._seen = len(positions)
        return self._keys.get(group, [])

    def all_names(self) -> dict[int, list[bytes]]:
        """Return the keys in the store of all its chunks, by group."""
        return {group: self.names(keys, group) for group, keys in self._keys.items()}
