"""What a store says of tokens that it did not give, in the words of explanations."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from kvkeep.observe.explain.answer import Missing

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvkeep.store import Fate

__all__ = ["missing"]

_REMOVED = {"cleared": "cleared", "removed": "asked"}
_REFUSED = frozenset({"admission", "answer"})
_DROPPED = {"queue full": "queue_full", "no time": "queue_full"}


def missing(fates: Iterable[Fate], *, waited_s: float | None = None) -> list[Missing]:
    """Convert a store's reports of missing tokens.

    Tokens that the store never had are left out: the explainer finds their reason. ``waited_s`` is
    how long the request waited for the store.
    """
    found = []
    for fate in fates:
        if fate.what == "never":
            continue
        reason, evidence = _converted(fate, fate.detail.partition(": ")[0], waited_s)
        tier = {"tier": fate.tier or None}
        found.append(Missing(fate.start, fate.stop, reason, {**tier, **evidence}))
    return found


def _converted(fate: Fate, word: str, waited_s: float | None) -> tuple[str, dict[str, Any]]:
    """Return reason and evidence, without the tier; ``word`` is the first part of the detail."""
    match fate.what:
        case "evicted":
            return "evicted", {**_eviction(fate, "pressure"), "policy": word}
        case "removed":
            return "evicted", {**_eviction(fate, _REMOVED.get(word, word)), "policy": None}
        case "dropped":
            return "not_admitted", {"why": _DROPPED.get(word, word.replace(" ", "_"))}
        case "refused":
            return "not_admitted", {"why": word if word in _REFUSED else "unknown"}
        case "damaged":
            return "damaged", {}
        case "late":
            return "tier_unavailable", {"why": "late", "waited_s": waited_s}
        case _:
            why = "breaker" if word == "breaker" else "error"
            return "tier_unavailable", {"why": why, "waited_s": waited_s}


def _eviction(fate: Fate, cause: str) -> dict[str, Any]:
    ago = None if fate.at is None else max(0.0, time.time() - fate.at)
    return {"at": fate.at, "ago_s": ago, "cause": cause, "by": None, "needed_pages": None}
