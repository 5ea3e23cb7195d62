"""Beam search gives token for token what Transformers' ``generate(num_beams=…)`` gives."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from kvkeep.core.errors import InvalidValue
from kvkeep.serve.engine.beams import BeamSearch, Pick
from kvkeep.serve.engine.params import SamplingParams

NOTHING = -torch.inf


def search(params, end_tokens=(), *, prompt=3, longest=512, has_stop=None):
    return BeamSearch(SamplingParams(**params), end_tokens, prompt, longest, has_stop=has_stop)


def play(beams, next_logits):
    """Run a search; ``next_logits(answers)`` gives a row for each. Returns the live answers."""
    picks = beams.start(next_logits([[]])[0])
    answers = [[pick.token] for pick in picks]
    while not beams.done:
        picks = beams.advance(next_logits(answers))
        answers = [[*answers[pick.parent], pick.token] for pick in picks]
    return answers


def of_model(model, prompt):
    def next_logits(answers):
        rows = torch.tensor([prompt + answer for answer in answers])
        with torch.inference_mode():
            return model(input_ids=rows, use_cache=False).logits[:, -1]

    return next_logits


def logs(*chances):
    return torch.tensor(chances).log()


# --- against Transformers --------------------------------------------------------------------


def assert_like_transformers(model, prompt, end_tokens, *, new=20, **params):
    n = params.get("n", 1)
    wanted = model.generate(
        torch.tensor([prompt]),
        max_new_tokens=new,
        num_beams=params["beams"],
        do_sample=False,
        early_stopping=False,
        length_penalty=params.get("length_penalty", 1.0),
        num_return_sequences=n,
        eos_token_id=list(end_tokens) or None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    beams = search({**params, "max_tokens": new}, end_tokens, prompt=len(prompt))
    play(beams, of_model(model, prompt))
    found = beams.finish()
    assert len(found) == n
    for row, score, one in zip(wanted.sequences, wanted.sequences_scores, found, strict=True):
        answer = row[len(prompt) :].tolist()
        length = len(one.tokens)
        assert list(one.tokens) == answer[:length]
        assert length == new or len(set(answer[length:])) <= 1  # padding
        assert one.score == pytest.approx(float(score), rel=1e-5)
        ended = one.tokens[-1] in end_tokens
        assert one.finish_reason == ("stop" if ended else "length")
    return found


@pytest.mark.model
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("end_count", [0, 1, 3])
def test_every_token_is_that_of_transformers(make_model, prompt, family, end_count):
    """With end tokens that answers reach, and all options that rank answers."""
    model = make_model(family)
    ended = set()
    for seed in range(2):
        tokens = prompt(12, seed).tolist()
        greedy = model.generate(
            torch.tensor([tokens]), max_new_tokens=16, do_sample=False, pad_token_id=0
        )[0, 12:].tolist()
        end_tokens = list(dict.fromkeys(greedy[5:]))[:end_count]
        for (beams, n), penalty in itertools.product(((2, 1), (4, 3)), (0.0, 1.0, 2.5, -1.0)):
            found = assert_like_transformers(
                model, tokens, end_tokens, beams=beams, n=n, length_penalty=penalty
            )
            ended |= {one.finish_reason for one in found}
    assert ended == ({"length"} if end_count == 0 else {"stop", "length"})


@pytest.mark.model
@pytest.mark.parametrize("new", [1, 2])
def test_the_shortest_answers_are_those_of_transformers(make_model, prompt, new):
    model = make_model("llama")
    tokens = prompt(7, 1).tolist()
    assert_like_transformers(model, tokens, [5, 9], new=new, beams=5, n=5)


@pytest.mark.model
def test_ignore_eos_is_a_search_without_end_tokens(make_model, prompt):
    model = make_model("llama")
    tokens = prompt(9, 2).tolist()
    plain, ignoring, heeding = (
        search({"beams": 3, "max_tokens": 8, "ignore_eos": ignore}, ends)
        for ignore, ends in ((False, ()), (True, range(80)), (False, range(80)))
    )
    for one in (plain, ignoring, heeding):
        play(one, of_model(model, tokens))
    assert ignoring.finish() == plain.finish()
    assert heeding.finish() != plain.finish()


# --- by hand ---------------------------------------------------------------------------------


def test_it_finds_what_greedy_misses():
    """0 is likelier first, but what follows 1 is certain."""

    def next_logits(answers):
        after = {(): logs(0.6, 0.4), (0,): logs(0.5, 0.5), (1,): logs(0.0, 1.0)}
        return torch.stack([after[tuple(answer)] for answer in answers])

    beams = search({"beams": 2, "n": 2, "max_tokens": 2, "length_penalty": 0.0})
    play(beams, next_logits)
    best, second = beams.finish()
    assert best.tokens == (1, 1)
    assert best.score == pytest.approx(math.log(0.4))
    assert second.tokens == (0, 0)
    assert second.score == pytest.approx(math.log(0.3))


def test_picks_name_parents_and_sums():
    beams = search({"beams": 2})
    first = beams.start(logs(0.1, 0.6, 0.3))
    assert first == [
        Pick(0, 1, pytest.approx(math.log(0.6))),
        Pick(0, 2, pytest.approx(math.log(0.3))),
    ]
    second = beams.advance(torch.stack((logs(0.2, 0.3, 0.5), logs(0.0, 0.95, 0.05))))
    assert [(pick.parent, pick.token) for pick in second] == [(0, 2), (1, 1)]
    assert second[1].score == pytest.approx(math.log(0.3 * 0.95))


@pytest.mark.parametrize(("chance", "kept"), [(0.15, False), (0.35, True)])
def test_an_end_that_is_not_among_the_best_is_not_kept(chance, kept):
    """As in Transformers: of four continuations considered, the end token is third, or second."""
    beams = search({"beams": 2, "n": 2, "length_penalty": -10}, end_tokens=[2])
    picks = beams.start(logs(0.5, 0.25, chance, 0.1))
    assert [pick.token for pick in picks] == [0, 1]
    beams.advance(torch.tensor([[9.0, 0, 0, 0], [0, 9.0, 0, 0]]))
    assert any(one.tokens == (2,) for one in beams.finish()) == kept


@pytest.mark.parametrize(("penalty", "wanted"), [(0.0, 1), (4.0, 6)])
def test_a_length_penalty_prefers_long_answers(penalty, wanted):
    """The end token is never the likeliest, but an immediate end is the likeliest answer."""
    beams = search({"beams": 2, "max_tokens": 6, "length_penalty": penalty}, end_tokens=[0])
    play(beams, lambda answers: logs(0.3, 0.45, 0.25).expand(len(answers), -1))
    (best,) = beams.finish()
    assert len(best.tokens) == wanted


def test_stop_texts_end_an_answer():
    seen = []

    def ends(tokens):
        seen.append(tokens)
        return tokens[-2:] == [1, 1]

    beams = search({"beams": 2, "n": 2, "max_tokens": 9, "length_penalty": 0.0}, [0], has_stop=ends)
    live = play(beams, lambda answers: logs(0.0, 0.8, 0.2).expand(len(answers), -1))
    assert live == []
    best, second = beams.finish()
    assert (best.tokens, best.finish_reason) == ((1, 1), "stop")
    assert (second.tokens, second.finish_reason) == ((2, 1, 1), "stop")
    assert not any(tokens[-1] == 0 for tokens in seen), "the end token ends without being asked"


def test_when_everything_ends_the_search_is_done():
    beams = search({"beams": 3, "n": 3}, has_stop=lambda tokens: True)
    assert beams.start(torch.zeros(10)) == []
    assert beams.done
    assert [one.tokens for one in beams.finish()] == [(0,), (1,), (2,)]


def test_the_longest_sequence_ends_it():
    """The prompt has 3 tokens and the pool holds 5."""
    beams = search({"beams": 2, "max_tokens": 100}, longest=5)
    play(beams, lambda answers: torch.zeros(len(answers), 9))
    assert [(len(one.tokens), one.finish_reason) for one in beams.finish()] == [(2, "length")]


def test_a_search_that_cannot_go_on_gives_what_it_has():
    beams = search({"beams": 2, "n": 2, "length_penalty": 0.0}, end_tokens=[0])
    assert search({"beams": 2}).finish() == []
    beams.start(logs(0.3, 0.45, 0.15, 0.1))  # the end token is second
    first, second = beams.finish()
    assert (first.tokens, first.finish_reason) == ((1,), "length")
    assert (second.tokens, second.finish_reason) == ((0,), "stop")
    assert beams.done


def test_biases_are_part_of_the_model():
    beams = search({"beams": 2, "max_tokens": 3, "logit_bias": ((4, 100.0), (1, -100.0))})
    play(beams, lambda answers: torch.zeros(len(answers), 6))
    (best,) = beams.finish()
    assert best.tokens == (4, 4, 4)


def test_a_vocabulary_smaller_than_the_beams():
    beams = search({"beams": 5, "n": 5, "max_tokens": 1})
    assert beams.start(torch.zeros(3)) == []
    assert len(beams.finish()) == 3
    beams = search({"beams": 5, "n": 5, "max_tokens": 2})
    assert len(beams.start(torch.zeros(3))) == 3
    assert beams.advance(torch.zeros(3, 3)) == []
    assert len(beams.finish()) == 5


@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
def test_broken_logits_end(broken):
    beams = search({"beams": 2, "n": 2, "max_tokens": 5}, end_tokens=[1])
    play(beams, lambda answers: torch.full((len(answers), 7), broken))
    assert len(beams.finish()) == 2


@pytest.mark.parametrize("penalty", [-10.0, 10.0])
def test_extreme_penalties_stay_numbers(penalty):
    beams = search({"beams": 2, "n": 2, "max_tokens": 300, "length_penalty": penalty}, [3])
    noise = torch.manual_seed(0)
    play(beams, lambda answers: torch.randn(len(answers), 20, generator=noise))
    assert all(math.isfinite(one.score) for one in beams.finish())


def test_logits_stay_as_they_are():
    logits = torch.zeros(2, 9)
    beams = search({"beams": 2, "logit_bias": ((1, 5.0),)})
    beams.start(logits[0])
    beams.advance(logits)
    assert not logits.any()


def test_wrong_values_are_named():
    with pytest.raises(InvalidValue, match="beams of 1 or more"):
        search({})
    with pytest.raises(InvalidValue, match="no room for an answer"):
        search({"beams": 2}, prompt=9, longest=9)


def test_steps_out_of_order_are_refused():
    beams = search({"beams": 2, "max_tokens": 2})
    beams.start(torch.zeros(5))
    with pytest.raises(AssertionError, match="2 beams, 3 rows"):
        beams.advance(torch.zeros(3, 5))
    with pytest.raises(AssertionError, match="starts once"):
        beams.start(torch.zeros(5))
    beams.advance(torch.zeros(2, 5))
    with pytest.raises(AssertionError, match="is done"):
        beams.advance(torch.zeros(2, 5))
