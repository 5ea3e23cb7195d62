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
from reporting import CAPACITIES, HOSTILE, Taken, made, sample, with_more

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
    assert whole["outcomes"] == json.loads(json.dumps([one.as_dict() for one in found[1]]))
    assert whole["trace"] == found[0]
    assert (whole["command"], whole["advice"]) == ("kvkeep replay", "more memory")


def test_the_page_is_whole(found, tmp_path):
    facts, outcomes = found
    _, text = report((facts, with_more(outcomes)), tmp_path, advice="Buy\n\nmemory")
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
    assert sections == ["findings", "advice", "hit-rate", "misses", "tiers", "trace", "made"]


def test_what_there_is_nothing_of_is_left_out(tmp_path):
    _, text = report(({}, [made()]), tmp_path)
    sections = [given["id"] for tag, given in Taken(text).elements if tag == "section"]
    assert sections == ["findings", "hit-rate", "misses", "trace", "made"]


def test_nothing_comes_from_anywhere_else(found, tmp_path):
    files, text = report(found, tmp_path)
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
    assert scripts[1:] == [{}] * 2
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
    files, text = report(
        ({**facts, "name": HOSTILE, HOSTILE: HOSTILE}, hostile),
        tmp_path, command=HOSTILE, advice=HOSTILE,
    )  # fmt: skip
    page = Taken(text)
    assert page.faults == []
    tags = [tag for tag, _ in page.elements]
    assert tags.count("script") == 3
    assert not {"img", "b"} & set(tags)
    assert set(re.findall(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e]", text)) == set()
    said = r"</script><script>window.taken=1</script><img src=x onerror=alert(1)>\x1b[31m\u202e&"
    assert said in page.text
    assert page.texts["title"][0] == f"What a cache would reuse of {said}\\ud800"
    assert {one["name"] for one in page.data["policies"]} == {"lru", said[:39] + "…"}
    # JSON keeps the names as they are.
    whole = json.loads(files[1].read_bytes())
    assert [one["trace"] for one in whole["outcomes"]] == [one.trace for one in hostile]


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
        tiers=[{"name": "disk", "hits": np.int64(7), "share": None}],
    )
    files, _text = report(({"span_s": np.float64(5)}, [odd]), tmp_path)
    whole = json.loads(files[1].read_text(), parse_constant=pytest.fail)
    assert whole["outcomes"][0]["latency"]["ttft_s"] == {"p50": None, "p90": 2, "mean": None}


def test_tables_have_the_figures(found, tmp_path):
    _, text = report(found, tmp_path)
    for outcome in found[1]:
        row = [f"{outcome.capacity_tokens:,}", f"{outcome.hit_rate:.1%}".replace("%", "\u00a0%")]
        cells = "".join(f"<td><bdi>{one}</bdi></td>" for one in row)
        assert cells in text
        assert f"<bdi>{outcome.hit_tokens:,}</bdi>" in text


def test_charts_have_the_figures(found, tmp_path):
    facts, outcomes = found
    data = Taken(report((facts, with_more(outcomes)), tmp_path)[1]).data
    assert [line["name"] for line in data["policies"]] == ["lru", "returns"]
    assert data["capacities"] == list(CAPACITIES)
    by = {(one.policy, one.capacity_tokens): one for one in outcomes}
    for line in [*data["policies"], {**data["belady"], "name": "belady"}]:
        for capacity, rate in line["points"]:
            assert rate == pytest.approx(by[line["name"], capacity].hit_rate, abs=1e-5)
        assert len(line["points"]) == len(CAPACITIES)
    assert data["infinite"] == pytest.approx(outcomes[0].hit_rate, abs=1e-5)


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
    report(found, tmp_path)
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


def test_models_with_states_have_a_reason(tmp_path):
    misses = {"first time seen": 300, "no state": 150, "page remainder": 50}
    made_so = made("lru", hits=50, misses=misses)
    write_report([made_so], tmp_path / "r.html", trace={})
    page = Taken((tmp_path / "r.html").read_text())
    assert not page.faults
    assert "30.0\xa0% were cached without a state to go on from" in page.text
    assert ("rect", "m5") in [(tag, has.get("class")) for tag, has in page.elements]


def said(tmp_path, *outcomes):
    write_report(outcomes, tmp_path / "r.html", trace={})
    page = Taken((tmp_path / "r.html").read_text())
    listed = page.texts["li"]
    return [one.replace("\u00a0", " ") for one in listed if one.endswith(".")]


def test_findings(tmp_path):
    evicted = {"first time seen": 600, "evicted": 250, "page remainder": 0}
    assert said(
        tmp_path,
        made("infinite", 10**9, 60),
        made("belady", 1000, 40),
        made("lru", 1000, 15, misses=evicted),
        made("returns", 1000, 20),
        made("lru", 3000, 25, refused=2),
        made("returns", 3000, 25),
    ) == [
        "Of all blocks requested, 60.0 % had been requested before: an unlimited cache would reuse "
        "all of these.",
        "With 1 k tokens, lru reuses 15.0 % of all blocks. returns would reuse 20.0 %, for which "
        "lru needs about 2 k. The optimum with that much memory is 40.0 %.",
        "With 3 k tokens, lru reuses 25.0 % of all blocks. No other policy reuses noticeably more.",
        "Of the 850 tokens that lru computes with 1 k, 70.6 % were never seen before and 29.4 % "
        "had been evicted.",
        "2 of 10 requests do not fit into 3 k tokens at all (lru); their tokens count as computed.",
    ]


def test_times_to_the_first_token(tmp_path):
    timed = [
        made("lru", capacity, misses={}, latency={"ttft_s": {"p50": half, "p99": most}})
        for capacity, half, most in ((9000, 0.25, 1), (1000, 2, 90))
    ]
    assert said(tmp_path, *timed)[-1] == (
        "With 1 k tokens and lru, half of the requests have their first token within 2 s, and "
        "99 of 100 within 1.5 min; with 9 k within 250 ms and 1 s."
    )


def test_bounds_alone(tmp_path):
    assert said(tmp_path, made("belady", 2000, 40)) == [
        "With 2 k tokens, no policy can reuse more than 40.0 %."
    ]


def test_of_many_capacities_a_few_are_told_of(tmp_path):
    many = said(tmp_path, *(made("lru", 1000 * at, at, misses={}) for at in range(1, 41)))
    assert len(many) == 5
    assert many[0].startswith("With 1 k tokens")
    assert many[-1].startswith("With 40 k tokens")


def test_a_policy_that_is_there_twice_has_two_lines(tmp_path):
    files = write_report([made(), made(hits=20)], tmp_path / "r.html", trace={})
    data = Taken(files[0].read_text()).data
    assert [line["name"] for line in data["policies"]] == ["lru", "lru (2)"]
