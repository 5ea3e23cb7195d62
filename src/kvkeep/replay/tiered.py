"""`simulate_tiers`: a trace through the tiers of a store, over places that are numbers."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING

import numpy as np

from kvkeep.errors import InvalidValue
from kvkeep.replay.outcome import Outcome
from kvkeep.replay.simulate import Paging
from kvkeep.replay.tiers import Level, TierSimulator
from kvkeep.replay.watching import Watch
from kvkeep.tiers import tiering as tiering_policy

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvkeep.replay.workload import Ids, Workload

__all__ = ["simulate_tiers"]


def simulate_tiers(
    workload: Workload,
    capacities_tokens: Sequence[int],
    tiering: str = "inclusive",
    policy: str = "lru",
    *,
    progress: Callable[[int], None] | None = None,
) -> Outcome:
    """Replay ``workload`` through tiers of so many tokens, fastest first, by units.

    Each unit is a block, the last of a prompt as well. ``tiering`` is what moves where, as
    `kvkeep.tiers.tiering` names it, ``policy`` the eviction of each tier. The outcome's ``tiers``
    say what each was asked for and what was written to it; its policy is "lru/inclusive".

    Cost: 5 to 10 µs a block.
    """
    if not capacities_tokens:
        raise InvalidValue("tiers have capacities, fastest first; none were given")
    begun = time.perf_counter()
    paging = Paging(workload.unit_tokens)
    outcome = Outcome(
        f"{policy}/{tiering}",
        sum(capacities_tokens),
        paging.tokens,
        workload.name,
        workload.digest,
    )
    watch = Watch(workload, 0, 1, outcome)
    levels = [
        Level("memory" if not at else f"tier {at + 1}", paging.pages(tokens), policy)
        for at, tokens in enumerate(capacities_tokens)
    ]

    def lost(level: int, blocks: list[bytes]) -> None:
        ids = np.array([int.from_bytes(block[-4:], "little") for block in blocks], np.int32)
        watch.gone(ids)
        gone[level] += len(blocks)

    gone = [0] * len(levels)
    simulator = TierSimulator(levels, tiering_policy(tiering), clock=lambda: watch.now, lost=lost)
    for number in range(len(workload)):
        watch.now = float(workload.times[number])
        _serve(workload, number, simulator, watch)
        if progress is not None and number % 100 == 99:
            progress(number + 1)
    outcome.tiers = [
        {**asdict(found), "capacity_tokens": tokens, "lost": count}
        for found, tokens, count in zip(simulator.stats(), capacities_tokens, gone, strict=True)
    ]
    outcome.evicted_pages = sum(gone)
    outcome.seconds = time.perf_counter() - begun
    return watch.done()


def _serve(workload: Workload, number: int, simulator: TierSimulator, watch: Watch) -> None:
    ids = workload.prompt(number)
    space = int(workload.namespace[number])
    keys = block_ids(ids, space)
    found = simulator.find(keys).blocks
    tokens = int(workload.tokens[number])
    watch.request(number, min(found * workload.unit_tokens, tokens), found)
    if not workload.store[number]:
        return
    new, rest = ids[found:], keys[found:]
    answer = workload.answer(number)
    if len(answer):
        new, rest = np.concatenate((new, answer)), rest + block_ids(answer, space)
    simulator.put(rest)
    watch.stored(new[[simulator.level_of(block) is not None for block in rest]])


def block_ids(ids: Ids, space: int) -> list[bytes]:
    """Names of blocks, as evenly spread as keys are: 16 bytes of the namespace, 32 of the key."""
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
