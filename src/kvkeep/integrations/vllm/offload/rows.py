"""Which bytes of a row in vLLM's memory belong to a chunk.

Groups of layers share rows, as they share pages: a row is as large as the largest needs, and has
padding. What a chunk does not fill is left over from chunks before it, so it is not stored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvkeep.integrations.vllm.offload.notes import WorkerNote

__all__ = ["ChunkRows", "Run"]

Run = tuple[int, int]
"""Offset in a row, and bytes."""


@dataclass(frozen=True, slots=True)
class ChunkRows:
    """The used bytes of a row, by vLLM's number of the group.

    Attributes:
        row_bytes: bytes of a whole row, which is what belongs to a group that is not in ``runs``.
    """

    row_bytes: int
    runs: Mapping[int, tuple[Run, ...]]

    def of(self, group: int) -> tuple[Run, ...]:
        """Return the runs of a chunk of ``group``, in order."""
        return self.runs.get(group) or ((0, self.row_bytes),)

    def size(self, group: int) -> int:
        """Return the bytes of a chunk of ``group``."""
        return sum(size for _, size in self.of(group))

    @classmethod
    def of_notes(
        cls,
        notes: Sequence[WorkerNote],
        numbers: Sequence[int],
        *,
        row_bytes: int,
        rank_bytes: int,
        blocks: int,
    ) -> ChunkRows:
        """Return the rows that workers fill.

        Args:
            notes: one for each part of a row, in order: all ranks, or one for all of them.
            numbers: vLLM's numbers of the groups.
            row_bytes: of a row.
            rank_bytes: of a rank's part of a row.
            blocks: in a chunk.
        """
        runs: dict[int, tuple[Run, ...]] = {}
        for at, number in enumerate(numbers):
            found: list[Run] = []
            for rank, note in enumerate(notes):
                found += _runs(note, at, rank * rank_bytes, blocks)
            runs[number] = tuple(_joined(sorted(set(found))))
            end = sum(runs[number][-1]) if runs[number] else 0
            assert end <= row_bytes, f"group {number} ends at {end} in a row of {row_bytes} bytes"
        return cls(row_bytes, runs)


def _runs(note: WorkerNote, group: int, start: int, blocks: int) -> list[Run]:
    """Return the pages of a group in one worker's part of a row, which begins at ``start``."""
    begins: list[int] = []
    for size in note.tensors:
        begins.append(start)
        start += size * blocks
    return [
        (begins[tensor] + block * note.tensors[tensor], size)
        for tensor, size in note.groups[group]
        for block in range(blocks)
    ]


def _joined(runs: Sequence[Run]) -> list[Run]:
    """Join runs that touch or overlap; ``runs`` are sorted."""
    joined: list[Run] = []
    for offset, size in runs:
        if joined and offset <= sum(joined[-1]):
            begin, before = joined[-1]
            joined[-1] = (begin, max(before, offset + size - begin))
        else:
            joined.append((offset, size))
    return joined
