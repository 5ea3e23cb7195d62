"""Which tokens many answers begin with, beside exact counts."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from kvkeep.core.returns import FirstTokens


@given(
    st.lists(st.one_of(st.integers(0, 3), st.integers(0, 40), st.integers(0, 10**6)), max_size=500)
)
def test_common_ones_are_found_and_rare_ones_are_not(tokens: list[int]) -> None:
    seen = FirstTokens()
    for token in tokens:
        seen.add("a", token)
    for token, count in Counter(tokens).items():
        common = seen.kind("a", "stop", token) == f"stop, from {token}"
        if count < max(4, len(tokens) / 8):
            assert not common
        if count >= max(4, len(tokens) / 8) + len(tokens) / 17:
            assert common
    assert seen.kind("a", None, None) is None
    assert seen.kind("b", "stop", tokens[0] if tokens else 0) == "stop"


def test_a_token_that_is_used_no_more_is_forgotten() -> None:
    seen = FirstTokens()
    for token in [7] * 1000 + [8] * 3000:
        seen.add("a", token)
    assert seen.kind("a", "stop", 7) == "stop"
    assert seen.kind("a", "stop", 8) != "stop"


def test_memory_is_bounded() -> None:
    seen = FirstTokens()
    for number in range(5000):
        seen.add(number, number)
        seen.add("busy", number)
    assert len(seen._tenants) == len(seen._seen) == 1024
    assert all(len(counts) <= 16 for counts in seen._tenants.values())
