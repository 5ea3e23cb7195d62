"""`RequestWatch`, what telemetry is told of requests, and `ReuseCounter`, which counts reuse."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from kvkeep.observe.telemetry.shares import NamespaceShare, Shares

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["POOL", "RequestWatch", "ReuseCounter", "Reused"]

POOL: Final = "pool"
"""What the pool of pages is called among the tiers."""

_MOST_TIERS = 32  # names of tiers are the operator's; this is for who invents them


class RequestWatch(Protocol):
    """What is told of each request, in this order; ``id`` is the one in its answer.

    Plain values, so that neither an engine nor a server needs to be known here. All calls are quick
    and may come from any thread, those of one request one after the other. An ``id`` that was not
    told of before is no error: it is left out.
    """

    def begun(self, id: str, *, kind: str, model: str, headers: Mapping[str, str]) -> None:
        """It has come, at endpoint ``kind``, with these HTTP headers (names in lower case)."""

    def admitted(
        self, id: str, *, namespace: str, prompt_tokens: int, cached_tokens: int, match_s: float
    ) -> None:
        """It has its pages; ``cached_tokens`` were in the pool. Once for each request."""

    def loaded(
        self, id: str, *, sources: Sequence[tuple[int, int, str]], seconds: float, late: bool
    ) -> None:
        """The store gave tokens start … stop of a tier, for each of ``sources``."""

    def computed(self, id: str, *, tokens: int, seconds: float) -> None:
        """A step computed so many tokens of its prompt; ``seconds`` is its share of the step."""

    def stored(self, id: str, *, tokens: int, seconds: float) -> None:
        """So many of its tokens were handed to the store, in so many seconds."""

    def ended(self, id: str, *, outcome: str, generated: int, ttft_s: float | None) -> None:
        """Nothing more comes of it. ``outcome``: "done", "aborted", "failed"."""


@dataclass(frozen=True, slots=True)
class Reused:
    """What a `ReuseCounter` has counted since the start.

    ``hit_tokens`` by tier ("pool", or the name of one behind it); ``computed_tokens`` of prompts
    took ``computed_seconds``; what was reused would have taken ``saved_seconds``, if a token had
    taken what tokens took on average up to then. ``shares`` are those of `Shares.top`.
    """

    hit_tokens: Mapping[str, int]
    computed_tokens: int
    computed_seconds: float
    saved_seconds: float
    shares: tuple[NamespaceShare, ...]

    @property
    def saved_tokens(self) -> int:
        """Prompt tokens that were not computed."""
        return sum(self.hit_tokens.values())


class ReuseCounter:
    """A `RequestWatch` that counts what requests reuse and what they compute.

    Thread safety: all methods. Memory: a name for each request that has not ended, and `Shares`.
    """

    def __init__(self, shares: Shares | None = None) -> None:
        self._lock = threading.Lock()
        self._shares = Shares() if shares is None else shares
        self._spaces: dict[str, str] = {}  # of requests that run
        self._hits = {POOL: 0}
        self._tokens = 0
        self._seconds = 0.0
        self._saved_seconds = 0.0
        self._unpriced = 0  # tokens reused before the first one was computed

    def begun(self, id: str, *, kind: str, model: str, headers: Mapping[str, str]) -> None:
        """Nothing is counted before it has its pages."""

    def admitted(
        self, id: str, *, namespace: str, prompt_tokens: int, cached_tokens: int, match_s: float
    ) -> None:
        """Count what the pool gave."""
        self._shares.add(namespace, prompt_tokens, cached_tokens)
        with self._lock:
            self._spaces[id] = namespace
            self._hit(POOL, cached_tokens)

    def loaded(
        self, id: str, *, sources: Sequence[tuple[int, int, str]], seconds: float, late: bool
    ) -> None:
        """Count what the store gave, by tier."""
        with self._lock:
            namespace = self._spaces.get(id)
            for start, stop, tier in sources:
                self._hit(tier, stop - start)
        if namespace is not None and sources:
            self._shares.add(namespace, 0, sum(stop - start for start, stop, _ in sources))

    def computed(self, id: str, *, tokens: int, seconds: float) -> None:
        """Count what was computed, and what that says of the price of a token."""
        with self._lock:
            self._tokens += tokens
            self._seconds += seconds
            if self._unpriced and self._tokens:
                self._saved_seconds += self._unpriced * self._seconds / self._tokens
                self._unpriced = 0

    def stored(self, id: str, *, tokens: int, seconds: float) -> None:
        """The store counts that itself."""

    def ended(self, id: str, *, outcome: str, generated: int, ttft_s: float | None) -> None:
        """Forget its name."""
        with self._lock:
            self._spaces.pop(id, None)

    def snapshot(self, most: int = 20) -> Reused:
        """What was counted so far, with the ``most`` largest namespaces."""
        shares = tuple(self._shares.top(most))
        with self._lock:
            return Reused(
                dict(self._hits), self._tokens, self._seconds, self._saved_seconds, shares
            )

    def _hit(self, tier: str, tokens: int) -> None:
        if tier not in self._hits and len(self._hits) > _MOST_TIERS:
            tier = "other"
        self._hits[tier] = self._hits.get(tier, 0) + tokens
        if self._tokens:
            self._saved_seconds += tokens * self._seconds / self._tokens
        else:
            self._unpriced += tokens
