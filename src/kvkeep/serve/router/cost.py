"""`RoutingCost`: the expected cost of a prompt on an instance, in seconds."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvkeep.core.errors import InvalidValue

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvkeep.serve.router.held import HeldPrefix

__all__ = ["RoutingCost"]

# Seconds per token of 128 KiB: memory at 20 GB/s, a disk at 3 GB/s, a network store at 1 GB/s.
_TIERS = {"GPU": 0.0, "COMING": 0.0, "CPU": 7e-6, "DISK": 45e-6, "STORAGE": 130e-6}


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingCost:
    """Estimates the part of the time to the first token that depends on the choice of instance.

    Computing tokens m … n of a prompt takes ``token_s · (n - m) + square_s · (n² - m²)``; the
    defaults are for an 8-billion-parameter model on one large GPU. ``tiers`` are the seconds to
    load a token from each tier, ``other_tier_s`` from a tier not listed. Each running request
    delays a new prompt on its instance by ``running_s``.

    ``balance`` is the weight of an instance's recent work: prefill seconds, averaged over
    ``memory_s``, beyond those of the least busy instance. With 0 only the current load counts, and
    a conversation stays where it began.
    """

    token_s: float = 1 / 15_000
    square_s: float = 1e-9
    tiers: Mapping[str, float] = field(default_factory=lambda: dict(_TIERS))
    other_tier_s: float = 130e-6
    running_s: float = 0.005
    balance: float = 0.02
    memory_s: float = 60.0

    def __post_init__(self) -> None:
        named = {name: getattr(self, name) for name in self.__slots__ if name != "tiers"}
        for name, seconds in {**named, **self.tiers}.items():
            if not 0 <= seconds < math.inf:
                raise InvalidValue(f"{name} must be a number of seconds, 0 or more; got {seconds}")
        if not self.token_s or not self.memory_s:
            raise InvalidValue("token_s and memory_s must be above 0")

    def prefill_s(self, tokens: int, held: HeldPrefix | None) -> float:
        """Return the seconds to prefill ``tokens`` tokens, of which ``held`` is cached.

        The last token is always computed, and so are tokens that are slower to load than to
        compute.
        """
        if held is None or not held.tokens:
            return self._compute(0, tokens)
        seconds, at = 0.0, 0
        for tier, length in held.tiers.items():
            stop = min(at + length, tokens - 1)
            load = self.tiers.get(tier, self.other_tier_s) * (stop - at)
            seconds += min(load, self._compute(at, stop))
            at = stop
        return seconds + self._compute(at, tokens)

    def _compute(self, start: int, stop: int) -> float:
        return self.token_s * (stop - start) + self.square_s * (stop * stop - start * start)
