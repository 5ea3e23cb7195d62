"""No parameters of one request harm those beside it, or the engine."""

from __future__ import annotations

import contextlib
import math
from dataclasses import fields
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvkeep.core.errors import InvalidValue
from kvkeep.serve.engine import Engine, Limits, SamplingParams

VOCABULARY = 160
MATE = SamplingParams(max_tokens=6, temperature=1.0, seed=3, top_p=0.9)
FIELDS = [field.name for field in fields(SamplingParams)]

numbers = st.one_of(
    st.sampled_from([
        0, 1, 2, 5, -1, 2**31 - 1, 2**31, 2**53 + 1, 2**63 - 1, 2**63, 2**64, 10**400, -(10**400),
        10**5000, math.nan, math.inf, -math.inf, 0.0, -0.0, 5e-324, 1e-300, 1e-45, 1e308, 0.5,
    ]),
    st.integers(), st.floats(), st.integers(0, 200), st.floats(0, 2),
)  # fmt: skip
strange = st.sampled_from([
    None, True, False, "", "1", b"1", (), [], {}, np.float32(0.5), np.float64(0.5), np.int64(2),
    np.array(1), np.zeros(3), Decimal(1), Fraction(1, 2), 1j, object(), range(3),
])  # fmt: skip
biases = st.lists(st.tuples(st.one_of(st.integers(0, 170), numbers), numbers), max_size=4)
anything = st.one_of(numbers, strange, biases.map(tuple), st.lists(numbers).map(tuple))
hostile = st.one_of(
    st.dictionaries(st.sampled_from(FIELDS), anything, min_size=1, max_size=4),
    st.fixed_dictionaries({"temperature": st.sampled_from([1, 0.5, 5e-324, 1e308])},
                          optional={name: numbers for name in FIELDS if name != "temperature"}),
    st.fixed_dictionaries({"logit_bias": biases.map(tuple)}),
)  # fmt: skip


@pytest.fixture(scope="module")
def bench(make_bench):
    return make_bench("llama", page_size=4, num_pages=256)


def run(engine, request):
    """Run all steps; return what each request got, or the error that ended it."""
    ended = {}
    for _ in range(200):
        if not engine.has_work:
            break
        for delta in engine.step():
            if delta.error is not None or delta.completion is not None:
                ended[delta.request.id] = delta.error or delta.completion
        if request.id in ended and len(ended) == 1:
            continue
    return ended


@pytest.fixture(scope="module")
def alone(bench, prompt):
    engine = Engine(bench.runner, bench.cache, limits=Limits(max_running=8))
    (alone,) = engine.generate([prompt(9, 1)], MATE)
    return alone


@given(asked=hostile)
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
def test_a_mate_gets_its_answer_whatever_is_asked_beside_it(bench, prompt, alone, asked):
    limits = Limits(max_running=8)
    engine = Engine(bench.runner, bench.cache, limits=limits)
    mate = engine.add(prompt(9, 1), MATE)
    with contextlib.suppress(InvalidValue):
        params = SamplingParams(**{"max_tokens": 4, **asked})
        engine.add(prompt(7, 2), params)
    ended = run(engine, mate)
    assert not any(isinstance(one, Exception) for one in ended.values()), "it was taken, and failed"
    assert ended[mate.id].tokens == alone.tokens
    assert engine.stats().failed == 0
    for request in list(engine._scheduler.requests.values()):
        engine.abort(request)
    assert bench.cache.stats().sequences == 0


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("value", [10**400, -(10**400), math.nan, math.inf, -math.inf])
def test_no_field_takes_what_no_tensor_holds(field, value):
    with pytest.raises(InvalidValue, match=field.removesuffix("s")):
        SamplingParams(**{field: value})
