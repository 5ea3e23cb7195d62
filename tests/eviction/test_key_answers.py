"""What prompts repeat of answers that are evicted already."""

from __future__ import annotations

import random

import numpy as np

from kvkeep import PagedCache
from kvkeep.core.eviction import Adaptive
from kvkeep.core.eviction.key_answers import KeyAnswers
from kvkeep.core.returns import Ended, Returns, Wait


def keys(text: str) -> list[bytes]:
    return [text[: end + 1].encode() for end in range(len(text))]


class Told:
    """Answers of eight blocks of ten tokens, behind prompts of two blocks."""

    def __init__(self) -> None:
        self.returns, self.answers = Returns(), KeyAnswers()

    def wait(self, *, evicted: bool = True) -> Wait:
        wait = self.returns.began(Ended("end"), 80, 0.0)
        wait.prompt, wait.answer, wait.answer_kind, wait.evicted = 20, 80, "end", evicted
        self.answers.ended(wait, keys("ppabcdefgh")[2:], 2)
        return wait

    def kept(self, prompt: str, count: int = 30, *, evicted: bool = True) -> int:
        """Return what is kept of such an answer after so many that were followed by ``prompt``."""
        for _ in range(count):
            self.answers.returned(self.wait(evicted=evicted), keys(prompt), self.returns)
        assert not len(self.answers)
        return self.returns.answers.kept(None, "end", 80)


def test_an_answer_that_no_prompt_contains_is_not_kept() -> None:
    assert Told().kept("ppnew prompt") < 20


def test_an_answer_that_is_read_is_kept() -> None:
    assert Told().kept("ppabcdefgh and more") == 80


def test_the_front_that_is_read_is_kept() -> None:
    assert 16 <= Told().kept("ppabcd, and another end") < 80


def test_what_says_nothing_teaches_nothing() -> None:
    """A prompt that ends within the answer, and a difference in its last block."""
    assert Told().kept("ppabc") == 80
    assert Told().kept("ppabcdefgX") == 80
    assert Told().kept("p") == 80


def test_of_a_long_answer_the_front_is_compared() -> None:
    """Of 40 blocks, 16 keys are kept: a prompt that has these may contain the rest."""
    told = Told()
    text = "pp" + "".join(chr(200 + at) for at in range(40))

    def wait() -> Wait:
        wait = told.returns.began(Ended("end"), 4000, 0.0)
        wait.prompt, wait.answer, wait.answer_kind, wait.evicted = 20, 4000, "end", True
        told.answers.ended(wait, keys(text)[2:], 2)
        return wait

    for _ in range(30):
        told.answers.returned(wait(), keys(text), told.returns)
    assert told.returns.answers.kept(None, "end", 4000) == 4000
    for _ in range(200):
        told.answers.returned(wait(), keys("pp another"), told.returns)
    assert told.returns.answers.kept(None, "end", 4000) < 500


def test_as_many_answers_are_kept_as_a_memory_has_blocks() -> None:
    answers, returns = KeyAnswers(8), Returns()
    for _ in range(20):
        answers.ended(returns.began(Ended("end"), 80, 0.0), keys("ppabcdefgh")[2:], 2)
    assert len(answers) == 8


def test_what_is_cached_is_told_by_its_tokens() -> None:
    assert Told().kept("ppnew prompt", evicted=False) == 80


def test_a_short_answer_and_an_unknown_one_are_left_out() -> None:
    told = Told()
    wait = told.returns.began(Ended("end"), 80, 0.0)
    told.answers.ended(wait, keys("ppabc")[2:], 2)
    assert not len(told.answers)
    wait.evicted = True
    told.answers.returned(wait, keys("ppnew"), told.returns)


def test_adaptive_learns_of_answers_while_it_evicts_them_early() -> None:
    """Long answers that no prompt contains, in a memory where they are evicted before it comes."""
    policy = Adaptive()
    cache = PagedCache(80, 2, eviction=policy, block_pages=1, clock=lambda: now)
    returns = policy._returns
    assert returns is not None
    chance, now = random.Random(1), 0.0
    talks = [[100 + talk, 200 + talk, 300 + talk] for talk in range(6)]
    learned = False
    for number in range(400):
        now += 1.0
        talk = talks[number % 6]
        with_end = np.array([*np.repeat(talk, 2), 9], np.int32)
        sequence = cache.open(with_end)
        sequence.copies()
        sequence.publish(2 * len(talk))
        sequence.truncate(2 * len(talk))
        answer = [1000 + 20 * number + at for at in range(12)]
        sequence.append(np.array([*np.repeat(answer, 2), 9], np.int32))
        sequence.copies()
        sequence.publish(2 * len(talk) + 24)
        sequence.close(ended=Ended("end"))
        talk.append(50_000 + number)
        if len(talk) > 12:
            del talk[3:]
            talk.append(60_000 + chance.randrange(1000))
        kept = returns.returns.answers.kept(sequence.namespace, "end", 24)
        learned |= kept < 12
    assert learned
    cache.check()
