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

__all__ = ["STEPS", "State", "permit"]


class State(Enum):
    """Where a sequence is in its life."""

    COPYING = auto()
    READY = auto()
    CLOSED = auto()


STEPS: dict[State, dict[str, frozenset[State]]] = {
    State.COPYING: {
        "copies": frozenset({State.READY}),
        "append": frozenset({State.COPYING}),
        "fork": frozenset({State.COPYING}),
        "truncate": frozenset({State.COPYING, State.READY}),
        "close": frozenset({State.CLOSED}),
    },
    State.READY: {
        "copies": frozenset({State.READY}),
        "append": frozenset({State.READY, State.COPYING}),
        "fork": frozenset({State.READY}),
        "truncate": frozenset({State.READY}),
        "publish": frozenset({State.READY}),
        "close": frozenset({State.CLOSED}),
    },
    State.CLOSED: {},
}

_WHY = {
    (State.COPYING, "publish"): "its page copies were not taken; call copies(), make them, then "
    "publish",
}


def permit(state: State, step: str) -> None:
    """Raise `IllegalStep` unless ``step`` is legal in ``state``."""
    if step not in STEPS[state]:
        why = _WHY.get((state, step), f"it is {state.name.lower()}")
        raise IllegalStep(f"cannot {step} this sequence: {why}")
