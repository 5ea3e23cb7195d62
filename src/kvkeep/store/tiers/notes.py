"""Notes of namespaces in a backend: by which a store that finds nothing sees what differs."""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from dataclasses import fields
from typing import TYPE_CHECKING

from kvkeep.core.keys import Namespace

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from kvkeep.store.tiers.calls import BackendCalls

__all__ = ["NOTE_BYTES", "SpaceNotes", "difference", "note_of"]

_LOG = logging.getLogger("kvkeep.tiers")
_NOTED_KEPT = 4096
NOTE_BYTES = 4096
"""Maximum bytes of a note; longer ones are ignored."""

_FORMAT = "kvkeep namespace 1"
_LONGEST = 160  # characters; of a longer field the note has a digest
_SHOWN = 60
_TENANTS = frozenset(("tenant", "scope"))  # separate what is shared; both change without a fault
_NAMES = tuple(sorted(field.name for field in fields(Namespace)))


class SpaceNotes:
    """The notes of one tier's backend. ``notes`` describe the store's namespaces, by space.

    Thread safety: all methods.
    """

    def __init__(self, calls: BackendCalls, notes: Mapping[bytes, bytes] | None) -> None:
        self._calls = calls
        self._notes = {} if notes is None else notes  # filled later: an empty one is kept
        self._lock = threading.Lock()
        self._noted: set[bytes] = set()
        self._expected: bytes | None = None  # the namespace that `compare` looks for

    def expect(self, space: bytes) -> None:
        """Make `compare` log, once, if the backend holds blocks but none of this namespace."""
        self._expected = space

    def compare(self, there: Collection[bytes] | None) -> None:
        """If the expected namespace is missing, log how the most similar stored one differs.

        ``there`` are the namespaces of stored blocks; None if that is unknown. A changed model
        revision or dtype makes another namespace, in which no block is found.
        """
        with self._lock:
            space, self._expected = self._expected, None
        ours = None if space is None else self._notes.get(space)
        if space is None or ours is None:
            return
        if there is not None and (not there or space in there):
            return
        calls = self._calls
        notes: dict[bytes, bytes] = {}
        with calls.to("noted_spaces"):
            notes = calls.backend.noted_spaces()
        if space in notes and there is None:
            return
        others = [note for one, note in notes.items() if there is None or one in there]
        nearest = difference(ours, others)
        if nearest is not None:
            unlike, unexpected = nearest
            _LOG.log(
                logging.WARNING if unexpected else logging.INFO,
                "tier %s: %s holds blocks, but none of this store; in the most similar ones, %s",
                calls.name, calls.backend.describe(), ", ".join(unlike),
            )  # fmt: skip

    def written(self, space: bytes) -> None:
        """Write the note of namespace ``space`` to the backend once; a block of it was written."""
        if space in self._noted:
            return
        if len(self._noted) >= _NOTED_KEPT:
            self._noted.clear()
        self._noted.add(space)
        note = self._notes.get(space)
        if note is not None:
            with self._calls.to("note_space"):
                self._calls.backend.note_space(space, note)


def note_of(namespace: Namespace) -> bytes:
    """Return the note of ``namespace``: one line of JSON in ASCII."""
    told = {name: _told(name, value) for name in _NAMES if (value := getattr(namespace, name))}
    return json.dumps({"format": _FORMAT, "fields": told}).encode()


def difference(ours: bytes, others: Iterable[bytes]) -> tuple[list[str], bool] | None:
    """Compare ``ours`` with the note in ``others`` that differs in the fewest fields.

    Return a text for each of these fields, as ``model is 'a' there and 'b' here``, and whether that
    is unexpected: both are of one model, and not only of different tenants. None if no readable
    note differs.
    """
    mine = _read(ours)
    assert mine is not None, "our own note"
    nearest: list[str] | None = None
    unexpected = False
    for other in others:
        theirs = _read(other)
        if theirs is None:
            continue
        unlike = [name for name in _NAMES if mine.get(name) != theirs.get(name)]
        if unlike and (nearest is None or len(unlike) < len(nearest)):
            nearest = [_sentence(name, theirs.get(name), mine.get(name)) for name in unlike]
            unexpected = "model" not in unlike and not _TENANTS.issuperset(unlike)
    return None if nearest is None else (nearest, unexpected)


def _told(name: str, value: str) -> str:
    if name == "tenant" or len(value) > _LONGEST:
        return f"sha256:{hashlib.sha256(value.encode('utf-8', 'surrogatepass')).hexdigest()[:16]}"
    return value


def _read(note: bytes) -> dict[str, str] | None:
    """Return the fields of a note; None if it is not a valid note."""
    if len(note) > NOTE_BYTES:
        return None
    try:
        read = json.loads(note)
    except (ValueError, RecursionError):
        return None
    if not isinstance(read, dict) or read.get("format") != _FORMAT:
        return None
    told = read.get("fields")
    if not isinstance(told, dict) or not all(isinstance(value, str) for value in told.values()):
        return None
    return {name: told[name] for name in _NAMES if name in told}


def _sentence(name: str, theirs: str | None, mine: str | None) -> str:
    if name == "tenant":
        return "tenant is different"
    return f"{name} is {_shown(theirs)} there and {_shown(mine)} here"


def _shown(value: str | None) -> str:
    """Return ``value`` quoted, escaped and shortened, so that a forged one is safe in a log."""
    return "empty" if value is None else ascii(value[:_SHOWN] + "…" * (len(value) > _SHOWN))
