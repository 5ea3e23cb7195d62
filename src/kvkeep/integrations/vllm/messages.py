"""Messages between the two sides: one each way with every step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

if TYPE_CHECKING:
    from kvkeep.integrations.vllm.groups import BlockReach
    from kvkeep.store.blocks import ReturnNotes

__all__ = ["BlockSpan", "LookupResults", "PageLoad", "RankLookup", "Save", "StepPlan"]


@dataclass(slots=True)
class BlockSpan:
    """Blocks of one group of layers: their keys in the store and their pages in the engine."""

    group: int
    keys: list[bytes]
    pages: list[int]

    def only(self, positions: list[int]) -> BlockSpan:
        """Return the blocks at these positions."""
        if len(positions) == len(self.keys):
            return self
        keys, pages = self.keys, self.pages
        return BlockSpan(
            self.group, [keys[at] for at in positions], [pages[at] for at in positions]
        )


@dataclass(slots=True)
class PageLoad:
    """Pages of a waiting request to fill; ``tokens`` need not be computed if all of them arrive."""

    request: str
    spans: list[BlockSpan]
    tokens: int


@dataclass(slots=True)
class Save:
    """Pages that are complete after this step; their blocks are deleted ``ttl`` seconds later."""

    spans: list[BlockSpan]
    ttl: float | None = None


@dataclass(slots=True)
class RankLookup:
    """A lookup of a request's blocks, from ``first`` on, in the stores of all ranks."""

    request: str
    number: int
    first: int
    hashes: list[bytes]


@dataclass(slots=True)
class StepPlan(KVConnectorMetadata):
    """A message from the scheduler to every worker.

    Attributes:
        idle: nothing is computed in this step.
        waiting: a request waits for the result of a lookup.
        late: blocks of requests that have ended: to be saved before anything is computed or loaded.
        clear: number of times so far that all blocks were to be deleted; for workers with their
            own stores.
        returns: of conversations, since the last step; for these stores, too. A request that has
            ended is named by all its blocks, once; 65,536 blocks in all, or one request.
    """

    idle: bool = False
    waiting: bool = False
    loads: list[PageLoad] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    late: list[Save] = field(default_factory=list)
    pins: list[tuple[list[bytes], float]] = field(default_factory=list)
    lookups: list[RankLookup] = field(default_factory=list)
    clear: int = 0
    returns: ReturnNotes = field(default_factory=list)


@dataclass(slots=True)
class LookupResults(KVConnectorWorkerMetadata):
    """A message from the workers: by lookup, how far each rank found the request."""

    found: dict[int, list[BlockReach]] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Return these results together with those of another rank."""
        assert isinstance(other, LookupResults)
        merged = {number: list(found) for number, found in self.found.items()}
        for number, found in other.found.items():
            merged.setdefault(number, []).extend(found)
        return LookupResults(merged)
