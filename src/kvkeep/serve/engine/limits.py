"""`Limits`: bounds on an engine's batch and queue."""

from __future__ import annotations

from dataclasses import dataclass

from kvkeep.core.errors import InvalidValue, whole

__all__ = ["Limits"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds on an engine's batch and queue.

    ``max_running`` answers are computed together, and ``step_tokens`` tokens in one forward pass:
    decoding answers come first, and chunks of prompts take the rest. ``max_waiting``
    requests may wait (None: any number). A request with more of its prompt cached may overtake
    others; each is overtaken at most ``max_overtaken`` times. ``watermark`` is the share of the
    pool that admission keeps free for running answers to grow into.
    """

    max_running: int = 32
    step_tokens: int = 1024
    max_waiting: int | None = None
    max_overtaken: int = 32
    watermark: float = 0.01

    def __post_init__(self) -> None:
        whole("max_running", self.max_running, 1)
        whole("step_tokens", self.step_tokens, 1)
        whole("max_overtaken", self.max_overtaken, 0)
        if self.max_waiting is not None:
            whole("max_waiting", self.max_waiting, 0)
        if self.step_tokens < self.max_running:
            raise InvalidValue(
                f"step_tokens has to allow a token for each of {self.max_running} running answers, "
                f"got {self.step_tokens}"
            )
        if not 0 <= self.watermark < 1:
            raise InvalidValue(f"watermark is a share of the pool, got {self.watermark!r}")
