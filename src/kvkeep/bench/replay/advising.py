"""`advise`: a recommendation from the outcomes of a plan's replays, in sentences."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvkeep.bench.replay.bounds import BELADY, INFINITE
from kvkeep.bench.replay.outcome import (
    EVICTED,
    NEVER,
    NO_STATE,
    NO_WINDOW,
    OTHER,
    REMAINDER,
)  # fmt: skip
from kvkeep.bench.replay.runs import BOUNDS, ReplayRun
from kvkeep.bench.replay.summary import doubts, gaps
from kvkeep.bench.replay.words import amount
from kvkeep.core.cost import TransferCost
from kvkeep.core.errors import InvalidValue
from kvkeep.core.eviction import POLICIES, Priority
from kvkeep.core.geometry.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kvkeep.bench.replay.outcome import Outcome
    from kvkeep.bench.replay.workload import Workload
    from kvkeep.core.cost import PrefillCost
    from kvkeep.core.groups import GroupLayout

__all__ = ["FLEXIBLE", "USUAL", "Advice", "PlanCandidate", "PlannedMemory", "advise"]

USUAL = "lru"
FLEXIBLE = "returns"
_TIERINGS = ("inclusive", "exclusive")
_THRIFTY = "inclusive:2"
_TIMES = (0.25, 0.5, 1.0, 2.0, 4.0)
_NEVER = TransferCost(seconds_per_byte=1e12)  # nothing is loaded from a tier that slow


@dataclass(frozen=True, slots=True)
class PlanCandidate:
    """A setting that was replayed; ``hit_rate`` is the share of prompt tokens that it reuses."""

    policy: str
    memory_tokens: int
    disk_tokens: int = 0
    tiering: str | None = None
    hit_rate: float = 0.0


@dataclass(frozen=True, slots=True)
class Advice:
    """What to use, and why: the recommendation is a sentence, each reason several sentences.

    ``chosen`` is the setting to use, and ``candidates`` are all that were replayed. ``warnings``
    say what the trace is too short to tell.
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
    ``bytes_per_token``, sizes are told in bytes.
    """

    memory_tokens: int
    disk_tokens: int = 0
    groups: GroupLayout | None = None
    cost: PrefillCost | None = None
    read: TransferCost | None = None
    bytes_per_token: float | None = None

    def runs(self, workload: Workload) -> list[ReplayRun]:
        """Return the replays to run: policies, less and more memory, tiers, and the bounds.

        Raises `InvalidValue` for a trace from which no advice can be read.
        """
        _check_telling(workload)
        policies = [name for name in POLICIES if name != Priority.name]  # nobody gave any here
        runs = [self.of(policy) for policy in policies]
        for times in _TIMES:
            size = int(self.memory_tokens * times)
            if size >= workload.unit_tokens:
                runs += [self.of(policy, size) for policy in (USUAL, FLEXIBLE, BELADY)]
        if self.disk_tokens:
            runs += self._tiers(policies)
        runs.append(ReplayRun(INFINITE, 0))
        return list(dict.fromkeys(runs))

    def _tiers(self, policies: list[str]) -> list[ReplayRun]:
        runs = [self.tiers(policy, name) for policy in policies for name in _TIERINGS]
        runs += [self.tiers(policy, _THRIFTY) for policy in (USUAL, FLEXIBLE)]
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

    def tiers(self, policy: str, tiering: str) -> ReplayRun:
        """Return the replay with the tier below memory."""
        return ReplayRun(policy, self.memory_tokens, below=(self.disk_tokens,), tiering=tiering)

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


_WORTH = 0.01
"""The least improvement that justifies a change, as a share of all prompt tokens."""
_SAVES_WRITES = 0.8  # a tiering that writes less than this share of another's is worth a change
_MISSES = {
    EVICTED: "were evicted before they were requested again (with LRU): more memory or another "
    "policy may keep them.",
    NEVER: "were seen before but never cached: their requests were too large for the memory, or "
    "were not to be stored.",
    OTHER: "were cached in another namespace: check whether tenants, salts or adapters must be "
    "kept apart.",
    REMAINDER: "lie in pages that were not full: smaller pages would reuse them.",
    NO_STATE: "were cached, but no state was kept with which computing could go on there.",
    NO_WINDOW: "were cached, but the windows before them were evicted.",
}


def advise(
    plan: PlannedMemory, outcomes: Mapping[ReplayRun, Outcome], workload: Workload
) -> Advice:
    """Return the setting that reuses most, unless a simpler one reuses nearly as much."""
    return _Advisor(plan, outcomes, workload).advice()


class _Advisor:
    """The outcomes of a plan, compared."""

    def __init__(
        self, plan: PlannedMemory, outcomes: Mapping[ReplayRun, Outcome], workload: Workload
    ) -> None:
        self.plan = plan
        self.outcomes = outcomes
        self.workload = workload
        self.most = outcomes[ReplayRun(INFINITE, 0)].token_hit_rate
        replayed = [
            (run, self._candidate(run, outcome))
            for run, outcome in outcomes.items()
            if run.policy not in BOUNDS and run.cost is None
        ]
        self.candidates = [one for _, one in replayed]
        here = [one for one in self.candidates if one.memory_tokens == plan.memory_tokens]
        self.memory = {one.policy: one for one in here if not one.disk_tokens}
        """The settings in memory alone, of the planned size, by policy."""
        self.tiers = {(one.policy, one.tiering or ""): one for one in here if one.disk_tokens}
        """The settings with the tier below memory of the planned size, by policy and tiering."""

    def _candidate(self, run: ReplayRun, outcome: Outcome) -> PlanCandidate:
        disk = sum(run.below)
        tiering = run.tiering if disk else None
        return PlanCandidate(run.policy, run.capacity_tokens, disk, tiering, outcome.token_hit_rate)

    def advice(self) -> Advice:
        """Return the recommendation."""
        plan = self.plan
        policy, why_policy = self._policy()
        chosen = self.memory[policy]
        below, why_disk = self._disk(chosen.hit_rate)
        if below is not None:
            chosen = below
            why_policy = f"In memory alone: {_lowered(why_policy)}"
        nothing_below = " and nothing below it" if plan.disk_tokens and below is None else ""
        words = (
            f"Keep {self._named(chosen)}{nothing_below}: {_percent(chosen.hit_rate)} of all prompt "
            f"tokens need not be computed; an unlimited cache would reuse {_percent(self.most)}."
        )
        reasons = (self._bounds(), why_policy, why_disk, self._sizes(), self._misses())
        warnings = tuple(self._doubts())
        return Advice(chosen, words, tuple(filter(None, reasons)), warnings, tuple(self.candidates))

    def _policy(self) -> tuple[str, str]:
        """Return the policy to use in memory alone, and why."""
        tried = {name: one.hit_rate for name, one in self.memory.items()}
        usual = tried[USUAL]
        best = max(tried, key=lambda name: tried[name])
        if tried[FLEXIBLE] > tried[best] - _WORTH / 2:
            best = FLEXIBLE  # as good, and it adapts when traffic changes
        if tried[best] - usual < _WORTH:
            return USUAL, (
                f"No other policy is worth a change: LRU reuses {_percent(usual)}, the best of "
                f"all {_percent(max(tried.values()))}."
            )
        return best, (
            f"The policy {best} reuses {_percent(tried[best])} where LRU reuses "
            f"{_percent(usual)}: {_points(tried[best] - usual)} more."
        )

    def _disk(self, rate: float) -> tuple[PlanCandidate | None, str]:
        """Return the best setting with a tier, None if it adds little to ``rate``; and why."""
        if not self.tiers:
            return None, ""
        most = max(one.hit_rate for one in self.tiers.values())
        below = self.plan.size(self.plan.disk_tokens)
        if most - rate < _WORTH:
            return None, (
                f"A tier of {below} below memory would add {_points(max(0.0, most - rate))}: "
                "nearly all reuse is from memory."
            )
        best = self._best_tiering(most)
        rates = {name: one for (policy, name), one in self.tiers.items() if policy == best.policy}
        why = (
            f"A tier of {below} below memory adds {_points(best.hit_rate - rate)}, with the "
            f"policy {best.policy} in both and the tiering {best.tiering} "
            f"({self._written(best):.2f} blocks written per computed block). "
            + "; ".join(f"{name} {_percent(one.hit_rate)}" for name, one in rates.items())
            + "."
        )
        if not self._saves_time(best):
            return None, f"{why} But it saves no time: computing is faster than loading from it."
        return best, why + self._seconds(best)

    def _best_tiering(self, most: float) -> PlanCandidate:
        """Return the best setting with a tier; prefer `USUAL`, then `FLEXIBLE`, if as good.

        A tiering that finds as much and writes much less is better still.
        """
        good = [one for one in self.tiers.values() if one.hit_rate > most - _WORTH / 2]
        for policy in (USUAL, FLEXIBLE):
            same = [one for one in good if one.policy == policy]
            if same:
                best = max(same, key=lambda one: one.hit_rate)
                least = min(same, key=self._written)
                saves = self._written(least) < _SAVES_WRITES * self._written(best)
                return least if saves else best
        return max(good, key=lambda one: one.hit_rate)

    def _written(self, one: PlanCandidate) -> float:
        outcome = self.outcomes[self.plan.tiers(one.policy, one.tiering or "")]
        computed = max(1, outcome.blocks - outcome.hit_blocks)
        return float(sum(tier["writes"] for tier in outcome.tiers[1:]) / computed)

    def _sizes(self) -> str:
        """Return what more and less memory reuses."""
        rates = {
            one.memory_tokens: one.hit_rate
            for one in self.candidates
            if one.policy == FLEXIBLE and not one.disk_tokens
        }
        here = self.plan.memory_tokens
        parts = [f"{self.plan.size(size)} {_percent(rate)}" for size, rate in sorted(rates.items())]
        words = f"More or less memory, with the policy {FLEXIBLE}: " + ", ".join(parts) + "."
        twice, half = rates.get(2 * here), rates.get(here // 2)
        if twice is not None and twice - rates[here] < _WORTH:
            words += " Twice the memory would add next to nothing."
            if half is not None and rates[here] - half < _WORTH:
                words += " Half of the memory would be enough for this trace."
        elif twice is not None:
            words += f" Twice the memory would add {_points(twice - rates[here])}."
        return words

    # --- seconds that a tier saves ---------------------------------------------------------------

    def _saves_time(self, one: PlanCandidate) -> bool:
        """Whether the tier makes first tokens come sooner; True where no tier is timed.

        Policies and sizes that were not timed are judged by those that were.
        """
        times = self._ttft(one.policy, one.tiering or "")
        timed = [times] if times else [found for pair in self.tiers if (found := self._ttft(*pair))]
        return not timed or any(
            below["mean"] < (1 - _WORTH) * alone["mean"] for below, alone in timed
        )

    def _seconds(self, one: PlanCandidate) -> str:
        """Return the seconds to the first token with the tier, and without loading from it."""
        times = self._ttft(one.policy, one.tiering or "")
        if times is None:
            return ""
        below, alone = (
            f"{found['p50']:.3g} s in the median, {found['p99']:.3g} s at p99" for found in times
        )
        return f" With it, first tokens take {below}; with memory alone {alone}."

    def _ttft(self, policy: str, tiering: str) -> list[dict[str, float]] | None:
        """Return the seconds to the first token with the tier, and with memory alone."""
        if self.plan.read is None:
            return None
        timed = [self.outcomes.get(run) for run in self.plan.timed(policy, tiering)]
        times = [one.latency["ttft_s"] for one in timed if one is not None]
        return times if len(times) == len(timed) and all(times) else None

    # --- sentences that all advice has -----------------------------------------------------------

    def _named(self, one: PlanCandidate) -> str:
        """Return a setting in words."""
        words = f"{self.plan.size(one.memory_tokens)} in memory with the policy "
        words += one.policy
        if one.disk_tokens:
            words += f" and {self.plan.size(one.disk_tokens)} below it with the tiering "
            words += f"{one.tiering}"
        return words

    def _doubts(self) -> Iterator[str]:
        """Yield what the trace leaves out, and what it is too short to tell."""
        yield from gaps(self.workload)
        usual, endless = self.outcomes[self.plan.of(USUAL)], self.outcomes[ReplayRun(INFINITE, 0)]
        size = self.plan.size(self.plan.memory_tokens)
        yield from doubts(usual, endless, self.workload.span_s, size)

    def _bounds(self) -> str:
        """Return what an unlimited cache and an optimal policy would reuse."""
        plan = self.plan
        if self.most < _WORTH:
            words = (
                "Prompts hardly share a prefix: an unlimited cache would reuse only "
                f"{_percent(self.most)}."
            )
            return words if any(self._doubts()) else f"{words} No cache will help this traffic."
        optimal = self.outcomes[plan.of(BELADY)]
        words = (
            f"An unlimited cache would reuse {_percent(self.most)}; all other tokens are seen for "
            f"the first time. An optimal policy would reuse {_percent(optimal.token_hit_rate)} "
            f"with {plan.size(plan.memory_tokens)} of memory"
        )
        if not self.tiers:
            return f"{words}."
        both = self.outcomes[ReplayRun(BELADY, plan.memory_tokens, below=(plan.disk_tokens,))]
        return f"{words}, {_percent(both.token_hit_rate)} with the tier below it."

    def _misses(self) -> str:
        """Return the main reason of avoidable misses, with LRU in the planned memory."""
        outcome = self.outcomes[self.plan.of(USUAL)]
        worst = max(_MISSES, key=lambda reason: outcome.misses.get(reason, 0))
        share = outcome.misses.get(worst, 0) / max(1, outcome.tokens)
        return "" if share < _WORTH else f"{_percent(share)} of all prompt tokens {_MISSES[worst]}"


def _lowered(sentence: str) -> str:
    return f"{sentence[0].lower()}{sentence[1:]}"


def _percent(part: float) -> str:
    """Format a share, with a space that breaks lines: ``0.136`` → 13.6 %."""
    return f"{100 * part:.1f} %"


def _points(part: float) -> str:
    """Format a difference of shares: ``-0.004`` → −0.4 points."""
    return f"{100 * part:.1f} points".replace("-", "−")
