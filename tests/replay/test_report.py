"""The report: its page taken apart, and what lies beside it."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import json
import re
import time
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from reporting import CAPACITIES, HOSTILE, PRICES, Taken, made, sample, with_more

from kvkeep.bench.replay import Outcome
from kvkeep.bench.replay.report import write_report
from kvkeep.core.errors import InvalidValue

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def found():
    return sample()


def report(found, folder, **more):
    facts, outcomes = found
    files = write_report(outcomes, folder / "report.html", trace=facts, **more)
    return files, (folder / "report.html").read_text("utf-8")


def test_what_is_written(found, tmp_path):
    files, _ = report(found, tmp_path)
    assert [path.name for path in files] == ["report.html", "report.json"]
    assert sorted(tmp_path.iterdir()) == sorted(files)


def test_json_has_the_outcomes_whole(found, tmp_path):
    files, _ = report(found, tmp_path, command="kvkeep replay", advice="more memory")
    whole = json.loads(files[1].read_text("utf-8"))
    assert [Outcome.of(one) for one in whole["outcomes"]] == found[1]
    assert whole["outcomes"] == json.loads(json.dumps([one.as_dict() for one in found[1]]))
    assert whole["trace"] == found[0]
    assert (whole["command"], whole["advice"]) == ("kvkeep replay", "more memory")


def test_times_of_jobs_are_told(tmp_path):
    job = {"p50": 12.5, "p90": 99.0, "p99": 700.0, "mean": 30.0}
    latency = {"ttft_s": {}, "jobs": 1234, "job_s": job, "job_served_s": {**job, "p99": 345.0}}
    _, text = report(({}, [made(latency=latency), made("returns")]), tmp_path)
    page = Taken(text)
    assert page.faults == []
    assert "jobs" in [given["id"] for tag, given in page.elements if tag == "section"]
    cells = page.texts["td"]
    assert "half of the jobs wait for answers for at most 12.5\u00a0s in all" in page.text
    assert {"1,234", "12.5\u00a0s", "11.7\u00a0min", "5.75\u00a0min"} <= set(cells)


def test_the_page_is_whole(found, tmp_path):
    facts, outcomes = found
    _, text = report((facts, with_more(outcomes)), tmp_path, prices=PRICES, advice="Buy\n\nmemory")
    page = Taken(text)
    assert page.faults == []
    assert "$" not in re.sub(r"\$[\d.,]+", "", page.text)  # no place in the template is left over
    tags = [tag for tag, _ in page.elements]
    assert tags.count("h1") == tags.count("main") == tags.count("header") == 1
    names = [given["id"] for _, given in page.elements if "id" in given]
    assert len(names) == len(set(names))
    for tag, given in page.elements:
        for pointing in ("aria-labelledby", "aria-describedby"):
            assert given.get(pointing) is None or given[pointing] in names, tag
    sections = [given["id"] for tag, given in page.elements if tag == "section"]
    assert sections == [
        "findings", "advice", "hit-rate", "misses", "closer", "latency", "jobs", "tiers", "cost",
        "namespaces", "words", "trace", "made",
    ]  # fmt: skip
    charts = [given["data-chart"] for _, given in page.elements if "data-chart" in given]
    assert charts == ["rates", "time", "gap", "life", "ago", "wait", "ttft", "jobs", "cost"]


def test_what_there_is_nothing_of_is_left_out(tmp_path):
    _, text = report(({}, [made()]), tmp_path)
    sections = [given["id"] for tag, given in Taken(text).elements if tag == "section"]
    assert sections == ["findings", "hit-rate", "misses", "closer", "words", "trace", "made"]


def test_nothing_comes_from_anywhere_else(found, tmp_path):
    files, text = report(found, tmp_path, prices=PRICES)
    page = Taken(text)
    assert not {"link", "img", "iframe", "object", "embed", "base", "form"} & {
        tag for tag, _ in page.elements
    }
    beside = [f"./{path.name}" for path in files[1:]]
    for tag, given in page.elements:
        assert given.get("src") is None
        assert not [name for name in given if name.startswith("on") or name == "style"], tag
        if "href" in given:
            assert tag == "a"
            assert given["href"] in beside
    for style in page.texts["style"]:
        assert "url(" not in style
        assert "@import" not in style


def test_no_script_runs_but_its_own(found, tmp_path):
    page = Taken(report(found, tmp_path)[1])
    (policy,) = [
        given["content"] for tag, given in page.elements
        if tag == "meta" and given.get("http-equiv") == "Content-Security-Policy"
    ]  # fmt: skip
    scripts = [given for tag, given in page.elements if tag == "script"]
    assert scripts[0] == {"type": "application/json", "id": "data"}
    assert scripts[1:] == [{}] * 4
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    for rule, contents in (
        ("script-src", page.texts["script"][1:]),
        ("style-src", page.texts["style"]),
    ):
        digests = [hashlib.sha256(one.encode()).digest() for one in contents]
        assert rules[rule].split() == [f"'sha256-{base64.b64encode(d).decode()}'" for d in digests]


def test_hostile_names_are_text(found, tmp_path):
    facts, outcomes = found
    spaces = {HOSTILE: [10, 5], "": [3, 0]}
    hostile = [
        replace(one, policy=HOSTILE if one.policy == "returns" else one.policy, trace=HOSTILE,
                namespaces=spaces, tiers=[{"name": HOSTILE, HOSTILE: HOSTILE}],
                misses={**one.misses, HOSTILE: 1})
        for one in outcomes
    ]  # fmt: skip
    prices = replace(PRICES, currency="<b>")
    files, text = report(
        ({**facts, "name": HOSTILE, HOSTILE: HOSTILE}, hostile),
        tmp_path, prices=prices, command=HOSTILE, advice=HOSTILE,
    )  # fmt: skip
    page = Taken(text)
    assert page.faults == []
    tags = [tag for tag, _ in page.elements]
    assert tags.count("script") == 5
    assert not {"img", "b"} & set(tags)
    assert set(re.findall(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e]", text)) == set()
    said = r"</script><script>window.taken=1</script><img src=x onerror=alert(1)>\x1b[31m\u202e&"
    assert said in page.text
    assert page.texts["title"][0] == f"What a cache would reuse of {said}\\ud800"
    assert {one["name"] for one in page.data["policies"]} == {"lru", said[:39] + "…"}
    assert "(none)" in page.text
    # JSON keeps the names as they are.
    whole = json.loads(files[1].read_bytes())
    assert [Outcome.of(one) for one in whole["outcomes"]] == hostile


def test_the_name_of_the_file_is_hostile_too(tmp_path):
    path = tmp_path / 'javascript:alert(1)"><x> %.html'
    write_report([made()], path, trace={})
    page = Taken(path.read_text("utf-8"))
    links = [given["href"] for tag, given in page.elements if tag == "a"]
    assert links[0] == "./javascript%3Aalert%281%29%22%3E%3Cx%3E%20%25.json"
    assert "x" not in [tag for tag, _ in page.elements]


def test_figures_that_are_none(tmp_path):
    odd = made(
        latency={"ttft_s": {"p50": float("nan"), "p90": np.float64(2), "mean": float("inf")}},
        timeline=[[float("inf"), 1, 1]],
        tiers=[{"name": "disk", "hits": np.int64(7), "share": None}],
    )
    files, text = report(({"span_s": np.float64(5)}, [odd]), tmp_path, prices=PRICES)
    whole = json.loads(files[1].read_text(), parse_constant=pytest.fail)
    assert whole["outcomes"][0]["latency"]["ttft_s"] == {"p50": None, "p90": 2, "mean": None}
    (point,) = Taken(text).data["policies"][0]["points"]
    assert point["ttft"] == {"p50": None, "p90": 2, "mean": None}


def test_tables_have_the_figures(found, tmp_path):
    _, text = report(found, tmp_path, prices=PRICES)
    for outcome in found[1]:
        row = [f"{outcome.capacity_tokens:,}", f"{outcome.hit_rate:.1%}".replace("%", "\u00a0%")]
        cells = "".join(f'<td class="n"><bdi>{one}</bdi></td>' for one in row)
        assert cells in text
        assert f"<bdi>{outcome.hit_tokens:,}</bdi>" in text


def test_charts_have_the_figures(found, tmp_path):
    facts, outcomes = found
    data = Taken(report((facts, with_more(outcomes)), tmp_path)[1]).data
    assert [line["name"] for line in data["policies"]] == ["lru", "returns"]
    assert data["capacities"] == list(CAPACITIES)
    by = {(one.policy, one.capacity_tokens): one for one in outcomes}
    for line in [*data["policies"], data["belady"]]:
        for point in line["points"]:
            outcome = by[line["name"], point["capacity"]]
            assert point["rate"] == pytest.approx(outcome.hit_rate, rel=1e-4)
        assert len(line["points"]) == len(CAPACITIES)
    for capacity in CAPACITIES:
        details = {one["name"]: one for one in data["details"][str(capacity)]}
        assert set(details) == {"lru", "returns", "belady"}
        for name, one in details.items():
            outcome = by[name, capacity]
            assert [row[1] for row in one["gap"]] == [row[1] for row in outcome.reuse_gap]
            assert [row[1] for row in one["life"]] == [row[1] for row in outcome.lifetime]
            assert [row[1] for row in one["ago"]] == [row[1] for row in outcome.evicted_ago]
            begun = (
                outcome.timeline[-1][0] - facts["span_s"]
            )  # the windows are the trace's here, too
            for row, (end, blocks, hits) in zip(one["time"], outcome.timeline, strict=True):
                assert row == pytest.approx([end - begun, hits / blocks], rel=1e-4, abs=1e-4)
    assert data["policies"][0]["what_if"] == [[10_000, 0.1], [100_000, 0.3], [400_000, 0.4]]


def test_forty_outcomes_stay_below_a_megabyte(tmp_path):
    steps = [[2.0**-4 * 2 ** (at / 4), 123_456_789 + at] for at in range(100)]
    timeline = [[1_763_700_000.0 + 36.3 * at, 12_345 + at, 4_321 + 7 * at] for at in range(100)]
    spaces = {f"tenant-{at:04}/a-model-with-a-long-name": [10**9, 10**8] for at in range(20)}
    outcomes = [
        made(f"policy-{policy}", 10**6 * capacity, timeline=timeline, reuse_gap=steps,
             lifetime=steps, evicted_ago=steps, namespaces=spaces,
             latency={"ttft_s": {"p50": 1.23456, "p90": 2.0, "p99": 3.0, "mean": 1.5}},
             tiers=[{"name": "disk", "blocks": 10**6, "hits": 10**6, "writes": 10**6}] * 3,
             what_if=[[10**5 * at, at / 100] for at in range(1, 65)])
        for policy in range(5) for capacity in range(1, 9)
    ]  # fmt: skip
    assert len(outcomes) == 40
    _, text = report(({"span_s": 3600.0}, outcomes), tmp_path, prices=PRICES)
    assert len(text.encode()) < 1_000_000


@pytest.mark.parametrize(
    ("name", "value"), [("report", "report"), ("a.csv", "a.csv"), ("b.html.gz", "b.html.gz")]
)
def test_a_report_is_html(tmp_path, name, value):
    with pytest.raises(InvalidValue, match=re.escape(value)):
        write_report([made()], tmp_path / name, trace={})
    assert list(tmp_path.iterdir()) == []


def test_nothing_to_report(tmp_path):
    with pytest.raises(InvalidValue, match="at least one"):
        write_report([], tmp_path / "a.html", trace={})
    with pytest.raises(InvalidValue, match="these outcomes are of 2"):
        write_report([made(), made(digest="other")], tmp_path / "a.html", trace={})
    assert list(tmp_path.iterdir()) == []


def test_what_is_there_is_replaced_whole_or_not(found, tmp_path, monkeypatch):
    report(({}, [made()]), tmp_path)
    files, text = report(found, tmp_path)
    assert "returns" in text
    before = {path: path.read_bytes() for path in files}

    def full(self, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space"):
        report(({}, [made()]), tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_outcomes_stay_as_they_are(found, tmp_path):
    before = [asdict(one) for one in found[1]]
    report(found, tmp_path, prices=PRICES)
    assert [asdict(one) for one in found[1]] == before


def test_how_it_was_made_is_told(found, tmp_path):
    page = Taken(report(found, tmp_path, command="kvkeep replay 'a b' --policy lru")[1])
    assert "kvkeep replay 'a b' --policy lru" in page.text
    assert found[0]["digest"] in page.text
    assert time.strftime("%Y-", time.gmtime()) in page.text


def test_what_is_vendored_is_what_the_script_pins():
    path = ROOT / "scripts/vendor_charts.py"
    spec = importlib.util.spec_from_file_location("vendor_charts", path)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    kept = {path.name for path in script.VENDOR.iterdir()}
    assert kept == set(script.FILES.values())
    version = script.PACKAGE.partition("@")[2]
    assert f"(v{version})" in (script.VENDOR / "uPlot.iife.min.js").read_text("utf-8")[:80]
    assert "MIT" in (script.VENDOR / "LICENSE").read_text("utf-8")


def test_a_closed_loop_has_a_clock_of_its_own(tmp_path):
    """Half as fast as its trace, and not a request in some of its windows."""
    steps = [1, 2, 5, 50, 99, 100]
    slow = made(latency={"ttft_s": {}}, timeline=[[1000 + 2.0 * at, 10, 5] for at in steps])
    data = Taken(report(({"span_s": 100.0}, [slow]), tmp_path)[1]).data
    (one,) = data["details"]["1000"]
    assert [row[0] for row in one["time"]] == [2.0 * at for at in steps]


def test_models_with_states_have_a_section_and_a_reason(tmp_path):
    misses = {"first time seen": 300, "no state": 150, "page remainder": 50}
    groups = {"pages": 62, "most_pages_stored": 12, "checkpoints_stored": 3456}
    made_so = made("lru", hits=50, misses=misses, groups=groups)
    write_report([made_so], tmp_path / "r.html", trace={})
    page = Taken((tmp_path / "r.html").read_text())
    assert not page.faults
    assert "Windows and states" in page.text
    assert "checkpoints stored" in page.text
    assert "3,456" in page.text
    assert "30.0\xa0% were cached without a state to go on from" in page.text
    assert ("rect", "m5") in [(tag, has.get("class")) for tag, has in page.elements]
