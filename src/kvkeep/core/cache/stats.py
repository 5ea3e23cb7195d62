"""`CacheStats`: what a cache holds and what it has done, as one frozen record."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvkeep.core.miss_ratio import MissRatioPoint

__all__ = ["CacheCounters", "CacheStats"]


@dataclass(slots=True)
class CacheCounters:
    """What has happened since the cache was made; only ever grows."""

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
    copies: int = 0
    out_of_pages: int = 0
    hook_errors: int = 0


@dataclass(frozen=True, slots=True)
class CacheStats:
    """A snapshot of a `PagedCache`. Counts are pages unless they say otherwise.

    ``used`` + ``free`` = ``total``. Of the used pages, ``cached`` are reusable by later prompts;
    of those, ``evictable`` may go now and ``protected`` are held. Of the cached ones, ``dead`` go
    first, and ``awaited`` are kept for sessions that are away. ``shared`` pages have more than one
    sequence. ``references`` sums all reference counts, ``shares`` is what sharing saves: pages
    that sequences would need besides if each had its own.
    """

    sequences: int
    pages_total: int
    pages_used: int
    pages_free: int
    pages_cached: int
    pages_evictable: int
    pages_protected: int
    pages_dead: int
    pages_awaited: int
    pages_shared: int
    shares: int
    references: int
    namespaces: int
    sessions: int
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
    what_if: tuple[MissRatioPoint, ...] = ()
    """What other sizes would do, where the cache was made to watch that."""

    @property
    def hit_rate(self) -> float:
        """Reused prompt tokens / prompt tokens, 0 before the first prompt."""
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def as_dict(self) -> dict[str, int | float]:
        """All counts, with the hit rate, for JSON."""
        counts = asdict(self)
        del counts["what_if"]  # a table of its own
        return {**counts, "hit_rate": self.hit_rate}
