"""`simulate_tiers`: a trace through the tiers of a store, over places that are numbers."""

from __future__ import annotations

import heapq
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvkeep.bench.replay.jobs import RequestTimes, calls_of
from kvkeep.bench.replay.outcome import Outcome, ReplayWatch
from kvkeep.bench.replay.paging import Paging
from kvkeep.core.cost import best_prefix
from kvkeep.core.errors import InvalidValue, whole
from kvkeep.store.tiers import Chain, Conversations, TenantWeights
from kvkeep.store.tiers import tiering as tiering_policy
from kvkeep.store.tiers.index import Index
from kvkeep.store.tiers.tiering import Planner
from kvkeep.store.tiers.two_queues import tier_policies

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from kvkeep.bench.replay.jobs import Calls
    from kvkeep.bench.replay.workload import Ids, Workload
    from kvkeep.core.cost import PrefillCost, TransferCost
    from kvkeep.core.returns import Ended
    from kvkeep.store.tiers import TieringPolicy

__all__ = ["Level", "LevelStats", "Pace", "Requests", "TierSimulator", "simulate_tiers"]


@dataclass(frozen=True, slots=True)
class Level:
    """A simulated tier: its name, its capacity in blocks, and the name of its eviction policy."""

    name: str
    blocks: int
    eviction: str = "lru"

    def __post_init__(self) -> None:
        whole(f"blocks of {self.name}", self.blocks, 1)
        if self.eviction not in tier_policies():
            raise InvalidValue(
                f"no eviction policy {self.eviction!r}; there are {', '.join(tier_policies())}"
            )


@dataclass(frozen=True, slots=True)
class LevelStats:
    """A level at one moment, in blocks; those from ``hits`` on are totals.

    ``hits`` were found in this level, ``writes`` were added to it (to memory also by reads),
    ``evictions`` were deleted to make room, ``demotions`` of these moved one level down.
    """

    name: str
    capacity: int
    blocks: int
    hits: int
    writes: int
    evictions: int
    demotions: int


class TierSimulator:
    """The tiers of a store without bytes, threads and time.

    The moves and their order are those of a store (`Planner`), and so are the catalogues. No tier
    fails or lags behind, so memory is used to the last block; with ``ahead`` a tenth of it is kept
    free where evicted blocks move down, as a store does.

    Thread safety: none. Cost: 5 to 10 µs a block.

    Arguments:
        levels: memory first.
        policy: the tiering policy.
        clock: returns seconds.
        ahead: demote from memory before its room is needed.
        shares: weights by which tenants share each level; None: they do not.
        lost: called with a level and the blocks that it evicted and that no level has any more.

    Attributes:
        conversations: follows conversations, if the ends of requests are reported to it.
    """

    def __init__(
        self,
        levels: Sequence[Level],
        policy: TieringPolicy,
        clock: Callable[[], float] = time.monotonic,
        *,
        ahead: bool = False,
        shares: TenantWeights | None = None,
        lost: Callable[[int, list[bytes]], None] = lambda _level, _blocks: None,
    ) -> None:
        if not levels:
            raise InvalidValue("there is no level; memory, at least, is needed")
        self.ahead = ahead
        self._lost = lost
        self._new = False  # whether no block of the prompt that is put was stored before
        self._levels = [_SimulatedLevel(level, clock, shares) for level in levels]
        self.conversations = Conversations([one.catalogue for one in self._levels], clock)
        self._below = range(1, len(levels))
        self.planner = Planner(policy, len(levels) - 1)
        self.memory = self._levels[0].catalogue

    def request(self, blocks: Sequence[bytes]) -> list[int]:
        """Read the stored beginning of a prompt, and store the rest; returns as `find`."""
        found = self.find(blocks)
        self.put(blocks[sum(found) :])
        return found

    def find(self, blocks: Sequence[bytes]) -> list[int]:
        """Read leading ``blocks``; return how many came from each level, memory first."""
        levels: list[int] = []
        for block in blocks:
            level = self.level_of(block)
            if level is None:
                break
            levels.append(level)
        count = self._read(blocks, levels)
        found = [0] * len(self._levels)
        for level in levels[:count]:
            found[level] += 1
        for one, hits in zip(self._levels, found, strict=True):
            one.hits += hits
        return found

    def level_of(self, block: bytes) -> int | None:
        """Return the fastest level that has ``block``, None for none."""
        for level, one in enumerate(self._levels):
            if block in one.catalogue:
                return level
        return None

    # --- a read ----------------------------------------------------------------------------------

    def _read(self, blocks: Sequence[bytes], levels: Sequence[int]) -> int:
        """Read ``blocks``, which are at ``levels``; return how many leading ones were read."""
        mixed = any(levels) and not all(levels)
        above = [block for block, level in zip(blocks, levels, strict=False) if mixed and not level]
        held: list[bytes] = []
        self.memory.hold(above, held)
        try:
            count = self._fetch(blocks, levels)
        finally:
            self.memory.free(held)
        self._use(blocks[:count], stored=False)
        for block in self.planner.read(blocks[:count]):
            for level in self._below:
                if block in self.memory:
                    self._add(level, [block])
        return count

    def _fetch(self, blocks: Sequence[bytes], levels: Sequence[int]) -> int:
        for count, (block, level) in enumerate(zip(blocks, levels, strict=False)):
            if level and not self.promote(block, level):
                return count  # evicted to make room for the blocks before it
        return len(levels)

    def promote(self, block: bytes, level: int) -> bool:
        """Read ``block`` from ``level``, into memory if it is to stay; False if it is not there."""
        source = self._levels[level].catalogue
        if block not in source:
            return False
        policy = self.planner.policy
        if policy.keeps_reads:
            self._add(0, [block])
            if policy.exclusive:
                source.forget(block)
            self._demote_ahead()
        return True

    # --- a put -----------------------------------------------------------------------------------

    def put(self, blocks: Sequence[bytes]) -> None:
        """Store ``blocks``, in order; a use of those already stored, but no reuse."""
        held: list[bytes] = []
        used: list[bytes] = []
        with self._holding(blocks):
            try:
                while len(used) < len(blocks):
                    if used:
                        self._demote_ahead()
                    level, run = self._place(blocks, len(used))
                    admitted = self.planner.store(run, new=level is None)
                    used += run
                    if not level:
                        self.memory.hold(self._copy_down(run, admitted), held)
                self._use(used, stored=True)
            finally:
                self.memory.free(held)
        self._demote_ahead()

    @contextmanager
    def _holding(self, blocks: Sequence[bytes]) -> Iterator[None]:
        self._new = all(self.level_of(block) is None for block in blocks)
        below = [] if self._new else self._levels[1:]
        for one in below:
            one.hold(blocks[: one.level.blocks])  # as `PromptHolds` does
        try:
            yield
        finally:
            for one in self._levels[1:]:
                one.free()

    def _place(self, blocks: Sequence[bytes], at: int) -> tuple[int | None, Sequence[bytes]]:
        """Place blocks from position ``at`` on; return where they were, None: nowhere, and them."""
        # Without any stored block, one run gives the same result as one run per block.
        run = blocks if self._new else blocks[at : at + 1]
        level = None if self._new else self.level_of(run[0])
        if level is None:
            self._add(0, run)
        return level, run

    def _copy_down(self, run: Sequence[bytes], admitted: Sequence[bool]) -> Sequence[bytes]:
        """Write the admitted blocks of a run to tiers; return those that memory alone has."""
        alone = len(run) == 1
        blocks = [block for block, now in zip(run, admitted, strict=True) if now]
        for level in self._below:
            self._add(level, blocks)
            if alone:
                self._levels[level].hold(blocks)
        if not alone:
            return ()  # the run is the whole prompt: no later block needs it
        below = any(run[0] in self._levels[level].catalogue for level in self._below)
        return () if below else run

    def _demote_ahead(self) -> None:
        memory = self._levels[0]
        excess = self.planner.excess(memory.level.blocks, memory.catalogue.total_bytes)
        if self.ahead and excess:
            self._evict(0, excess)

    def _use(self, blocks: Sequence[bytes], *, stored: bool) -> None:
        self.conversations.used(blocks, stored)
        for one in self._levels:
            one.catalogue.used(blocks, stored=stored)

    # --- making room -----------------------------------------------------------------------------

    def _add(self, level: int, blocks: Sequence[bytes]) -> None:
        """Add ``blocks`` to ``level``, as many as it has room for."""
        one = self._levels[level]
        catalogue, room = one.catalogue, one.level.blocks
        blocks = [block for block in blocks if block not in catalogue][:room]
        short = len(blocks) + catalogue.total_bytes - room
        if short > 0:
            self._evict(level, short)
            blocks = blocks[: room - catalogue.total_bytes]  # held blocks are not evicted
        for block in blocks:
            catalogue.add(block, 1)
        one.writes += len(blocks)

    def _evict(self, level: int, needed: int) -> None:
        one = self._levels[level]
        victims = one.catalogue.victims(needed)
        one.evictions += len(victims)
        down: dict[int, list[bytes]] = {}
        dropped: list[bytes] = []
        for block in victims:
            target, _ = self.planner.below(block, level)
            if target is None:
                dropped.append(block)
            elif block not in self._levels[target].catalogue:
                down.setdefault(target, []).append(block)
        for target, blocks in down.items():
            before = self._levels[target].writes
            self._add(target, blocks)
            one.demotions += self._levels[target].writes - before
            dropped += blocks
        gone = [block for block in dropped if self.level_of(block) is None]
        if gone:
            self._lost(level, gone)

    # --- figures ---------------------------------------------------------------------------------

    def stats(self) -> list[LevelStats]:
        """Return the figures of all levels at this moment, memory first."""
        return [
            LevelStats(
                one.level.name,
                one.level.blocks,
                len(one.catalogue),
                one.hits,
                one.writes,
                one.evictions,
                one.demotions,
            )
            for one in self._levels
        ]

    def check(self) -> None:
        """Recount everything; an AssertionError is a bug of kvkeep."""
        for one in self._levels:
            one.catalogue.check()
            assert one.catalogue.total_bytes == len(one.catalogue) <= one.level.blocks

    def __repr__(self) -> str:
        levels = ", ".join(f"{one.level.name} {one.level.blocks}" for one in self._levels)
        return f"<TierSimulator {levels}, {self.planner.policy!r}>"


class _SimulatedLevel:
    """A level, the catalogue of its blocks, of one byte each, and its counters."""

    def __init__(
        self, level: Level, clock: Callable[[], float], shares: TenantWeights | None
    ) -> None:
        self.level = level
        self.catalogue = Index(
            tier_policies()[level.eviction], clock=clock, budget=level.blocks, shares=shares
        )
        self.hits = self.writes = self.evictions = self.demotions = 0
        self._held: list[bytes] = []

    def hold(self, blocks: Sequence[bytes]) -> None:
        """Protect those of ``blocks`` that are in this level from eviction until `free`."""
        self.catalogue.hold(blocks, self._held)

    def free(self) -> None:
        """Allow all held blocks to be evicted again."""
        self.catalogue.free(self._held)
        self._held = []


class Pace:
    """Requests one after the other: tiers are read for some while others are computed.

        arrive ──▶ read from tiers ───────────────▶ ┐
                   one at a time each               ├ ──▶ rest of prefill ──▶ decode ──▶ end
                   wait for the one before ──▶ prefill    beside the next one
                                     one at a time ┘

    ``reads`` are the costs to read each level, fastest first; None: it takes no time. The prefix
    that pays is read before the rest is computed. Blocks of slower levels are taken to be behind
    those of faster ones. Iterate over the requests, in the order in which they are computed, and
    call `served` for each.
    """

    def __init__(
        self,
        workload: Workload,
        calls: Calls,
        cost: PrefillCost,
        reads: Sequence[TransferCost | None],
    ) -> None:
        if any(reads) and not cost.kv_bytes_per_token:
            raise InvalidValue(
                "the time to read a tier depends on the bytes of a token, which the cost lacks: "
                "set its kv_bytes_per_token"
            )
        self.now = float(workload.times[0])
        """The time at which the current request is looked up: those before it are computed."""
        self._work = workload
        self._calls = calls
        self._cost = cost
        self._unit = workload.unit_tokens
        self._unit_bytes = workload.unit_tokens * cost.kv_bytes_per_token
        self._reads = list(reads)
        self._free = [self.now for _ in reads]  # when each level has finished its reads
        self._times = RequestTimes(len(workload))

    def __iter__(self) -> Iterator[int]:
        events = [(when, number) for when, number in self._calls.first()]
        heapq.heapify(events)
        while events:
            came, number = heapq.heappop(events)
            self._times.came[number] = came
            self.now = max(self.now, came)
            yield number
            # A request that this answer causes arrives after all that have arrived so far.
            for following in self._calls.after(number, float(self._times.last[number])):
                heapq.heappush(events, following)

    def served(self, number: int, hits: Sequence[int], hit_tokens: int) -> None:
        """Record the leading units found in each level, and the ``hit_tokens`` they make."""
        times, cost = self._times, self._cost
        came, tokens = float(times.came[number]), int(self._work.tokens[number])
        # The last token is always computed: the answer follows from it.
        stop = min(hit_tokens, tokens - 1)
        fast = sum(units for units, read in zip(hits, self._reads, strict=True) if read is None)
        start = min(fast * self._unit, stop)
        units = self._paying(hits, start, stop, tokens, came)
        at = min(start + sum(units) * self._unit, stop)
        begin = max(self.now, self._ready(units, came))
        for level, count in enumerate(units):
            if count:
                idle = max(came, self._free[level])
                self._free[level] = self._read(level, count, came)
                times.loaded[number] += self._free[level] - idle
        times.loaded_tokens += at - start
        times.computed_stored_tokens += stop - at
        seconds = cost.prefill_s(at, tokens)
        times.computing(number, begin, seconds, cost.prefill_s(0, tokens) - seconds)
        self.now = begin + seconds
        times.first[number] = self.now
        times.last[number] = self.now + cost.decode_s(int(self._work.output_tokens[number]))

    def _paying(
        self, hits: Sequence[int], start: int, stop: int, tokens: int, came: float
    ) -> list[int]:
        """Return the units of each level that takes time whose loading pays, from the front."""
        slow = [0 if read is None else units for units, read in zip(hits, self._reads, strict=True)]
        runs, ready, end = [], self.now, start
        for level, units in enumerate(slow):
            if units:
                end = min(end + units * self._unit, stop)
                later = max(ready, self._read(level, units, came))
                runs.append((end, later - ready))
                ready = later
        if not runs:
            return slow
        prefix = best_prefix(start, tokens, runs, self._cost.prefill_s)
        most = -(-(prefix.tokens - start) // self._unit)
        leading = []
        for units in slow:
            leading.append(min(units, most))
            most -= leading[-1]
        return leading

    def _ready(self, units: Sequence[int], came: float) -> float:
        """Return when ``units`` of the levels are read."""
        return max(
            [came, *(self._read(at, count, came) for at, count in enumerate(units) if count)]
        )

    def _read(self, level: int, units: int, came: float) -> float:
        """Return when ``units`` of a level are read, after all that it reads already."""
        cost = self._reads[level]
        seconds = 0.0 if cost is None else cost.seconds(units * self._unit_bytes)
        return max(came, self._free[level]) + seconds

    def finish(self, outcome: Outcome) -> None:
        """Set the latency of ``outcome``."""
        outcome.latency = self._times.latency(self._work)


def simulate_tiers(
    workload: Workload,
    capacities_tokens: Sequence[int],
    tiering: str = "inclusive",
    policy: str = "lru",
    *,
    cost: PrefillCost | None = None,
    reads: Sequence[TransferCost | None] = (),
    users: int | None = None,
    shares: Mapping[str, float] | None = None,
    progress: Callable[[int], None] | None = None,
) -> Outcome:
    """Replay ``workload`` through tiers of so many tokens, fastest first, by units.

    Each unit is a block, including the last unit of a prompt. ``tiering`` names the policy that
    moves blocks between tiers (`kvkeep.store.tiers.tiering`), ``policy`` the eviction policy of
    each tier. As a store does, the replay learns which tokens of answers are never read again, and
    does not store them. The outcome's ``tiers`` count the hits and writes of each tier; its policy
    is named like "lru/inclusive". ``written_tokens_a_day`` in ``tiers`` is what was written, for a
    day at the pace of the trace. With ``shares`` tenants have these weights in each tier, others 1,
    and the policy of the outcome is then "lru+shares/inclusive".

    With ``cost`` requests wait in line, and the outcome has a ``latency``, as from `simulate_loop`,
    which explains ``users``. ``reads`` are the costs to read each tier (None or not given: no
    time); one request is read at a time from each, while the prompt before is computed. Of a prompt
    the prefix that pays is read, before the rest is computed, so no prompt takes longer than
    without the tier. ``loaded_s`` is the sum of the times of reading, ``loaded_tokens`` are those
    read, and ``computed_stored_tokens`` those that were computed though a tier with a cost has
    them; both count as hits. The memory of running requests is not subtracted from the first tier.

    Cost: 5 to 10 µs a block.
    """
    if not capacities_tokens:
        raise InvalidValue("tiers have capacities, fastest first; none were given")
    pace = None
    if cost is not None:
        costs = [*reads, *(None for _ in capacities_tokens)][: len(capacities_tokens)]
        pace = Pace(workload, calls_of(workload, users), cost, costs)
    elif reads or users is not None:
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
    levels = [
        Level("memory" if not at else f"tier {at + 1}", paging.pages(tokens), policy)
        for at, tokens in enumerate(capacities_tokens)
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
    requests = Requests(workload, simulator)
    for done, number in enumerate(range(len(workload)) if pace is None else pace):
        watch.now = float(workload.times[number]) if pace is None else pace.now
        found = requests.find(number)
        blocks = sum(found)
        hit_tokens = min(blocks * workload.unit_tokens, int(workload.tokens[number]))
        watch.request(number, hit_tokens, blocks)
        if pace is not None:
            pace.served(number, found, hit_tokens)
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
    if pace is not None:
        pace.finish(outcome)
    outcome.seconds = time.perf_counter() - begun
    return outcome


def _weights(workload: Workload, shares: Mapping[str, float]) -> TenantWeights:
    spaces = {space_id(number): name for number, name in enumerate(workload.namespaces)}
    return TenantWeights(shares, spaces)


class Requests:
    """The requests of a workload, as calls of a store's engine."""

    def __init__(self, workload: Workload, simulator: TierSimulator) -> None:
        self._workload = workload
        self._simulator = simulator

    def find(self, number: int) -> list[int]:
        """Read the stored beginning of a prompt; return how many units came from each level."""
        keys = block_ids(self._workload.prompt(number), int(self._workload.namespace[number]))
        self._simulator.conversations.requested(self._chain(number, keys))
        return self._simulator.find(keys)

    def keep(self, number: int, found: int) -> Ids:
        """Store the units of a prompt that were not found, and those of its answer.

        Returns those that a level has now.
        """
        work, space = self._workload, int(self._workload.namespace[number])
        prompt, answer, tokens = work.prompt(number), work.answer(number), int(work.tokens[number])
        ended = work.ended(number)
        answered = ended.tokens or 0
        kept = answer[: self._worth(number, ended)]
        new = np.concatenate((prompt[found:], kept)) if len(kept) else prompt[found:]
        keys = block_ids(new, space)
        self._simulator.put(keys)
        stored = new[[self._simulator.level_of(block) is not None for block in keys]]
        whole = prompt[: tokens // work.unit_tokens]
        keys = block_ids(np.concatenate((whole, answer)), space)
        chain = self._chain(number, keys)._replace(blocks=keys, tokens=tokens + answered)
        self._simulator.conversations.ended(chain, tokens, ended, space)
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
        kept = self._simulator.conversations.worth(space, answer, ended)
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
