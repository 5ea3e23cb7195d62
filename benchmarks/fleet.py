"""The router in front of a large fleet, simulated in one process: instances are their KV events.

Each instance holds a system prompt that all share, and prompts of its own, in blocks of 16 tokens,
as its events say. Measured are: the time to choose an instance for a prompt whose beginning is held
by all, by one, or by nobody; memory; which prompts move when instances are lost; and the time to
learn what an instance holds that has come back, from a snapshot.

Then two routers over a few nodes, as in ``benchmarks/router.py``: prompts arrive at either one by
chance, each router knows the load of its own prompts alone, and both read all events. Reported are
the share of prompts that both would place alike, and hits beside one router.

Times are processor time, medians.

    python benchmarks/fleet.py                                # up to 1,000 × 2,000 blocks
    python benchmarks/fleet.py --blocks 20000 --instances 1000
    python benchmarks/fleet.py --trace conversation.jsonl.gz  # and two routers on a trace
    python benchmarks/fleet.py --json                         # for machines
"""

from __future__ import annotations

import argparse
import gc
import gzip
import heapq
import json
import random
import resource
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvkeep import PagedCache
from kvkeep.core.cost import PrefillCost
from kvkeep.serve.kv_events import AllBlocksCleared, BlockStored, CacheBlocks
from kvkeep.serve.kv_events.wire import Batch, decode, encode
from kvkeep.serve.router import PrefixRouter, RoutingCost

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvkeep.core.events import Event
    from kvkeep.serve.kv_events import KVEvent
    from kvkeep.serve.router import RouteTicket

BLOCK = 16
RUN = 64  # blocks of an event
SYSTEM = 1024  # tokens that all prompts begin with
PROMPT = 8192
TRACE_BLOCK = 512
SPEED = 15_000  # tokens a second
ANSWER_S = 0.03  # a token of an answer
LAST = 2**31 - 1  # a token that is in no trace


@dataclass(frozen=True, slots=True)
class Size:
    """What was measured with so many instances of so many blocks each."""

    instances: int
    blocks: int
    fill_us: float
    bytes_a_block: float
    held_by_all_ms: float
    held_by_all_p99_ms: float
    held_by_one_ms: float
    held_by_one_p99_ms: float
    unknown_ms: float
    unknown_p99_ms: float
    moved_after_1: float
    moved_after_100: float
    moved_others: int
    lose_ms: float
    rejoin_ms: float


@dataclass(frozen=True, slots=True)
class Pair:
    """Prompts of a trace at so many routers that do not talk."""

    routers: int
    slack: float
    nodes: int
    hits: float
    agree: float
    agree_best: float
    """Of prompts of which one node alone holds the most."""
    computed_load: float


# --- one large fleet -------------------------------------------------------------------------


def name_of(number: int) -> str:
    """Return the name of an instance."""
    return f"http://10.{number // 250}.{number % 250}.1:8000"


def events_of(number: int, blocks: int, system: list[int]) -> list[BlockStored]:
    """Return the events of an instance: the system prompt, and runs of its own behind it."""
    draw = np.random.default_rng(number)
    shared = len(system) // BLOCK
    hashes = draw.integers(0, 2**63, blocks).tolist()
    made = [BlockStored(hashes[:shared], None, system, BLOCK, None, "GPU", None)]
    for start in range(shared, blocks, RUN):
        some = hashes[start : start + RUN]
        tokens = draw.integers(0, 128_000, len(some) * BLOCK).tolist()
        made.append(BlockStored(some, hashes[shared - 1], tokens, BLOCK, None, "GPU", None))
    return made


def resident() -> int:
    """Return the memory of this process, in bytes."""
    with Path("/proc/self/statm").open(encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def milliseconds(run: Callable[[Any], object], values: Sequence[Any]) -> tuple[float, float]:
    """Return the median and the 99th percentile of ``run``'s time, over all values."""
    times = []
    run(values[0])
    for value in values:
        begun = time.process_time()
        run(value)
        times.append((time.process_time() - begun) * 1e3)
    return statistics.median(times), float(np.quantile(times, 0.99))


def measure(instances: int, blocks: int, count: int) -> Size:
    """Measure a fleet of ``instances``, with ``count`` prompts of each kind."""
    draw = np.random.default_rng(instances)
    system = draw.integers(0, 128_000, SYSTEM).tolist()
    gc.collect()
    gc.freeze()
    before = resident()
    router = PrefixRouter([name_of(number) for number in range(instances)])
    taken = 0.0
    for number in range(instances):
        made = events_of(number, blocks, system)
        begun = time.process_time()
        router.apply(name_of(number), made)
        taken += time.process_time() - begun
        del made
    memory = resident() - before
    stored = instances * blocks

    def prompt(behind: Sequence[int]) -> np.ndarray[Any, Any]:
        return np.array([*behind, *draw.integers(0, 128_000, PROMPT - len(behind))], np.int32)

    def of_one() -> np.ndarray[Any, Any]:
        number = int(draw.integers(instances))
        return prompt([*system, *events_of(number, SYSTEM // BLOCK + RUN, system)[1].token_ids])

    shared = [prompt(system) for _ in range(count)]
    own = [of_one() for _ in range(count)]
    unknown = [prompt(()) for _ in range(count)]
    busy = [router.begin(router.choose(one), one) for one in shared[:8]]  # type: ignore[arg-type]
    all_ms, one_ms, no_ms = (milliseconds(router.choose, some) for some in (shared, own, unknown))
    for ticket in busy:
        router.end(ticket)

    everything = [*shared, *own, *unknown]
    homes = [place(router, one) for one in everything]
    moved, others, lose_ms = {}, 0, 0.0
    for lost in (1, min(100, instances // 2)):
        gone = {name_of(number) for number in range(lost)}
        begun = time.process_time()
        for name in gone:
            router.remove(name)
        lose_ms = (time.process_time() - begun) * 1e3 / lost
        after = [place(router, one) for one in everything]
        changed = [old for old, new in zip(homes, after, strict=True) if old != new]
        moved[lost] = len(changed) / len(homes)
        others += sum(old not in gone for old in changed)
        for number in range(lost):
            router.add(name_of(number))
            events: list[KVEvent] = [AllBlocksCleared(), *events_of(number, blocks, system)]
            payloads = [encode(Batch(0.0, [event], 0)) for event in events]
            begun = time.process_time()
            for payload in payloads:
                router.apply(name_of(number), decode(payload)[0].events)
            rejoin_ms = (time.process_time() - begun) * 1e3
    assert [place(router, one) for one in everything] == homes, "it is not as before"
    return Size(
        instances, blocks, taken / stored * 1e6, memory / stored, *all_ms, *one_ms, *no_ms,
        moved[1], list(moved.values())[-1], others, lose_ms, rejoin_ms,
    )  # fmt: skip


def place(router: PrefixRouter, prompt: np.ndarray[Any, Any]) -> str:
    """Return the instance that a prompt goes to."""
    found = router.choose(prompt)
    assert found is not None
    return found.place.instance


# --- two routers -----------------------------------------------------------------------------


class Node:
    """A simulated instance: a cache whose events all routers read, and a queue."""

    def __init__(self, name: str, pages: int, routers: list[PrefixRouter]) -> None:
        self.cache = PagedCache(pages, 1)
        self.computed = 0
        self.free_at = 0.0
        mirror = CacheBlocks(1)

        def tell(event: Event) -> None:
            events = list(mirror.take(event))
            for router in routers:
                router.apply(name, events)

        self.cache.subscribe(tell)

    def serve(self, blocks: np.ndarray[Any, Any], now: float) -> int:
        """Serve a prompt; return the number of its cached blocks."""
        sequence = self.cache.open(np.append(blocks, np.int32(LAST)))
        hits = sequence.num_cached
        sequence.publish(len(blocks))
        sequence.close()
        self.computed += len(blocks) - hits
        self.free_at = max(self.free_at, now) + (len(blocks) - hits) * TRACE_BLOCK / SPEED
        return hits


def replay(
    requests: list[dict[str, Any]], routers: int, nodes: int, pages: int, slack: float
) -> Pair:
    """Replay a trace over nodes, each prompt through one of the routers."""
    now = 0.0
    prefill = PrefillCost(
        seconds_per_token=TRACE_BLOCK / SPEED, seconds_per_token_pair=2e-9 * TRACE_BLOCK**2
    )
    cost = RoutingCost(prefill=prefill, slack=slack)
    names = [name_of(number) for number in range(nodes)]
    made = [PrefixRouter(names, cost=cost, clock=lambda: now) for _ in range(routers)]
    cluster = {name: Node(name, pages, made) for name in names}
    chance = random.Random(1)
    ahead: list[tuple[float, int, bool, PrefixRouter, RouteTicket]] = []
    hits = total = agreed = unique = agreed_unique = 0
    for number, request in enumerate(requests):
        arrival = request["timestamp"] / 1000
        while ahead and ahead[0][0] <= arrival:
            now, _, ended, router, ticket = heapq.heappop(ahead)
            (router.end if ended else router.first_token)(ticket)
        now = arrival
        blocks = np.array(request["hash_ids"], np.int32)
        total += len(blocks)
        router = chance.choice(made)
        chosen = router.choose(blocks)
        assert chosen is not None
        others = [one.choose(blocks) for one in made if one is not router]
        same = all(one is not None and one.place == chosen.place for one in others)
        agreed += same
        tokens = sorted(score.tokens for score in router.score(blocks))
        unique += tokens[-1] > tokens[-2]
        agreed_unique += same and tokens[-1] > tokens[-2]
        ticket = router.begin(chosen, blocks)
        node = cluster[chosen.place.instance]
        hits += node.serve(blocks, now)
        done = node.free_at + request["output_length"] * ANSWER_S
        heapq.heappush(ahead, (node.free_at, number * 2, False, router, ticket))
        heapq.heappush(ahead, (done, number * 2 + 1, True, router, ticket))
    each = [node.computed for node in cluster.values()]
    return Pair(
        routers, slack, nodes, hits / total, agreed / len(requests), agreed_unique / max(1, unique),
        max(each) * nodes / sum(each),
    )  # fmt: skip


def pairs(path: Path, nodes: int, tokens: int, slacks: list[float]) -> list[Pair]:
    """Replay a trace at one router and at two, with each slack."""
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8") as lines:
        requests = [json.loads(line) for line in lines]
    pages = tokens // TRACE_BLOCK
    return [
        replay(requests, routers, nodes, pages, slack) for routers in (1, 2) for slack in slacks
    ]


def main() -> int:
    """Run all measurements and print them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument(
        "--instances", type=int, nargs="*", default=[10, 100, 1000], help="default: 10 100 1000"
    )
    parser.add_argument("--blocks", type=int, default=2000, help="an instance (default: 2,000)")
    parser.add_argument("--prompts", type=int, default=200, help="of each kind (default: 200)")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="replay it at two routers")
    parser.add_argument("--nodes", type=int, default=4, help="default: 4")
    parser.add_argument("--tokens", type=int, default=3_000_000, help="a node (default: 3 million)")
    parser.add_argument(
        "--slack", type=float, nargs="*", default=[0.0, RoutingCost().slack],
        help="of the routers (default: none, and theirs)",
    )  # fmt: skip
    options = parser.parse_args()
    sizes = [measure(count, options.blocks, options.prompts) for count in options.instances]
    found = []
    if options.trace is not None:
        found = pairs(options.trace, options.nodes, options.tokens, options.slack)
    if options.json:
        print(json.dumps({"sizes": list(map(asdict, sizes)), "pairs": list(map(asdict, found))}))
        return 0
    for size in sizes:
        print(f"{size.instances:,} instances of {size.blocks:,} blocks")
        for name, value in asdict(size).items():
            print(f"  {name:20} {value:12,.3f}")
    for pair in found:
        print(
            f"{pair.routers} routers, slack {pair.slack}: hits {pair.hits:.1%}, agree "
            f"{pair.agree:.1%} ({pair.agree_best:.1%} where one node holds most), "
            f"most computed / mean {pair.computed_load:.2f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
