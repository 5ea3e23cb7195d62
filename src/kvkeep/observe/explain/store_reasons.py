"""Converts a store's reasons for tokens that were not loaded to those of explanations."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from kvkeep.observe.explain.answer import Missing

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvkeep.store import Miss

__all__ = ["missing"]

_REMOVED = {"cleared": "cleared", "removed": "asked"}
_REFUSED = frozenset({"admission", "answer", "lossy", "unread"})
_DROPPED = {"queue full": "queue_full", "no time": "queue_full"}


def missing(misses: Iterable[Miss], *, waited_s: float | None = None) -> list[Missing]:
    """Convert a store's reports of missing tokens.

    Tokens that the store never had are left out: the explainer finds their reason. ``waited_s`` is
    how long the request waited for the store.
    """
    found = []
    for miss in misses:
        if miss.what == "never":
            continue
        reason, evidence = _converted(miss, miss.detail.partition(": ")[0], waited_s)
        tier = {"tier": miss.tier or None}
        found.append(Missing(miss.start, miss.stop, reason, {**tier, **evidence}))
    return found


def _converted(miss: Miss, word: str, waited_s: float | None) -> tuple[str, dict[str, Any]]:
    """Return reason and evidence, without the tier; ``word`` is the detail before the colon."""
    match miss.what:
        case "evicted":
            return "evicted", {**_eviction(miss, "pressure"), "policy": word}
        case "removed":
            return "evicted", {**_eviction(miss, _REMOVED.get(word, word)), "policy": None}
        case "dropped":
            return "not_admitted", {"why": _DROPPED.get(word, word.replace(" ", "_"))}
        case "refused":
            return "not_admitted", {"why": word if word in _REFUSED else "unknown"}
        case "slower":
            return "not_loaded", {"why": word, "load_s": miss.load_s, "compute_s": miss.compute_s}
        case "damaged":
            return "damaged", {}
        case "late":
            return "tier_unavailable", {"why": "late", "waited_s": waited_s}
        case _:
            why = "breaker" if word == "breaker" else "error"
            return "tier_unavailable", {"why": why, "waited_s": waited_s}


def _eviction(miss: Miss, cause: str) -> dict[str, Any]:
    ago = None if miss.at is None else max(0.0, time.time() - miss.at)
    return {"at": miss.at, "ago_s": ago, "cause": cause, "by": None, "needed_pages": None}
