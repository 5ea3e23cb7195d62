"""`RoutingCost`: the expected cost of a prompt on an instance, in seconds."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from kvkeep.core.cost import PrefillCost, TransferCost, best_prefix
from kvkeep.core.errors import InvalidValue, told

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvkeep.core.cost import CostModel
    from kvkeep.serve.router.held import HeldPrefix

__all__ = ["CostTable", "RoutingCost"]

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
    "CPU": TransferCost(seconds_per_byte=1 / 20e9),
    "DISK": TransferCost(seconds_per_byte=1 / 3e9),
    "STORAGE": _STORAGE,
}
# The media of KV events by the names of a store's tiers; all others are STORAGE.
_MEDIA: Final = {"memory": "CPU", "shm": "CPU", "buffer": "CPU", "file": "DISK"}
# A cost outside of this for 1,000 tokens is none of a machine: 10 µs … 1,000 s.
_LEAST_S, _MOST_S = 1e-5, 1e3

_ALIKE: Final = 2.0  # times the lower cost


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

    def learned(self, found: CostModel) -> RoutingCost:
        """Return this cost with what ``found`` knows of prefill and of tiers.

        Raises `InvalidValue` where 1,000 tokens take less than 10 µs or more than 1,000 s.
        """
        prefill, tiers = self.prefill, dict(self.tiers)
        if found.prefill.known:
            prefill = found.prefill.cost
            seconds = prefill.prefill_s(0, 1_000)
            if not _LEAST_S <= seconds <= _MOST_S:
                raise InvalidValue(
                    f"a prompt of 1,000 tokens takes {told(seconds)} seconds by this cost; "
                    f"{_LEAST_S:g} … {_MOST_S:g} is needed"
                )
            if not prefill.kv_bytes_per_token:
                prefill = replace(prefill, kv_bytes_per_token=self.prefill.kv_bytes_per_token)
        slowest: dict[str, TransferCost] = {}
        for name, cost in found.reads().items():
            medium = _MEDIA.get(name.rstrip("0123456789"), "STORAGE")
            known = slowest.get(medium)
            if known is None or cost.seconds(1 << 20) > known.seconds(1 << 20):
                slowest[medium] = cost
        return replace(self, prefill=prefill, tiers={**tiers, **slowest})

    def alike(self, other: RoutingCost) -> bool:
        """Whether both differ by less than a factor of two, for prompts and for each tier.

        Equal machines that others use as well measure as different costs. Taken at their word, all
        prompts would go to one of them.
        """
        pairs = [
            (self.prefill.prefill_s(*span), other.prefill.prefill_s(*span))
            for span in ((0, 256), (0, 2_048))
        ]
        for tier in {*self.tiers, *other.tiers}:
            mine, its = (
                one.tiers.get(tier, one.other_tier).seconds(1 << 20) for one in (self, other)
            )
            pairs.append((mine, its))
        return all(max(pair) <= _ALIKE * min(pair) for pair in pairs)

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


class CostTable:
    """The costs of instances that told theirs, beside the router's own ``cost``.

    Thread safety: none.
    """

    def __init__(self, cost: RoutingCost) -> None:
        self._cost = cost
        self._own: dict[str, RoutingCost] = {}

    def learn(self, instance: str, cost: RoutingCost | None) -> None:
        """Set the cost of an instance; None: it is not known any more.

        Instances with costs that are alike share one, so that none of them is preferred for errors
        of measuring.
        """
        own = self._own.pop(instance, None)
        if cost is not None:
            known = (*self._own.values(), *(() if own is None else (own,)))
            self._own[instance] = next((one for one in known if one.alike(cost)), cost)

    def of(self, instance: str) -> RoutingCost:
        """Return an instance's own cost, or that of others as long as its own is not known.

        Else the default would prefer, or avoid, those that are not known.
        """
        own = self._own.get(instance)
        return next(iter(self._own.values()), self._cost) if own is None else own
