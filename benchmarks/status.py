"""What the status of a cache inside an engine costs the engine's thread, and the ones beside it.

    python benchmarks/status.py     # 500 requests each, prompts of 1,024 and of 8,192 tokens

A request is told of as vLLM's connector does: it arrives, gets pages, is computed in one step,
answers 64 tokens, and ends. The calls are timed in the thread that makes them; the rest, which
threads of their own do, by the time that settling takes.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

from kvkeep.core.cost import CostModel
from kvkeep.core.keys import Namespace
from kvkeep.integrations.engine_status import EngineFacts, EngineStatus

PAGE, PAGES, ANSWER = 16, 65_536, 64


def measured(length: int, requests: int, *, cached: bool) -> tuple[list[float], float]:
    """Seconds of each request in the engine's thread, and seconds a request of all threads."""
    status = EngineStatus(EngineFacts("a benchmark", "none", PAGE, PAGES), CostModel(), tiers=tuple)
    status.watch.close()  # settled by hand
    rng, watch, space = random.Random(7), status.watch, Namespace()
    common = [rng.randrange(100_000) for _ in range(length - 16)]
    spent, settled = [], 0.0
    pages = list(range(1, PAGES))
    for number in range(requests):
        prompt = common if cached else [rng.randrange(100_000) for _ in range(length - 16)]
        prompt = [*prompt, *(rng.randrange(100_000) for _ in range(16))]
        count = -(-length // PAGE)
        begin = (number * count) % (PAGES - count - 8)
        table, id = pages[begin : begin + count], f"request {number}"
        had = (length - 16) // PAGE * PAGE if cached and number else 0
        answer = list(range(ANSWER))
        began = time.perf_counter()
        watch.arrived(id, prompt, space, at=0.0)
        watch.found(id, had)
        watch.admitted(id, table)
        for one in watch.unanswered:
            watch.computed(one, length)
        for one in watch.unanswered:
            watch.answering(one)
        for step in range(ANSWER // PAGE):
            watch.grown(id, [pages[begin + count + step]])
        watch.ended(id, "done", answer=answer, computed=length + ANSWER - 1, kept=length)
        spent.append(time.perf_counter() - began)
        began = time.perf_counter()
        explainer = status.explainer
        assert explainer is not None
        explainer.computed()
        settled += time.perf_counter() - began
    assert watch.lost == 0
    status.close()
    return spent, settled / requests


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=500)
    args = parser.parse_args()
    print("prompt   reused   engine's thread, µs a request (median, 99 %)   others, µs a request")
    for length in (1024, 8192):
        for cached in (False, True):
            spent, beside = measured(length, args.requests, cached=cached)
            spent.sort()
            median, most = statistics.median(spent), spent[int(0.99 * len(spent))]
            print(
                f"{length:>6,}   {'most' if cached else 'none':>6}   "
                f"{1e6 * median:>8.0f} {1e6 * most:>8.0f} {1e6 * beside:>40.0f}"
            )


if __name__ == "__main__":
    main()
