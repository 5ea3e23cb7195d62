"""`PlannedMemory`: replays for a memory size, and the recommendation that follows from them."""

from __future__ import annotations

from dataclasses import dataclass
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
from kvkeep.bench.replay.runs import ReplayRun
from kvkeep.bench.replay.simulate import SESSIONS
from kvkeep.core.cost import TransferCost
from kvkeep.core.eviction import POLICIES
from kvkeep.core.eviction import policy as policy_named

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvkeep.bench.replay.outcome import Outcome
    from kvkeep.bench.replay.workload import Workload
    from kvkeep.core.cost import PrefillCost
    from kvkeep.core.groups import GroupLayout

__all__ = ["Advice", "PlannedMemory", "amount"]

_USUAL = "lru"
_TIERINGS = ("inclusive", "exclusive", "adaptive")
_TIMES = (0.25, 0.5, 1.0, 2.0, 4.0)
_NEVER = TransferCost(seconds_per_byte=1e12)  # nothing is loaded from a tier that slow
_WORTH = 0.01
"""The least improvement that justifies a change, as a share of all prompt tokens."""


@dataclass(frozen=True, slots=True)
class Advice:
    """A recommendation and its reasons, each one or several sentences.

    ``policy`` and ``tiering`` are the settings to use; ``disk`` is whether a tier below memory
    pays.
    """

    policy: str
    tiering: str | None
    disk: bool
    recommendation: str
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        return "\n\n".join((self.recommendation, *self.reasons))


@dataclass(frozen=True, slots=True)
class PlannedMemory:
    """The memory to plan for: its tokens, and those of a tier below it (0: none).

    Shares are of prompt tokens, with one page per unit of the trace. ``groups`` are those of a
    model with windows or states, in such pages; it is planned without a tier. With ``cost``, that
    of prompts, and ``read``, that of the tier, the plan says what the tier saves in seconds.
    """

    memory_tokens: int
    disk_tokens: int = 0
    groups: GroupLayout | None = None
    cost: PrefillCost | None = None
    read: TransferCost | None = None

    def runs(self, workload: Workload) -> list[ReplayRun]:
        """Return the replays to run: policies, less and more memory, tiers, and the bounds."""
        policies = [name for name in POLICIES if policy_named(name).advised]
        found = [self._run(policy) for policy in policies]
        if (workload.session >= 0).any():
            found += [self._run(policy + SESSIONS) for policy in ("lru", "adaptive")]
        for times in _TIMES:
            size = int(self.memory_tokens * times)
            if size >= workload.unit_tokens:
                found += [self._run(policy, size) for policy in (_USUAL, "adaptive", BELADY)]
        if self.disk_tokens:
            below = (self.disk_tokens,)
            found += [
                ReplayRun(policy, self.memory_tokens, below=below, tiering=name)
                for policy in policies
                for name in _TIERINGS
            ]
            found.append(ReplayRun(BELADY, self.memory_tokens, below=below))
            if self.cost is not None:
                found += [
                    self.timed(policy, name, read)
                    for policy in (_USUAL, "adaptive")
                    for name in _TIERINGS
                    for read in (self.read, _NEVER)
                ]
        found.append(ReplayRun(INFINITE, 0))
        return list(dict.fromkeys(found))

    def timed(self, policy: str, tiering: str, read: TransferCost | None) -> ReplayRun:
        """Return the replay that takes time, with a tier that takes ``read``."""
        return ReplayRun(
            policy, self.memory_tokens, below=(self.disk_tokens,), tiering=tiering, cost=self.cost,
            reads=(None, read),
        )  # fmt: skip

    def _run(self, policy: str, tokens: int | None = None) -> ReplayRun:
        size = self.memory_tokens if tokens is None else tokens
        return ReplayRun(policy, size, groups=None if policy == BELADY else self.groups)

    def advice(self, outcomes: Mapping[ReplayRun, Outcome]) -> Advice:
        """Return the recommendation that the outcomes of `runs` support."""
        return _Reading(self, outcomes).advice()


class _Reading:
    def __init__(self, plan: PlannedMemory, outcomes: Mapping[ReplayRun, Outcome]) -> None:
        self._plan = plan
        self._all = outcomes
        self._here = {
            run.policy: outcome.token_hit_rate
            for run, outcome in outcomes.items()
            if run.capacity_tokens == plan.memory_tokens and not run.below and run.cost is None
        }
        self._tiers = {
            (run.policy, run.tiering): outcome.token_hit_rate
            for run, outcome in outcomes.items()
            if run.below and run.policy != BELADY and run.cost is None
        }
        self._usual = self._here[_USUAL]
        self._most = outcomes[ReplayRun(INFINITE, 0)].token_hit_rate

    def advice(self) -> Advice:
        policy, why_policy = self._policy()
        kept = self._here[policy]
        below, why_disk = self._disk(kept)
        tiering = None
        if below is not None and not self._saves_time(*below):
            below = None
            why_disk += " But it saves no time: computing is faster than loading from it."
        if below is not None:
            policy, tiering = below
            why_disk += self._seconds(*below)
            kept = self._tiers[below]
            why_policy = f"In memory alone: {why_policy[0].lower()}{why_policy[1:]}"
        disk = below is not None
        size = amount(self._plan.memory_tokens)
        words = [f"Keep {size} in memory with the policy {policy.removesuffix(SESSIONS)}"]
        if policy.endswith(SESSIONS):
            words.append(", name the session of each request,")
        if disk:
            words.append(
                f" and {amount(self._plan.disk_tokens)} below it with the tiering {tiering}"
            )
        elif self._plan.disk_tokens:
            words.append(" and nothing below it")
        words.append(
            f": {_share(kept)} of all prompt tokens need not be computed; an unlimited cache would "
            f"reuse {_share(self._most)}."
        )
        reasons = [
            self._bounds(), why_policy, why_disk, self._sizes(), self._groups(policy),
            self._misses(),
        ]  # fmt: skip
        return Advice(policy, tiering, disk, "".join(words), tuple(filter(None, reasons)))

    def _bounds(self) -> str:
        if self._most < _WORTH:
            return (
                f"Prompts hardly share a prefix: an unlimited cache would reuse only "
                f"{_share(self._most)}. No cache will help this traffic."
            )
        said = (
            f"An unlimited cache would reuse {_share(self._most)}; all other tokens are seen for "
            f"the first time. An optimal policy would reuse {_share(self._here[BELADY])}"
        )
        if not self._tiers:
            return f"{said}."
        plan = self._plan
        both = self._all[ReplayRun(BELADY, plan.memory_tokens, below=(plan.disk_tokens,))]
        return f"{said} with memory alone, {_share(both.token_hit_rate)} with the tier below."

    def _policy(self) -> tuple[str, str]:
        tried = {name: rate for name, rate in self._here.items() if name != BELADY}
        plain = {name: rate for name, rate in tried.items() if not name.endswith(SESSIONS)}
        best = max(tried, key=lambda name: tried[name])
        best_plain = max(plain, key=lambda name: plain[name])
        if tried[best] - plain[best_plain] < _WORTH:
            best = best_plain
        if plain["adaptive"] > tried[best] - _WORTH / 2:
            best = "adaptive"  # as good, and it adapts when traffic changes
        if tried[best] - self._usual < _WORTH:
            return _USUAL, (
                f"No other policy is worth a change: LRU reuses {_share(self._usual)}, the best of "
                f"all {_share(max(plain.values()))}."
            )
        return best, (
            f"The policy {best} reuses {_share(tried[best])} where LRU reuses "
            f"{_share(self._usual)}: {_points(tried[best] - self._usual)} more."
        )

    def _disk(self, kept: float) -> tuple[tuple[str, str] | None, str]:
        """Return the best policy and tiering, None if a tier adds little to ``kept``; and why."""
        if not self._tiers:
            return None, ""
        most = max(self._tiers.values())
        below = amount(self._plan.disk_tokens)
        if most - kept < _WORTH:
            return None, (
                f"A tier of {below} below memory would add {_points(max(0.0, most - kept))}: "
                "nearly all reuse is from memory."
            )
        policy, tiering = self._pair(most)
        rates = {name: rate for (one, name), rate in self._tiers.items() if one == policy}
        return (policy, tiering), (
            f"A tier of {below} below memory adds {_points(rates[tiering] - kept)}, with the "
            f"policy {policy} in both and the tiering {tiering} "
            f"({self._written(policy, tiering):.2f} blocks written per computed block). "
            + "; ".join(f"{name} {_share(rate)}" for name, rate in rates.items())
            + "."
        )

    def _saves_time(self, policy: str, tiering: str) -> bool:
        """Whether the tier makes first tokens come sooner; True where that is not replayed."""
        found = self._ttft(policy, tiering)
        return found is None or found[0]["mean"] < (1 - _WORTH) * found[1]["mean"]

    def _seconds(self, policy: str, tiering: str) -> str:
        """Return the seconds to the first token with the tier, and without loading from it."""
        found = self._ttft(policy, tiering)
        if found is None:
            return ""
        told = [f"{one['p50']:.3g} s in the median, {one['p99']:.3g} s at p99" for one in found]
        loaded = self._all[self._plan.timed(policy, tiering, self._plan.read)].latency
        stored = loaded["loaded_tokens"] + loaded["computed_stored_tokens"]
        said = f" With it, first tokens take {told[0]}; with memory alone {told[1]}."
        if stored:
            said += (
                f" {_share(loaded['loaded_tokens'] / stored)} of what is found in it is loaded; "
                "the rest is faster to compute."
            )
        return said

    def _ttft(self, policy: str, tiering: str) -> list[dict[str, float]] | None:
        """Return the seconds to the first token with the tier, and with memory alone."""
        plan = self._plan
        if plan.cost is None:
            return None
        found = [self._all.get(plan.timed(policy, tiering, read)) for read in (plan.read, _NEVER)]
        times = [one.latency["ttft_s"] for one in found if one is not None]
        return times if len(times) == len(found) and all(times) else None

    def _pair(self, most: float) -> tuple[str, str]:
        """Return the best policy and tiering; prefer the usual and adaptive ones if as good."""
        good = [pair for pair, rate in self._tiers.items() if rate > most - _WORTH / 2]
        for policy in (_USUAL, "adaptive"):
            found = [name for one, name in good if one == policy]
            if found:
                best = max(found, key=lambda name: self._tiers[policy, name])
                return policy, "adaptive" if "adaptive" in found else best
        return max(good, key=lambda pair: self._tiers[pair])

    def _written(self, policy: str, tiering: str) -> float:
        plan = self._plan
        outcome = self._all[
            ReplayRun(policy, plan.memory_tokens, below=(plan.disk_tokens,), tiering=tiering)
        ]
        computed = max(1, outcome.blocks - outcome.hit_blocks)
        return float(sum(tier["writes"] for tier in outcome.tiers[1:]) / computed)

    def _sizes(self) -> str:
        rates = {
            run.capacity_tokens: outcome.token_hit_rate
            for run, outcome in self._all.items()
            if run.policy == "adaptive" and not run.below
        }
        here = self._plan.memory_tokens
        parts = [f"{amount(size)} {_share(rate)}" for size, rate in sorted(rates.items())]
        said = "More or less memory, with the policy adaptive: " + ", ".join(parts) + "."
        twice, half = rates.get(2 * here), rates.get(here // 2)
        if twice is not None and twice - rates[here] < _WORTH:
            said += " Twice the memory would add next to nothing."
            if half is not None and rates[here] - half < _WORTH:
                said += " Half of the memory would be enough."
        elif twice is not None:
            said += f" Twice the memory would add {_points(twice - rates[here])}."
        return said

    def _groups(self, policy: str) -> str:
        """Return how much of the memory windows and states take."""
        plan = self._plan
        if plan.groups is None:
            return ""
        found = self._all[ReplayRun(policy, plan.memory_tokens, groups=plan.groups)].groups
        part = _share(found["most_pages_stored"] / max(1, found["pages"]))
        of_one = amount(found["most_pages_of_a_request"] * plan.groups.page_size)
        return (
            f"Windows and states of earlier prompts take up to {part} of the memory, and one "
            f"request at most {of_one} of it. The bounds are those of a model without them."
        )

    def _misses(self) -> str:
        plan = self._plan
        outcome = self._all[ReplayRun(_USUAL, plan.memory_tokens, groups=plan.groups)]
        avoidable = {
            reason: outcome.misses.get(reason, 0) / max(1, outcome.tokens)
            for reason in (EVICTED, NEVER, OTHER, REMAINDER, NO_STATE, NO_WINDOW)
        }
        worst = max(avoidable, key=lambda reason: avoidable[reason])
        if avoidable[worst] < _WORTH:
            return ""
        share = _share(avoidable[worst])
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


def _share(part: float) -> str:
    return f"{100 * part:.1f} %"


def _points(part: float) -> str:
    return f"{100 * part:.1f} points"


def amount(tokens: int) -> str:
    """Format tokens: ``1_536_000`` → 1.54 M tokens."""
    for scale, letter in ((1_000_000_000, "G"), (1_000_000, "M"), (1_000, "k")):
        if tokens >= scale:
            return f"{tokens / scale:.3g} {letter} tokens"
    return f"{tokens} tokens"
