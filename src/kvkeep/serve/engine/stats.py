"""`EngineStats`: the counters of an engine."""

from __future__ import annotations

from dataclasses import asdict, dataclass

__all__ = ["EngineStats"]


@dataclass(slots=True)
class EngineStats:
    """What an engine has done since it was made, and what it does now (``running``, ``waiting``).

    ``running`` and ``waiting`` are answers, ``requests`` were taken on and ``finished``,
    ``aborted`` or ``failed`` since. Of ``prompt_tokens`` (of admitted requests) ``cached_tokens``
    were reused. ``computed_tokens`` are all tokens of all forward passes (``steps``): also those
    computed again after an answer was ``preempted``, and ``drafted_tokens``, of which
    ``accepted_drafts`` were right. ``deferred`` answers waited for a prefix that another computed.

    With a store: ``loaded_tokens`` came from it into pages (those of a request's first time are
    among its ``cached_tokens``), ``late_loads`` times it took longer than a request waits,
    ``kept_tokens`` were handed to it, and ``unkept_tokens``, in full blocks, found no room.
    ``observer_errors`` times an observer raised.
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
        """The figures by name."""
        return asdict(self)
