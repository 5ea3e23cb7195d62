"""What computing takes: the formula, the fit, and files that are none."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.core.cost import Measured, PrefillCost
from kvkeep.core.errors import InvalidValue

COST = PrefillCost(
    seconds_fixed=0.01,
    seconds_per_token=1e-4,
    seconds_per_token_pair=2e-9,
    decode_seconds_per_token=0.02,
    kv_bytes_per_token=2048,
    name="a model somewhere",
)
SECONDS = st.floats(0, 10, allow_subnormal=False)


def points(cost: PrefillCost, spans: list[tuple[int, int]]) -> list[Measured]:
    return [Measured(start, stop, cost.prefill_s(start, stop)) for start, stop in spans]


def test_each_token_costs_itself_and_those_before_it():
    cost = PrefillCost(seconds_fixed=0.5, seconds_per_token=1, seconds_per_token_pair=0.25)
    # Token n, counted from 0, meets n + 1/2 tokens before it: those, and half of itself.
    by_token = sum(1 + 0.25 * (at + 0.5) for at in range(10, 30))
    assert cost.prefill_s(10, 30) == pytest.approx(0.5 + by_token)
    assert cost.prefill_s(30, 30) == cost.prefill_s(31, 30) == 0
    assert COST.decode_s(11) == pytest.approx(0.2)
    assert COST.decode_s(1) == COST.decode_s(0) == 0


@given(SECONDS, st.floats(1e-6, 1e-2), st.floats(0, 1e-5, allow_subnormal=False))
def test_what_is_exact_is_found_again(fixed, linear, pair):
    cost = PrefillCost(
        seconds_fixed=fixed, seconds_per_token=linear, seconds_per_token_pair=pair, name="x"
    )
    spans = [(0, 64), (0, 512), (0, 4096), (2048, 4096), (4000, 4096), (100, 101)]
    fit = PrefillCost.fit(points(cost, spans), name="x")
    assert fit.largest_error < 1e-6
    for start, stop in [(0, 200), (1000, 1500)]:
        assert fit.cost.prefill_s(start, stop) == pytest.approx(cost.prefill_s(start, stop), 1e-4)
    assert fit.cost.name == "x"


@given(
    st.lists(
        st.tuples(st.integers(0, 4000), st.integers(1, 4000), st.floats(1e-4, 10)),
        min_size=1,
        max_size=8,
    )
)
def test_no_coefficient_is_below_0_and_none_fits_better_nearby(measured):
    fit = PrefillCost.fit([Measured(at, at + more, seconds) for at, more, seconds in measured])
    found = np.array(
        [fit.cost.seconds_fixed, fit.cost.seconds_per_token, fit.cost.seconds_per_token_pair]
    )
    assert (found >= 0).all()
    starts, lengths, seconds = np.array(measured).T
    stops = starts + lengths
    terms = np.stack((np.ones(len(seconds)), lengths, (stops**2 - starts**2) / 2), 1)
    terms /= seconds[:, None]

    def missed(coefficients: np.ndarray) -> float:
        return float(((terms @ coefficients - 1) ** 2).sum())

    least = missed(found)
    assert least == pytest.approx(sum(error**2 for error in fit.errors), abs=1e-9)
    for at, step in enumerate(1 / np.abs(terms).max(0)):
        for share in (1e-3, 1e-2, 0.1):
            for sign in (-1, 1):
                other = found.copy()
                other[at] = max(0.0, other[at] + sign * share * step)
                assert missed(other) >= least - 1e-6


def test_a_slope_that_would_go_down_is_flat():
    fit = PrefillCost.fit([Measured(0, 100, 2.0), Measured(0, 200, 1.0)])
    assert fit.cost.seconds_fixed == pytest.approx(1.2)  # 40 % below one, 20 % above the other
    assert fit.cost.seconds_per_token == fit.cost.seconds_per_token_pair == 0
    assert (fit.median_error, fit.largest_error) == pytest.approx((0.3, 0.4))


@pytest.mark.parametrize(
    "bad",
    [[], [Measured(0, 0, 1.0)], [Measured(3, 2, 1.0)], [Measured(0, 2, 0.0)],
     [Measured(-1, 2, 1.0)], [Measured(0, 2, float("nan"))], [Measured(0, 2, float("inf"))]],
)  # fmt: skip
def test_what_was_not_measured_is_not_fitted(bad):
    with pytest.raises(InvalidValue):
        PrefillCost.fit(bad)


def test_a_file_holds_it(tmp_path):
    path = tmp_path / "cost.json"
    COST.write(path, measured=[[0, 512, 0.25]])
    assert PrefillCost.read(path) == COST
    assert json.loads(path.read_text())["measured"] == [[0, 512, 0.25]]
    whole = PrefillCost(seconds_per_token=1)  # a person may write it, and leaves out the rest
    assert PrefillCost.of({"kvkeep_cost": 1, "seconds_per_token": 1}) == whole


GOOD = '{"kvkeep_cost": 1, "seconds_per_token": %s}'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "not JSON"),
        ("\xff\xfe", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "an object"),
        ("{}", "kvkeep_cost is missing"),
        ('{"kvkeep_cost": true, "seconds_per_token": 1}', "kvkeep_cost is True"),
        ('{"kvkeep_cost": 2, "seconds_per_token": 1}', "kvkeep_cost is 2"),
        ('{"kvkeep_cost": 1}', "seconds_per_token is missing"),
        (GOOD % "NaN", "seconds_per_token is nan"),
        (GOOD % "Infinity", "seconds_per_token is inf"),
        (GOOD % "1e999", "seconds_per_token is inf"),
        (GOOD % ("1" + "0" * 400), "0 … 1e+12"),
        (GOOD % ("1" * 5000), "not JSON"),
        (GOOD % "-0.1", "seconds_per_token is -0.1"),
        (GOOD % "true", "a number is needed"),
        (GOOD % "null", "a number is needed"),
        (GOOD % '"1"', "a number is needed"),
        (GOOD % '[1], "name": "x"', "a number is needed"),
        (GOOD % ('1, "name": "' + "x" * 513 + '"'), "at most 512 characters"),
        (GOOD % '1, "name": 7', "name is text"),
        (GOOD % ("1" + " " * (1 << 20)), "more than 1,048,576 bytes"),
    ],
)
def test_files_that_are_none_say_why(text, said, tmp_path):
    path = tmp_path / "cost.json"
    path.write_text(text, encoding="latin-1" if "\xff" in text else "utf-8")
    with pytest.raises(InvalidValue) as error:
        PrefillCost.read(path)
    assert said in str(error.value)
    assert "cost.json" in str(error.value)
    assert len(str(error.value)) < 400


def test_files_that_are_not_there(tmp_path):
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(InvalidValue, match="cannot read"):
            PrefillCost.read(path)
    with pytest.raises(InvalidValue, match="cannot write"):
        COST.write(tmp_path / "no folder" / "cost.json")
