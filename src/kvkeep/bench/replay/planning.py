"""`PlannedMemory`: the replays for a memory size, and what they recommend."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvkeep.bench.replay.bounds import BELADY, INFINITE
from kvkeep.bench.replay.runs import ReplayRun
from kvkeep.bench.replay.words import amount
from kvkeep.core.cost import TransferCost
from kvkeep.core.errors import InvalidValue
from kvkeep.core.eviction import POLICIES
from kvkeep.core.eviction import policy as policy_named
from kvkeep.core.geometry.units import format_bytes

if TYPE_CHECKING:
    from kvkeep.bench.replay.workload import Workload
    from kvkeep.core.cost import PrefillCost
    from kvkeep.core.groups import GroupLayout

__all__ = ["FLEXIBLE", "USUAL", "Advice", "PlanCandidate", "PlannedMemory", "Prices"]

USUAL = "lru"
FLEXIBLE = "returns"
_TIERINGS = ("inclusive", "exclusive")
_THRIFTY = "inclusive:2"
_TIMES = (0.25, 0.5, 1.0, 2.0, 4.0)
_NEVER = TransferCost(seconds_per_byte=1e12)  # nothing is loaded from a tier that slow
_MONTH_S = 365.25 * 86_400 / 12
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Prices:
    """Prices in one currency: of an hour of the GPUs, and of a GiB a month.

    Raises `InvalidValue` for prices that are negative or no numbers.
    """

    gpu_hour: float
    memory_gib: float
    disk_gib: float | None = None

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise InvalidValue(f"the price {name} is {value!r}; at least 0 is needed")

    @classmethod
    def parse(cls, text: str) -> Prices:
        """Parse ``gpu=2.5,memory=3,disk=0.1``; the disk may be left out. Raises `InvalidValue`."""
        names = {"gpu": "gpu_hour", "memory": "memory_gib", "disk": "disk_gib"}
        prices: dict[str, float] = {}
        for part in text.split(","):
            name, _, value = part.strip().partition("=")
            try:
                prices[names[name]] = float(value)
            except (KeyError, ValueError):
                raise InvalidValue(
                    f"prices are such as gpu=2.5,memory=3,disk=0.1; got {part.strip()!r}"
                ) from None
        for name in ("gpu", "memory"):
            if names[name] not in prices:
                raise InvalidValue(f"the price of {name} is missing in {text!r}")
        return cls(**prices)


@dataclass(frozen=True, slots=True)
class PlanCandidate:
    """A setting that was replayed, or no cache at all (then ``policy`` is None).

    ``hit_rate`` is the share of prompt tokens that it reuses, ``month`` what a month of such
    traffic costs with it; None without prices.
    """

    policy: str | None
    memory_tokens: int
    disk_tokens: int = 0
    tiering: str | None = None
    hit_rate: float = 0.0
    month: float | None = None


@dataclass(frozen=True, slots=True)
class Advice:
    """What to use, and why: the recommendation is a sentence, each reason several sentences.

    ``chosen`` is the setting to use, and ``candidates`` are those that it was chosen from: with
    prices, none costs less a month. ``warnings`` say what the trace is too short to tell.
    """

    chosen: PlanCandidate
    recommendation: str
    reasons: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    candidates: tuple[PlanCandidate, ...] = ()

    def __str__(self) -> str:
        return "\n\n".join((self.recommendation, *self.warnings, *self.reasons))


@dataclass(frozen=True, slots=True)
class PlannedMemory:
    """The memory to plan for: its tokens, and those of a tier below it (0: none).

    Shares are of prompt tokens, with one page per unit of the trace. ``groups`` are those of a
    model with windows or states, in such pages; it is planned without a tier. With ``cost``, that
    of prompts, and ``read``, that of the tier, the plan says what the tier saves in seconds. With
    ``prices``, which need ``cost`` and ``bytes_per_token``, it recommends the cheapest setting,
    without them the one that reuses most. With ``bytes_per_token``, sizes are told in bytes.
    """

    memory_tokens: int
    disk_tokens: int = 0
    groups: GroupLayout | None = None
    cost: PrefillCost | None = None
    read: TransferCost | None = None
    prices: Prices | None = None
    bytes_per_token: float | None = None

    def __post_init__(self) -> None:
        if self.prices is not None and (self.cost is None or self.bytes_per_token is None):
            raise InvalidValue("prices need the cost of prompts, and the bytes of a token")
        if self.prices is not None and self.disk_tokens and self.prices.disk_gib is None:
            raise InvalidValue("a disk needs the price of a GiB of it, as disk=0.1")

    def runs(self, workload: Workload) -> list[ReplayRun]:
        """Return the replays to run: policies, less and more memory, tiers, and the bounds.

        Raises `InvalidValue` for a trace from which no advice can be read.
        """
        _check_telling(workload)
        policies = [name for name in POLICIES if policy_named(name).advised]
        runs = [self.of(policy) for policy in policies]
        for times in _TIMES:
            size = int(self.memory_tokens * times)
            if size >= workload.unit_tokens:
                runs += [self.of(policy, size) for policy in (USUAL, FLEXIBLE, BELADY)]
        if self.disk_tokens:
            runs += self._tiers(policies, workload.unit_tokens)
        runs.append(ReplayRun(INFINITE, 0))
        return list(dict.fromkeys(runs))

    def _tiers(self, policies: list[str], least: int) -> list[ReplayRun]:
        runs = [self.tiers(policy, name) for policy in policies for name in _TIERINGS]
        runs += [self.tiers(policy, _THRIFTY) for policy in (USUAL, FLEXIBLE)]
        if self.prices is not None:  # a disk below less memory may be cheaper
            sizes = [int(self.memory_tokens * times) for times in _TIMES if times < 1]
            runs += [
                self.tiers(policy, name, size)
                for size in sizes
                if size >= least
                for policy in (USUAL, FLEXIBLE)
                for name in _TIERINGS
            ]
        runs.append(ReplayRun(BELADY, self.memory_tokens, below=(self.disk_tokens,)))
        if self.cost is not None and self.read is not None:
            pairs = [(policy, name) for policy in (USUAL, FLEXIBLE) for name in _TIERINGS]
            for policy, name in (*pairs, (USUAL, _THRIFTY)):
                runs += self.timed(policy, name)
        return runs

    def of(self, policy: str, tokens: int | None = None) -> ReplayRun:
        """Return the replay in memory alone, by default of the planned size."""
        size = self.memory_tokens if tokens is None else tokens
        return ReplayRun(policy, size, groups=None if policy == BELADY else self.groups)

    def tiers(self, policy: str, tiering: str, tokens: int | None = None) -> ReplayRun:
        """Return the replay with the tier below memory, by default of the planned size."""
        size = self.memory_tokens if tokens is None else tokens
        return ReplayRun(policy, size, below=(self.disk_tokens,), tiering=tiering)

    def timed(self, policy: str, tiering: str) -> tuple[ReplayRun, ReplayRun]:
        """Return the replays that take time: with the tier, and without loading from it."""
        with_tier, alone = (
            replace(self.tiers(policy, tiering), cost=self.cost, reads=(None, read))
            for read in (self.read, _NEVER)
        )
        return with_tier, alone

    def size(self, tokens: int) -> str:
        """Return a size as text: in bytes if the size of a token is known, else in tokens."""
        if self.bytes_per_token is None:
            return amount(tokens)
        return format_bytes(round(tokens * self.bytes_per_token))

    def month(self, workload: Workload, memory: int, disk: int, hit_rate: float) -> float | None:
        """Return what a month of such traffic costs; None without prices, or without a duration.

        Memory and disk as they are given, and the GPUs for the prompt tokens that are not reused.
        Answers are not counted: they cost the same whatever is reused.
        """
        if self.prices is None or workload.span_s <= 0:
            return None
        assert self.cost is not None
        assert self.bytes_per_token is not None
        busy_s = sum(self.cost.prefill_s(0, tokens) for tokens in workload.tokens.tolist())
        gib = self.bytes_per_token / _GIB
        return (
            memory * gib * self.prices.memory_gib
            + disk * gib * (self.prices.disk_gib or 0.0)
            + (1 - hit_rate) * busy_s / 3600 * self.prices.gpu_hour * _MONTH_S / workload.span_s
        )


def _check_telling(workload: Workload) -> None:
    """Raise `InvalidValue` if the trace lacks what an advice is read from."""
    requests, skipped = len(workload), workload.skipped
    if workload.unknown == requests:
        raise InvalidValue(
            f"{workload.name} has lengths only: no prompt can be compared with another, so there "
            "is nothing to advise from; a trace with ids, tokens or text of the prompts is needed"
        )
    if skipped >= requests:
        reasons = "".join(f"; {reason}" for reason in workload.skipped_reasons[:1])
        raise InvalidValue(
            f"{workload.name}: {skipped:,} of {skipped + requests:,} lines are skipped, too many "
            f"to advise from the rest{reasons}"
        )
