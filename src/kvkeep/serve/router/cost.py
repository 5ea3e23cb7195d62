"""`RoutingCost`: the expected cost of a prompt on an instance, in seconds."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kvkeep.core.cost import PrefillCost, TransferCost, best_prefix
from kvkeep.core.errors import InvalidValue

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvkeep.serve.router.held import HeldPrefix

__all__ = ["RoutingCost"]

# An 8-billion-parameter model on one large GPU.
_PREFILL: Final = PrefillCost(
    seconds_per_token=1 / 15_000, seconds_per_token_pair=2e-9, kv_bytes_per_token=128 * 1024
)
_TOKEN_BYTES: Final = 128 * 1024  # where the cost of prefill does not say
_FREE: Final = TransferCost(seconds_per_byte=0.0)
_STORAGE: Final = TransferCost(seconds_per_byte=1e-9)  # a store on the network at 1 GB/s
_TIERS: Final = {
    "GPU": _FREE,
    "COMING": _FREE,
    "ROUTED": _FREE,
    "CPU": TransferCost(seconds_per_byte=1 / 20e9),
    "DISK": TransferCost(seconds_per_byte=1 / 3e9),
    "STORAGE": _STORAGE,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingCost:
    """Estimates the part of the time to the first token that depends on the choice of instance.

    ``prefill`` is the cost to compute a prompt; the default is for an 8-billion-parameter model on
    one large GPU. ``tiers`` are the costs to load bytes from each medium of KV events,
    ``other_tier`` from a medium not listed; a token has the bytes that ``prefill`` says, or
    128 KiB. Each running request delays a new prompt on its instance by ``running_s``.

    ``balance`` is the weight of an instance's recent work: prefill seconds, averaged over
    ``memory_s``, beyond those of the least busy instance. With 0 only the current load counts, and
    a conversation stays where it began.

    Places whose load differs by less than ``slack`` of the seconds that the whole prompt would
    take count as equally loaded, and a hash of the prompt chooses one of them: so several routers,
    each of which knows its own part of the load, agree. With 0 the least loaded place is chosen.

    Raises `InvalidValue` for seconds that are no numbers, and for prompts that cost nothing.
    """

    prefill: PrefillCost = _PREFILL
    tiers: Mapping[str, TransferCost] = field(default_factory=lambda: dict(_TIERS))
    other_tier: TransferCost = _STORAGE
    running_s: float = 0.005
    balance: float = 0.02
    memory_s: float = 60.0
    slack: float = 0.1

    def __post_init__(self) -> None:
        for name in ("running_s", "balance", "memory_s", "slack"):
            seconds = getattr(self, name)
            if not 0 <= seconds < math.inf:
                raise InvalidValue(f"{name} must be a number, 0 or more; got {seconds}")
        if not self.memory_s:
            raise InvalidValue("memory_s must be above 0")
        if not self.prefill.prefill_s(0, 1):
            raise InvalidValue("computing a prompt takes time; the cost of prefill is 0")

    def prefill_s(self, tokens: int, held: HeldPrefix | None) -> float:
        """Return the seconds to prefill ``tokens`` tokens, of which ``held`` is cached.

        The last token is always computed, and so is what is slower to load than to compute.
        """
        compute_s = self.prefill.prefill_s
        if held is None or not held.tokens:
            return compute_s(0, tokens)
        nbytes = self.prefill.kv_bytes_per_token or _TOKEN_BYTES
        runs, at = [], 0
        for tier, length in held.tiers.items():
            stop = min(at + length, tokens - 1)
            cost = self.tiers.get(tier, self.other_tier)
            runs.append((stop, cost.seconds(nbytes * (stop - at))))
            at = stop
        return best_prefix(0, tokens, runs, compute_s).seconds
