"""The state of a unit: a full page of tokens with all tokens before it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["UNKNOWN", "Eviction", "Requester", "UnitState"]

UNKNOWN = "unknown"
"""Cause of an eviction without an event: events were lost, or came before the first one seen."""


@dataclass(slots=True, eq=False)
class Requester:
    """A request that computes units, and publishes them or not; shared by all of its units.

    ``reuse`` is False if the cache keeps nothing. ``tail`` is the name of the full unit into which
    generated tokens turned the prompt's last, short one; None if they did not.
    """

    id: str
    store: bool
    reuse: bool = True
    running: bool = True
    outcome: str | None = None
    tail: bytes | None = None

    @property
    def why_not(self) -> str:
        """The reason why no page of the request was kept."""
        if not self.reuse:
            return "reuse_off"
        if not self.store:
            return "store_false"
        return UNKNOWN if self.outcome in {None, "done"} else "given_up"


@dataclass(slots=True, eq=False)
class Eviction:
    """An eviction at ``at`` (unix seconds), for the ``needed_pages`` of request ``by``."""

    at: float
    cause: str
    by: str | None = None
    needed_pages: int | None = None


UnitState = Requester | Eviction | int | None
"""The latest event of a unit; a number is the sequence that published it."""
