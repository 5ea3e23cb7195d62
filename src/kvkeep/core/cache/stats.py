"""`CacheStats`: the content and the totals of a cache, as one frozen record."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvkeep.core.groups import GroupStats
    from kvkeep.core.miss_ratio import MissRatioPoint

__all__ = ["CacheCounters", "CacheStats"]


@dataclass(slots=True)
class CacheCounters:
    """Counts of what happened since the cache was made; they never fall."""

    opened: int = 0
    forked: int = 0
    closed: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    partial_hits: int = 0
    partial_hits_given_up: int = 0
    stored_pages: int = 0
    duplicate_pages: int = 0
    evicted_pages: int = 0
    evictions: int = 0
    out_of_pages: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStats:
    """A snapshot of a `PagedCache`. Counts are pages unless they say otherwise.

    ``used`` + ``free`` = ``total``. Of the used pages, ``cached`` are reusable by later prompts;
    of those, ``evictable`` can be evicted now and ``protected`` are held. Of the cached pages,
    ``dead`` are evicted first, and ``awaited`` are kept for suspended sessions. ``shared`` pages
    are in the tables of several sequences. ``references`` sums the users of all pages: tables, the
    tree, copies to be made, rows and states; ``shares`` counts the pages that sequences would need
    in addition if they shared none. Cached pages are those of tokens; ``groups`` has the pages of
    rows and states beside them, which ``dead``, ``awaited`` and hard-pinned pages include.
    """

    sequences: int
    pages_total: int
    pages_used: int
    pages_free: int
    pages_cached: int
    pages_evictable: int
    pages_protected: int
    pages_dead: int = 0
    pages_awaited: int = 0
    pages_shared: int
    shares: int
    references: int
    namespaces: int
    sessions: int = 0
    pins: int
    pinned_pages: int
    hard_pinned_pages: int
    pins_broken: int
    pins_expired: int
    opened: int
    forked: int
    closed: int
    prompt_tokens: int
    hit_tokens: int
    partial_hits: int
    partial_hits_given_up: int
    stored_pages: int
    duplicate_pages: int
    evictions: int
    evicted_pages: int
    copies: int
    out_of_pages: int
    hook_errors: int
    groups: GroupStats | None = None
    """What is kept beside the pages, of a cache with a `GroupLayout`."""
    what_if: tuple[MissRatioPoint, ...] = ()
    """Estimated hit rates of other sizes, if the cache was made with ``what_if``."""

    @property
    def hit_rate(self) -> float:
        """Reused prompt tokens / prompt tokens; 0 before the first prompt."""
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def pages_by_state(self) -> dict[str, int]:
        """Return all pages of the pool by state; of cached ones, rows and states included.

        "free", "cached_evictable", "cached_held", and "private" ones of running sequences.
        """
        beside, idle = (
            (0, 0) if self.groups is None else (self.groups.pages, self.groups.idle_pages)
        )
        return {
            "free": self.pages_free,
            "cached_evictable": self.pages_evictable + idle,
            "cached_held": self.pages_protected + beside - idle,
            "private": self.pages_used - self.pages_cached - beside,
        }

    def as_dict(self) -> dict[str, int | float]:
        """Return all counts and the hit rate, for JSON."""
        counts = asdict(self)
        del counts["what_if"]  # estimates, one per size, and no counts
        groups = counts.pop("groups") or {}
        counts.update((f"groups_{name}", count) for name, count in groups.items())
        return {**counts, "hit_rate": self.hit_rate}
