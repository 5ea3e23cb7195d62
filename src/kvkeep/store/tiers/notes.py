"""Notes on namespaces, stored beside their blocks: they explain why a store finds none of its own.

A block id contains its namespace only as a hash. The note has the fields that were hashed, but only
a digest of the tenant, which may be private. Notes are not authenticated: anyone with write access
to the backend can forge one. They are used for one log line only.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import fields
from typing import TYPE_CHECKING

from kvkeep.core.keys import Namespace

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["NOTE_BYTES", "difference", "note_of"]

NOTE_BYTES = 4096
"""Maximum bytes of a note; longer ones are ignored."""
_FORMAT = "kvkeep namespace 1"
_LONGEST = 160  # characters; of a longer field the note has a digest
_SHOWN = 60
_TENANTS = frozenset(("tenant", "scope"))  # separate what is shared; both change without a fault
_NAMES = tuple(sorted(field.name for field in fields(Namespace)))


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
