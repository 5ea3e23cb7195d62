"""What a report says in words, and what it counts as costs."""

from __future__ import annotations

import pytest
from reporting import PRICES, made

from kvkeep.bench.replay.report import Prices
from kvkeep.bench.replay.report.arranged import arranged
from kvkeep.bench.replay.report.findings import findings
from kvkeep.bench.replay.words import duration, money, shown, tokens
from kvkeep.core.errors import InvalidValue


def said(*outcomes, prices=None, span_s=3600.0):
    return [one.replace("\u00a0", " ") for one in findings(arranged(outcomes), prices, span_s)]


def test_findings():
    evicted = {"first time seen": 600, "evicted": 250, "page remainder": 0}
    assert said(
        made("infinite", 10**9, 60),
        made("belady", 1000, 40),
        made("lru", 1000, 15, misses=evicted, evicted_ago=[[60.0, 10], [120.0, 30], [240.0, 10]]),
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
        "had been evicted. Half of the evicted tokens were requested again within 4 min.",
        "2 of 10 requests do not fit into 3 k tokens at all (lru); their tokens count as computed.",
    ]


def test_times_to_first_token():
    def timed(capacity, half, most):
        ttft = {"ttft_s": {"p50": half, "p99": most, "mean": 9}}
        return made("lru", capacity, misses={}, latency=ttft)

    first = "With 1 k tokens and lru, half of the requests have their first token within 2 s, and "
    assert said(timed(1000, 2, 90))[-1] == first + "99 of 100 within 1.5 min."
    assert said(timed(9000, 0.25, 1), timed(1000, 2, 90))[-1] == (
        first + "99 of 100 within 1.5 min; with 9 k within 250 ms and 1 s."
    )
    nothing = made("lru", latency={"ttft_s": {}}, misses={})
    assert len(said(nothing)) == 1


def test_bounds_alone():
    assert said(made("belady", 2000, 40)) == [
        "With 2 k tokens, no policy can reuse more than 40.0 %."
    ]


def test_one_policy_is_not_compared():
    assert said(made("returns", misses={})) == [
        "With 1 k tokens, returns reuses 50.0 % of all blocks."
    ]


def test_of_many_capacities_a_few_are_told_of():
    many = said(*(made("lru", 1000 * at, at, misses={}) for at in range(1, 41)))
    assert len(many) == 5
    assert many[0].startswith("With 1 k tokens")
    assert many[-1].startswith("With 40 k tokens")


def test_costs_are_the_formula():
    rooms = [
        {"name": "memory", "capacity": 2**20},
        {"name": "disk", "capacity": 2**20, "blocks": 3},
    ]
    outcome = made("lru", 2**21, 40, tiers=rooms)
    prices = Prices(3.6, 2.0, 0.5, 1024, 100)  # 2**20 tokens are a GiB
    cost = prices.month(outcome, 3600.0)
    assert cost.memory == pytest.approx(2.0 * 10)
    assert cost.disk == pytest.approx(0.5 * 10)  # blocks of 10 tokens
    # 600 tokens at 100/s are 6 s, for 3.6 an hour: 0.006 an hour of the trace.
    assert cost.gpu == pytest.approx(0.006 * 730.5)
    assert cost.total == pytest.approx(cost.memory + cost.disk + cost.gpu)
    assert prices.nothing_kept(outcome, 3600.0).total == pytest.approx(0.01 * 730.5)
    assert prices.month(outcome, 0.0) is None
    alone = made("lru", 2**20)
    assert prices.month(alone, 1.0).memory == pytest.approx(2.0)


def test_the_cheapest_is_told():
    small, large = made("lru", 1000, 10, misses={}), made("returns", 10**7, 90, misses={})
    dear = Prices(3600.0, 0.001, 0.0, 1024, 1)
    assert said(small, large, prices=dear)[-1] == (
        "The cheapest of all replays is returns with 10 M tokens: $73,050 a month for prefill "
        "and memory. Without any cache it would be $730,500."
    )
    cheap = Prices(0.0, 10.0, 0.0, 2**20, 1, currency="€")
    assert said(small, large, prices=cheap)[-1] == (
        "The cheapest of all replays is lru with 1 k tokens: €9.77 a month for prefill "
        "and memory. No cache at all would be cheaper still: €0.00."
    )
    assert "cannot be estimated" in said(small, prices=PRICES, span_s=0.0)[-1]


@pytest.mark.parametrize(
    ("name", "value"),
    [("gpu_hour", -1), ("memory_gib_month", float("nan")), ("disk_gib_month", "3"),
     ("kv_bytes_per_token", 0), ("prefill_tokens_per_s", 0), ("prefill_tokens_per_s", True)],
)  # fmt: skip
def test_prices_that_are_none(name, value):
    given = {"gpu_hour": 1, "memory_gib_month": 1, "disk_gib_month": 1, "kv_bytes_per_token": 1,
             "prefill_tokens_per_s": 1}  # fmt: skip
    Prices(**given)
    with pytest.raises(InvalidValue, match=name):
        Prices(**{**given, name: value})


def test_lines_by_policy():
    found = arranged([made("b", 2000), made("infinite", 9), made("a"), made("b"), made("belady")])
    assert [line.name for line in found.policies] == ["b", "a"]
    assert [one.capacity_tokens for one in found.policies[0].outcomes] == [1000, 2000]
    assert found.capacities == (1000, 2000)
    assert found.usual.name == "b"
    assert found.best(2000).name == "b"
    assert found.infinite.capacity_tokens == 9


def test_what_is_there_twice_is_told_apart():
    found = arranged([made("lru"), made("lru", hits=60), made("lru", 2000), made("lru", hits=70)])
    assert [line.name for line in found.policies] == ["lru", "lru (2)", "lru (3)"]
    assert [len(line.outcomes) for line in found.policies] == [2, 1, 1]
    pages = made()
    pages.page_tokens = 16
    assert [line.name for line in arranged([made(), pages]).policies] == [
        "lru, pages of 10", "lru, pages of 16",
    ]  # fmt: skip


def test_a_curve_that_falls_needs_no_capacity():
    line = arranged([made(hits=50), made(capacity=2000, hits=40), made(capacity=3000, hits=70)])
    assert line.policies[0].capacity_for(0.55) == pytest.approx(2500)
    assert line.policies[0].capacity_for(0.9) is None


@pytest.mark.parametrize(
    ("text", "seen"),
    [("plain name", "plain name"), ("a\nb\x1b[0m", r"a\x0ab\x1b[0m"), ("\u202eevil", r"\u202eevil"),
     ("\ud800", r"\ud800"), ("שלום", "שלום"), ("x" * 99, "x" * 79 + "…"), (3, "3")],
)  # fmt: skip
def test_names_as_they_can_be_printed(text, seen):
    assert shown(text) == seen


@pytest.mark.parametrize(
    ("amount", "seen"),
    [(0, "0"), (999, "999"), (1000, "1 k"), (16_384, "16.4 k"), (999_499, "999 k"),
     (999_600, "1 M"), (3_000_000, "3 M"), (12_345_678, "12.3 M"), (2_500_000_000, "2,500 M")],
)  # fmt: skip
def test_tokens(amount, seen):
    assert tokens(amount).replace("\u00a0", " ") == seen


@pytest.mark.parametrize(
    ("amount", "seen"),
    [(0, "0 s"), (0.0625, "62.5 ms"), (1, "1 s"), (89, "89 s"), (90, "1.5 min"), (5400, "1.5 h"),
     (86_400, "24 h"), (200_000, "2.31 days")],
)  # fmt: skip
def test_durations(amount, seen):
    assert duration(amount).replace("\u00a0", " ") == seen


def test_money():
    assert (money(1234.56, "$"), money(2.5, "€")) == ("$1,235", "€2.50")
