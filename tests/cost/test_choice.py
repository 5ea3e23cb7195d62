"""How much of a stored prefix to load: no other is better."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.core.cost import PrefillCost, best_prefix

SECONDS = st.floats(0, 5, allow_subnormal=False)
COSTS = st.builds(
    PrefillCost,
    seconds_fixed=st.floats(0, 0.1),
    seconds_per_token=st.floats(0, 0.01),
    seconds_per_token_pair=st.floats(0, 1e-5),
)


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
