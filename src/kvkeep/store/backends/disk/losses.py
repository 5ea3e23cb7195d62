"""Notices that other processes emptied, removed or replaced the directory."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from kvkeep.core.keys import SPACE_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvkeep.store.backends.disk.directory import RecordDirectory
    from kvkeep.store.backends.disk.ledger import Count, DiskLedger

__all__ = ["Losses"]

_LOG = logging.getLogger("kvkeep.tiers")


class Losses:
    """Compares the namespaces that had a directory at the last use with those that have one now.

    Empty namespaces' directories are removed at every recount (a sweep). The ledger numbers the
    sweeps, so that a swept directory is not taken for a loss.

    Attributes:
        count: how often a loss was noticed.

    Thread safety: all methods.
    """

    def __init__(self, directory: RecordDirectory, ledger: DiskLedger) -> None:
        self.count = 0
        self._directory = directory
        self._ledger = ledger
        self._known: set[bytes] = set()
        self._sweeps = ledger.sweeps()  # number of the last sweep that `_known` reflects

    def listed(self, spaces: set[bytes]) -> None:
        """Expect exactly the directories of ``spaces`` from now on."""
        self._known = spaces

    def stored(self, space: bytes) -> None:
        """Expect a directory of ``space`` from now on: a record was put there."""
        self._known.add(space)

    def replaced(self) -> None:
        """Count a loss of the whole directory."""
        self._known = set()
        self.report()

    def check(self, blocks: Sequence[bytes]) -> None:
        """Count a loss if the directory of a block, or the ledger, is missing or replaced.

        Called when records of some of ``blocks`` are missing.
        """
        lost = self.of({block[:SPACE_BYTES] for block in blocks})
        if lost or not self._ledger.is_same_file():
            self._ledger.forget_file()
            self._known -= lost
            self.report()

    def of(self, spaces: set[bytes]) -> set[bytes]:
        """Return those of ``spaces`` that had a directory and lost it, with its records."""
        lost = {space for space in spaces & self._known if not self._is_there(space)}
        if lost and (sweeps := self._ledger.sweeps()) != self._sweeps:
            # Another process swept empty directories since; these may be among them.
            self._sweeps = sweeps
            known = self._known.copy()  # other threads put meanwhile
            self._known.difference_update([space for space in known if not self._is_there(space)])
            lost = set()
        return lost

    def sweep(self, count: Count) -> None:
        """Remove the directories of empty namespaces, under the ledger's lock."""
        if empty := self._directory.empty_spaces():
            before = self._ledger.sweeps()
            count.note_sweep()
            self._directory.remove_spaces(empty)
            if before == self._sweeps:  # no other process swept, so only these are gone
                self._sweeps = self._ledger.sweeps()
                self._known.difference_update(map(bytes.fromhex, empty))

    def report(self) -> None:
        """Count a loss and log it."""
        _LOG.warning(
            "%s was emptied or replaced by another process; it is listed again", self._directory.url
        )
        self.count += 1

    def _is_there(self, space: bytes) -> bool:
        return os.path.isdir(self._directory.space(space))
