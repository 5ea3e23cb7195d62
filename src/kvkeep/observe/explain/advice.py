"""What an operator can do against a cause of computed tokens, in one sentence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["advice"]

_EVICTED: Final = {
    "pressure": "Give the pool more memory, or the store another tier, or pin the prefix.",
    "asked": "Somebody had it evicted: pin prefixes that are to stay.",
    "cleared": "The cache was cleared; it fills again by itself.",
    "dropped": "Its request gave it up; it is kept once a request computes it to its end.",
}
_NOT_ADMITTED: Final = {
    "reuse_off": "Start the server without --no-reuse.",
    "store_false": "Requests had store: false; leave that out where prompts come again.",
    "answer": "Store answers as well, if later prompts contain them.",
    "admission": "The tier takes blocks used more often; --tiering inclusive writes all at once.",
    "lossy": "The tier takes exact KV only: use one kind of codec in all tiers.",
    "queue_full": "Writes were dropped: use a faster tier, or give memory more bytes.",
    "no_room": "Give the tier more room (size=).",
    "write_failed": "Look at the tier's errors: writes failed.",
    "given_up": "Requests ended before they published it; give clients more time.",
}
_UNAVAILABLE: Final = {
    "breaker": "Look at the tier: it failed, and is left alone until it answers again.",
    "late": "Use a faster tier, or give loads more time (--load-timeout).",
    "error": "Look at the tier's errors: reads failed.",
}
_NOT_RESUMABLE: Final = {
    "evicted": "Give the pool more memory, or pin the prefix: the state was evicted.",
    "no_room": "Give the pool more memory: there was no room for the state.",
}


def advice(reason: str, evidence: Mapping[str, Any]) -> str | None:
    """Return what to do against tokens that were computed for ``reason``; None: nothing.

    ``reason`` is one of `REASONS`; ``evidence`` is that of a span with it.
    """
    why = evidence.get("why") or ""
    match reason:
        case "diverged":
            return "Move what changes (a time, names, ids, the order of tools) behind what stays."
        case "evicted":
            return _EVICTED.get(evidence.get("cause") or "", _EVICTED["pressure"])
        case "not_admitted":
            return _NOT_ADMITTED.get(why)
        case "other_namespace":
            return "Use one cache_salt for users who may share."
        case "not_resumable":
            return _NOT_RESUMABLE.get(why)
        case "tier_unavailable":
            return _UNAVAILABLE.get(why, _UNAVAILABLE["error"])
        case "damaged":
            return "Look at the disk if it happens again: records failed their checksum."
        case _:
            return None
