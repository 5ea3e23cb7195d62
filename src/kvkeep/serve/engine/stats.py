"""`EngineStats`: the counters of an engine."""

from __future__ import annotations

from dataclasses import asdict, dataclass

__all__ = ["EngineStats"]


@dataclass(slots=True)
class EngineStats:
    """Counts since the engine was made, and the answers now ``running`` and ``waiting``.

    ``requests`` were added, and ``finished``, ``aborted`` or ``failed`` since. Of
    ``prompt_tokens`` (of admitted requests) ``cached_tokens`` were reused. ``computed_tokens`` are
    the tokens of all forward passes (``steps``), including tokens computed again after a
    preemption (``preempted`` answers) and ``drafted_tokens``, of which ``accepted_drafts`` were
    right. ``deferred`` answers waited for a prefix that another request computed.

    With a store: ``loaded_tokens`` were loaded into pages (those of a request's first admission are
    part of its ``cached_tokens``), ``late_loads`` were late and overtaken by computing,
    ``kept_tokens`` were handed to the store, and ``unkept_tokens``, in full blocks, were dropped
    because its queue was full. Observers raised ``observer_errors`` times.
    """

    running: int = 0
    waiting: int = 0
    steps: int = 0
    requests: int = 0
    finished: int = 0
    aborted: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    preempted: int = 0
    deferred: int = 0
    drafted_tokens: int = 0
    accepted_drafts: int = 0
    loaded_tokens: int = 0
    late_loads: int = 0
    kept_tokens: int = 0
    unkept_tokens: int = 0
    observer_errors: int = 0

    def as_dict(self) -> dict[str, int]:
        """Return the figures by name."""
        return asdict(self)
