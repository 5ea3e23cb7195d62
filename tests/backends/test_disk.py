"""The disk backend: the contract, and its directory, files, budget and faults."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvkeep.backends.disk import DiskBackend
from kvkeep.testing.backend_suite import BackendTests

if TYPE_CHECKING:
    from pathlib import Path


class TestDisk(BackendTests):
    persistent = True

    def make_backend(self, tmp_path: Path) -> DiskBackend:
        return DiskBackend(tmp_path / "store")

    def make_bounded(self, tmp_path: Path, capacity: int) -> DiskBackend:
        return DiskBackend(tmp_path / "store", capacity)


class TestDiskBuffered(TestDisk):
    examples = 10
    steps = 20

    def make_backend(self, tmp_path: Path) -> DiskBackend:
        return DiskBackend(tmp_path / "store", sync="always", io="buffered")
