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
from kvkeep.cli.replaying import ModelSizes
from kvkeep.core.errors import InvalidValue


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    path = tmp_path_factory.mktemp("traces") / "agent.jsonl.gz"
    write_trace(generate("agent", seed=1, requests=200, unit_tokens=128), path)
    return str(path)


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    path = tmp_path_factory.mktemp("traces") / "agent.jsonl.gz"
    write_trace(generate("agent", seed=1, requests=30, unit_tokens=128), path)
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
        (["--capacity", "3M", "--groups", "mamba"], "state=2400@64; got 'mamba'"),
        (["--capacity", "1M+2M", "--groups", "state=5"], "tiers are replayed without windows"),
        (["--capacity", "9GiB", "--groups", "state=5"], "needs --model"),
        (["--capacity", "3M", "--groups", "state=5", "--model", "here"], "leave it out with"),
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
    words = ["--memory", "20GiB", "--model", hybrid, "--jobs", "1"]
    prices = ["--gpu-hour", "2", "--prefill-speed", "1000", "--memory-price", "3"]
    assert main(["plan", short, *words, *prices]) == 0
    assert "Windows and states of earlier" in " ".join(capsys.readouterr().out.split())
    assert main(["plan", short, *words, "--disk", "1TiB"]) == 2
    assert "leave out --disk" in capsys.readouterr().err


def test_groups_without_a_model(trace, capsys):
    words = ["--capacity", "50k,200k", "--policy", "lru", "--groups", "state=64@64"]
    assert main(["replay", trace, *words, "--jobs", "1"]) == 0
    out = capsys.readouterr().out
    assert "not resumed" in out
    assert "best for KV alone" in out
    assert main(["replay", trace, *words, "--page", "32", "--jobs", "1", "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["page_tokens"] for one in found] == [32, 32]
    assert all(one["misses"]["no state"] >= 0 for one in found)
    assert found[0]["hit_tokens"] < found[1]["hit_tokens"]


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
    words += ["--tiering", "inclusive", "--no-bounds"]
    assert main([*words, "--json"]) == 0
    one = json.loads(capsys.readouterr().out)
    memory, disk = one["tiers"]
    assert main(words) == 0
    row, _ = [
        line
        for line in capsys.readouterr().out.splitlines()
        if line.strip().startswith("returns/inclusive, 320")
    ]
    cells = [memory["hits"] / one["blocks"], disk["hits"] / one["blocks"]]
    assert re.findall(r"[\d.]+ %", row) == [f"{100 * cell:.1f} %" for cell in cells]


def test_shares_of_tenants(tmp_path, capsys):
    path = tmp_path / "tenants.jsonl.gz"
    write_trace(
        generate("tenants", seed=1, requests=150, unit_tokens=128, changed={"flood": 1}), path
    )
    words = ["replay", str(path), "--capacity", "60k", "--policy", "lru,returns", "--jobs", "1"]
    words += ["--share", "tenant-0=2,flooder=0.5"]
    assert main([*words, "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["policy"] for one in found] == ["lru", "lru+shares", "returns", "returns+shares"]
    assert [bool(one["shares"]) for one in found] == [False, True, False, True]
    compared = found[1]["shares"]
    assert [compared[name][0] for name in ("tenant-0", "tenant-1", "flooder")] == [2, 1, 0.5]
    assert main([*words, "--no-bounds"]) == 0
    out = capsys.readouterr().out
    worst, name = min(
        (hits / alone, name) for name, (_, _, hits, alone) in compared.items() if alone
    )
    (row,) = [line for line in out.splitlines() if line.strip().startswith("lru, 60")]
    rates = [100 * found[at]["token_hit_rate"] for at in (1, 0)]
    for text in (f"{rates[0]:.1f} %", f"{rates[1]:.1f} %", f"{100 * worst:.1f} %", name):
        assert text in row


def test_shares_of_tenants_in_tiers(tmp_path, capsys):
    path = tmp_path / "tenants.jsonl.gz"
    trace = generate("tenants", seed=1, requests=100, unit_tokens=256, changed={"flood": 1})
    write_trace(trace, path)
    words = ["replay", str(path), "--capacity", "20k+40k,40k+20k", "--policy", "lru"]
    words += ["--tiering", "inclusive,exclusive", "--share", "flooder=0.5", "--jobs", "1"]
    assert main([*words, "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    names = ["lru/inclusive", "lru/exclusive", "lru+shares/inclusive", "lru+shares/exclusive"]
    assert [one["policy"] for one in found] == 2 * names
    assert [bool(one["shares"]) for one in found] == 2 * [False, False, True, True]
    assert main([*words, "--no-bounds"]) == 0
    out = capsys.readouterr().out.splitlines()
    for row, one in (("lru/inclusive, 20 k + 40 k", 2), ("lru/exclusive, 40 k + 20 k", 7)):
        (line,) = [line for line in out if line.strip().startswith(row)]
        assert f"{100 * found[one]['token_hit_rate']:.1f} %" in line
        assert f"{100 * found[one - 2]['token_hit_rate']:.1f} %" in line


def test_time_to_the_first_token(trace, tmp_path, capsys):
    cost = tmp_path / "cost.json"
    PrefillCost(seconds_per_token=1e-4, decode_seconds_per_token=0.01).write(cost)
    words = ["--capacity", "20k,200k", "--policy", "lru", "--jobs", "1", "--cost", str(cost)]
    assert main(["replay", trace, *words, "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    small, large = (one["latency"] for one in found)
    assert 0 < large["ttft_s"]["p50"] <= small["ttft_s"]["p50"]
    assert large["saved_s"] > small["saved_s"] > 0
    assert main(["replay", trace, *words, "--users", "4"]) == 0
    assert "seconds to the first token" in capsys.readouterr().out


def test_jobs_in_a_closed_loop(tmp_path, capsys):
    trace, cost = str(tmp_path / "agent.jsonl.gz"), tmp_path / "cost.json"
    write_trace(generate("agent", seed=1, requests=200, unit_tokens=128), trace)
    PrefillCost(seconds_per_token=1e-3, decode_seconds_per_token=0.02).write(cost)
    words = ["--capacity", "20k,500k", "--policy", "lru", "--jobs", "1", "--cost", str(cost)]
    assert main(["replay", trace, *words, "--closed-loop", "--json"]) == 0
    closed = [json.loads(line)["latency"] for line in capsys.readouterr().out.splitlines()]
    assert closed[0]["jobs"] == closed[1]["jobs"] > 10
    assert closed[0]["job_s"]["p90"] > closed[1]["job_s"]["p90"]
    assert closed[0]["job_s"]["p90"] > closed[0]["job_served_s"]["p90"]
    out = tmp_path / "report.html"
    assert main(["replay", trace, *words, "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "best possible" in shown
    assert "seconds of a job" in shown
    assert "How long a job takes" in out.read_text()
    assert main(["replay", trace, *words, "--closed-loop", "--out", str(out)]) == 0
    other = capsys.readouterr().out
    assert other.split("seconds of a job")[1] != shown.split("seconds of a job")[1]
    assert "best possible" not in other  # its order of requests is another one
    assert "endless memory" in other
    for more, message in (
        (["--users", "3"], "not both"),
        (["--capacity", "20k+500k", "--bandwidth", "1GB"], "kv_bytes_per_token"),
    ):
        assert main(["replay", trace, *words, "--closed-loop", *more]) == 2
        assert message in capsys.readouterr().err
    assert main(["replay", trace, *words[:-2], "--closed-loop"]) == 2
    assert "that needs their cost" in capsys.readouterr().err


def test_nobody_is_served_in_time_where_nobody_fits(trace, tmp_path, capsys):
    cost = tmp_path / "cost.json"
    PrefillCost(seconds_per_token=1e-4).write(cost)
    words = ["--policy", "lru", "--jobs", "1", "--cost", str(cost)]
    assert main(["replay", trace, "--capacity", "128", *words]) == 0
    assert "lru, 128 tokens" in capsys.readouterr().out


def test_a_bandwidth_too_many_is_refused(trace, tmp_path, capsys):
    cost = tmp_path / "cost.json"
    PrefillCost(seconds_per_token=1e-4).write(cost)
    words = ["--capacity", "20k+200k", "--cost", str(cost), "--bandwidth", "20GB,3GB"]
    assert main(["replay", trace, *words]) == 2
    assert "each tier below memory; got 20GB,3GB" in capsys.readouterr().err


def test_a_report_and_going_on_from_it(trace, tmp_path, capsys):
    out = tmp_path / "report.html"
    words = ["--capacity", "50k", "--policy", "lru", "--jobs", "1", "--out", str(out)]
    assert main(["replay", trace, *words]) == 0
    assert {path.suffix for path in tmp_path.iterdir()} == {".html", ".json", ".jsonl"}
    capsys.readouterr()
    assert main(["replay", trace, *words[:3], "lru,returns", *words[4:]]) == 0
    assert "3 of 4 replays are taken from" in capsys.readouterr().err
    assert "returns" in out.read_text()


@pytest.mark.parametrize("command", ["replay", "plan"])
@pytest.mark.parametrize("ending", [".json", ".runs.jsonl", ".html"])
def test_a_report_is_not_written_over_what_is_read(trace, tmp_path, capsys, command, ending):
    own = tmp_path / f"azure{ending}"
    lines = Path(trace).read_bytes()
    own.write_bytes(lines)
    size = ["--capacity", "50k"] if command == "replay" else ["--memory", "50k"]
    assert main([command, str(own), *size, "--fresh", "--out", str(tmp_path / "azure.html")]) == 2
    assert f"would overwrite {own}; name another" in capsys.readouterr().err
    assert own.read_bytes() == lines
    assert list(tmp_path.iterdir()) == [own]


def test_a_report_is_not_written_over_the_cost(trace, tmp_path, capsys):
    cost = tmp_path / "cost.json"
    PrefillCost(seconds_per_token=1e-4).write(cost)
    words = ["--capacity", "50k", "--cost", str(cost), "--out", str(tmp_path / "cost.html")]
    assert main(["replay", trace, *words]) == 2
    assert "would overwrite" in capsys.readouterr().err


def test_where_no_report_can_be_is_said_before_anything_runs(trace, tmp_path, capsys):
    (tmp_path / "taken.html").mkdir()
    (tmp_path / "begun.runs.jsonl").mkdir()
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
    trace = str(tmp_path / "agent.jsonl.gz")  # a plan replays it some forty times
    write_trace(generate("agent", seed=1, requests=20, unit_tokens=128), trace)
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


def test_a_plan_with_prices_is_of_money_and_in_bytes(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("kvkeep.cli.replaying._MOMENT_S", 0.0)
    trace, out = tmp_path / "chat.jsonl.gz", tmp_path / "plan.html"
    write_trace(generate("chat", seed=1, requests=30, unit_tokens=256), trace)
    model = tmp_path / "model"
    model.mkdir()
    fields = {
        "model_type": "llama", "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "hidden_size": 4096, "dtype": "bfloat16",
    }  # fmt: skip
    (model / "config.json").write_text(json.dumps(fields))
    words = ["--model", str(model), "--memory", "4GiB", "--disk", "40GiB", "--jobs", "1"]
    words += ["--gpu-hour", "2.5", "--prefill-speed", "20000", "--memory-price", "3"]
    words += ["--disk-price", "0.1", "--out", str(out)]
    assert main(["plan", str(trace), *words]) == 0
    said = capsys.readouterr()
    assert re.search(r"\d+ replays of 30 requests: about ", said.err)
    text = " ".join(said.out.split())
    assert "GiB in memory with the policy" in text
    assert "tokens in memory" not in text
    advised = re.search(r"a month costs (\$[\d,.]+\d) instead of (\$[\d,.]+\d)", text)
    table = said.out[said.out.index("a month of this traffic") :]
    costs = re.findall(r"(\$[\d,.]+)$", table.replace(" \n", "\n"), re.MULTILINE)
    assert costs[0] == advised[1], "the table begins with what is advised"
    assert advised[2] in costs
    assert f"kvkeep serve --model {model} --memory " in text
    assert "--kv-transfer-config" in text
    # The report knows of nothing cheaper.
    page = out.read_text()
    assert "The cheapest of all replays is" in page
    assert f"{advised[1]} a month for prefill and memory" in page


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--memory", "lots"], "40GiB: 'lots' is no count"),
        (["--memory", "40GiB"], "needs --model"),
        (["--memory", "0"], "capacity"),
        (["--memory", "3M", "--gpu-hour", "2"], "--prefill-speed, --memory-price, --model"),
    ],
)
def test_what_is_wrong_with_a_plan_is_one_line(trace, capsys, words, says):
    assert main(["plan", trace, *words]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--prefill-speed 2", "--gpu-hour, --memory-price"),
        ("--gpu-hour -1 --prefill-speed 9 --memory-price 3", "--gpu-hour is -1.0"),
        ("--gpu-hour nan --prefill-speed 9 --memory-price 3", "--gpu-hour is nan"),
        ("--gpu-hour 1 --prefill-speed 0 --memory-price 3", "--prefill-speed is 0"),
        ("--gpu-hour 1 --prefill-speed 9 --memory-price 3 --disk-price -1", "--disk-price is -1.0"),
    ],
)
def test_wrong_prices_are_told_by_their_options(short, hybrid, capsys, words, says):
    for command in (["plan", short, "--memory", "50k"], ["replay", short, "--capacity", "50k"]):
        assert main([*command, "--model", hybrid, *words.split()]) == 2
        error = capsys.readouterr().err
        assert says in error
        assert error.count("\n") == 1


@pytest.mark.parametrize(
    "command",
    [["plan", "--memory", "50k", "--disk", "1M"], ["replay", "--capacity", "50k+1M"]],
)
def test_a_tier_is_not_replayed_as_free(short, tmp_path, capsys, command):
    """Without a price of its own a disk would cost nothing, and always pay."""
    fields = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 2,
              "num_key_value_heads": 2, "head_dim": 8, "hidden_size": 16}  # fmt: skip
    model = tmp_path / "config.json"
    model.write_text(json.dumps(fields))
    words = [
        "--model",
        str(model),
        "--gpu-hour",
        "2",
        "--prefill-speed",
        "9",
        "--memory-price",
        "3",
    ]
    assert main([command[0], short, *command[1:], *words]) == 2
    assert "the cost of a month also needs --disk-price" in capsys.readouterr().err
