"""The speed of the router's index, and the hit rates of routing on a trace.

Speed: blocks of 16 tokens, in runs of 64 as a chunk of prefill stores them, from msgpack as it
received; prompts of 32,768 tokens, of which each of 100 instances holds another part.
In processor time, so that other load on the machine counts less.

Replay: the requests of a trace (``--trace``: one JSON object a line with ``timestamp`` in ms,
``input_length``, ``output_length`` and ``hash_ids``, one for 512 tokens, as Mooncake's) on
simulated nodes. A node is our `PagedCache` (LRU), of which the router knows what its events say; it
computes 15,000 tokens a second, one prompt after the other. Beside it the same nodes with requests
placed at random, by load, and by what was routed to each node (both without events), as texts,
which events tell nothing of, and one node with the memory of all.

    python benchmarks/router.py                          # speed
    python benchmarks/router.py --trace conversation.jsonl.gz
    python benchmarks/router.py --trace … --json         # for machines
"""

from __future__ import annotations

import argparse
import gc
import gzip
import heapq
import json
import random
import statistics
import sys
import time
import tracemalloc
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvkeep import PagedCache
from kvkeep.core.cost import PrefillCost
from kvkeep.serve.kv_events import BlockRemoved, BlockStored, CacheBlocks
from kvkeep.serve.kv_events.wire import Batch, decode, encode
from kvkeep.serve.router import PrefixRouter, RoutingCost, Text

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvkeep.core.events import Event
    from kvkeep.serve.router import RouteTicket

BLOCK = 16
RUN = 64
PROMPT = 32_768
INSTANCES = 100
TRACE_BLOCK = 512
SPEED = 15_000  # tokens a second
ANSWER_S = 0.03  # a token of an answer
LAST = 2**31 - 1  # a token that is in no trace


@dataclass(frozen=True, slots=True)
class Figure:
    """A measured figure: the median of some runs, and its spread."""

    name: str
    unit: str
    median: float
    low: float
    high: float
    runs: int
    goal: str = ""


@dataclass(frozen=True, slots=True)
class Replay:
    """The result of a trace; each load is the maximum over all nodes divided by their mean."""

    name: str
    nodes: int
    hits: float
    computed_load: float
    token_load: float
    request_load: float
    seconds: float


# --- speed -----------------------------------------------------------------------------------


def timed(name: str, unit: str, run: Callable[[], float], runs: int, goal: str = "") -> Figure:
    """Return the median of ``run``'s figures; garbage collection is off, as in `timeit`."""
    run()
    gc.collect()
    gc.disable()
    try:
        got = sorted(run() for _ in range(runs))
    finally:
        gc.enable()
    return Figure(name, unit, statistics.median(got), got[0], got[-1], runs, goal)


def run_of(rng: np.random.Generator, blocks: int) -> BlockStored:
    """Return the events of an instance for new blocks."""
    hashes = rng.integers(0, 2**63, blocks).tolist()
    tokens = rng.integers(0, 128_000, blocks * BLOCK).tolist()
    return BlockStored(hashes, None, tokens, BLOCK, None, "GPU", None)


def updates(rng: np.random.Generator, runs: int) -> list[Figure]:
    """Measure stores and removals, in blocks per second."""
    events = [run_of(rng, RUN) for _ in range(300)]
    stored = [encode(Batch(0.0, [event], 0)) for event in events]
    # Removed one by one, as vLLM says it.
    removed = [
        encode(Batch(0.0, [BlockRemoved([one], "GPU") for one in event.block_hashes], 0))
        for event in events
    ]
    single = [encode(Batch(0.0, [run_of(rng, 1) for _ in range(32)], 0)) for _ in range(200)]
    blocks = RUN * len(events)

    def rate(payloads: list[bytes], blocks: int, router: PrefixRouter) -> float:
        begun = time.process_time()
        for payload in payloads:
            router.apply("a", decode(payload)[0].events)
        return blocks / (time.process_time() - begun)

    def filled() -> PrefixRouter:
        router = PrefixRouter(["a"])
        rate(stored, blocks, router)
        return router

    goal = "≥ 200,000"
    return [
        timed("index: store, runs of 64", "blocks/s",
              lambda: rate(stored, blocks, PrefixRouter(["a"])), runs, goal),
        timed("index: store, one by one", "blocks/s",
              lambda: rate(single, 32 * 200, PrefixRouter(["a"])), runs),
        timed("index: remove, one by one", "blocks/s",
              lambda: rate(removed, blocks, filled()), runs, goal),
    ]  # fmt: skip


def lookups(rng: np.random.Generator, runs: int) -> list[Figure]:
    """Measure the placement of a long prompt among instances that each hold another part."""
    router = PrefixRouter([f"i{number}" for number in range(INSTANCES)])
    prompt = rng.integers(0, 128_000, PROMPT, np.int32)
    listed = prompt.tolist()
    most = PROMPT // BLOCK
    for number in range(INSTANCES):
        count = most - number * most // (2 * INSTANCES)
        hashes = rng.integers(0, 2**63, count).tolist()
        event = BlockStored(hashes, None, listed[: count * BLOCK], BLOCK, None, "GPU", None)
        router.apply(f"i{number}", [event])

    coming = rng.integers(0, 128_000, PROMPT, np.int32)
    last = router.score(coming, among=[f"i{INSTANCES - 1}"])[0]
    router.begin(last, coming)  # something always is on its way

    def once(tokens: Any) -> float:
        begun = time.process_time()
        best = router.choose(tokens)
        took = (time.process_time() - begun) * 1e3
        assert best is not None
        assert best.tokens == PROMPT
        return took

    new = rng.integers(0, 128_000, PROMPT, np.int32)

    def unknown() -> float:
        begun = time.process_time()
        router.choose(new)
        return (time.process_time() - begun) * 1e3

    name = f"choose: {PROMPT:,} tokens, {INSTANCES} instances"
    return [
        timed(f"{name}, as an array", "ms", lambda: once(prompt), runs * 5, "≤ 1"),
        timed(f"{name}, as a list", "ms", lambda: once(listed), runs * 5),
        timed(f"{name}, nobody has it", "ms", unknown, runs * 5),
    ]


def memory(rng: np.random.Generator) -> Figure:
    """Measure the index memory of one block of a single instance."""
    payloads = [encode(Batch(0.0, [run_of(rng, RUN)], 0)) for _ in range(300)]
    tracemalloc.start()
    router = PrefixRouter(["a"])
    before = tracemalloc.get_traced_memory()[0]
    for payload in payloads:
        router.apply("a", decode(payload)[0].events)
    taken = (tracemalloc.get_traced_memory()[0] - before) / (RUN * len(payloads))
    tracemalloc.stop()
    return Figure("index: memory", "bytes/block", taken, taken, taken, 1)


# --- replay ----------------------------------------------------------------------------------


class Node:
    """A simulated instance: a cache whose pages are the trace's blocks, and a queue."""

    def __init__(self, name: str, pages: int, router: PrefixRouter | None) -> None:
        self.name = name
        self.cache = PagedCache(pages, 1)
        self.computed = self.tokens = self.requests = 0
        self.free_at = 0.0
        if router is not None:
            journal = CacheBlocks(1)

            def tell(event: Event) -> None:
                router.apply(name, journal.take(event))

            self.cache.subscribe(tell)

    def serve(self, blocks: np.ndarray[Any, np.dtype[np.int32]], now: float) -> int:
        """Serve a prompt; return the number of its cached blocks."""
        # The last token of a prompt is always computed: one more, so that all blocks may be hits.
        sequence = self.cache.open(np.append(blocks, np.int32(LAST)))
        hits = sequence.num_cached
        sequence.publish(len(blocks))
        sequence.close()
        self.computed += len(blocks) - hits
        self.tokens += len(blocks)
        self.requests += 1
        seconds = (len(blocks) - hits) * TRACE_BLOCK / SPEED
        self.free_at = max(self.free_at, now) + seconds
        return hits


def as_tokens(blocks: np.ndarray[Any, np.dtype[np.int32]]) -> np.ndarray[Any, Any]:
    """Return as many tokens as the blocks have."""
    each = np.arange(TRACE_BLOCK, dtype=np.int64) + blocks[:, None].astype(np.int64) * TRACE_BLOCK
    return (each % LAST).astype(np.int32).ravel()


def replay(
    name: str,
    requests: list[dict[str, Any]],
    nodes: int,
    pages: int,
    *,
    routed: bool,
    events: bool = True,
    remembered: bool = False,
    text: bool = False,
) -> Replay:
    """Replay the trace over nodes of equal size; ``remembered``: by what was routed, or by text."""
    begun = time.perf_counter()
    now = 0.0
    block = 1 if remembered else TRACE_BLOCK  # tokens that a token of the router stands for
    prefill = PrefillCost(seconds_per_token=block / SPEED, seconds_per_token_pair=2e-9 * block**2)
    cost = RoutingCost(prefill=prefill, slack=0.0)  # there is one router
    names = [f"n{number}" for number in range(nodes)]
    router = PrefixRouter(names, cost=cost, clock=lambda: now) if routed else None
    made = {one: Node(one, pages, router if events else None) for one in names}
    chance = random.Random(1)
    ahead: list[tuple[float, int, bool, RouteTicket]] = []
    hits = total = 0
    for number, request in enumerate(requests):
        arrival = request["timestamp"] / 1000
        while router is not None and ahead and ahead[0][0] <= arrival:
            now, _, ended, ticket = heapq.heappop(ahead)
            (router.end if ended else router.first_token)(ticket)
        now = arrival
        blocks = np.array(request["hash_ids"], np.int32)
        total += len(blocks)
        if router is None:
            hits += made[chance.choice(names)].serve(blocks, now)
            continue
        prompt: Any = as_tokens(blocks) if remembered else blocks
        if text:
            prompt = Text(prompt.tobytes())
        best = router.choose(prompt)
        assert best is not None
        ticket = router.begin(best, prompt if remembered else None)
        node = made[best.place.instance]
        hits += node.serve(blocks, now)
        done = node.free_at + request["output_length"] * ANSWER_S
        heapq.heappush(ahead, (node.free_at, number * 2, False, ticket))
        heapq.heappush(ahead, (done, number * 2 + 1, True, ticket))

    def load(what: str) -> float:
        each: list[int] = [getattr(node, what) for node in made.values()]
        return max(each) * len(each) / sum(each)

    took = time.perf_counter() - begun
    return Replay(
        name, nodes, hits / total, load("computed"), load("tokens"), load("requests"), took
    )


def replays(path: Path, nodes: int, tokens: int) -> list[Replay]:
    """Replay random placement, placement by prefix, and one pool with all memory."""
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8") as lines:
        requests = [json.loads(line) for line in lines]
    pages = tokens // TRACE_BLOCK
    return [
        replay("random", requests, nodes, pages, routed=False),
        replay("by load", requests, nodes, pages, routed=True, events=False),
        replay("as routed", requests, nodes, pages, routed=True, events=False, remembered=True),
        replay("as text", requests, nodes, pages, routed=True, remembered=True, text=True),
        replay("by prefix", requests, nodes, pages, routed=True),
        replay("one pool", requests, 1, nodes * pages, routed=False),
    ]


def main() -> int:
    """Run all measurements and print them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--quick", action="store_true", help="fewer runs")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="replay it (.jsonl, .jsonl.gz)")
    parser.add_argument("--nodes", type=int, default=10, help="default: 10")
    parser.add_argument("--tokens", type=int, default=3_000_000, help="a node (default: 3 million)")
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    runs = 3 if options.quick else 9
    figures = [*updates(rng, runs), *lookups(rng, runs), memory(rng)]
    replayed = (
        [] if options.trace is None else replays(options.trace, options.nodes, options.tokens)
    )
    if options.json:
        answer = {"figures": list(map(asdict, figures)), "replay": list(map(asdict, replayed))}
        print(json.dumps(answer, indent=1))
        return 0
    width = max(len(figure.name) for figure in figures)
    for one in figures:
        spread = f"{one.low:,.2f} … {one.high:,.2f}"
        print(f"{one.name:{width}}  {one.median:>12,.2f} {one.unit:11} {spread:>27}  {one.goal}")
    if not replayed:
        print("no --trace: nothing replayed", file=sys.stderr)
        return 0
    print(f"\n{'placed':12} {'nodes':>5} {'hits':>7}    most/mean: computed  tokens requests")
    for done in replayed:
        loads = f"{done.computed_load:20.2f} {done.token_load:7.2f} {done.request_load:8.2f}"
        print(f"{done.name:12} {done.nodes:5} {done.hits:7.1%} {loads}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
