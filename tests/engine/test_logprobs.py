"""Log probabilities are those of the model's own distribution, before temperature and penalties."""

from __future__ import annotations

import math

import pytest
import torch

from kvkeep.serve.engine.sampling import TokenLogprob, logprobs_of

LOGITS = torch.tensor([[1.0, 3.0, 0.0, 3.0, -1.0], [0.0, 1.0, 2.0, 3.0, 4.0]])


def test_they_are_natural_and_of_the_row():
    for row, found in enumerate(logprobs_of(LOGITS, [2, 4], [0, 0])):
        token = (2, 4)[row]
        logits = LOGITS[row].tolist()
        expected = logits[token] - math.log(sum(map(math.exp, logits)))
        assert found == TokenLogprob(token, pytest.approx(expected, abs=1e-6), ())


def test_the_likeliest_come_first_and_equals_by_id():
    first, second = logprobs_of(LOGITS, [0, 0], [3, 5])
    assert [token for token, _ in first.top] == [1, 3, 0]
    assert [token for token, _ in second.top] == [4, 3, 2, 1, 0]
    assert dict(first.top)[0] == first.logprob
    assert sum(math.exp(value) for _, value in second.top) == pytest.approx(1)


def test_rows_ask_for_different_numbers_and_for_nothing():
    found = logprobs_of(LOGITS.repeat(2, 1), [1, 2, 3, 4], [None, 2, 0, None])
    assert [one if one is None else len(one.top) for one in found] == [None, 2, 0, None]
    assert [one.token for one in found if one] == [2, 3]


def test_nobody_asks():
    assert logprobs_of(LOGITS, [1, 2], [None, None]) == [None, None]
    assert logprobs_of(torch.empty(0, 5), [], []) == []


def test_more_than_the_vocabulary_is_all_of_it():
    (found,) = logprobs_of(LOGITS[:1], [1], [20])
    assert len(found.top) == 5


def test_half_precision_is_summed_in_full():
    """In bfloat16, a sum of 40,000 equal probabilities would stop at 32,768."""
    logits = torch.zeros(1, 40_000, dtype=torch.bfloat16)
    (found,) = logprobs_of(logits, [7], [2])
    assert found.logprob == pytest.approx(-math.log(40_000), abs=1e-4)
    assert [token for token, _ in found.top] == [0, 1]
    assert logits.dtype == torch.bfloat16


def test_against_a_sort():
    logits = torch.randn(6, 3000, generator=torch.manual_seed(0)).bfloat16()  # many are equal
    tops = [0, 1, 5, 20, 100, 100]
    tokens = [0, 1000, 2000, 1, 2, 3]
    expected = logits.float().log_softmax(-1)
    for row, found in enumerate(logprobs_of(logits, tokens, tops)):
        values, ids = expected[row].sort(descending=True, stable=True)
        assert [token for token, _ in found.top] == ids[: tops[row]].tolist()
        assert [value for _, value in found.top] == values[: tops[row]].tolist()
        assert found.logprob == expected[row, tokens[row]]


def test_broken_logits_do_no_harm_to_others():
    logits = torch.stack((torch.full((5,), torch.nan), LOGITS[0]))
    broken, whole = logprobs_of(logits, [0, 1], [2, 2])
    assert math.isnan(broken.logprob)
    assert whole == logprobs_of(LOGITS[:1], [1], [2])[0]
