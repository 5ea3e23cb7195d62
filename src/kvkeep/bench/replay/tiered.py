"""`simulate_tiers`: a trace through the tiers of a store, over places that are numbers."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING

import numpy as np

from kvkeep.bench.replay.calls import calls_of
from kvkeep.bench.replay.outcome import Outcome
from kvkeep.bench.replay.pace import Pace
from kvkeep.bench.replay.paging import Paging
from kvkeep.bench.replay.simulate import LEAST_TOKENS
from kvkeep.bench.replay.tiers import Level, TierSimulator
from kvkeep.bench.replay.watching import ReplayWatch
from kvkeep.core.errors import InvalidValue
from kvkeep.store.backends import WriteBudget
from kvkeep.store.tiers import Chain, TenantWeights
from kvkeep.store.tiers import tiering as tiering_policy

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvkeep.bench.replay.workload import Ids, Workload
    from kvkeep.core.cost import PrefillCost, TransferCost
    from kvkeep.core.returns import Ended

__all__ = ["Requests", "simulate_tiers"]


def simulate_tiers(
    workload: Workload,
    capacities_tokens: Sequence[int],
    tiering: str = "inclusive",
    policy: str = "lru",
    *,
    cost: PrefillCost | None = None,
    reads: Sequence[TransferCost | None] = (),
    loading: str = "prefix",
    users: int | None = None,
    closed_loop: bool = False,
    speed: float = 1.0,
    whole_answers: bool = False,
    shares: Mapping[str, float] | None = None,
    writes: Sequence[WriteBudget | None] = (),
    progress: Callable[[int], None] | None = None,
) -> Outcome:
    """Replay ``workload`` through tiers of so many tokens, fastest first, by units.

    Each unit is a block, including the last unit of a prompt. ``tiering`` names the policy that
    moves blocks between tiers (`kvkeep.store.tiers.tiering`), ``policy`` the eviction policy of
    each tier. As a store does, the replay learns which tokens of answers are never read again, and
    does not store them; ``whole_answers`` stores all. The outcome's ``tiers`` count the hits and
    writes of each tier; its policy is named like "lru/inclusive". With ``shares`` tenants have
    these weights in each tier, others 1; the outcome's ``shares`` have the hits of each that has
    0.2 % of the tokens, and its policy is then "lru+shares/inclusive".

    ``writes`` are the write budgets of the tiers, the first one included, in tokens instead of
    bytes; None, or not given: there is none. ``written_tokens_a_day`` in ``tiers`` is what was
    written, for a day at the pace of the trace.

    With ``cost`` requests wait in line, and the outcome has a ``latency``, as from `simulate_loop`,
    which explains ``users``, ``closed_loop`` and ``speed``. ``reads`` are the costs to read each
    tier (None or not given: no time); one request is read at a time from each, while the prompt
    before is computed. ``loading`` says what is read: "prefix", the prefix that pays, before the
    rest is computed, as `kvkeep.core.cost.best_prefix` decides; "all", whatever is stored. With the
    first no prompt takes longer than without the tier. ``loaded_s`` is the sum of the times of
    reading, ``loaded_tokens`` are those read, and ``computed_stored_tokens`` those that were
    computed though a tier with a cost has them; both count as hits. The memory of running requests
    is not subtracted from the first tier.

    Cost: 5 to 10 µs a block.
    """
    if not capacities_tokens:
        raise InvalidValue("tiers have capacities, fastest first; none were given")
    pace = None
    if cost is not None:
        costs = [*reads, *(None for _ in capacities_tokens)][: len(capacities_tokens)]
        calls = calls_of(workload, users, speed, closed_loop=closed_loop)
        pace = Pace(workload, calls, cost, costs, loading)
    elif reads or users is not None or closed_loop:
        raise InvalidValue("how long tiers and users take matters where prompts cost something")
    begun = time.perf_counter()
    paging = Paging(workload.unit_tokens)
    outcome = Outcome(
        f"{policy}{'' if shares is None else '+shares'}/{tiering}",
        sum(capacities_tokens),
        paging.tokens,
        workload.name,
        workload.digest,
    )
    watch = ReplayWatch(workload, 0, None, outcome)
    budgets = [
        None if one is None else WriteBudget(one.amount // workload.unit_tokens, one.seconds)
        for one in [*writes, *(None for _ in capacities_tokens)][: len(capacities_tokens)]
    ]
    levels = [
        Level("memory" if not at else f"tier {at + 1}", paging.pages(tokens), policy, budget)
        for at, (tokens, budget) in enumerate(zip(capacities_tokens, budgets, strict=True))
    ]

    def lost(level: int, blocks: list[bytes]) -> None:
        ids = np.array([int.from_bytes(block[-4:], "little") for block in blocks], np.int32)
        watch.gone(ids)
        gone[level] += len(blocks)

    gone = [0] * len(levels)
    simulator = TierSimulator(
        levels,
        tiering_policy(tiering),
        clock=lambda: watch.now,
        shares=None if shares is None else _weights(workload, shares),
        lost=lost,
    )
    requests = Requests(workload, simulator, whole_answers=whole_answers)
    for done, number in enumerate(range(len(workload)) if pace is None else pace):
        watch.now = float(workload.times[number]) if pace is None else pace.now
        found = requests.find(number)
        blocks = sum(found)
        hit_tokens = min(blocks * workload.unit_tokens, int(workload.tokens[number]))
        watch.request(number, hit_tokens, blocks)
        if pace is not None:
            pace.served(number, found, hit_tokens, outcome)
            watch.now = pace.now
        if workload.store[number]:
            watch.stored(requests.keep(number, blocks))
        if progress is not None and done % 100 == 99:
            progress(done + 1)
    per_day = 86_400 / (workload.span_s or 1.0) * workload.unit_tokens
    outcome.tiers = [
        {
            **asdict(found),
            "capacity_tokens": tokens,
            "lost": count,
            "written_tokens_a_day": found.writes * per_day,
        }
        for found, tokens, count in zip(simulator.stats(), capacities_tokens, gone, strict=True)
    ]
    outcome.evicted_pages = sum(gone)
    watch.done()
    if shares is not None:
        for tenant, amounts in watch.tokens_of(LEAST_TOKENS).items():
            outcome.shares[tenant] = [shares.get(tenant, 1.0), *amounts]
    if pace is not None:
        pace.finish(outcome)
    outcome.seconds = time.perf_counter() - begun
    return outcome


def _weights(workload: Workload, shares: Mapping[str, float]) -> TenantWeights:
    spaces = {space_id(number): name for number, name in enumerate(workload.namespaces)}
    return TenantWeights(shares, spaces)


class Requests:
    """The requests of a workload, as calls of a store's engine."""

    def __init__(
        self, workload: Workload, simulator: TierSimulator, *, whole_answers: bool
    ) -> None:
        self._workload = workload
        self._simulator = simulator
        self._whole_answers = whole_answers

    def find(self, number: int) -> list[int]:
        """Read the stored beginning of a prompt; return how many units came from each level."""
        keys = block_ids(self._workload.prompt(number), int(self._workload.namespace[number]))
        self._simulator.returns.requested(self._chain(number, keys))
        return self._simulator.find(keys)

    def keep(self, number: int, found: int) -> Ids:
        """Store the units of a prompt that were not found, and those of its answer.

        Returns those that a level has now.
        """
        work, space = self._workload, int(self._workload.namespace[number])
        prompt, answer, tokens = work.prompt(number), work.answer(number), int(work.tokens[number])
        ended = work.ended(number)
        answered = ended.tokens or 0
        kept = answer if self._whole_answers else answer[: self._worth(number, ended)]
        new = np.concatenate((prompt[found:], kept)) if len(kept) else prompt[found:]
        keys = block_ids(new, space)
        self._simulator.put(keys)
        stored = new[[self._simulator.level_of(block) is not None for block in keys]]
        whole = prompt[: tokens // work.unit_tokens]
        keys = block_ids(np.concatenate((whole, answer)), space)
        chain = self._chain(number, keys)._replace(blocks=keys, tokens=tokens + answered)
        self._simulator.returns.ended(chain, tokens, ended, space)
        return stored

    def _chain(self, number: int, keys: Sequence[bytes]) -> Chain:
        """Return a prompt without its last unit, if that is not full."""
        work = self._workload
        tokens, root = int(work.tokens[number]), b"%d" % work.namespace[number]
        return Chain(root, keys, work.unit_tokens, tokens).beginning(tokens)

    def _worth(self, number: int, ended: Ended) -> int:
        """Return how many units of an answer are worth storing."""
        work, tokens = self._workload, int(self._workload.tokens[number])
        space, answer = int(work.namespace[number]), ended.tokens or 0
        kept = self._simulator.returns.conversations.kept(space, answer, ended)
        if kept >= answer:
            return len(work.answer(number))
        return (tokens + kept) // work.unit_tokens - tokens // work.unit_tokens


def space_id(space: int) -> bytes:
    """Return the first 16 bytes of the block ids of namespace number ``space``."""
    return 2 * space.to_bytes(8, "little")


def block_ids(ids: Ids, space: int) -> list[bytes]:
    """Return block ids, spread as evenly as real ones: 16 bytes of namespace, 32 of key."""
    words = np.empty((len(ids), 6), np.uint64)
    words[:, 0] = words[:, 1] = space
    mixed = ids.astype(np.uint64)
    for column in (2, 3, 4):
        # splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014)
        mixed = mixed + np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed = mixed ^ (mixed >> np.uint64(31))
        words[:, column] = mixed
    # The id itself comes last, to be read back.
    words[:, 5] = (mixed & np.uint64(0xFFFFFFFF)) | (ids.astype(np.uint64) << np.uint64(32))
    packed = words.astype("<u8").tobytes()
    return [packed[at : at + 48] for at in range(0, len(packed), 48)]
