"""Outcomes to report about, and a page taken apart."""

from __future__ import annotations

import json
from dataclasses import replace
from html.parser import HTMLParser

from replaying import tenants

from kvkeep.bench.replay import Outcome, belady, infinite, simulate

CAPACITIES = (20_000, 60_000, 200_000)
HOSTILE = (
    "</script><script>window.taken=1</script><img src=x onerror=alert(1)>\x1b[31m\u202e&\ud800"
)
VOID = {"meta", "br", "img", "link", "rect"}


def sample() -> tuple[dict[str, object], list[Outcome]]:
    """Facts of a small workload with tenants, and two policies with three capacities."""
    work = tenants(seed=3, requests=150)
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
    """The same with times and tiers."""
    return [
        one
        if one.policy in {"belady", "infinite"}
        else replace(
            one,
            latency={"ttft_s": {"p50": 0.5 - one.hit_rate / 4, "p90": 1.5, "p99": 4.0}},
            tiers=[{"name": "disk", "capacity": 4000, "blocks": 3999, "hits": 1234, "writes": 777}],
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
