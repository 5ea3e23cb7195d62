"""Prompts of one key, in the scores and through the proxy."""

from __future__ import annotations

import httpx
from standing_in import eventually, routing

from kvkeep.serve.router.affinity import with_key
from kvkeep.serve.router.health import InstanceHealth
from kvkeep.serve.router.index import Place
from kvkeep.serve.router.router import Score

NAMES = "abcd"


def scores(**changed):
    """A score for each instance: half a second of prefill; ``changed`` are further seconds."""
    made = []
    for name in NAMES:
        prefill, wait = changed.get(name, (0.5, 0.0))
        made.append(Score(Place(name), 0, {}, prefill, wait, 0.0))
    return sorted(made, key=lambda score: score.seconds)


def chosen(key, **changed):
    return with_key(scores(**changed), key).place.instance


def test_keys_are_spread_and_stay():
    keys = [f"key {number}" for number in range(400)]
    found = {key: chosen(key) for key in keys}
    assert found == {key: chosen(key) for key in keys}
    for name in NAMES:
        assert 60 < list(found.values()).count(name) < 140
    left = [score for score in scores() if score.place.instance != "a"]
    for key, name in found.items():
        now = with_key(left, key).place.instance
        assert name in {now, "a"}, "only the keys of an instance that is gone move"


def test_more_cached_and_much_sooner_win():
    own = chosen("k")
    other = next(name for name in NAMES if name != own)
    assert chosen("k", **{own: (0.5, 0.9)}) == own
    assert chosen("k", **{own: (0.5, 1.1)}) != own
    assert chosen("k", **{other: (0.1, 0.0)}) == other
    assert chosen("k", **{own: (0.1, 0.9)}) == own
    assert chosen("", **{other: (0.4, 0.0)}) == other


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
