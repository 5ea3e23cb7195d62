"""The curve, against full simulations of a plain LRU memory."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lru_model import plain_rates, words_of

from kvkeep.bench.traces import generate
from kvkeep.core.errors import InvalidValue
from kvkeep.core.keys import Namespace, chain_keys, root_key
from kvkeep.core.miss_ratio import MissRatioCurve

CONVERSATION = "shared/traces/mooncake_conversation.jsonl.gz"
MOST_POINTS = 1.5


def feed(curve: MissRatioCurve, prompts: list[np.ndarray], seed: int) -> None:
    """Prompts of blocks with numbers, whose keys are chance."""
    _, numbers = np.unique(np.concatenate(prompts), return_inverse=True)
    words = words_of(numbers, seed)
    start = 0
    for one in prompts:
        curve.add(words[start : start + len(one)], Namespace(), len(one))
        start += len(one)
    curve.check()


def largest_error(prompts: list[np.ndarray], capacities: list[int], seed: int) -> float:
    curve = MissRatioCurve(0.1)
    feed(curve, prompts, seed)
    # In full: exact by other means, and for each capacity.
    exact = plain_rates([one.tolist() for one in prompts], capacities)
    found = curve.curve(capacities)
    return 100 * max(abs(a - b) for a, b in zip(found, exact, strict=True))


# --- exactness -------------------------------------------------------------------------------


@given(
    st.lists(st.lists(st.integers(0, 2), max_size=9), max_size=40),
    st.lists(st.integers(0, 12), max_size=4),
)
def test_all_blocks_make_it_exact(paths: list[list[int]], settles: list[int]) -> None:
    curve = MissRatioCurve(1.0, 2, most_blocks=1000)
    prompts = []
    for number, path in enumerate(paths):
        tokens = np.repeat(np.array(path, np.int32), 2)
        keys = chain_keys(root_key(Namespace()), tokens.tobytes(), 8)
        curve.requested(keys)
        prompts.append(keys)
        if number in settles:
            curve.settle()  # when it counts makes no difference
    curve.check()
    capacities = [0, 1, 2, 3, 5, 8, 20, 100]
    assert curve.curve(capacities) == pytest.approx(plain_rates(prompts, capacities))
    assert curve.blocks == sum(map(len, paths))


def test_it_is_exact_where_bins_begin_however_far() -> None:
    chance = np.random.default_rng(5)
    sizes = chance.integers(1, 30, 3000)
    # 400 conversations that grow by a block or two, in turns.
    prompts = [
        np.arange(1 + turn // 300) + 10_000 * int(talk) + 1
        for turn, talk in enumerate(chance.integers(0, 400, len(sizes)))
    ]
    curve = MissRatioCurve(1.0, most_blocks=65_536)
    feed(curve, prompts, 0)
    capacities = [100, 511, 512, 768, 1024, 1536, 2048, 3072]
    exact = plain_rates([one.tolist() for one in prompts], capacities)
    assert curve.curve(capacities) == pytest.approx(exact)
    assert exact[-1] > exact[0] + 0.1


# --- accuracy --------------------------------------------------------------------------------


def conversation_trace() -> Path | None:
    places = (up / CONVERSATION for up in Path(__file__).parents)
    return next((path for path in places if path.exists()), None)


@pytest.mark.parametrize("seed", range(2))
def test_a_tenth_of_a_real_trace(seed: int) -> None:
    path = conversation_trace()
    if path is None:
        pytest.skip(f"{CONVERSATION} is not beside this repository")
    with gzip.open(path) as lines:
        prompts = [np.array(json.loads(line)["hash_ids"]) for line in lines]
    assert largest_error(prompts, [500, 1500, 5859, 20_000], seed) <= MOST_POINTS


@pytest.fixture(scope="module")
def mixed() -> list[np.ndarray]:
    """Conversations of all lengths, and prompts that nobody asks for again."""
    made = generate("chat", seed=7, requests=3000, unit_tokens=64)
    prompts = [one.units[: one.tokens // 64] for one in made]
    prompts = [one for one in prompts if len(one)]
    # A scan: every fifth prompt is one of 40 blocks that comes this once.
    scans = [np.arange(40) + 2**62 + 40 * number for number in range(len(prompts) // 5)]
    return [one for at in range(0, len(prompts), 5) for one in (*prompts[at : at + 5],
            *scans[at // 5 : at // 5 + 1])]  # fmt: skip


@pytest.mark.parametrize("seed", range(2))
def test_a_tenth_of_conversations_zipf_and_scans(mixed: list[np.ndarray], seed: int) -> None:
    assert largest_error(mixed, [500, 1500, 4000, 15_000], seed) <= MOST_POINTS


# --- namespaces, time, bounds ----------------------------------------------------------------


def ask(curve: MissRatioCurve, number: int, space: str = "", blocks: int = 4) -> None:
    tokens = np.full(blocks, number, np.int32).tobytes()
    curve.requested(chain_keys(root_key(Namespace(tenant=space)), tokens, 4), space)


def test_each_namespace_has_its_own_curve_over_one_memory() -> None:
    curve = MissRatioCurve(1.0, 1, most_blocks=1000)
    for _ in range(10):
        ask(curve, 1, "same")
        for other in range(10):
            ask(curve, other, "many")
    # Between two of the one tenant's prompts lie 40 blocks of the other's.
    assert curve.curve([40, 44], "same") == pytest.approx([0.0, 0.9])
    assert curve.curve([40, 44], "many") == pytest.approx([0.0, 0.9])
    assert curve.curve([44]) == pytest.approx([0.9])
    assert curve.curve([44], "nobody") == [0.0]


def test_namespaces_beyond_the_64th_share_a_curve() -> None:
    curve = MissRatioCurve(1.0, 1, most_blocks=10_000)
    for turn in range(2):
        for space in range(100):
            ask(curve, turn if space < 64 else 7, f"t{space}")
    assert curve.curve([9000], "t63") == [0.0]
    assert curve.curve([9000], "t3") == [0.0]
    assert curve.curve([9000], "t99") == [0.0]  # it has none
    assert curve.curve([9000]) == pytest.approx([0.18])


def test_millions_of_blocks_are_bounded() -> None:
    curve = MissRatioCurve(0.1, most_blocks=20_000)
    chance = np.random.default_rng(1)
    for _ in range(40):
        words = chance.integers(0, 2**64, 50_000, dtype=np.uint64)
        curve.add(words, Namespace(), 50_000)
    huge = chance.integers(0, 2**64, 2**20, dtype=np.uint64)
    for _ in range(2):
        curve.add(huge, Namespace(), len(huge))
    curve.check()
    # Only its beginning fits, and that is there the second time.
    (rate,) = curve.curve([20_000])
    assert rate * curve.blocks == pytest.approx(20_000, rel=0.1)


def test_a_sample_is_made_smaller_where_it_would_not_fit() -> None:
    curve = MissRatioCurve(0.5, most_blocks=65_536_000)
    assert curve.sample == pytest.approx(0.001)
    assert MissRatioCurve(0.5).most_blocks == 131_072


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"sample": 0}, "share above 0"),
        ({"sample": 1.5}, "share above 0"),
        ({"sample": True}, "share above 0"),
        ({"block_tokens": 0}, "block_tokens"),
        ({"most_blocks": 0}, "most_blocks"),
    ],
)
def test_mistakes(wrong: dict[str, float], said: str) -> None:
    with pytest.raises(InvalidValue, match=said):
        MissRatioCurve(**wrong)


def test_mistakes_in_asking() -> None:
    curve = MissRatioCurve(most_blocks=100)
    for capacities in ([101], [-1], [float("nan")], [[1]]):
        with pytest.raises(InvalidValue, match=r"0 … 100"):
            curve.curve(capacities)
    with pytest.raises(InvalidValue, match="32 bytes"):
        curve.requested([b"short"])
