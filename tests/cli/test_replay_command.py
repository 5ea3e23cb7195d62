"""``kvkeep replay`` as it is typed."""

from __future__ import annotations

import errno
import json
import os
import re
from pathlib import Path

import pytest

from kvkeep.bench.replay import PrefillCost
from kvkeep.bench.traces import generate, write_trace
from kvkeep.cli import main
from kvkeep.cli.replay import ModelSizes
from kvkeep.core.cost import CostModel
from kvkeep.core.errors import InvalidValue


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    path = tmp_path_factory.mktemp("traces") / "chat.jsonl.gz"
    write_trace(generate("chat", seed=1, requests=200, unit_tokens=128), path)
    return str(path)


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    path = tmp_path_factory.mktemp("traces") / "chat.jsonl.gz"
    write_trace(generate("chat", seed=1, requests=30, unit_tokens=128), path)
    return str(path)


def test_json_has_a_line_for_each_policy_and_capacity(trace, capsys):
    words = ["--capacity", "50k,200k", "--policy", "lru,returns", "--jobs", "1", "--json"]
    assert main(["replay", trace, *words]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(one["policy"], one["capacity_tokens"]) for one in found] == [
        (policy, size) for policy in ("lru", "returns") for size in (50_000, 200_000)
    ]
    for one in found:
        assert one["requests"] == 200
        assert one["seconds"] > 0
        assert 0 < one["hit_rate"] < 1
        assert sum(one["misses"].values()) + one["hit_tokens"] == one["tokens"]


def test_a_table_for_people(trace, capsys):
    assert main(["replay", trace, "--capacity", "50k", "--policy", "lru", "--jobs", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "200 requests" in lines[0]
    names = [line.split("  ")[0].strip() for line in lines[1:] if "%" in line]
    assert names == ["lru", "best possible", "endless memory"]
    rates = [float(line.split("%")[0].split()[-1]) for line in lines[1:] if "%" in line]
    assert rates == sorted(rates)


def test_pages_and_processes(trace, capsys):
    words = ["--capacity", "50k,100k", "--policy", "lru", "--page", "16", "--json"]
    assert main(["replay", trace, *words, "--jobs", "2"]) == 0
    two = capsys.readouterr().out
    assert main(["replay", trace, *words, "--jobs", "1"]) == 0
    one = capsys.readouterr().out

    def figures(out):
        lines = [json.loads(line) for line in out.splitlines()]
        return [{**line, "seconds": 0} for line in lines]

    assert figures(one) == figures(two)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--capacity", "3M", "--policy", "oracle"], "no eviction policy 'oracle'; there are lru"),
        (
            ["--capacity", "lots"],
            "40GiB: 'lots' is no count; write a whole number, or a number and k",
        ),
        (["--capacity", "40XB"], "write a number and a unit: KiB, MiB, GiB"),
        (["--capacity", "3"], "less than a page"),
        (["--capacity", "0"], "capacity"),
        (["--capacity", "3M,,5M"], "--capacity is a list"),
        (["--capacity", "40GiB"], "needs --model"),
        (["--capacity", "999999999G", "--policy", "lru"], "pages is"),
        (["--capacity", "3M", "--jobs", "0"], "--jobs"),
        (["--capacity", "3M", "--page", "0"], "page_tokens"),
        (["--capacity", "3M", "--out", "report.pdf"], "report.html; got 'report.pdf'"),
        (["--capacity", "3M", "--share", "a"], "--share is 'a'; TENANT=WEIGHT is needed"),
        (["--capacity", "3M", "--share", "a=2"], "a share for 'a', but"),
    ],
)
def test_what_is_wrong_is_one_line(trace, capsys, words, says):
    assert main(["replay", trace, *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("kvkeep: error: ")
    assert says in error
    assert error.count("\n") == 1


def test_capacities():
    def tokens(text):
        return ModelSizes().tokens(text, 16)

    assert tokens("3M") == 3_000_000
    assert tokens("1.5k") == 1_500
    assert tokens("70") == 70
    assert tokens("500K") == tokens("500k") == tokens("0.5m") == 500_000
    with pytest.raises(InvalidValue):
        tokens("-3M")


@pytest.fixture
def hybrid(tmp_path):
    fields = {
        "model_type": "gemma3_text",
        "num_hidden_layers": 62,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "hidden_size": 5376,
        "sliding_window": 1024,
        "dtype": "bfloat16",
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(fields))
    return str(path)


def test_a_model_with_windows(hybrid, trace, short, capsys):
    words = ["--capacity", "20GiB", "--policy", "lru", "--jobs", "1", "--json"]
    assert main(["replay", trace, *words, "--model", hybrid]) == 0
    (found,) = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    # 10 of the 62 layers keep every token: 16 heads of 128, K and V, two bytes.
    assert found["capacity_tokens"] == 20 * 2**30 // (10 * 16 * 128 * 2 * 2)
    assert found["groups"]["rows_stored"] > 0
    assert found["misses"]["window gone"] >= 0
    assert sum(found["misses"].values()) + found["hit_tokens"] == found["tokens"]
    assert main(["replay", short, *words[:-1], "--model", hybrid]) == 0
    shown = capsys.readouterr().out
    assert "not resumed" in shown
    assert "best for KV alone" in shown
    assert main(["replay", short, "--capacity", "1M+2M", "--model", hybrid]) == 2
    assert "tiers are replayed without windows" in capsys.readouterr().err
    words = ["--memory", "20GiB", "--model", hybrid, "--jobs", "1"]
    assert main(["plan", short, *words]) == 0
    capsys.readouterr()
    assert main(["plan", short, *words, "--disk", "1TiB"]) == 2
    assert "leave out --disk" in capsys.readouterr().err


def test_tiers(short, capsys):
    words = ["--capacity", "5k+10k", "--policy", "lru", "--jobs", "1", "--json"]
    assert main(["replay", short, *words]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["policy"] for one in found] == ["lru/inclusive", "lru/exclusive"]
    for one in found:
        assert one["capacity_tokens"] == 15_000
        assert [tier["capacity_tokens"] for tier in one["tiers"]] == [5_000, 10_000]
        assert all(tier["hits"] for tier in one["tiers"])
        assert one["misses"]["evicted"] > 0
        assert sum(tier["hits"] for tier in one["tiers"]) == one["hit_blocks"]
        assert sum(one["misses"].values()) + one["hit_tokens"] == one["tokens"]


def test_where_blocks_come_from(tmp_path, capsys):
    path = tmp_path / "agents.jsonl.gz"
    write_trace(generate("agents", seed=3, requests=120, unit_tokens=1024), path)
    words = ["replay", str(path), "--capacity", "20k+300k", "--policy", "returns", "--jobs", "1"]
    words += ["--tiering", "inclusive"]
    assert main([*words, "--json"]) == 0
    one = json.loads(capsys.readouterr().out)
    memory, disk = one["tiers"]
    assert main(words) == 0
    (row,) = [
        line
        for line in capsys.readouterr().out.splitlines()
        if line.strip().startswith("returns/inclusive, 320")
    ]
    cells = [memory["hits"] / one["blocks"], disk["hits"] / one["blocks"]]
    assert re.findall(r"[\d.]+ %", row) == [f"{100 * cell:.1f} %" for cell in cells]


def test_shares_of_tenants(tmp_path, capsys):
    path = tmp_path / "tenants.jsonl"
    path.write_text("".join(
        json.dumps({"prompt": f"{number % 3} " * 40 + "and so on " * number,
                    "namespace": f"tenant-{number % 2}"}) + "\n"
        for number in range(40)
    ))  # fmt: skip
    words = ["replay", str(path), "--unit", "16", "--policy", "lru,returns", "--jobs", "1"]
    words += ["--share", "tenant-0=2"]
    assert main([*words, "--capacity", "1k", "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["policy"] for one in found] == ["lru", "lru+shares", "returns", "returns+shares"]
    assert all(set(one["namespaces"]) == {"tenant-0", "tenant-1"} for one in found)
    assert main([*words, "--capacity", "500+1k"]) == 0
    assert "returns+shares/exclusive" in capsys.readouterr().out


def test_time_to_the_first_token(trace, tmp_path, capsys):
    cost = tmp_path / "cost.json"
    CostModel(PrefillCost(seconds_per_token=1e-4, decode_seconds_per_token=0.01)).write(cost)
    words = ["--capacity", "20k,200k", "--policy", "lru", "--jobs", "1", "--cost", str(cost)]
    assert main(["replay", trace, *words, "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    small, large = (one["latency"] for one in found)
    assert 0 < large["ttft_s"]["p50"] <= small["ttft_s"]["p50"]
    assert large["saved_s"] > small["saved_s"] > 0
    assert main(["replay", trace, *words, "--users", "4"]) == 0
    assert "seconds to the first token" in capsys.readouterr().out


def test_jobs_of_users(tmp_path, capsys):
    trace, cost = str(tmp_path / "chat.jsonl.gz"), tmp_path / "cost.json"
    write_trace(generate("chat", seed=1, requests=200, unit_tokens=128), trace)
    CostModel(PrefillCost(seconds_per_token=1e-3, decode_seconds_per_token=0.02)).write(cost)
    words = ["--capacity", "20k,500k", "--policy", "lru", "--jobs", "1", "--cost", str(cost)]
    assert main(["replay", trace, *words, "--users", "20", "--json"]) == 0
    closed = [json.loads(line)["latency"] for line in capsys.readouterr().out.splitlines()]
    assert closed[0]["jobs"] == closed[1]["jobs"] > 10
    assert closed[0]["job_s"]["p90"] > closed[1]["job_s"]["p90"]
    assert main(["replay", trace, *words]) == 0
    shown = capsys.readouterr().out
    assert "best possible" in shown
    assert "seconds of a job" in shown
    assert main(["replay", trace, *words, "--users", "20"]) == 0
    other = capsys.readouterr().out
    assert other.split("seconds of a job")[1] != shown.split("seconds of a job")[1]
    assert "best possible" not in other  # its order of requests is another one
    assert "endless memory" in other
    assert main(["replay", trace, *words[:-2], "--users", "3"]) == 2
    assert "that needs the cost of prompts" in capsys.readouterr().err


def test_nobody_is_served_in_time_where_nobody_fits(trace, tmp_path, capsys):
    cost = tmp_path / "cost.json"
    CostModel(PrefillCost(seconds_per_token=1e-4)).write(cost)
    words = ["--policy", "lru", "--jobs", "1", "--cost", str(cost)]
    assert main(["replay", trace, "--capacity", "128", *words]) == 0
    assert "lru, 128 tokens" in capsys.readouterr().out


def test_a_report(trace, tmp_path, capsys):
    out = tmp_path / "report.html"
    words = ["--capacity", "50k", "--policy", "lru,returns", "--jobs", "1", "--out", str(out)]
    assert main(["replay", trace, *words]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"report.html", "report.json"}
    assert "returns" in out.read_text()


@pytest.mark.parametrize("command", ["replay", "plan"])
@pytest.mark.parametrize("ending", [".json", ".html"])
def test_a_report_is_not_written_over_what_is_read(trace, tmp_path, capsys, command, ending):
    own = tmp_path / f"own{ending}"
    lines = Path(trace).read_bytes()
    own.write_bytes(lines)
    size = ["--capacity", "50k"] if command == "replay" else ["--memory", "50k"]
    assert main([command, str(own), *size, "--out", str(tmp_path / "own.html")]) == 2
    assert f"would overwrite {own}; name another" in capsys.readouterr().err
    assert own.read_bytes() == lines
    assert list(tmp_path.iterdir()) == [own]


def test_a_report_is_not_written_over_the_cost(trace, tmp_path, capsys):
    cost = tmp_path / "cost.json"
    CostModel(PrefillCost(seconds_per_token=1e-4)).write(cost)
    words = ["--capacity", "50k", "--cost", str(cost), "--out", str(tmp_path / "cost.html")]
    assert main(["replay", trace, *words]) == 2
    assert "would overwrite" in capsys.readouterr().err


def test_where_no_report_can_be_is_said_before_anything_runs(trace, tmp_path, capsys):
    (tmp_path / "taken.html").mkdir()
    (tmp_path / "begun.json").mkdir()
    for name in ("taken.html", "begun.html", "nowhere/report.html"):
        assert main(["replay", trace, "--capacity", "50k", "--out", str(tmp_path / name)]) == 2
        error = capsys.readouterr().err
        assert error.startswith("kvkeep: error: cannot write ")
        assert error.count("\n") == 1


def test_a_report_that_fails_is_one_line(trace, tmp_path, capsys, monkeypatch):
    def full(*_args, **_options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("kvkeep.bench.replay.report.write_report", full)
    words = ["--capacity", "50k", "--policy", "lru", "--jobs", "1"]
    assert main(["replay", trace, *words, "--out", str(tmp_path / "report.html")]) == 2
    assert "report.html: No space left on device\n" in capsys.readouterr().err


def test_plan_ends_in_words(tmp_path, capsys):
    trace = str(tmp_path / "chat.jsonl.gz")  # a plan replays it some forty times
    write_trace(generate("chat", seed=1, requests=20, unit_tokens=128), trace)
    out = tmp_path / "plan.html"
    words = ["--memory", "50k", "--disk", "500k", "--jobs", "1", "--out", str(out)]
    assert main(["plan", trace, *words]) == 0
    said = capsys.readouterr().out
    assert "Keep 50 k tokens in memory with the policy" in said
    assert "need not be computed" in said
    assert "Keep 50 k tokens in memory" in out.read_text()
    assert main(["plan", trace, *words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["recommendation"] in " ".join(said.split())
    assert found["memory_tokens"] == 50_000
    assert found["chosen"]["memory_tokens"] == 50_000
    assert any("20 requests, too few" in one for one in found["warnings"])
    assert "Warning: The trace has 20 requests" in said
    assert "With --model PATH, the flags" in said


@pytest.fixture
def model(tmp_path):
    fields = {
        "model_type": "llama", "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "hidden_size": 4096, "dtype": "bfloat16",
    }  # fmt: skip
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(fields))
    return str(tmp_path / "model")


@pytest.fixture
def cost(tmp_path):
    path = tmp_path / "cost.json"
    CostModel(PrefillCost(seconds_per_token=5e-5, kv_bytes_per_token=131_072)).write(path)
    return str(path)


def test_a_plan_with_a_model_is_in_bytes(short, model, cost, tmp_path, capsys):
    out = tmp_path / "plan.html"
    words = ["--model", model, "--memory", "4GiB", "--disk", "40GiB", "--jobs", "1"]
    assert main(["plan", short, *words, "--cost", cost, "--out", str(out)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "GiB in memory with the policy" in text
    assert "tokens in memory" not in text
    assert f"kvkeep serve --model {model} --" in text
    assert "--kv-transfer-config" in text
    assert "Keep 4 GiB in memory" in out.read_text()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--memory", "lots"], "40GiB: 'lots' is no count"),
        (["--memory", "40GiB"], "needs --model"),
        (["--memory", "0"], "capacity"),
    ],
)
def test_what_is_wrong_with_a_plan_is_one_line(trace, capsys, words, says):
    assert main(["plan", trace, *words]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1
