"""How fast traces of agents are read and replayed: sessions as files, and closed beside open loops.

    python benchmarks/traces.py            # a minute on one core
    python benchmarks/traces.py --quick    # a tenth of the requests
    python benchmarks/traces.py --json

The file of sessions is generated: prompts that grow by 20 ids of 64 tokens a request. Beside
reading it, `json.load` of the same file is timed, the floor of any reader that is not streaming.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from kvkeep.bench.replay import Workload, simulate
from kvkeep.bench.replay.loop import simulate_loop
from kvkeep.bench.traces import generate, open_trace
from kvkeep.core.cost import PrefillCost

if TYPE_CHECKING:
    from collections.abc import Callable

ROUNDS = 5
COST = PrefillCost(seconds_per_token=1e-5, decode_seconds_per_token=0.012)
CAPACITY = 500_000


def session(requests: int) -> dict[str, object]:
    """Return a session whose prompts grow, and begin anew at 768,000 tokens."""
    ids, number = list(range(300)), 300
    found = []
    for turn in range(requests):
        ids = [*(ids if len(ids) < 12_000 else ids[:300]), *range(number, number + 20)]
        number += 20
        found.append({
            "t": 10.0 * turn, "type": "s", "in": 64 * len(ids) + 5, "out": 100, "hash_ids": ids,
            "stop": "tool_use", "api_time": 3.0,
        })  # fmt: skip
    return {"id": "session", "block_size": 64, "requests": found}


def alternating(*tasks: tuple[str, Callable[[], object]]) -> dict[str, list[float]]:
    """Return the seconds of each task, run in turn after a round to warm up."""
    seconds: dict[str, list[float]] = {name: [] for name, _ in tasks}
    for round_ in range(ROUNDS + 1):
        for name, task in tasks:
            begun = time.perf_counter()
            task()
            if round_:
                seconds[name].append(time.perf_counter() - begun)
    return seconds


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tenth of the requests")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    few = 10 if args.quick else 1
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "session.json"
        path.write_text(json.dumps(session(2000 // few)), encoding="utf-8")
        size = path.stat().st_size
        found = alternating(
            ("json.load", lambda: json.loads(path.read_bytes())),
            ("open_trace", lambda: sum(1 for _ in open_trace(path, strict=True))),
            (
                "open_trace, unit_tokens=512",
                lambda: sum(1 for _ in open_trace(path, strict=True, unit_tokens=512)),
            ),
        )
    work = Workload.read(generate("agents", seed=1, requests=6000 // few, unit_tokens=512))
    found |= alternating(
        ("simulate", lambda: simulate(work, CAPACITY)),
        ("open loop", lambda: simulate_loop(work, CAPACITY, cost=COST)),
        ("closed loop", lambda: simulate_loop(work, CAPACITY, cost=COST, closed_loop=True)),
    )
    medians = {name: statistics.median(seconds) for name, seconds in found.items()}
    if args.json:
        print(json.dumps({"bytes": size, "requests": len(work), "seconds": found}, indent=2))
        return
    print(f"a session of {size / 1e6:.0f} MB; a workload of {len(work):,} requests")
    for name, seconds in found.items():
        spread = (max(seconds) - min(seconds)) / medians[name]
        print(f"{name:<28} {medians[name]:8.3f} s  ± {spread / 2:.0%}")
    print(f"reading takes {medians['open_trace'] / medians['json.load']:.2f} times json.load,")
    print(f"a closed loop {medians['closed loop'] / medians['open loop']:.2f} times an open one")


if __name__ == "__main__":
    main()
