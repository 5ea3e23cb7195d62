"""Choosing tokens: the parameters do what they say, and no row affects another."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep.core.errors import InvalidValue
from kvkeep.serve.engine import sampling
from kvkeep.serve.engine.params import SamplingParams
from kvkeep.serve.engine.sampling import LogitsRow, chance_of, choose, fresh_seed, likeliest

LOGITS = torch.tensor([1.0, 3.0, 0.0, 2.0, -1.0])  # likeliest first: 1, 3, 0, 2, 4
MANY = [chance_of(0, 0, i) for i in range(20_000)]


def row(chance=None, generated=(), **params):
    if chance is not None:
        params = {"temperature": 1.0, **params}
    return LogitsRow(SamplingParams(**params), chance, generated)


def draws(logits=LOGITS, chances=MANY, generated=(), **params):
    """A token for each of many random bits; `near` compares their shares with probabilities."""
    asked = SamplingParams(**{"temperature": 1.0, **params})
    rows = [LogitsRow(asked, chance, generated) for chance in chances]
    return choose(logits.expand(len(rows), -1), rows)


def shares(tokens, vocabulary):
    return np.bincount(tokens, minlength=vocabulary) / len(tokens)


def near(found, expected, draws=20_000):
    """Whether shares are within five standard deviations, and nothing impossible was drawn."""
    allowed = 5 * np.sqrt(expected * (1 - expected) / draws) + 1e-6
    return (abs(found - expected) <= allowed + (expected > 0) / draws).all()


def raced(weights, chance):
    """The token that wins the race, one number at a time: SplitMix64 and exponential times."""
    best, first = None, math.inf
    for token, weight in enumerate(weights):
        state = (chance + token * 0x9E3779B97F4A7C15) % 2**64
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        state = (state ^ state >> 27) * 0x94D049BB133111EB % 2**64
        number = (((state ^ state >> 31) >> 12) + 0.5) / 2**52
        if weight and (time := -math.log1p(-number) / weight) < first:
            best, first = token, time
    return best


def reference(logits, params):
    """The probabilities that the parameters ask for, computed plainly in float64."""
    scores = np.asarray(logits, np.float64)
    order = sorted(range(len(scores)), key=lambda token: (-scores[token], token))
    weights = np.exp((scores - scores.max()) / params.temperature)
    order = order[: params.top_k or None]
    if params.top_p < 1:
        mass = np.cumsum(weights[order]) / weights[order].sum()
        order = order[: int(np.searchsorted(mass, params.top_p)) + 1]
    chances = np.zeros(len(scores))
    for token in order:
        if weights[token] >= params.min_p * weights.max():
            chances[token] = weights[token]
    return chances / chances.sum()


# --- chance ----------------------------------------------------------------------------------


def test_chance_is_the_same_everywhere_and_for_ever():
    """A seed gives the same tokens in every release: users have written their seeds down."""
    assert chance_of(0, 0, 0) == 2891389769238885931
    assert chance_of(2**63 - 1, 3, 1000) == 5882800783909281698
    assert draws(torch.zeros(4096), [chance_of(7, 0, i) for i in range(6)]) == [
        2276,
        942,
        1734,
        2636,
        2732,
        3420,
    ]


def test_chance_is_even_and_depends_on_all_of_it():
    bits = np.array([chance_of(s, c, p) for s in range(20) for c in range(10) for p in range(50)])
    values = bits / 2**64 + 0.5
    assert len(set(bits.tolist())) == len(bits)
    counts = np.bincount((values * 20).astype(int), minlength=20)
    assert (abs(counts - 500) < 5 * 500**0.5).all()
    steps = values.reshape(-1, 50)
    assert abs(np.corrcoef(steps[:, :-1].ravel(), steps[:, 1:].ravel())[0, 1]) < 0.05


def test_fresh_seeds_are_seeds_and_differ():
    seeds = {fresh_seed() for _ in range(100)}
    assert len(seeds) == 100
    assert all(SamplingParams(seed=seed).seed == seed for seed in seeds)


# --- ranking ---------------------------------------------------------------------------------


@given(
    st.lists(
        st.floats(width=32, allow_nan=False) | st.sampled_from([0.0, -0.0, 1.0, -1.0]),
        min_size=1,
        max_size=40,
    ),
    st.integers(1, 40),
)
def test_likeliest_is_a_stable_sort(scores, count):
    count = min(count, len(scores))
    expected = sorted(range(len(scores)), key=lambda token: (-scores[token], token))[:count]
    assert likeliest(torch.tensor([scores, scores]), count).tolist() == [expected, expected]


def test_likeliest_does_not_change_the_scores():
    scores = torch.randn(3, 5000)
    before = scores.clone()
    likeliest(scores, 7)
    assert torch.equal(scores, before)


# --- greedy ----------------------------------------------------------------------------------


def test_greedy_takes_the_likeliest_of_equals_the_lowest():
    rows = torch.stack((LOGITS, LOGITS.flip(0), torch.zeros(5)))
    assert choose(rows, [row()] * 3) == [1, 3, 0]


def test_no_rows():
    assert choose(torch.empty(0, 5), []) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_logits_stay_as_they_are(dtype):
    with torch.inference_mode():
        logits = torch.randn(4, 300, generator=torch.manual_seed(0)).to(dtype)
    before = logits.clone()
    rows = [row(), row(logit_bias=((3, 100.0),)), row(5, top_p=0.5), row(5, [1, 2, 2],
            presence_penalty=1.0)]  # fmt: skip
    assert choose(logits, rows)[:2] == [int(before[0].argmax()), 3]
    assert torch.equal(logits, before)


# --- drawing ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.3},
        {"temperature": 5.0},
        {"top_k": 1},
        {"top_k": 7},
        {"top_k": 60},
        {"top_k": 99},
        {"top_p": 0.05},
        {"top_p": 0.6},
        {"top_p": 0.97},
        {"top_p": 1e-9},
        {"min_p": 0.3},
        {"min_p": 1.0},
        {"top_k": 9, "top_p": 0.7},
        {"top_k": 9, "min_p": 0.2},
        {"top_p": 0.8, "min_p": 0.1},
        {"temperature": 2.0, "top_k": 20, "top_p": 0.9, "min_p": 0.05},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["smooth", "ties"])
def test_draws_follow_the_probabilities(params, kind):
    logits = torch.randn(60, generator=torch.manual_seed(1)) * 2
    if kind == "ties":
        logits = logits.round()
    expected = reference(logits, SamplingParams(**{"temperature": 1.0, **params}))
    found = shares(draws(logits, **params), 60)
    assert near(found, expected)
    weights = expected / expected.max()
    some = MANY[:50]
    assert draws(logits, some, **params) == [raced(weights, chance) for chance in some]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(-12, 12).map(lambda n: n / 2), min_size=1, max_size=30),
    st.integers(0, 32),
    st.floats(0.01, 1) | st.just(1.0),
    st.floats(0, 1),
    st.floats(0.1, 10),
)
def test_draws_follow_the_probabilities_whatever_the_parameters(
    logits, top_k, top_p, min_p, temperature
):
    params = {"top_k": top_k, "top_p": top_p, "min_p": min_p, "temperature": temperature}
    found = shares(draws(torch.tensor(logits), MANY[:500], **params), len(logits))
    nearby = [  # a token on the edge may be in or out by rounding
        reference(logits, SamplingParams(**{**params, "top_p": p, "min_p": m}))
        for p in {top_p, min(top_p * 1.00001, 1.0), top_p * 0.99999}
        for m in {min_p, min(min_p * 1.00001, 1.0), min_p * 0.99999}
    ]
    assert any(near(found, expected, 500) for expected in nearby)


@pytest.mark.parametrize("temperature", [5e-324, 1e-30, 1e-8])
def test_the_coldest_are_greedy(temperature):
    assert set(draws(temperature=temperature)) == {1}


@pytest.mark.parametrize("temperature", [1e30, 1e308])
def test_the_hottest_draw_all_alike_but_never_the_impossible(temperature):
    logits = torch.tensor([1.0, -torch.inf, 3.0, 0.0])
    found = shares(draws(logits, temperature=temperature), 4)
    assert near(found, np.array([1 / 3, 0, 1 / 3, 1 / 3]))


@pytest.mark.parametrize("params", [{}, {"top_k": 4}, {"top_p": 0.999999}, {"min_p": 1e-30}])
@pytest.mark.parametrize("chance", [0, 1, -1, 2**63 - 1, -(2**63), 2**62])
def test_the_ends_of_chance_draw_nothing_impossible(params, chance):
    nothing = -torch.inf
    logits = torch.tensor([nothing, nothing, 1.0, nothing, 1.0, nothing, -300.0, nothing])
    assert draws(logits, [chance], **params)[0] in {2, 4}


def test_top_k_of_equals_takes_the_lowest_ids():
    assert set(draws(torch.zeros(2000), MANY[:2000], top_k=3)) == {0, 1, 2}


def test_a_nucleus_of_most_of_the_vocabulary():
    """Wider than the tokens ranked first."""
    assert sampling._FIRST < 1100
    logits = torch.zeros(2600)
    found = set(draws(logits, MANY[:3000], top_p=0.5))
    assert max(found) < 1300
    assert len(found) > 1100  # 3,000 draws of 1,300 see 1,171 of them


# --- rows by themselves ----------------------------------------------------------------------


def mixed_rows(count, vocabulary):
    kinds = [
        {}, {"top_p": 0.9}, {"top_k": 50}, {"top_k": 5, "top_p": 0.5}, {"min_p": 0.01},
        {"top_p": 0.99999}, {"temperature": 0.2}, {"top_k": vocabulary - 1},
        {"logit_bias": ((3, 5.0),)}, {"frequency_penalty": 1.5},
    ]  # fmt: skip
    rows = [row(chance_of(7, 0, i), [3, 3, i], **kinds[i % len(kinds)]) for i in range(count)]
    for i in range(0, count, 7):
        rows[i] = row(generated=[i, i], presence_penalty=2.0) if i % 2 else row()
    return rows


@pytest.mark.parametrize("vocabulary", [50, 3000, 40_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_gives_the_same_token_whatever_other_rows_there_are(vocabulary, dtype):
    count = 40
    rows = mixed_rows(count, vocabulary)
    logits = torch.randn(count, vocabulary, generator=torch.manual_seed(2)).to(dtype)
    together = choose(logits, rows)
    assert [choose(logits[i : i + 1], rows[i : i + 1])[0] for i in range(count)] == together
    order = np.random.default_rng(0).permutation(count).tolist()
    assert choose(logits[order], [rows[i] for i in order]) == [together[i] for i in order]


def test_what_a_batch_does_to_the_last_bits_of_logits_does_not_change_what_is_drawn():
    logits = torch.randn(4096, generator=torch.manual_seed(3)) * 2
    moved = logits + torch.randn(4096) * 1e-5
    differ = np.array(draws(logits, MANY[:5000])) != np.array(draws(moved, MANY[:5000]))
    assert differ.sum() <= 2  # 0.03 are to be expected


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.cuda)])
def test_a_gpu_gives_the_same_tokens(device):
    rows = mixed_rows(40, 40_000)
    logits = torch.randn(40, 40_000, generator=torch.manual_seed(2)).bfloat16()
    there = logits.to(device)
    found = choose(there, rows)
    assert found == choose(logits, rows)
    assert [choose(there[i : i + 1], rows[i : i + 1])[0] for i in range(40)] == found


# --- adjustments -----------------------------------------------------------------------------


@pytest.mark.parametrize("chance", [None, 3])
def test_biases_force_and_ban(chance):
    def tokens(*bias):
        return choose(LOGITS[None], [row(chance, logit_bias=bias)])[0]

    assert tokens((4, 100.0)) == 4
    assert tokens((1, -100.0), (3, -100.0), (0, -100.0), (4, -100)) == 2
    assert tokens((4, 60), (4, 60.0), (2, 100)) == 4  # a token named twice gets both


def test_penalties_are_what_openai_documents():
    """logit - presence · (count > 0) - frequency · count."""
    generated = [1, 1, 1, 3]
    params = {"presence_penalty": 0.5, "frequency_penalty": 0.25}
    expected = LOGITS - torch.tensor([0, 0.5 + 3 * 0.25, 0, 0.5 + 0.25, 0])
    want = reference(expected, SamplingParams(temperature=1.0))
    found = shares(draws(generated=generated, **params), 5)
    assert near(found, want)
    greedy = row(generated=[1], presence_penalty=1.5)
    assert choose(LOGITS[None], [greedy]) == [3]
    liked = row(generated=[0], presence_penalty=-2.0, frequency_penalty=-0.5)
    assert choose(LOGITS[None], [liked]) == [0]
    assert choose(LOGITS[None], [row(presence_penalty=2.0)]) == [1]  # nothing generated yet


def test_adjustments_stay_in_their_row():
    rows = [row(), row(generated=[1], presence_penalty=2.0), row(), row(logit_bias=((4, 100.0),))]
    assert choose(LOGITS.expand(4, -1), rows) == [1, 3, 1, 4]


@pytest.mark.parametrize("chance", [None, 5])
def test_a_bias_outside_the_vocabulary_is_named(chance):
    with pytest.raises(InvalidValue, match="token 5; the model knows 0 … 4"):
        choose(LOGITS[None], [row(chance, logit_bias=((5, 1.0),))])


# --- broken logits ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("logits", "token"),
    [
        ([1.0, torch.nan, 3.0, torch.nan], 1),
        ([torch.nan] * 4, 0),
        ([1.0, torch.inf, 3.0, torch.inf], 1),
        ([-torch.inf] * 4, 0),
    ],
    ids=["a NaN", "all NaN", "infinity", "nothing possible"],
)
@pytest.mark.parametrize(
    "params", [None, {}, {"top_p": 0.5}, {"top_k": 2}, {"min_p": 0.5}, {"logit_bias": ((0, 1),)}]
)
def test_what_cannot_be_compared_is_not_drawn_from(logits, token, params):
    other = row(99, top_p=0.9)
    mine = row() if params is None else row(7, **params)
    good = torch.tensor([0.0, 0.0, 0.0, 9.0])
    assert choose(torch.stack((torch.tensor(logits), good)), [mine, other]) == [token, 3]
