"""The shared-memory backend: the contract, drafts and leases."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvkeep.store.backends.shm import ShmBackend
from kvkeep.testing.backend_suite import BackendTests

if TYPE_CHECKING:
    from pathlib import Path


class TestShmBackend(BackendTests):
    persistent = True

    def make_backend(self, tmp_path: Path) -> ShmBackend:
        return ShmBackend(64 << 20, directory=str(tmp_path))

    def make_bounded(self, tmp_path: Path, capacity: int) -> ShmBackend:
        return ShmBackend(capacity, directory=str(tmp_path))
