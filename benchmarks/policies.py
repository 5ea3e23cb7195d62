"""Hit rates of all eviction policies at eight capacities, and the points `adaptive` is behind.

    python benchmarks/policies.py                    # every generator, two seeds: an hour
    python benchmarks/policies.py --quick            # one seed, fewer requests: minutes
    python benchmarks/policies.py --trace FILE …     # and traces, whole
    python benchmarks/policies.py --requests 4000    # and their first 4,000 requests alone
    python benchmarks/policies.py --seeds 11,12 --markdown
    python benchmarks/policies.py --behind           # a line a trace

Capacities are from 2 % to 100 % of the distinct blocks of a trace, in equal ratios. Hit rates are
cached tokens over prompt tokens in percent, and the same on every machine. Each generated trace is
replayed by blocks of its unit, and by pages of 64 tokens with blocks of 512 for the history, as in
an engine. With ``--cache FILE`` the rates are kept in a file, and reused while the code of the
policies is unchanged.
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import json
import sys
import time
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from kvkeep.bench.replay import Workload, simulate
from kvkeep.bench.traces import KINDS, generate, open_trace
from kvkeep.core import eviction
from kvkeep.core.eviction import POLICIES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvkeep.bench.traces import Trace, TraceRequest

FIXED = tuple(name for name in POLICIES if name not in {"adaptive", "priority"})
JUDGED = "adaptive"
SHARES = tuple(0.02 * 50 ** (step / 7) for step in range(8))
UNITS = {"chat": 64, "tenants": 64, "rag": 64, "agent": 256, "api": 64}
REQUESTS = {"chat": 6000, "tenants": 6000, "rag": 6000, "agent": 4000, "api": 8000}
PAGE = 64


@dataclass(frozen=True, slots=True)
class Row:
    """Hit rates in percent of one trace, in one way of replaying, at one capacity in tokens."""

    trace: str
    capacity: int
    rates: dict[str, float]

    @property
    def best(self) -> float:
        """The highest rate of a fixed policy."""
        return max(self.rates[name] for name in FIXED if name in self.rates)

    @property
    def behind(self) -> float:
        """Points that the judged policy lacks to the best fixed one; below 0 if it is better."""
        return self.best - self.rates[JUDGED]


class First:
    """The first ``count`` requests of a trace, as a trace."""

    def __init__(self, trace: Trace, count: int) -> None:
        self.trace, self.count, self.length = trace, count, None
        self.name, self.unit_tokens = f"{trace.name}, first {count:,}", trace.unit_tokens

    def __iter__(self) -> Iterator[TraceRequest]:
        return islice(iter(self.trace), self.count)


class Rates:
    """Hit rates by what they were measured with, kept in ``file`` if there is one."""

    def __init__(self, file: Path | None) -> None:
        self.file = file
        self.known: dict[str, float] = {}
        if file is not None and file.exists():
            for line in file.read_text().splitlines():
                key, rate = json.loads(line)
                self.known[key] = rate

    def of(self, work: Workload, capacity: int, policy: str, page: int | None) -> float:
        """Return the percentage of prompt tokens that were cached."""
        key = f"{work.digest} {capacity} {page} {policy} {code_of(policy)}"
        if key not in self.known:
            outcome = simulate(work, capacity, policy, page_tokens=page)
            self.known[key] = 100 * outcome.hit_tokens / outcome.tokens
            if self.file is not None:
                with self.file.open("a") as file:
                    file.write(json.dumps([key, self.known[key]]) + "\n")
        return self.known[key]


def code_of(policy: str) -> str:
    """Return a digest of the code that decides for ``policy``."""
    if policy == JUDGED:
        assert eviction.__file__ is not None
        files = sorted(Path(eviction.__file__).parent.glob("*.py"))
        text = "".join(file.read_text() for file in files)
    else:
        made = type(POLICIES[policy]())
        text = "".join(inspect.getsource(base) for base in made.__mro__[:-2])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def rows_of(work: Workload, name: str, page: int | None, rates: Rates) -> Iterator[Row]:
    """Yield the rates of a workload at each of the capacities."""
    for share in SHARES:
        capacity = max(1, round(share * work.num_ids)) * work.unit_tokens
        found = {policy: rates.of(work, capacity, policy, page) for policy in (*FIXED, JUDGED)}
        yield Row(name, capacity, found)


def workloads(arguments: argparse.Namespace) -> Iterator[tuple[str, Workload, int | None]]:
    """Yield what to replay: a name, the workload, and the size of pages if not by blocks."""
    for path in arguments.trace:
        name = Path(path).name.split(".")[0]
        trace: Trace = open_trace(path)
        if arguments.requests:
            trace = First(trace, arguments.requests)
            name += f", first {arguments.requests:,}"
        yield name, Workload.read(trace), None
    for seed in arguments.seeds:
        for kind in arguments.kinds:
            requests = REQUESTS.get(kind, 6000) // (4 if arguments.quick else 1)
            made = generate(kind, seed=seed, requests=requests, unit_tokens=UNITS.get(kind, 64))
            work = Workload.read(made)
            yield f"{kind} {seed}", work, None
            if not arguments.blocks:
                yield f"{kind} {seed}, pages", work, PAGE


def table(rows: list[Row], *, markdown: bool) -> str:
    """Return the rates by trace and capacity, the best in each row and the points behind it."""
    heads = ["trace", "tokens", *FIXED, JUDGED, "best", "behind"]
    lines = [heads]
    for row in rows:
        best = max(FIXED, key=lambda name: row.rates[name])
        rates = [f"{row.rates[name]:.1f}" for name in (*FIXED, JUDGED)]
        lines.append([row.trace, f"{row.capacity:,}", *rates, best, f"{row.behind:+.2f}"])
    if markdown:
        body = [f"| {' | '.join(line)} |" for line in lines]
        return "\n".join([body[0], "|---" * len(heads) + "|", *body[1:]])
    widths = [max(len(line[at]) for line in lines) for at in range(len(heads))]
    return "\n".join(
        "  ".join(word.rjust(width) for word, width in zip(line, widths, strict=True))
        for line in lines
    )


def behind(rows: list[Row]) -> str:
    """Return a line a trace: points behind the best at each of the capacities, in Markdown."""
    heads = ["trace", *(f"{share:.0%}" for share in SHARES)]
    lines = [heads, ["---"] * len(heads)]
    for first in range(0, len(rows), len(SHARES)):
        some = rows[first : first + len(SHARES)]
        lines.append([some[0].trace, *(f"{row.behind:+.1f}" for row in some)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main(arguments: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--trace", nargs="+", default=[], metavar="FILE")
    parser.add_argument("--requests", type=int, help="of each trace, only so many")
    parser.add_argument(
        "--kinds", type=lambda text: text.split(",") if text else [], default=list(KINDS)
    )
    parser.add_argument("--seeds", type=lambda text: [*map(int, text.split(","))], default=[1, 2])
    parser.add_argument("--blocks", action="store_true", help="not also by pages")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--cache", type=Path, metavar="FILE")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--behind", action="store_true", help="only the points behind the best")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args(arguments)
    if chosen.quick:
        chosen.seeds = chosen.seeds[:1]
    rates = Rates(chosen.cache)
    rows: list[Row] = []
    for name, work, page in workloads(chosen):
        begun = time.perf_counter()
        rows += rows_of(work, name, page, rates)
        took = time.perf_counter() - begun
        worst = max(row.behind for row in rows[-len(SHARES) :])
        print(f"{name}: {worst:+.2f} at most, {took:.0f} s", file=sys.stderr, flush=True)
    if chosen.json:
        print(json.dumps([asdict(row) for row in rows]))
        return 0
    print(behind(rows) if chosen.behind else table(rows, markdown=chosen.markdown))
    print(f"\n{JUDGED} is at most {max(row.behind for row in rows):.2f} points behind the best.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
