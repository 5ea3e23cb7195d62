"""`stop_after`: answers that end with the same token, told apart by the last mark before it."""

from __future__ import annotations

import pytest

from kvkeep.core.returns import Ended, stop_after

THINK, CALL, CALLED, END, CALL_END = 900, 901, 902, 903, 904
NAMED = {THINK, CALL, CALLED, END, CALL_END}


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ([1, 2, END], "stop 903"),
        ([1, 2, CALL_END], "stop 904"),
        ([END], "stop 903"),
        ([1, CALL, 5, CALLED, END], "stop 903 after 902"),
        ([CALL, *range(50), END], "stop 903 after 901"),
        ([THINK, *range(50), CALL, 7, CALLED, END], "stop 903 after 902"),
        ([3, THINK, *range(50), END], "stop 903 after 900"),
        ([CALL, *[1] * 9000, END], "stop 903"),
    ],
)
def test_ends(answer: list[int], expected: str) -> None:
    assert stop_after(answer, NAMED) == expected
    assert stop_after(answer, ()) == f"stop {answer[-1]}"


def test_it_is_a_stop_for_any_tokens() -> None:
    assert Ended(stop_after([2**31 - 1, 2**31 - 2], {2**31 - 1})).stop is not None
