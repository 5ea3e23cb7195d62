"""What workers tell the tier of their pages.

Only a worker knows which attention backend writes its pages, and which tensors a row is made of.
The tier is in the scheduler, often another process. So `KVKeepSpec` leaves a note of each worker in
shared memory, where vLLM's rows are as well, before vLLM makes the scheduler.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvkeep.store.backends.disk.files import closing_fd, open_known

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import CanonicalKVCaches

__all__ = ["WorkerNote", "leave_note", "take_notes"]

_LOG = logging.getLogger("kvkeep.vllm")
_PLACE = Path("/dev/shm")  # noqa: S108 - as vLLM's rows; the files are of this user alone
_MOST_BYTES = 64 << 20


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


def leave_note(engine: str, rank: int, note: WorkerNote) -> bool:
    """Write the note of worker ``rank``, and return whether that succeeded.

    A failure is logged: the tier then stores whole rows.
    """
    path = _path(engine, rank)
    try:
        with suppress(FileNotFoundError):
            path.unlink()  # of this engine's earlier pages
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "w") as file:
            json.dump(asdict(note), file)
    except OSError as error:
        _LOG.warning("kvkeep's worker could not tell the tier of its pages: %s", error)
        return False
    return True


def take_notes(engine: str, ranks: int) -> list[WorkerNote] | None:
    """Return the notes of all workers, and remove them; None if one is missing or damaged."""
    found = [_take(_path(engine, rank)) for rank in range(ranks)]
    notes = [note for note in found if note is not None]
    return notes if len(notes) == ranks else None


def _path(engine: str, rank: int) -> Path:
    name = hashlib.sha256(engine.encode()).hexdigest()[:32]
    return _PLACE / f"kvkeep_{name}_{rank}.json"


def _take(path: Path) -> WorkerNote | None:
    try:
        fd, found = open_known(str(path), os.O_RDONLY)
        with closing_fd(fd):
            if found.st_size > _MOST_BYTES:
                return None
            given: dict[str, Any] = json.loads(os.read(fd, found.st_size))
        path.unlink()
        groups = [[(int(at), int(size)) for at, size in group] for group in given["groups"]]
        return WorkerNote(
            str(given["machine"]), [int(each) for each in given["tensors"]], groups,
            bool(given["canonical"]), bool(given["portable"]),
        )  # fmt: skip
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        _LOG.warning("kvkeep cannot read what a worker tells of its pages: %s", error)
        return None
