"""The life cycle of a sequence as a table: the legal steps of each state, and the next states.

    COPYING   page copies wait for the engine: pages to publish may not be written yet
    READY     all copies were handed out
    CLOSED    the sequence has no pages any more

A step that is not in the table raises `IllegalStep` and changes nothing. A step with two next
states depends on the case (an append may need a copy).
"""

from __future__ import annotations

from enum import Enum, auto

from kvkeep.core.errors import IllegalStep

__all__ = ["STEPS", "SequenceState", "permit"]


class SequenceState(Enum):
    """State of a sequence."""

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

_VERBS = {"copies": "take the copies of"}


def permit(state: SequenceState, step: str) -> None:
    """Raise `IllegalStep` unless ``step`` is legal in ``state``."""
    if step not in STEPS[state]:
        why = _WHY.get((state, step), f"it is {state.name.lower()}")
        raise IllegalStep(f"cannot {_VERBS.get(step, step)} this sequence: {why}")
