"""What workers tell the tier of their pages.

Only a worker knows which attention backend writes its pages, and which tensors a row is made of.
The tier is in the scheduler, often another process. So `KVKeepSpec` leaves a note of each worker in
shared memory, where vLLM's rows are as well, before vLLM makes the scheduler.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvkeep.core.errors import InvalidValue, reason
from kvkeep.store.backends.disk.files import closing_fd, open_known

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vllm.v1.kv_offload.base import CanonicalKVCaches

__all__ = ["ChunkRows", "Run", "WorkerNote", "leave_note", "take_notes"]

_PLACE = Path("/dev/shm")  # noqa: S108 - as vLLM's rows; the files are of this user alone
_MOST_BYTES = 64 << 20


Run = tuple[int, int]
"""Offset in a row, and bytes."""


@dataclass(frozen=True, slots=True)
class ChunkRows:
    """The used bytes of a row, by vLLM's number of the group, in order.

    Groups of layers share rows, as they share pages: a row is as large as the largest needs. What a
    chunk does not fill is left over from chunks before it, so it is not stored.
    """

    runs: Mapping[int, tuple[Run, ...]]

    def size(self, group: int) -> int:
        """Return the bytes of a chunk of ``group``."""
        return sum(size for _, size in self.runs[group])

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
            runs[number] = tuple(_joined(sorted(set(found)))) or ((0, row_bytes),)
            end = sum(runs[number][-1])
            assert end <= row_bytes, f"group {number} ends at {end} in a row of {row_bytes} bytes"
        return cls(runs)


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


@dataclass(frozen=True, slots=True)
class WorkerNote:
    """A worker's part of a row.

    Attributes:
        machine: attention backends and hardware, which pack the pages.
        tensors: bytes of a block in each tensor of the row, in order.
        groups: for each group, ``(tensor, bytes)`` of its layers' pages.
        canonical: whether tensors and pages are those of all ranks together.
        portable: whether the row is the same for every number of ranks.
    """

    machine: str
    tensors: list[int]
    groups: list[list[tuple[int, int]]]
    canonical: bool = False
    portable: bool = False

    @classmethod
    def of(cls, machine: str, caches: CanonicalKVCaches, *, canonical: bool) -> WorkerNote:
        """Describe ``caches``; ``canonical``: as pages of all ranks together."""
        refs = caches.group_data_refs
        tensors = [tensor.page_size_bytes for tensor in caches.tensors]
        if canonical:
            tensors = [0] * len(tensors)
            for ref in (ref for group in refs for ref in group):
                size = ref.mapping.canonical_page_size_bytes
                tensors[ref.tensor_idx] = max(tensors[ref.tensor_idx], size)
        groups = [
            [
                (
                    ref.tensor_idx,
                    ref.mapping.canonical_page_size_bytes if canonical else ref.page_size_bytes,
                )
                for ref in group
            ]
            for group in refs
        ]
        portable = canonical and all(
            ref.mapping.parallelism_agnostic for group in refs for ref in group
        )
        return cls(machine, tensors, groups, canonical, portable)


def leave_note(engine: str, rank: int, note: WorkerNote) -> None:
    """Write the note of worker ``rank``.

    Raises:
        InvalidValue: it cannot be written.
    """
    path = _path(engine, rank)
    try:
        with suppress(FileNotFoundError):
            path.unlink()  # of this engine's earlier pages
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "w") as file:
            json.dump(asdict(note), file)
    except OSError as error:
        raise InvalidValue(
            f"a worker of kvkeep cannot tell the tier of its pages in {_PLACE}: {reason(error)}"
        ) from error


def take_notes(engine: str, ranks: int) -> list[WorkerNote]:
    """Return the notes of all workers, and remove them.

    Raises:
        InvalidValue: one is missing or damaged.
    """
    return [_take(_path(engine, rank), rank) for rank in range(ranks)]


def _path(engine: str, rank: int) -> Path:
    name = hashlib.sha256(engine.encode()).hexdigest()[:32]
    return _PLACE / f"kvkeep_{name}_{rank}.json"


def _take(path: Path, rank: int) -> WorkerNote:
    try:
        fd, found = open_known(str(path), os.O_RDONLY)
        with closing_fd(fd):
            given: dict[str, Any] = json.loads(os.read(fd, min(found.st_size, _MOST_BYTES)))
        path.unlink()
        groups = [[(int(at), int(size)) for at, size in group] for group in given["groups"]]
        return WorkerNote(
            str(given["machine"]), [int(each) for each in given["tensors"]], groups,
            bool(given["canonical"]), bool(given["portable"]),
        )  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidValue(
            f"worker {rank} did not tell the tier of its pages in {_PLACE} ({reason(error)}): a "
            "KVKeepTier needs all workers on the scheduler's machine"
        ) from error
