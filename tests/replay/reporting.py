"""Outcomes to report about, and a page taken apart."""

from __future__ import annotations

import json
from dataclasses import replace
from html.parser import HTMLParser

from kvkeep.bench.replay import Outcome, Workload, belady, infinite, simulate
from kvkeep.bench.replay.report import Prices
from kvkeep.bench.traces import generate

CAPACITIES = (20_000, 60_000, 200_000)
PRICES = Prices(
    gpu_hour=2.5,
    memory_gib_month=3.0,
    disk_gib_month=0.1,
    kv_bytes_per_token=131_072,
    prefill_tokens_per_s=20_000,
)
HOSTILE = (
    "</script><script>window.taken=1</script><img src=x onerror=alert(1)>\x1b[31m\u202e&\ud800"
)
VOID = {"meta", "br", "img", "link", "rect"}


def sample() -> tuple[dict[str, object], list[Outcome]]:
    """Facts of a small workload with tenants, and two policies with three capacities."""
    work = Workload.read(generate("tenants", seed=3, requests=150))
    facts = {
        "name": work.name, "digest": work.digest, "requests": len(work),
        "tokens": int(work.tokens.sum()), "unit_tokens": work.unit_tokens, "span_s": work.span_s,
        "namespaces": len(work.namespaces), "skipped": 0,
    }  # fmt: skip
    found = [infinite(work)]
    for capacity in CAPACITIES:
        found.append(belady(work, capacity))
        found += [simulate(work, capacity, policy) for policy in ("lru", "returns")]
    return facts, found


def with_more(found: list[Outcome]) -> list[Outcome]:
    """The same with times, tiers and what-if curves, as later stages fill them in."""
    return [
        one
        if one.policy in {"belady", "infinite"}
        else replace(
            one,
            latency={
                "ttft_s": {"p50": 0.5 - one.hit_rate / 4, "p90": 1.5, "p99": 4.0, "mean": 0.7},
                "utilisation": 0.61,
                "queue_s": {"p50": 0.01, "p99": 2.0},
                "total_s": {"p50": 12.0},
                "jobs": 40,
                "job_s": {"p50": 900.0, "p90": 1800.0, "p99": 7200.0, "mean": 1000.0},
                "job_served_s": {"p50": 100 - 50 * one.hit_rate, "p90": 300.0, "mean": 120.0},
                "prefill_s": 30.0,
                "saved_s": 40.0,
                "rows": [[0.25, 90], [0.29730, 40], [0.35355, 20]],
            },
            tiers=[{"name": "disk", "capacity": 4000, "blocks": 3999, "hits": 1234, "writes": 777}],
            what_if=[[10_000, 0.1], [100_000, 0.3], [400_000, 0.4]],
        )
        for one in found
    ]


def made(policy: str = "lru", capacity: int = 1000, hits: int = 50, **more: object) -> Outcome:
    """By hand: a hundred blocks of ten tokens."""
    known: dict[str, object] = {
        "requests": 10, "tokens": 1000, "hit_tokens": hits * 10, "blocks": 100, "hit_blocks": hits,
        "misses": {"first time seen": 1000 - hits * 10}, "digest": "d", "trace": "made",
    }  # fmt: skip
    return Outcome(policy, capacity, 10, **{**known, **more})


class Taken(HTMLParser):
    """A page's elements, and its text by element; what is not closed is a fault."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.open: list[str] = []
        self.faults: list[str] = []
        self.feed(text)
        self.close()
        self.faults += self.open

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if len(dict(attrs)) != len(attrs):
            self.faults.append(f"{tag} has an attribute twice")
        if tag not in VOID:
            self.open.append(tag)
            self.texts.setdefault(tag, []).append("")

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if tag in VOID:
            return
        if not self.open or self.open[-1] != tag:
            self.faults.append(f"</{tag}> closes {self.open[-1:]}")
        elif self.open:
            self.open.pop()

    def handle_data(self, data):
        for tag in set(self.open):
            self.texts[tag][-1] += data

    @property
    def text(self) -> str:
        """All that is neither script nor style."""
        return self.texts["main"][0] + self.texts["header"][0]

    @property
    def data(self) -> dict:
        """What the charts are drawn from."""
        return json.loads(self.texts["script"][0])
