"""The largest tenants alone: no token is lost or counted twice, whatever is asked for."""

from __future__ import annotations

from dataclasses import asdict

from hypothesis import given
from hypothesis import strategies as st

from kvkeep.observe.usage import TenantCounts, TenantReport
from kvkeep.observe.usage.shortened import shortened

COUNTS = st.builds(
    TenantCounts, requests=st.integers(0, 9), prompt_tokens=st.integers(0, 999),
    computed_tokens=st.integers(0, 999),
)  # fmt: skip


@st.composite
def reports(draw):
    names = draw(st.lists(st.text("aAbB-", max_size=3), unique=True, max_size=12))
    return [
        TenantReport(name, draw(COUNTS), draw(st.integers(0, 99)), float(draw(st.integers(0, 99))))
        for name in (*names, None)
    ]


def sums(lines):
    counts = TenantCounts()
    for line in lines:
        counts.add(line.counts)
    return (
        asdict(counts),
        sum(one.pool_tokens for one in lines),
        sum(one.tier_tokens for one in lines),
    )


@given(
    reports(), st.sampled_from(["prompt_tokens", "computed_tokens"]),
    st.sampled_from(["", "a", "B-"]), st.none() | st.integers(1, 14),
)  # fmt: skip
def test_rows_are_the_largest_that_are_found_and_the_last_has_the_rest(report, order, search, most):
    before = sums(report)
    rows, count = shortened(report, order=order, search=search, most=most)
    assert sums(rows) == before == sums(report)  # the report itself is as it was
    *shown, rest = rows
    assert rest.tenant is None
    found = [
        one for one in report if one.tenant is not None and search.lower() in one.tenant.lower()
    ]
    assert count == len(found)
    assert len(shown) == (count if most is None else min(most, count))
    values = [getattr(one.counts, order) for one in shown]
    assert (
        values == sorted((getattr(one.counts, order) for one in found), reverse=True)[: len(shown)]
    )
    assert all(one in found for one in shown)


def test_all_of_it_is_the_report_itself():
    report = [
        TenantReport("a", TenantCounts(requests=2, prompt_tokens=20), 4, 1.0),
        TenantReport("", TenantCounts(requests=1, prompt_tokens=10), 0, 0.0),
        TenantReport(None, TenantCounts(requests=7), 1, 2.0),
    ]
    assert shortened(report) == (report, 2)
