"""`PlannedMemory`: the replays for a memory size, and what they recommend."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvkeep.bench.replay.advising import Advice, advise
from kvkeep.bench.replay.bounds import BELADY, INFINITE
from kvkeep.bench.replay.doubts import gaps
from kvkeep.bench.replay.plan_figures import FLEXIBLE, THRIFTY, USUAL, PlanFigures
from kvkeep.bench.replay.runs import ReplayRun
from kvkeep.bench.replay.words import amount
from kvkeep.core.cost import TransferCost
from kvkeep.core.errors import InvalidValue
from kvkeep.core.eviction import POLICIES
from kvkeep.core.eviction import policy as policy_named
from kvkeep.core.geometry.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvkeep.bench.replay.outcome import Outcome
    from kvkeep.bench.replay.prices import Prices
    from kvkeep.bench.replay.workload import Workload
    from kvkeep.core.cost import PrefillCost
    from kvkeep.core.groups import GroupLayout

__all__ = ["Advice", "PlannedMemory"]

_TIERINGS = ("inclusive", "exclusive")
_TIMES = (0.25, 0.5, 1.0, 2.0, 4.0)
_NEVER = TransferCost(seconds_per_byte=1e12)  # nothing is loaded from a tier that slow


@dataclass(frozen=True, slots=True)
class PlannedMemory:
    """The memory to plan for: its tokens, and those of a tier below it (0: none).

    Shares are of prompt tokens, with one page per unit of the trace. ``groups`` are those of a
    model with windows or states, in such pages; it is planned without a tier. With ``cost``, that
    of prompts, and ``read``, that of the tier, the plan says what the tier saves in seconds. With
    ``prices`` it recommends the cheapest setting, without them the one that reuses most. With
    ``bytes_per_token``, sizes are told in bytes.
    """

    memory_tokens: int
    disk_tokens: int = 0
    groups: GroupLayout | None = None
    cost: PrefillCost | None = None
    read: TransferCost | None = None
    prices: Prices | None = None
    bytes_per_token: float | None = None

    def runs(self, workload: Workload) -> list[ReplayRun]:
        """Return the replays to run: policies, less and more memory, tiers, and the bounds.

        Raises `InvalidValue` for a trace from which no advice can be read.
        """
        _check_telling(workload)
        policies = [name for name in POLICIES if policy_named(name).advised]
        found = [self.of(policy) for policy in policies]
        for times in _TIMES:
            size = int(self.memory_tokens * times)
            if size >= workload.unit_tokens:
                found += [self.of(policy, size) for policy in (USUAL, FLEXIBLE, BELADY)]
        if self.disk_tokens:
            found += self._tiers(policies, workload.unit_tokens)
        found.append(ReplayRun(INFINITE, 0))
        return list(dict.fromkeys(found))

    def _tiers(self, policies: list[str], least: int) -> list[ReplayRun]:
        found = [self.tiers(policy, name) for policy in policies for name in _TIERINGS]
        found += [self.tiers(policy, THRIFTY) for policy in (USUAL, FLEXIBLE)]
        if self.prices is not None:  # a disk below less memory may be cheaper
            sizes = [int(self.memory_tokens * times) for times in _TIMES if times < 1]
            found += [
                self.tiers(policy, name, size)
                for size in sizes
                if size >= least
                for policy in (USUAL, FLEXIBLE)
                for name in _TIERINGS
            ]
        found.append(ReplayRun(BELADY, self.memory_tokens, below=(self.disk_tokens,)))
        if self.cost is not None:
            pairs = [(policy, name) for policy in (USUAL, FLEXIBLE) for name in _TIERINGS]
            for policy, name in (*pairs, (USUAL, THRIFTY)):
                found += self.timed(policy, name)
        return found

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
        """Return a size as text: in bytes if the plan was asked for in bytes, else in tokens."""
        if self.bytes_per_token is None:
            return amount(tokens)
        return format_bytes(round(tokens * self.bytes_per_token))

    def advice(self, outcomes: Mapping[ReplayRun, Outcome], workload: Workload) -> Advice:
        """Return the recommendation that the outcomes of `runs` support.

        Prices tell nothing of a trace that covers no time.
        """
        return advise(PlanFigures(self, outcomes, workload.span_s, tuple(gaps(workload))))


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
