"""The life of a sequence as a table: which step is legal in which state, and where it leads.

    COPYING   page copies wait for the engine: what it would publish may not be there yet
    READY     all copies were handed out
    CLOSED    nothing is held any more

A step that is not in the table raises `IllegalStep` and changes nothing. Two states behind a step
say that it depends on what the step finds (an append may need a copy).
"""

from __future__ import annotations

from enum import Enum, auto

from kvkeep.core.errors import IllegalStep

__all__ = ["STEPS", "SequenceState", "permit"]


class SequenceState(Enum):
    """Where a sequence is in its life."""

    COPYING = auto()
    READY = auto()
    CLOSED = auto()


STEPS: dict[SequenceState, dict[str, frozenset[SequenceState]]] = {
    SequenceState.COPYING: {
        "copies": frozenset({SequenceState.READY}),
        "append": frozenset({SequenceState.COPYING}),
        "fork": frozenset({SequenceState.COPYING}),
        "truncate": frozenset({SequenceState.COPYING, SequenceState.READY}),
        "close": frozenset({SequenceState.CLOSED}),
    },
    SequenceState.READY: {
        "copies": frozenset({SequenceState.READY}),
        "append": frozenset({SequenceState.READY, SequenceState.COPYING}),
        "fork": frozenset({SequenceState.READY}),
        "truncate": frozenset({SequenceState.READY}),
        "publish": frozenset({SequenceState.READY}),
        "close": frozenset({SequenceState.CLOSED}),
    },
    SequenceState.CLOSED: {},
}

_WHY = {
    (
        SequenceState.COPYING,
        "publish",
    ): "its page copies were not taken; call copies(), make them, then publish",
}


def permit(state: SequenceState, step: str) -> None:
    """Raise `IllegalStep` unless ``step`` is legal in ``state``."""
    if step not in STEPS[state]:
        why = _WHY.get((state, step), f"it is {state.name.lower()}")
        raise IllegalStep(f"cannot {step} this sequence: {why}")
