"""Prompts of one key, at the router and through the proxy."""

from __future__ import annotations

import httpx
from standing_in import eventually, routing

from kvkeep.core.cost import PrefillCost
from kvkeep.serve.kv_events import BlockStored
from kvkeep.serve.router import PrefixRouter, RoutingCost
from kvkeep.serve.router.health import InstanceHealth

NAMES = "abcd"
PROMPT = list(range(50))
COST = RoutingCost(
    prefill=PrefillCost(seconds_per_token=0.01), balance=0.0, running_s=0.0, slack=0.0
)


def fleet(*held, **waits):
    """A router of four; ``held`` have half of the prompt, ``waits`` are seconds of work there."""
    router = PrefixRouter(NAMES, cost=COST)
    for name in held:
        router.apply(name, [BlockStored([1], None, PROMPT[:40], 40, None, "GPU", None)])
    for name, seconds in waits.items():
        (score,) = router.score([7] * round(seconds * 100), among=[name])
        router.begin(score)
    return router


def chosen(key, *held, **waits):
    return fleet(*held, **waits).choose(PROMPT, key=key).place.instance


def test_keys_are_spread_and_stay():
    keys = [f"key {number}" for number in range(400)]
    router = fleet()
    found = {key: router.choose(PROMPT, key=key).place.instance for key in keys}
    for name in NAMES:
        assert 60 < list(found.values()).count(name) < 140
    for key, name in found.items():
        assert router.choose([1, 2, 3], key=key).place.instance == name
        now = router.choose(PROMPT, key=key, without="a").place.instance
        assert name in {now, "a"}, "only the keys of an instance that is gone move"


def test_more_cached_and_much_sooner_win():
    own = chosen("k")
    other = next(name for name in NAMES if name != own)
    assert chosen("k", **{own: 0.9}) == own
    assert chosen("k", **{own: 1.1}) != own
    assert chosen("k", other) == other
    assert chosen("k", own, **{own: 0.9}) == own
    assert chosen("", other) == other


def test_a_key_brings_prompts_together_on_plain_servers():
    with routing("well", "well", "well") as (proxy, made):

        def counts(**request):
            before = [len(one.paths) for one in made]
            for number in range(6):
                body = {"prompt": [number] * 4, "model": "m", **request.get("body", {})}
                url = f"{proxy.url}/v1/completions"
                httpx.post(url, json=body, headers=request.get("headers")).raise_for_status()
            return [len(one.paths) - had for one, had in zip(made, before, strict=True)]

        for number in range(6):
            by_key = counts(body={"prompt_cache_key": f"k{number}"})
            assert sorted(by_key) == [0, 0, 6]
            # A header names the same, and the field has precedence.
            assert counts(headers={"X-Session-Id": f"k{number}"}) == by_key
        both = counts(body={"prompt_cache_key": "k0"}, headers={"X-Session-Id": "other"})
        assert both == counts(body={"prompt_cache_key": "k0"})
        at = both.index(6)
        made[at].mood = "stopped"
        eventually(lambda: proxy.upstreams.health.state(made[at].url) is not InstanceHealth.UP)
        assert counts(body={"prompt_cache_key": "k0"})[at] == 0
        made[at].wake()
