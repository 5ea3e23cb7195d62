"""`choose` against scores of all places, and two routers that do not talk."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep.core.cost import TransferCost
from kvkeep.serve.kv_events import BlockStored
from kvkeep.serve.router import PrefixRouter, RoutingCost
from kvkeep.serve.router.placing import heaviest, name_hash, prompt_hash

MASK = (1 << 64) - 1
SIZE = 16


def stored(first, tokens, medium="GPU"):
    hashes = list(range(first, first + len(tokens) // SIZE))
    return BlockStored(hashes, None, list(tokens), SIZE, None, medium, None)


def weight(name: int, key: int) -> int:
    """SplitMix64's finalizer, in the plainest way."""
    mixed = name ^ key
    mixed = ((mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9) & MASK
    mixed = ((mixed ^ mixed >> 27) * 0x94D049BB133111EB) & MASK
    return mixed ^ mixed >> 31


def expected(router, prompt, without, key):
    """What `choose` must return, from the scores of all places."""
    names = {score.place.instance for score in router.score(prompt)} - set(without)
    scores = router.score(prompt, among=names)
    if not scores:
        return None
    best = scores[0]
    load = best.wait_s + best.balance_s
    slack = router.cost.slack * router.cost.prefill_s(len(prompt), None)
    near = [
        one
        for one in scores
        if one.prefill_s <= best.prefill_s and one.wait_s + one.balance_s <= load + slack
    ]
    tie = prompt_hash(np.asarray(prompt, np.int32), "", "")
    best = max(
        near, key=lambda one: weight(name_hash(one.place.instance, str(one.place.rank)), tie)
    )
    if not key:
        return best
    home = max(names, key=lambda name: weight(name_hash(name), name_hash(key)))
    for one in scores:
        if one.place.instance == home and one.prefill_s <= best.prefill_s:
            late = one.wait_s - best.wait_s
            return one if late <= max(best.prefill_s, 1.0) else best
    return best


@given(st.data())
@settings(max_examples=150)
def test_the_choice_is_that_of_the_scores(data):
    """Random holdings in tiers and ranks, random loads."""
    slack = data.draw(st.sampled_from([0.0, 0.1, 1.0]))
    draw = random.Random(data.draw(st.integers(0, 2**32)))
    free, slow = TransferCost(seconds_per_byte=0), TransferCost(seconds_per_byte=1e-9)
    cost = RoutingCost(slack=slack, tiers={"GPU": free, "COMING": free, "CPU": slow})
    names = [f"http://h{number}:1" for number in range(draw.randint(1, 9))]
    router = PrefixRouter(names, cost=cost, ranks=2, clock=lambda: 0.0)
    prompt = [draw.randrange(50_000) for _ in range(SIZE * draw.randint(1, 30))]
    for name in names:
        for rank in range(draw.randint(1, 2)):
            for first, medium in ((0, "GPU"), (10_000, "CPU")):
                if draw.random() < 0.6:
                    length = draw.choice([len(prompt), draw.randint(1, 30) * SIZE])
                    router.apply(name, [stored(first, prompt[:length], medium)], rank)
    for _ in range(draw.randint(0, 12)):
        scores = router.score([draw.randrange(50_000) for _ in range(draw.randint(1, 3000))])
        ticket = router.begin(draw.choice(scores), prompt if draw.random() < 0.1 else None)
        if draw.random() < 0.5:
            router.first_token(ticket)
    for _ in range(5):
        without = [name for name in names if draw.random() < 0.2]
        key = draw.choice(["", "", "k1", "k2"])
        found = router.choose(prompt, without=without, key=key)
        wanted = expected(router, prompt, without, key)
        if wanted is None:
            assert found is None
            continue
        assert found.place == wanted.place
        assert found.tokens == wanted.tokens
        assert found.tiers == wanted.tiers
        assert found.seconds == pytest.approx(wanted.seconds)
    router.check()


@given(st.lists(st.integers(0, MASK), min_size=1, max_size=50), st.integers(0, MASK))
def test_the_order_of_a_key(names, key):
    at = heaviest(np.array(names, np.uint64), key)
    assert weight(names[at], key) == max(weight(name, key) for name in names)


def test_requests_of_unknown_tokens_are_spread():
    router = PrefixRouter([f"i{number}" for number in range(4)])
    found = {router.choose(None).place.instance for _ in range(200)}
    assert len(found) == 4


def test_a_prompt_moves_only_if_its_instance_goes():
    names = [f"i{number}" for number in range(20)]
    router = PrefixRouter(names)
    prompts = [list(range(number, number + 200)) for number in range(300)]
    homes = [router.choose(prompt).place.instance for prompt in prompts]
    assert len(set(homes)) == 20
    router.remove("i7")
    moved = {
        home
        for prompt, home in zip(prompts, homes, strict=True)
        if router.choose(prompt).place.instance != home
    }
    assert moved == {"i7"}
    router.add("i7")
    assert [router.choose(prompt).place.instance for prompt in prompts] == homes


def test_two_routers_agree_whatever_the_order_of_their_instances():
    names = [f"http://10.0.0.{number}:8000" for number in range(12)]
    one, other = PrefixRouter(names), PrefixRouter(reversed(names))
    draw = random.Random(4)
    system = [draw.randrange(1000) for _ in range(64)]
    prompts = [[*system, *(draw.randrange(1000) for _ in range(160))] for _ in range(200)]
    for number, prompt in enumerate(prompts[:100]):
        events = [stored(number * 100, prompt)]
        for router in (one, other):
            router.apply(names[number % 12], events)
    for prompt in prompts:
        assert one.choose(prompt).place == other.choose(prompt).place
        assert one.choose(prompt, key="k").place == other.choose(prompt, key="k").place
