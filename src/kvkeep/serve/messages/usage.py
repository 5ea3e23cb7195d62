"""`split_usage`: a prompt's tokens by what the cache did with them, as Anthropic counts them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["LONG_S", "MessageUsage", "split_usage"]

LONG_S = 3600
"""Seconds of the long time to live."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageUsage:
    """Token counts of one request; the three kinds of input tokens add up to the prompt.

    ``read``: reused from the cache. ``written``: computed, and at or before the last breakpoint, so
    kept; of these, ``written_1h`` for an hour. ``rest``: computed, behind the last breakpoint.
    ``more`` are kvkeep's own figures.
    """

    read: int
    written: int
    written_1h: int
    rest: int
    output: int = 0
    more: Mapping[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return the ``usage`` object of an answer."""
        usage: dict[str, Any] = {
            "input_tokens": self.rest,
            "cache_creation_input_tokens": self.written,
            "cache_read_input_tokens": self.read,
            "cache_creation": {
                "ephemeral_5m_input_tokens": self.written - self.written_1h,
                "ephemeral_1h_input_tokens": self.written_1h,
            },
            "output_tokens": self.output,
            "service_tier": "standard",
        }
        return {**usage, "kvkeep": dict(self.more)} if self.more else usage


def split_usage(
    prompt: int,
    cached: int,
    breakpoints: Sequence[tuple[int, float]] = (),
    *,
    output: int = 0,
    more: Mapping[str, Any] | None = None,
) -> MessageUsage:
    """Return the usage of ``prompt`` tokens of which the first ``cached`` were reused.

    ``breakpoints`` are (position in tokens, seconds to live).
    """
    last = max((at for at, _ in breakpoints), default=0)
    last_1h = max((at for at, ttl_s in breakpoints if ttl_s >= LONG_S), default=0)
    written = max(0, min(last, prompt) - cached)
    return MessageUsage(
        read=cached,
        written=written,
        written_1h=max(0, min(last_1h, prompt) - cached),
        rest=prompt - cached - written,
        output=output,
        more=more or {},
    )
