"""docs/observability.md tells of every metric that there is, and of none besides."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from test_metrics_families import all_of_it

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs/observability.md").read_text(encoding="utf-8")


def documented():
    """Name → labels, of the first column of the tables."""
    cells = [line.split("|")[1] for line in DOCUMENT.splitlines() if line.startswith("| `kvkeep_")]
    found = {}
    for name, labels in re.findall(r"`(kvkeep_\w+)(?:{([\w,]+)})?`", " ".join(cells)):
        assert name not in found, f"{name} is there twice"
        found[name] = set(labels.split(",")) - {""}
    return found


def exposed():
    found = {}
    for family in all_of_it():
        name = f"{family.name}_total" if family.type == "counter" else family.name
        found[name] = {label for one in family.samples for label in one.labels} - {"le"}
    return found


def test_every_metric_is_documented_with_its_labels():
    assert documented() == exposed()


def test_histograms_are_called_so():
    rows = [line for line in DOCUMENT.splitlines() if line.startswith("| `kvkeep_")]
    for family in all_of_it():
        if family.type == "histogram" and "_by_" not in family.name:
            (row,) = [row for row in rows if f"`{family.name}" in row]
            assert "histogram" in row, family.name


def test_every_span_and_attribute_is_documented():
    pytest.importorskip("opentelemetry.sdk")
    source = (ROOT / "src/kvkeep/observe/telemetry/tracing.py").read_text(encoding="utf-8")
    names = set(re.findall(r'"((?:gen_ai|error)\.[\w.]+|kvkeep\.[a-z_]+)"', source))
    assert len(names) > 12
    names -= {"kvkeep.loaded", "kvkeep.tier", "kvkeep.start", "kvkeep.stop"}  # of events in a span
    for name in names:
        assert f"`{name}`" in DOCUMENT, name
    for part in ("match", "load", "prefill", "store"):
        assert f"`kvkeep.{part}`" in DOCUMENT


def test_files_that_are_named_are_there():
    found = re.findall(r"`(deploy/[\w./-]+)`", DOCUMENT)
    assert len(found) == 2
    for path in found:
        assert (ROOT / path).is_file(), path
