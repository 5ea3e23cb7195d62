"""What can become of a unit: somebody asks for it, and it may be evicted."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["UNKNOWN", "Asker", "Eviction", "Fate"]

UNKNOWN = "unknown"
"""The cause of an eviction that nobody told of: events were lost, or came before the first."""


@dataclass(slots=True, eq=False)
class Asker:
    """A request that computes units, and publishes them or not. Shared by all of its units.

    ``reuse`` is False where the cache keeps nothing of any request.
    ``tail`` names the full unit that its prompt's last, short one became, if it did.
    """

    id: str
    store: bool
    reuse: bool = True
    running: bool = True
    outcome: str | None = None
    tail: bytes | None = None

    @property
    def why_not(self) -> str:
        """Why nothing of it was kept."""
        if not self.reuse:
            return "reuse_off"
        if not self.store:
            return "store_false"
        return UNKNOWN if self.outcome in {None, "done"} else "given_up"


@dataclass(slots=True, eq=False)
class Eviction:
    """Pages went at ``at`` (unix seconds). ``by`` and ``needed_pages``: who needed them."""

    at: float
    cause: str
    by: str | None = None
    needed_pages: int | None = None


Fate = Asker | Eviction | int | None
"""The last that happened to a unit; a number is the sequence that published it."""
