"""What Prometheus is told: all of it, by its own parser, and by the conventions for names."""

from __future__ import annotations

import re
from types import SimpleNamespace

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvkeep.core.cache import PagedCache
from kvkeep.core.cost import CostModel, PrefillCost, TransferCost
from kvkeep.core.groups import GroupLayout, WindowSpec
from kvkeep.observe.usage import TenantLedger
from kvkeep.serve.engine.stats import EngineStats
from kvkeep.serve.http import BodyBudget, ConnectionLimits, Connections
from kvkeep.serve.server import families
from kvkeep.serve.server.engine_costs import EngineCosts
from kvkeep.serve.server.metrics import ServerMetrics
from kvkeep.serve.server.pins import PoolPins
from kvkeep.store.blocks import StoreStats
from kvkeep.store.tiers.counters import TierCounters, TierStats
from request_events import Requests

PAGE = 4
HOSTILE = ['a"b\\c\nd', "\x1b[31m", "\u202etxt", "x" * 10_000, "a␊", "a\n", "other", ""]


def serve(cache, *parts, namespace=""):
    sequence = cache.open(np.repeat(np.array(parts, np.int32), PAGE), namespace)
    sequence.copies()
    sequence.publish()
    sequence.close()


def tier(name, **more):
    return TierStats(
        name=name, place="x", codec="raw", blocks=3, used_bytes=10, capacity=100, pinned_bytes=1,
        queued_bytes=2, breaker="closed", breaker_opened=1, counters=TierCounters(hits=5).as_dict(),
        breakers={"read": "closed"},
    ).as_dict() | more  # fmt: skip


def store(*tiers):
    known = StoreStats(1, 100, 50, 1, 30, 10, 0, 0, ()).as_dict()
    return known | {"tiers": list(tiers or (tier("memory"), tier("file")))}


def told(metrics, cache, *, store=None, namespaces=None):
    metrics.usage.pages.pages.update(namespaces or {})
    text = metrics.exposition(cache.stats(), EngineStats().as_dict(), store).decode()
    return list(text_string_to_metric_families(text))


def samples(found):
    """Name and labels → value; none comes twice."""
    values = {}
    for family in found:
        for sample in family.samples:
            key = sample.name, *sorted(sample.labels.values())
            assert key not in values, key
            values[key] = sample.value
    return values


def all_of_it():
    """An exposition with every family that there is."""
    metrics = ServerMetrics()
    cache = PagedCache(16, PAGE, what_if=1.0)
    for number in range(30):
        serve(cache, number % 3, number)
    Requests(metrics.usage.see).admitted(
        "a", namespace="", prompt_tokens=9, cached_tokens=4, match_s=0.0
    )
    Requests(metrics.usage.see).computed("a", tokens=5, seconds=0.5)
    metrics.requests.labels("chat", "stop").inc()
    metrics.note_first_token(0.1, prompt_tokens=10, reused_tokens=5)
    metrics.reasons = lambda: {"new": 5, "evicted": 7}
    metrics.events = lambda: dict.fromkeys(
        ("batches", "events", "dropped", "resyncs", "replays", "snapshots", "refused"), 1
    )
    metrics.pool_pins = PoolPins(cache)
    metrics.tier_pins = SimpleNamespace(
        pinned_tokens=5, unpinned_tokens=4, given_tokens=3, lost_tokens=2, count=1
    )
    metrics.tenants = TenantLedger()
    transfer = TransferCost(seconds_fixed=0.001, seconds_per_byte=1e-9)
    cost = CostModel(
        PrefillCost(seconds_per_token=0.001), reads={"file": transfer}, writes={"file": transfer}
    )
    metrics.costs = EngineCosts(cost)
    metrics.connections, metrics.bodies = Connections(ConnectionLimits()), BodyBudget()
    found = told(metrics, cache, store=store(), namespaces={"": 4})
    names = {family.name for family in found}
    layout = GroupLayout(PAGE, (WindowSpec(PAGE),))
    grouped = told(ServerMetrics(), PagedCache(16, layout, what_if=1.0))
    found += [family for family in grouped if family.name not in names]
    # The client tells besides when each counter began; those are not ours to name.
    return [family for family in found if not family.name.endswith("_created")]


# --- figures ---------------------------------------------------------------------------------


def test_pages_by_state_are_all_pages_and_the_others_are_apart():
    metrics, cache = ServerMetrics(), PagedCache(32, PAGE)
    serve(cache, 1, 2, 3)
    cache.pin([1] * PAGE + [2] * PAGE, hard=True)
    running = cache.open([5] * 9)
    found = samples(told(metrics, cache))
    states = {key[1]: value for key, value in found.items() if key[0] == "kvkeep_pages"}
    assert sum(states.values()) == 32
    assert states == {"free": 26, "cached_evictable": 1, "cached_held": 2, "private": 3}
    assert found["kvkeep_pages_pinned",] == 2
    running.close()


def test_reuse_is_told_by_tier_with_what_it_saved():
    metrics, cache = ServerMetrics(), PagedCache(8, PAGE)
    reuse = Requests(metrics.usage.see)
    reuse.computed("a", tokens=100, seconds=2.0)
    reuse.admitted("b", namespace="t", prompt_tokens=60, cached_tokens=20, match_s=0.0)
    reuse.loaded("b", sources=[(20, 30, "file")], seconds=0.1, late=False)
    found = samples(told(metrics, cache))
    assert found["kvkeep_hit_tokens_total", "pool"] == 20
    assert found["kvkeep_hit_tokens_total", "file"] == 10
    assert found["kvkeep_prefill_saved_tokens_total",] == 30
    assert found["kvkeep_prefill_saved_seconds_total", "pool"] == pytest.approx(0.4)
    assert found["kvkeep_prefill_saved_seconds_total", "file"] == pytest.approx(0.2)


def test_first_tokens_are_told_apart_by_what_was_reused():
    metrics, cache = ServerMetrics(), PagedCache(8, PAGE)
    for reused in (0, 49, 50, 100):
        metrics.note_first_token(0.2, prompt_tokens=100, reused_tokens=reused)
    found = samples(told(metrics, cache))
    assert found["kvkeep_time_to_first_token_seconds_count",] == 4
    name = "kvkeep_time_to_first_token_by_warmth_seconds_count"
    assert (found[name, "cold"], found[name, "warm"]) == (2, 2)


def test_counters_of_a_tier_are_told():
    found = samples(
        told(ServerMetrics(), PagedCache(8, PAGE), store=store(tier("file", capacity=None)))
    )
    assert found["kvkeep_store_hits_total", "file"] == 5
    assert ("kvkeep_store_capacity_bytes", "file") not in found
    assert found["kvkeep_store_breaker_open", "file"] == 0


def test_losses_of_a_publisher_are_told():
    feed = pytest.importorskip("kvkeep.serve.kv_events")
    counts = feed.PublisherStats(dropped=3).as_dict()
    metrics = ServerMetrics()
    metrics.events = lambda: counts
    found = samples(told(metrics, PagedCache(8, PAGE)))
    assert found["kvkeep_events_dropped_total",] == 3


# --- bounds and hostile names ----------------------------------------------------------------


def test_labels_are_bounded_whatever_comes():
    metrics, cache = ServerMetrics(), PagedCache(8, PAGE)
    metrics.tenants = TenantLedger()
    names = [f"salt {number}" for number in range(3000)]
    for name in names:
        Requests(metrics.tenants.see).admitted(
            name, namespace=name, prompt_tokens=5, cached_tokens=1, match_s=0.0
        )
    metrics.reasons = lambda: dict.fromkeys(names, 1)
    found = told(metrics, cache, namespaces=dict.fromkeys(names, 2))
    for family in found:
        assert len({tuple(sorted(one.labels.items())) for one in family.samples}) <= 70, family.name
    values = samples(found)
    assert values["kvkeep_recomputed_tokens_total", "other"] == 3000 - families.MOST_NAMES


def test_hostile_names_are_read_back_by_prometheus_parser_and_are_visible():
    metrics, cache = ServerMetrics(), PagedCache(8, PAGE)
    metrics.tenants = TenantLedger(named=HOSTILE)
    for name in HOSTILE:
        Requests(metrics.tenants.see).admitted(
            name, namespace=name, prompt_tokens=5, cached_tokens=1, match_s=0.0
        )
        Requests(metrics.usage.see).loaded("x", sources=[(0, 1, name)], seconds=0.0, late=False)
    found = told(
        metrics,
        cache,
        store=store(*(tier(name) for name in HOSTILE)),
        namespaces=dict.fromkeys(HOSTILE, 1),
    )
    values = samples(found)  # and no sample comes twice
    assert sum(key[0] == "kvkeep_namespace_tokens_total" for key in values) == 6 * len(HOSTILE) + 6
    for family in found:
        for sample in family.samples:
            for value in sample.labels.values():
                assert len(value) <= 64
                assert value.isprintable()


# --- lint, as promtool does it ---------------------------------------------------------------

NOT_BASE = re.compile(
    r"_(milliseconds|ms|minutes|hours|kilobytes|mib|gib|percent)\b", re.IGNORECASE
)


def test_every_family_is_named_and_explained_by_the_conventions():
    found = all_of_it()
    assert len(found) > 50
    for family in found:
        assert re.fullmatch(r"kvkeep_[a-z][a-z_]*", family.name), family.name
        assert len(family.documentation) > 8, family.name
        assert not family.documentation[0].islower(), family.documentation
        assert not family.documentation.endswith("."), family.documentation
        assert not NOT_BASE.search(family.name), family.name
        assert family.type in {"counter", "gauge", "histogram"}, family.name
        assert not {"counter", "gauge", "histogram"} & set(family.name.split("_")), family.name


def test_a_family_is_told_once_and_its_labels_are_known():
    found = all_of_it()
    names = [family.name for family in found]
    assert len(names) == len(set(names))
    labels = {name for family in found for one in family.samples for name in one.labels}
    assert labels == {
        "endpoint", "outcome", "state", "reason", "tier", "memory", "namespace", "warmth", "le",
        "phase", "call", "kind",
    }  # fmt: skip
