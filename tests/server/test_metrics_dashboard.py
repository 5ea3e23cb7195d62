"""The dashboard for Grafana and Prometheus' rules: whole, and about metrics that there are."""

from __future__ import annotations

import ast
import functools
import json
import re
from pathlib import Path

import promql_parser
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from test_metrics_families import all_of_it

from kvkeep.serve.http import BodyBudget
from kvkeep.serve.router import PrefixRouter
from kvkeep.serve.router.health import InstanceHealth
from kvkeep.serve.router.membership import Resolution
from kvkeep.serve.router.metrics import RouterMetrics

ROOT = Path(__file__).parents[2]
DASHBOARD = json.loads((ROOT / "deploy/grafana/kvkeep.json").read_text(encoding="utf-8"))
RULES = yaml.safe_load((ROOT / "deploy/prometheus/kvkeep-rules.yml").read_text(encoding="utf-8"))
# What Grafana puts in place of its variables.
GRAFANA = {"$__rate_interval": "1m", "$__range": "1h", "$job": ".*", "$instance": ".*"}


VLLM = ROOT / "src/kvkeep/integrations/vllm"


def table(file, name):
    """The keys of a table of metrics in a module that only vLLM can import."""
    for node in ast.parse((VLLM / file).read_text(encoding="utf-8")).body:
        target = node.target if isinstance(node, ast.AnnAssign) else None
        target = node.targets[0] if isinstance(node, ast.Assign) else target
        if isinstance(target, ast.Name) and target.id == name:
            return list(ast.literal_eval(node.value))
    raise AssertionError(f"{file} has no {name}")


@functools.cache
def of_vllm():
    """What the connector adds to vLLM's page: name → (labels, type)."""
    counters = {f"vllm:kvkeep_{name}_total": set() for name in table("stats.py", "METRICS")}
    for name in table("stats.py", "TIER_COUNTERS"):
        called = "hit_blocks" if name == "hits" else name
        counters[f"vllm:kvkeep_{called}_total"] = {"tier"}
    gauges = {f"vllm:kvkeep_{one}" for one in table("stats.py", "TIER_GAUGES")}
    return {
        **{name: (labels, "counter") for name, labels in counters.items()},
        **{name: ({"tier", "rank"}, "gauge") for name in gauges},
    }


@functools.cache
def of_router():
    """Every family of `kvkeep route` that panels and alerts are about."""
    router, metrics = PrefixRouter(["http://a"]), RouterMetrics(BodyBudget(), ["GPU"])
    metrics.resolved("a.svc", Resolution(["http://a"], None))
    metrics.matched_tokens.labels("GPU").inc()
    text = metrics.exposition({"http://a": InstanceHealth.UP}, router, None).decode()
    found = list(text_string_to_metric_families(text))
    return [family for family in found if not family.name.endswith("_created")]


@functools.cache
def names():
    """Name of each sample in the exposition, or on vLLM's page → its labels."""
    found = {name: set(labels) for name, (labels, _) in of_vllm().items()}
    found["vllm:generation_tokens_total"] = set()  # vLLM's own; tests_vllm finds it there
    for family in [*all_of_it(), *of_router()]:
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def panels():
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def queries():
    for panel in panels():
        for target in panel["targets"]:
            yield f"{panel['title']} {target['refId']}", target["expr"], target["legendFormat"]


def selectors(expression, found=None):
    """Every vector selector of a parsed query: name and the labels that it matches."""
    found = [] if found is None else found
    if isinstance(expression, promql_parser.VectorSelector):
        found.append((expression.name, {m.name for m in expression.matchers.matchers}))
    for part in ("expr", "lhs", "rhs", "vector_selector", "param"):
        inner = getattr(expression, part, None)
        if inner is not None:
            selectors(inner, found)
    for inner in getattr(expression, "args", None) or []:
        selectors(inner, found)
    return found


def parsed(query):
    for variable, value in GRAFANA.items():
        query = query.replace(variable, value)
    return promql_parser.parse(query)


def grouped(expression):
    """The labels that a query sums by, wherever in it."""
    return {
        name.strip()
        for group in re.findall(r"\bby \(([^)]*)\)", expression)
        for name in group.split(",")
        if name.strip()
    }


# --- Grafana ---------------------------------------------------------------------------------


def test_the_dashboard_is_one():
    assert DASHBOARD["schemaVersion"] >= 39
    assert DASHBOARD["id"] is None
    assert DASHBOARD["uid"] == "kvkeep"
    variables = {one["name"]: one for one in DASHBOARD["templating"]["list"]}
    assert set(variables) == {"datasource", "job", "instance"}
    assert variables["datasource"]["type"] == "datasource"
    assert variables["datasource"]["query"] == "prometheus"
    kinds = {panel["type"] for panel in panels()}
    assert kinds == {one["id"] for one in DASHBOARD["__requires"] if one["type"] == "panel"}
    assert re.search(r"https?://|/home/|localhost", json.dumps(DASHBOARD)) is None


def test_grafanas_own_types_read_it_and_write_it_again():
    """Grafana's published classes; what they do not know they leave out, so it would be missed."""
    dashboards = pytest.importorskip("grafana_foundation_sdk.models.dashboard")
    encoder = pytest.importorskip("grafana_foundation_sdk.cog.encoder")
    for kind in ("timeseries", "stat", "bargauge", "heatmap"):
        pytest.importorskip(f"grafana_foundation_sdk.models.{kind}")
    read = dashboards.Dashboard.from_json(DASHBOARD)
    again = json.loads(encoder.JSONEncoder(sort_keys=True).encode(read))
    assert again["title"] == DASHBOARD["title"]
    assert len(again["panels"]) == len(DASHBOARD["panels"])
    for ours, theirs in zip(DASHBOARD["panels"], again["panels"], strict=True):
        for field in ("id", "type", "title", "gridPos"):
            assert theirs[field] == ours[field]
        if ours["type"] == "row":
            continue
        unknown = set(ours) - set(theirs)
        assert not unknown, (ours["title"], unknown)
        assert theirs["datasource"] == ours["datasource"]
        assert theirs["fieldConfig"]["defaults"]["unit"] == ours["fieldConfig"]["defaults"]["unit"]


@pytest.mark.parametrize(
    ("where", "query", "legend"), list(queries()), ids=lambda value: str(value)[:30]
)
def test_a_query_is_promql_about_metrics_that_there_are(where, query, legend):
    known = names()
    found = selectors(parsed(query))
    assert found, where
    labels: set[str] = set()
    for name, matched in found:
        assert name in known, (where, name)
        assert {"job", "instance"} <= matched, (where, name)
        assert matched - {"job", "instance"} <= known[name], (where, name)
        labels |= known[name]
    assert grouped(query) <= labels, where
    assert set(re.findall(r"{{(\w+)}}", legend)) <= grouped(query), where


def test_counters_are_asked_for_their_rate_and_gauges_are_not():
    types = {family.name: family.type for family in [*all_of_it(), *of_router()]}
    types |= {name: kind for name, (_, kind) in of_vllm().items()}
    for where, query, _ in queries():
        for name, _ in selectors(parsed(query)):
            counts = name.endswith(("_total", "_bucket"))
            inside = re.search(rf"\b(rate|increase)\({name}\b", query)
            assert bool(inside) == counts, (where, name)
            if not counts:
                assert types[name] == "gauge", (where, name)


# --- Prometheus' rules -----------------------------------------------------------------------


def rules():
    return [rule for group in RULES["groups"] for rule in group["rules"]]


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule.get("alert") or rule["record"])
def test_a_rule_is_about_metrics_that_there_are(rule):
    known = names()
    recorded = {one["record"] for one in rules() if "record" in one}
    found = selectors(promql_parser.parse(rule["expr"]))
    assert found
    for name, matched in found:
        assert name in known or name in recorded, name
        assert matched <= known.get(name, {"job", "instance"}), name
    assert grouped(rule["expr"]) <= {"job", "instance", "le"}
    if "record" in rule:
        assert set(rule) == {"record", "expr"}
        assert re.fullmatch(r"kvkeep:\w+:rate5m", rule["record"])
        return
    assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
    assert rule["labels"]["severity"] in {"info", "warning", "critical"}
    assert set(rule["annotations"]) == {"summary", "description"}
    assert re.fullmatch(r"\d+m", rule.get("for", "1m"))


def test_alerts_name_labels_that_their_series_have():
    known = names()
    for rule in rules():
        told = set(re.findall(r"\$labels\.(\w+)", str(rule.get("annotations"))))
        if not told - {"instance", "job"}:
            continue
        (series, _), *_ = selectors(promql_parser.parse(rule["expr"]))  # others only filter it
        assert told - {"instance", "job"} <= known[series], rule["alert"]


def test_what_is_wrong_is_found():
    """The checks above are checks."""
    with pytest.raises(ValueError, match="unclosed left parenthesis"):
        parsed("sum by (tier (rate(x[5m]))")
    assert selectors(parsed('a{b="c"} / sum by (d) (rate(e{f="g"}[5m]))')) == [
        ("a", {"b"}),
        ("e", {"f"}),
    ]
    assert "kvkeep_nothing_total" not in names()
