"""Costs that the router reads from its instances, from honest ones and others."""

from __future__ import annotations

import json

import httpx
import pytest
from standing_in import Routing, StandIn, eventually

from kvkeep.cli import main
from kvkeep.core.cost import CostModel, PrefillCost
from kvkeep.serve.router.health import InstanceHealth

COST = PrefillCost(seconds_fixed=0.01, seconds_per_token=0.002, kv_bytes_per_token=500.0)


def told(cost=COST, **more):
    return json.dumps({**CostModel(cost).as_dict(), "error": 0.1, **more}).encode()


@pytest.fixture
def in_front_of():
    """Return a proxy that probes often, in front of instances that tell these costs."""
    made = []

    def start(*costs, **options):
        instances = [StandIn() for _ in costs]
        made.extend(instances)
        for one, cost in zip(instances, costs, strict=True):
            one.cost = cost
        made.append(Routing(*(one.url for one in instances), **options))
        return made[-1], instances

    yield start
    for one in reversed(made):
        one.stop()


def seconds(proxy, instance):
    return proxy.router.cost_of(instance.url).prefill.prefill_s(0, 1_000)


def outcomes(proxy, instance):
    text = httpx.get(f"{proxy.url}/metrics").text
    found = {}
    for line in text.splitlines():
        if line.startswith("kvkeep_router_costs_total{") and instance.url in line:
            labels, _, value = line.rpartition(" ")
            found[labels.partition('outcome="')[2].partition('"')[0]] = float(value)
    return found


def test_prompts_are_scored_by_what_the_instances_tell(in_front_of):
    proxy, (slow, quick, silent) = in_front_of(
        told(), told(PrefillCost(seconds_per_token=1e-5)), None
    )
    router = proxy.router
    eventually(lambda: seconds(proxy, slow) == pytest.approx(COST.prefill_s(0, 1_000)))
    eventually(lambda: seconds(proxy, quick) == pytest.approx(0.01))
    assert router.score(range(500))[0].place.instance == quick.url
    eventually(lambda: slow.told > 2)  # it is asked again and again, but not by each probe
    assert slow.probes > 10
    assert silent.told == 0
    assert router.cost_of(silent.url) in [router.cost_of(one.url) for one in (slow, quick)]
    text = httpx.get(f"{proxy.url}/metrics").text
    assert f'kvkeep_router_prefill_token_seconds{{instance="{slow.url}"}} 0.002' in text
    assert outcomes(proxy, slow)["learned"] >= 2


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"no JSON",
        b"[" * 100_000,
        b"{}",
        b'{"kvkeep_cost": 1, "seconds_per_token": 1' + b"0" * 5_000 + b', "error": 0.1}',
        told(PrefillCost(seconds_per_token=0.0)),
        told(PrefillCost(seconds_per_token=1e-11)),
        told(PrefillCost(seconds_per_token=1e11)),
        told(tiers={"file": {"read": {"seconds_per_byte": -1}}}),
        told(tiers={"file": []}),
        told(tiers={str(number): {"read": {"seconds_per_byte": 1}} for number in range(1_000)}),
        told(more="x" * 1_000_000),
    ],
)
def test_answers_that_have_no_costs_are_refused(in_front_of, answer):
    proxy, (one,) = in_front_of(answer)
    eventually(lambda: sum(outcomes(proxy, one).values()) >= 1)
    assert set(outcomes(proxy, one)) <= {"refused", "unsure"}
    assert proxy.router.cost_of(one.url) is proxy.router.cost
    assert proxy.upstreams.health.state(one.url) is InstanceHealth.UP


@pytest.mark.parametrize("error", [1.0, None, "none", -1, float("nan"), 10**400])
def test_what_is_unsure_is_not_used(in_front_of, error):
    proxy, (one,) = in_front_of(told(error=error))
    eventually(lambda: outcomes(proxy, one).get("unsure", 0) >= 1)
    assert proxy.router.cost_of(one.url) is proxy.router.cost


def test_an_instance_whose_answer_hangs_stays_up(in_front_of):
    proxy, (one,) = in_front_of(b"hangs", timeouts={"probe_s": 1.0})
    eventually(lambda: outcomes(proxy, one).get("refused") == 1)
    before = one.probes
    eventually(lambda: one.probes > before + 5)
    assert one.told == 1
    assert proxy.upstreams.health.state(one.url) is InstanceHealth.UP


def test_costs_that_are_given_are_not_learned(in_front_of):
    _, (one,) = in_front_of(told(), learn_costs=False)
    eventually(lambda: one.probes > 5)
    assert one.told == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cost", "COST", "--prefill-speed", "100"], "leave one out"),
        (["--prefill-speed", "nan"], "--prefill-speed"),
        (["--cost", "none.json"], "cannot read none.json"),
        (["--cost", "FREE"], "1,000 tokens"),
    ],
)
def test_costs_on_the_command_line(tmp_path, capsys, arguments, message):
    CostModel(COST).write(tmp_path / "COST")
    CostModel(PrefillCost(seconds_per_token=1e-12)).write(tmp_path / "FREE")
    given = [str(tmp_path / one) if one.isupper() else one for one in arguments]
    assert main(["route", "--instances", "http://127.0.0.1:1", *given]) == 2
    assert message in capsys.readouterr().err
