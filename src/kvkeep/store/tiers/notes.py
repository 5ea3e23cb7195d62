"""What a namespace is, noted beside its blocks: so a store that finds none of its own can say why.

A block's name has its namespace as a hash. The note names the fields behind the hash, but for the
tenant, which may be private: of that it has a digest. Whoever can write to a place can write any
note there; it decides nothing but one line in the log.
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
"""A note has no more than these; what is longer is none."""
_FORMAT = "kvkeep namespace 1"
_LONGEST = 160  # characters of a field that are noted as they are
_SHOWN = 60
_NAMES = tuple(sorted(field.name for field in fields(Namespace)))


def note_of(namespace: Namespace) -> bytes:
    """The note of ``namespace``: one line of JSON in ASCII."""
    told = {name: _told(name, value) for name in _NAMES if (value := getattr(namespace, name))}
    return json.dumps({"format": _FORMAT, "fields": told}).encode()


def difference(ours: bytes, others: Iterable[bytes]) -> tuple[list[str], bool] | None:
    """How the nearest of ``others`` differs from ``ours``, a field each: ``model is 'a', not 'b'``.

    And whether it is of the same model. None where none of them is a note that can be read, or
    none differs.
    """
    mine = _read(ours)
    assert mine is not None, "our own note"
    nearest: list[str] | None = None
    same = False
    for other in others:
        theirs = _read(other)
        if theirs is None:
            continue
        unlike = [name for name in _NAMES if mine.get(name) != theirs.get(name)]
        if unlike and (nearest is None or len(unlike) < len(nearest)):
            nearest = [_sentence(name, theirs.get(name), mine.get(name)) for name in unlike]
            same = "model" not in unlike
    return None if nearest is None else (nearest, same)


def _told(name: str, value: str) -> str:
    if name == "tenant" or len(value) > _LONGEST:
        return f"sha256:{hashlib.sha256(value.encode('utf-8', 'surrogatepass')).hexdigest()[:16]}"
    return value


def _read(note: bytes) -> dict[str, str] | None:
    """The fields of a note; None for what is none."""
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
        return "tenant is another"
    return f"{name} is {_shown(theirs)} there and {_shown(mine)} here"


def _shown(value: str | None) -> str:
    """As it can stand in a log, whatever it is."""
    return "empty" if value is None else ascii(value[:_SHOWN] + "…" * (len(value) > _SHOWN))
