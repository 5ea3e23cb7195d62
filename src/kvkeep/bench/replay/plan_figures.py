"""`PlanFigures`: the outcomes of a plan's replays, in figures and sentences."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvkeep.bench.replay.bounds import BELADY, INFINITE
from kvkeep.bench.replay.candidates import candidates
from kvkeep.bench.replay.doubts import doubts
from kvkeep.bench.replay.outcome import (
    EVICTED,
    NEVER,
    NO_STATE,
    NO_WINDOW,
    OTHER,
    REMAINDER,
)  # fmt: skip
from kvkeep.bench.replay.runs import ReplayRun
from kvkeep.bench.replay.words import amount

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kvkeep.bench.replay.candidates import PlanCandidate
    from kvkeep.bench.replay.outcome import Outcome
    from kvkeep.bench.replay.planning import PlannedMemory

__all__ = ["FLEXIBLE", "THRIFTY", "USUAL", "WORTH", "PlanFigures", "percent", "points"]

USUAL = "lru"
FLEXIBLE = "returns"
WORTH = 0.01
"""The least improvement that justifies a change, as a share of all prompt tokens."""

THRIFTY = "inclusive:2"
_SAVES_WRITES = 0.8  # a tiering that writes less than this share of another's is worth a change


class PlanFigures:
    """What the replays of a plan found.

    ``span_s`` are the seconds that the trace covers, and ``gaps`` sentences on what it leaves out.
    """

    def __init__(
        self,
        plan: PlannedMemory,
        outcomes: Mapping[ReplayRun, Outcome],
        span_s: float,
        gaps: tuple[str, ...] = (),
    ) -> None:
        self.plan = plan
        self.outcomes = outcomes
        self.candidates = candidates(outcomes, plan.prices, span_s)
        self._span_s = span_s
        self._gaps = gaps
        self.here = {
            run.policy: outcome.token_hit_rate
            for run, outcome in outcomes.items()
            if run.capacity_tokens == plan.memory_tokens and not run.below and run.cost is None
        }
        """Share that each policy reuses in memory alone."""
        self.tiers = {
            (run.policy, run.tiering): outcome.token_hit_rate
            for run, outcome in outcomes.items()
            if run.below
            and run.policy != BELADY
            and run.cost is None
            and run.capacity_tokens == plan.memory_tokens
        }
        """Share that each policy and tiering reuses with the tier below memory."""
        self._endless = outcomes[ReplayRun(INFINITE, 0)]
        self.most = self._endless.token_hit_rate

    # --- names ---------------------------------------------------------------------------------

    def named(self, one: PlanCandidate) -> str:
        """Return a setting in words."""
        if one.policy is None:
            return "no cache"
        words = f"{self.plan.size(one.memory_tokens)} in memory with the policy "
        words += one.policy
        if one.disk_tokens:
            words += f" and {self.plan.size(one.disk_tokens)} below it with the tiering "
            words += f"{one.tiering}"
        return words

    def run(self, one: PlanCandidate) -> ReplayRun:
        """Return the replay of a setting."""
        assert one.policy is not None
        if one.tiering is not None:
            return self.plan.tiers(one.policy, one.tiering, one.memory_tokens)
        return self.plan.of(one.policy, one.memory_tokens)

    # --- policy and tiering --------------------------------------------------------------------

    def policy(self) -> tuple[str, str]:
        """Return the policy to use in memory alone, and why."""
        usual = self.here[USUAL]
        tried = {name: rate for name, rate in self.here.items() if name != BELADY}
        best = max(tried, key=lambda name: tried[name])
        if tried[FLEXIBLE] > tried[best] - WORTH / 2:
            best = FLEXIBLE  # as good, and it adapts when traffic changes
        if tried[best] - usual < WORTH:
            return USUAL, (
                f"No other policy is worth a change: LRU reuses {percent(usual)}, the best of "
                f"all {percent(max(tried.values()))}."
            )
        return best, (
            f"The policy {best} reuses {percent(tried[best])} where LRU reuses "
            f"{percent(usual)}: {points(tried[best] - usual)} more."
        )

    def disk(self, kept: float) -> tuple[tuple[str, str] | None, str]:
        """Return the best policy and tiering, None if a tier adds little to ``kept``; and why."""
        if not self.tiers:
            return None, ""
        most = max(self.tiers.values())
        below = self.plan.size(self.plan.disk_tokens)
        if most - kept < WORTH:
            return None, (
                f"A tier of {below} below memory would add {points(max(0.0, most - kept))}: "
                "nearly all reuse is from memory."
            )
        policy, tiering = self._pair(most)
        rates = {name: rate for (one, name), rate in self.tiers.items() if one == policy}
        return (policy, tiering), (
            f"A tier of {below} below memory adds {points(rates[tiering] - kept)}, with the "
            f"policy {policy} in both and the tiering {tiering} "
            f"({self._written(policy, tiering):.2f} blocks written per computed block). "
            + "; ".join(f"{name} {percent(rate)}" for name, rate in rates.items())
            + "."
        )

    def _pair(self, most: float) -> tuple[str, str]:
        """Return the best policy and tiering; prefer `USUAL`, then `FLEXIBLE`, if as good.

        A tiering that finds as much and writes much less is better still.
        """
        good = [pair for pair, rate in self.tiers.items() if rate > most - WORTH / 2]
        for policy in (USUAL, FLEXIBLE):
            found = [name for one, name in good if one == policy]
            if found:
                best = max(found, key=lambda name: self.tiers[policy, name])
                if THRIFTY in found and self._written(policy, THRIFTY) < (
                    _SAVES_WRITES * self._written(policy, best)
                ):
                    best = THRIFTY
                return policy, best
        return max(good, key=lambda pair: self.tiers[pair])

    def _written(self, policy: str, tiering: str) -> float:
        outcome = self.outcomes[self.plan.tiers(policy, tiering)]
        computed = max(1, outcome.blocks - outcome.hit_blocks)
        return float(sum(tier["writes"] for tier in outcome.tiers[1:]) / computed)

    # --- what a tier saves in seconds ----------------------------------------------------------

    def in_time(self, one: PlanCandidate) -> bool:
        """Whether loading from the tier of a setting saves time, as far as that is replayed.

        Policies and sizes that were not timed are judged by those that were.
        """
        assert one.policy is not None
        assert one.tiering is not None
        if self._ttft(one.policy, one.tiering) is not None:
            return self.saves_time(one.policy, one.tiering)
        pairs = [pair for pair in self.tiers if self._ttft(*pair) is not None]
        return not pairs or any(self.saves_time(*pair) for pair in pairs)

    def saves_time(self, policy: str, tiering: str) -> bool:
        """Whether the tier makes first tokens come sooner; True where that is not replayed."""
        found = self._ttft(policy, tiering)
        return found is None or found[0]["mean"] < (1 - WORTH) * found[1]["mean"]

    def seconds(self, policy: str, tiering: str) -> str:
        """Return the seconds to the first token with the tier, and without loading from it."""
        found = self._ttft(policy, tiering)
        if found is None:
            return ""
        told = [f"{one['p50']:.3g} s in the median, {one['p99']:.3g} s at p99" for one in found]
        loaded = self.outcomes[self.plan.timed(policy, tiering)[0]].latency
        stored = loaded["loaded_tokens"] + loaded["computed_stored_tokens"]
        said = f" With it, first tokens take {told[0]}; with memory alone {told[1]}."
        if stored:
            said += (
                f" {percent(loaded['loaded_tokens'] / stored)} of what is found in it is loaded; "
                "the rest is faster to compute."
            )
        return said

    def _ttft(self, policy: str, tiering: str) -> list[dict[str, float]] | None:
        """Return the seconds to the first token with the tier, and with memory alone."""
        if self.plan.cost is None:
            return None
        found = [self.outcomes.get(run) for run in self.plan.timed(policy, tiering)]
        times = [one.latency["ttft_s"] for one in found if one is not None]
        return times if len(times) == len(found) and all(times) else None

    # --- sentences that all advice has ---------------------------------------------------------

    def doubts(self) -> Iterator[str]:
        """Yield what the trace leaves out, and what it is too short to tell."""
        yield from self._gaps
        usual = self.outcomes[self.plan.of(USUAL)]
        size = self.plan.size(self.plan.memory_tokens)
        yield from doubts(usual, self._endless, self._span_s, size)

    def bounds(self) -> str:
        """Return what an unlimited cache and an optimal policy would reuse."""
        if self.most < WORTH:
            said = (
                f"Prompts hardly share a prefix: an unlimited cache would reuse only "
                f"{percent(self.most)}."
            )
            return said if any(self.doubts()) else f"{said} No cache will help this traffic."
        plan = self.plan
        said = (
            f"An unlimited cache would reuse {percent(self.most)}; all other tokens are seen for "
            f"the first time. An optimal policy would reuse {percent(self.here[BELADY])} with "
            f"{plan.size(plan.memory_tokens)} of memory"
        )
        if not self.tiers:
            return f"{said}."
        both = self.outcomes[ReplayRun(BELADY, plan.memory_tokens, below=(plan.disk_tokens,))]
        return f"{said}, {percent(both.token_hit_rate)} with the tier below it."

    def groups(self, policy: str) -> str:
        """Return how much of the memory windows and states take."""
        plan = self.plan
        if plan.groups is None:
            return ""
        found = (self.outcomes.get(plan.of(policy)) or self.outcomes[plan.of(USUAL)]).groups
        part = percent(found["most_pages_stored"] / max(1, found["pages"]))
        of_one = amount(found["most_pages_of_a_request"] * plan.groups.page_size)
        return (
            f"Windows and states of earlier prompts take up to {part} of the memory, and one "
            f"request at most {of_one} of it. The bounds are those of a model without them."
        )

    def misses(self) -> str:
        """Return the main reason of avoidable misses, with LRU in the planned memory."""
        outcome = self.outcomes[self.plan.of(USUAL)]
        avoidable = {
            reason: outcome.misses.get(reason, 0) / max(1, outcome.tokens)
            for reason in (EVICTED, NEVER, OTHER, REMAINDER, NO_STATE, NO_WINDOW)
        }
        worst = max(avoidable, key=lambda reason: avoidable[reason])
        if avoidable[worst] < WORTH:
            return ""
        share = percent(avoidable[worst])
        return {
            EVICTED: f"{share} of all prompt tokens were evicted before they were requested again "
            "(with LRU): more memory or another policy may keep them.",
            NEVER: f"{share} of all prompt tokens were seen before but never cached: their "
            "requests were too large for the memory, or were not to be stored.",
            OTHER: f"{share} of all prompt tokens were cached in another namespace: check whether "
            "tenants, salts or adapters must be kept apart.",
            REMAINDER: f"{share} of all prompt tokens lie in pages that were not full: smaller "
            "pages would reuse them.",
            NO_STATE: f"{share} of all prompt tokens were cached, but no state was kept with which "
            "computing could go on there.",
            NO_WINDOW: f"{share} of all prompt tokens were cached, but the windows before them "
            "were evicted.",
        }[worst]


def percent(part: float) -> str:
    """Format a share, with a space that breaks lines: ``0.136`` → 13.6 %."""
    return f"{100 * part:.1f} %"


def points(part: float) -> str:
    """Format a difference of shares: ``-0.004`` → −0.4 points."""
    return f"{100 * part:.1f} points".replace("-", "−")
