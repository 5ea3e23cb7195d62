"""`ReuseTotals`: reused prompt tokens by tier, computed ones, and the time that reuse saved."""

from __future__ import annotations

from typing import Final

__all__ = ["POOL", "ReuseTotals"]

POOL: Final = "pool"
"""The name of the page pool among the tiers."""

_MOST_TIERS = 32  # an operator names a few; this is the bound for any other caller


class ReuseTotals:
    """Counts since the start. Thread safety: none.

    ``hit_tokens`` and ``saved_seconds`` by tier ("pool", or a tier behind it); ``computed_tokens``
    of prompts took ``computed_seconds``. Saved: each reused token counts the average time of a
    computed token at that moment.
    """

    def __init__(self) -> None:
        self.hit_tokens = {POOL: 0}
        self.saved_seconds = {POOL: 0.0}
        self.computed_tokens = 0
        self.computed_seconds = 0.0
        self._unpriced: dict[str, int] = {}  # reused before the first token was computed

    def reused(self, tier: str, tokens: int) -> None:
        """Count tokens reused from a tier."""
        if tier not in self.hit_tokens and len(self.hit_tokens) > _MOST_TIERS:
            tier = "other"
        self.hit_tokens[tier] = self.hit_tokens.get(tier, 0) + tokens
        if self.computed_tokens:
            self._save(tier, tokens)
        else:
            self._unpriced[tier] = self._unpriced.get(tier, 0) + tokens

    def computed(self, tokens: int, seconds: float) -> None:
        """Count computed tokens; their average time is the time that a reused token saves."""
        self.computed_tokens += tokens
        self.computed_seconds += seconds
        if self._unpriced and self.computed_tokens:
            for tier, unpriced in self._unpriced.items():
                self._save(tier, unpriced)
            self._unpriced = {}

    def _save(self, tier: str, tokens: int) -> None:
        seconds = tokens * self.computed_seconds / self.computed_tokens
        self.saved_seconds[tier] = self.saved_seconds.get(tier, 0.0) + seconds
