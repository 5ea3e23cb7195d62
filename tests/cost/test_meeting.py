"""Where computing and loading meet: never worse than either alone, and the best there is."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.core.cost import LoadablePrompt, PrefillCost, TransferCost, best_prefix, meet

SECONDS = st.floats(0, 5, allow_subnormal=False)
COSTS = st.builds(
    PrefillCost,
    seconds_fixed=st.floats(0, 0.1),
    seconds_per_token=st.floats(0, 0.01),
    seconds_per_token_pair=st.floats(0, 1e-5),
)
LOADS = st.builds(TransferCost, seconds_fixed=st.floats(0, 1), seconds_per_byte=st.floats(0, 0.02))


@st.composite
def prompts(draw: st.DrawFn) -> LoadablePrompt:
    unit = draw(st.sampled_from([1, 16, 256]))
    tokens = draw(st.integers(2, 5000))
    stop = draw(st.integers(0, tokens - 1))
    computed = draw(st.integers(0, tokens - 1))
    blocks = draw(st.integers(0, stop // unit))
    loaded = draw(st.sampled_from([stop, max(computed, blocks * unit)]))
    return LoadablePrompt(computed, max(loaded, computed), max(stop, computed), tokens, unit)


def places(prompt: LoadablePrompt) -> list[int]:
    """Every place where they can meet."""
    between = range(prompt.computed // prompt.unit * prompt.unit, prompt.loaded, prompt.unit)
    return [prompt.computed, *(one for one in between if one > prompt.computed), prompt.loaded]


@given(prompts(), COSTS, LOADS, SECONDS, SECONDS)
def test_no_other_place_is_better(prompt, cost, load, compute_free, load_free):
    found = meet(
        prompt, cost.prefill_s, load.seconds, compute_free_s=compute_free, load_free_s=load_free
    )

    def seconds(at: int) -> float:
        if at == prompt.stop:  # all of the rest is computed at once
            return compute_free + cost.prefill_s(prompt.computed, prompt.tokens)
        computed = compute_free + cost.prefill_s(prompt.computed, at)
        loaded = load_free + load.seconds(prompt.loaded - at) if at < prompt.loaded else 0.0
        return max(computed, loaded) + cost.prefill_s(prompt.stop, prompt.tokens)

    assert found.at in places(prompt)
    assert found.seconds == pytest.approx(seconds(found.at))
    assert found.all_computed_s == pytest.approx(seconds(prompt.loaded))
    assert found.all_loaded_s == pytest.approx(seconds(prompt.computed))
    behind = cost.prefill_s(prompt.stop, prompt.tokens)
    best = min(map(seconds, places(prompt)))
    if found.at in {prompt.computed, prompt.loaded}:  # both at once save less than a twentieth
        assert found.seconds == pytest.approx(min(found.all_computed_s, found.all_loaded_s))
        assert (found.seconds - behind) * 0.95 <= best - behind + 1e-9
    else:
        assert found.seconds <= best * (1 + 1e-9)


@given(COSTS, LOADS, st.integers(1, 5000), st.integers(0, 4999))
def test_it_is_never_worse_than_computing_or_loading_alone(cost, load, tokens, stop):
    prompt = LoadablePrompt(0, min(stop, tokens - 1), min(stop, tokens - 1), tokens, 16)
    found = meet(prompt, cost.prefill_s, load.seconds)
    behind = cost.prefill_s(prompt.stop, tokens)
    assert found.seconds <= cost.prefill_s(0, prompt.stop) + behind + 1e-9
    assert found.seconds <= load.seconds(prompt.stop) + behind + 1e-9


def test_where_they_balance_both_take_half():
    cost, load = PrefillCost(seconds_per_token=1e-3), TransferCost(seconds_per_byte=1e-3)
    found = meet(LoadablePrompt(0, 4096, 4096, 4097, 16), cost.prefill_s, load.seconds)
    assert found.at == 2048
    assert found.seconds == pytest.approx(2.048 + 1e-3)


def test_nothing_is_loaded_where_a_lookup_alone_takes_longer():
    cost = PrefillCost(seconds_per_token=1e-4)
    slow = TransferCost(seconds_fixed=1, seconds_per_byte=0)
    prompt = LoadablePrompt(0, 4096, 4096, 4097, 16)
    assert meet(prompt, cost.prefill_s, slow.seconds).at == 4096
    free = TransferCost(seconds_per_byte=0)
    assert meet(prompt, cost.prefill_s, free.seconds).at == 0


@given(
    st.integers(0, 4000),
    st.lists(st.tuples(st.integers(1, 800), SECONDS), max_size=6),
    st.integers(1, 1000),
    COSTS,
    SECONDS,
)
def test_no_other_prefix_is_better(computed, runs, more, cost, free):
    ends = list(accumulate((count for count, _ in runs), initial=computed))[1:]
    tokens = (ends[-1] if ends else computed) + more
    pieces = [(end, seconds) for end, (_, seconds) in zip(ends, runs, strict=True)]
    found = best_prefix(computed, tokens, pieces, cost.prefill_s, load_free_s=free)
    loads = accumulate((seconds for _, seconds in runs), initial=free)
    took = [cost.prefill_s(computed, tokens)] + [
        load + cost.prefill_s(end, tokens)
        for (end, _), load in zip(pieces, list(loads)[1:], strict=True)
    ]
    assert found.seconds == pytest.approx(min(took))
    assert found.compute_s == took[0]
    assert found.tokens in {computed, *ends}


@given(st.integers(1, 4000), st.floats(0, 1e-2), COSTS)
def test_between_the_ends_of_a_run_no_prefix_is_better(tokens, each, cost):
    """So a run of one tier is loaded whole or not at all, as long as a load has no fixed part."""
    found = best_prefix(0, tokens + 1, [(tokens, each * tokens)], cost.prefill_s)
    between = [each * part + cost.prefill_s(part, tokens + 1) for part in range(1, tokens, 37)]
    assert all(found.seconds <= one * (1 + 1e-9) + 1e-12 for one in between)
