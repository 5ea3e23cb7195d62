"""What the two sides tell each other: one message each way with every step."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

__all__ = ["Answers", "BlockSpan", "PageLoad", "RankLookup", "Save", "StepPlan"]


@dataclass(slots=True)
class BlockSpan:
    """Blocks of one group of layers: their keys in the store and their pages in the engine."""

    group: int
    keys: list[bytes]
    pages: list[int]


@dataclass(slots=True)
class PageLoad:
    """Pages of a waiting request to be filled; ``tokens`` are what it saves if all of it comes."""

    request: str
    spans: list[BlockSpan]
    tokens: int


@dataclass(slots=True)
class Save:
    """Pages that are complete after this step; ``ttl`` seconds later they are to be deleted."""

    spans: list[BlockSpan]
    ttl: float | None = None


@dataclass(slots=True)
class RankLookup:
    """How much of a request is in the stores of all ranks, from block ``first`` on."""

    request: str
    number: int
    first: int
    hashes: list[bytes]


@dataclass(slots=True)
class StepPlan(KVConnectorMetadata):
    """From the scheduler to every worker.

    Attributes:
        idle: nothing is computed in this step.
        asking: a request waits for the answer to a question.
    """

    idle: bool = False
    asking: bool = False
    loads: list[PageLoad] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    pins: list[tuple[list[bytes], float]] = field(default_factory=list)
    questions: list[RankLookup] = field(default_factory=list)
    clear: int = 0
    """How often everything was to be deleted, so far; for workers with stores of their own."""


@dataclass(slots=True)
class Answers(KVConnectorWorkerMetadata):
    """From the workers: by question, what each of those that answered found."""

    found: dict[int, list[int]] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """With those of another rank."""
        assert isinstance(other, Answers)
        merged = {number: list(found) for number, found in self.found.items()}
        for number, found in other.found.items():
            merged.setdefault(number, []).extend(found)
        return Answers(merged)
