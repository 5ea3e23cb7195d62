"""Which tokens of answers are worth keeping, learned from where next prompts differ."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvkeep.core.returns import AnswerShares


def taught(*answers: tuple[str, int, int], tenant: str = "a", times: int = 30) -> AnswerShares:
    shares = AnswerShares()
    for _ in range(times):
        for stop, tokens, again in answers:
            shares.returned(tenant, stop, tokens, again)
    return shares


def test_everything_is_kept_until_something_is_known() -> None:
    shares = AnswerShares()
    assert shares.kept("a", "stop", 500) == 500
    shares.returned("a", "stop", 500, 0)
    assert shares.kept("a", "stop", 500) == 500  # one answer is not enough
    assert shares.kept("a", "stop", 0) == 0


def test_answers_that_no_prompt_contains_are_not_kept() -> None:
    shares = taught(("stop", 500, 0))
    assert shares.kept("a", "stop", 500) == 0
    assert shares.kept("a", "stop", 40) == 0  # the tenant's other answers were not, either
    assert shares.kept("b", "stop", 500) == 500  # nothing is known of other tenants


def test_how_an_answer_ended_and_how_long_it_is_tell_them_apart() -> None:
    shares = taught(("stop", 2000, 0), ("tool_use", 2000, 2000), ("stop", 20, 20))
    assert shares.kept("a", "stop", 2000) == 0
    assert shares.kept("a", "tool_use", 2000) == 2000
    assert shares.kept("a", "stop", 20) == 20


def test_the_beginning_of_an_answer_is_kept_up_to_where_prompts_differ() -> None:
    shares = taught(("stop", 3000, 150))
    assert shares.kept("a", "stop", 3000) == 256


def test_a_share_that_is_worth_its_bytes_is_kept() -> None:
    shares = taught(("stop", 800, 800), ("stop", 800, 0), ("stop", 800, 0))
    assert shares.kept("a", "stop", 800) == 800


def test_a_change_is_noticed() -> None:
    shares = taught(("stop", 800, 0), times=1000)
    assert shares.kept("a", "stop", 800) == 0
    for _ in range(40):
        shares.returned("a", "stop", 800, 800)
    assert shares.kept("a", "stop", 800) == 800


def test_memory_is_bounded() -> None:
    shares = AnswerShares()
    for number in range(3000):
        shares.returned(number, "stop", 100, 0)
        shares.returned(1 << 40, f"hostile {number}", number + 1, 0)
    assert len(shares._tenants) <= 1024
    assert all(len(classes) <= 64 for classes in shares._tenants.values())


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["a", "b"]),
            st.sampled_from([None, "stop", "tool_use"]),
            st.integers(0, 5000),
            st.floats(0, 1),
        ),
        max_size=60,
    ),
    st.integers(0, 10**6),
)
def test_any_history_keeps_a_beginning(
    history: list[tuple[str, str | None, int, float]], tokens: int
) -> None:
    shares = AnswerShares()
    for tenant, stop, length, share in history:
        shares.returned(tenant, stop, length, int(share * length))
    for stop in (None, "stop", "new"):
        assert 0 <= shares.kept("a", stop, tokens) <= tokens
    # A tenant whose answers were all read keeps all of each.
    if all(int(share * length) == length for name, _, length, share in history if name == "b"):
        assert shares.kept("b", "stop", tokens) == tokens
