"""Messages between the two sides, one each way with every step."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

if TYPE_CHECKING:
    from kvkeep.integrations.load_choice import ProbeEnd, RunCost
    from kvkeep.integrations.vllm.groups import BlockReach
    from kvkeep.store.tiers import ReturnNotes

__all__ = [
    "BlockSpan", "LoadEnd", "PageLoad", "Probe", "RankLookup", "Save", "StepPlan", "WorkerNews",
]  # fmt: skip


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
    """Pages of a waiting request to fill; ``tokens`` need not be computed if all of them arrive.

    ``patience`` are the seconds after which computing them is faster, and ``compute_s`` those that
    computing takes, 0 if unknown.
    """

    request: str
    spans: list[BlockSpan]
    tokens: int
    patience: float = math.inf
    compute_s: float = 0.0


class LoadEnd(NamedTuple):
    """A load that has ended.

    Attributes:
        seconds: that it took.
        failed: a tier that was too slow, or "".
    """

    seconds: float
    failed: str


@dataclass(slots=True)
class Probe:
    """Blocks of a group to read a few of from ``tier``, to see whether it is fast again."""

    tier: str
    group: int
    keys: list[bytes]


@dataclass(slots=True)
class Save:
    """Pages that are complete after this step; their blocks are deleted ``ttl`` seconds later.

    ``generation`` is that of their KV, see `StepPlan`.
    """

    spans: list[BlockSpan]
    ttl: float | None = None
    generation: int = 0


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
        step: its number.
        reports: the scheduler has to be told when this step has ended.
        idle: nothing is computed in this step.
        waiting: a request waits for the result of a lookup.
        late: blocks of requests that have ended: to be saved before anything is computed or loaded.
        generation: how often all blocks were deleted so far. Workers with their own stores delete
            theirs when it grows; no blocks of an earlier generation are saved.
        returns: of conversations, since the last step; for these stores, too. A request that has
            ended is named by all its blocks, once; 65,536 blocks in all, or one request.
    """

    step: int = -1
    reports: bool = False
    idle: bool = False
    waiting: bool = False
    loads: list[PageLoad] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    late: list[Save] = field(default_factory=list)
    pins: list[tuple[list[bytes], float]] = field(default_factory=list)
    lookups: list[RankLookup] = field(default_factory=list)
    probes: list[Probe] = field(default_factory=list)
    generation: int = 0
    returns: ReturnNotes = field(default_factory=list)


@dataclass(slots=True)
class WorkerNews(KVConnectorWorkerMetadata):
    """A message from the workers.

    Attributes:
        found: by lookup, how far each rank found the request.
        runs: by lookup, what loading it takes each rank.
        step: the step that has ended; -1: none that had to be reported.
        loads: the loads that have ended, by request.
        probes: the probes that have ended.
    """

    found: dict[int, list[BlockReach]] = field(default_factory=dict)
    runs: dict[int, list[list[RunCost]]] = field(default_factory=dict)
    step: int = -1
    loads: dict[str, LoadEnd] = field(default_factory=dict)
    probes: list[ProbeEnd] = field(default_factory=list)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Return this news together with that of another rank."""
        assert isinstance(other, WorkerNews)
        loads = dict(self.loads)
        for request, end in other.loads.items():
            mine = loads.get(request, end)
            loads[request] = LoadEnd(max(mine.seconds, end.seconds), mine.failed or end.failed)
        return WorkerNews(
            _joined(self.found, other.found), _joined(self.runs, other.runs),
            max(self.step, other.step), loads, self.probes + other.probes,
        )  # fmt: skip


T = TypeVar("T")


def _joined(mine: dict[int, list[T]], others: dict[int, list[T]]) -> dict[int, list[T]]:
    joined = {number: list(found) for number, found in mine.items()}
    for number, found in others.items():
        joined.setdefault(number, []).extend(found)
    return joined
