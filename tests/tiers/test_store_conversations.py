"""Which prompts are returns of which conversations, beside a definition over whole token rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvkeep.core.keys import chain_keys
from kvkeep.core.returns import Answers, Ended
from kvkeep.core.tokens import TOKEN_BYTES
from kvkeep.store.tiers import Chain
from kvkeep.store.tiers.conversations import Conversations

SIZE, SLACK = 4, 5
ROOT = bytes(48)


def chain(tokens: list[int], *, rows: bool = True) -> Chain:
    row = np.array(tokens, np.int32)
    keys = chain_keys(bytes(32), row.tobytes(), SIZE * TOKEN_BYTES)
    return Chain(ROOT, keys, SIZE, len(row), row if rows else None)


def same(one: list[int], other: list[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


class NotedAnswers(Answers):
    """Answers of tenant "a" that write down what they learn."""

    def __init__(self, learned: list[tuple[Any, ...]]) -> None:
        super().__init__()
        self.learned = learned

    def returned(self, kind: tuple[str | None, int | None], tokens: int, again: int) -> None:
        self.learned.append(("a", kind[0], tokens, again))
        super().returned(kind, tokens, again)


class Told(Conversations):
    """Conversations that write down what they learn."""

    def __init__(self, clock: Any) -> None:
        super().__init__((), clock)
        self.learned: list[tuple[Any, ...]] = []
        self.returns.tenant("a").answers = NotedAnswers(self.learned)


@dataclass
class Known:
    """A conversation of the model; ``over`` once its next prompt has come."""

    prompt: list[int]
    tokens: list[int]
    number: int
    gaps: list[float] = field(default_factory=list)
    since: float = 0.0
    over: bool = False

    @property
    def place(self) -> list[int]:
        return self.prompt[: max(0, len(self.prompt) - SLACK)]


class Machine(RuleBasedStateMachine):
    """A prompt is the return of the conversation with the longest place that it begins with."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.real = Told(lambda: self.now)
        self.model: list[Known] = []
        self.learned: list[tuple[Any, ...]] = []
        self.count = 0

    def find(self, tokens: list[int]) -> Known | None:
        begun = [one for one in self.model if same(one.place, tokens) == len(one.place)]
        longest = max((len(one.place) for one in begun), default=0)
        begun = [one for one in begun if len(one.place) == longest]
        if not begun:
            return None
        most = max(same(one.tokens, tokens) for one in begun)
        best = [one for one in begun if same(one.tokens, tokens) == most][-1]
        if len(tokens) <= len(best.prompt) or most == len(tokens):
            return None
        return None if len(begun) > 1 and most < len(best.prompt) else best

    def end(self, one: Known, tokens: list[int]) -> None:
        if one.over:
            return
        one.over = True
        one.gaps.append(self.now - one.since)
        answer = len(one.tokens) - len(one.prompt)
        again = max(0, same(one.tokens, tokens) - len(one.prompt))
        self.learned.append(("a", f"end {one.number % 3}", answer, min(again, answer)))

    @rule(seconds=st.floats(0.1, 100.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(data=st.data(), ends=st.booleans())
    def request(self, data: st.DataObject, ends: bool) -> None:
        pieces = st.lists(st.integers(1, 2), max_size=9)
        before: list[int] = []
        if self.model:
            before = data.draw(st.sampled_from(self.model)).tokens
            before = before[: data.draw(st.integers(0, len(before)))]
        prompt = before + data.draw(pieces)
        found = self.find(prompt)
        if found is not None:
            self.end(found, prompt)
        self.real.requested(chain(prompt))
        if not ends or not prompt:
            return
        tokens = prompt + data.draw(pieces)
        found = self.find(prompt)
        if found is not None:
            self.end(found, tokens)
            self.model.remove(found)
        new = Known(prompt, tokens, self.count, [*found.gaps[-5:]] if found else [], self.now)
        ended = Ended(f"end {self.count % 3}")
        self.count += 1
        self.model.append(new)
        if len([one for one in self.model if one.place == new.place]) > 16:
            self.model.remove(next(one for one in self.model if one.place == new.place))
        wait = self.real.ended(chain(tokens), len(prompt), ended, "a")
        assert [*wait.gaps] == new.gaps[-5:]

    @rule()
    def clear(self) -> None:
        if len(self.model) > 12:
            self.real.clear("b")
            assert len(self.real) == len(self.model)
            self.real.clear("a")
            self.model.clear()

    @invariant()
    def knows_the_same(self) -> None:
        self.real.check()
        assert len(self.real) == len(self.model)
        assert self.real.learned == self.learned


TestConversations = Machine.TestCase
TestConversations.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def talks() -> Told:
    return Told(lambda: 0.0)


def test_parts_of_a_conversation_are_not_its_return() -> None:
    one, tokens = talks(), [*range(1, 41)]
    one.ended(chain(tokens), 20, Ended(), "a")
    for length in (3, 16, 20, 30, 40):  # as engines store it, block by block
        assert one.requested(chain(tokens[:length])) == ()
    assert not one.learned
    one.requested(chain([*tokens, 7]))
    assert one.learned == [("a", None, 20, 20)]


def test_a_prompt_may_differ_in_its_last_tokens() -> None:
    """Chat templates end a prompt with tokens that the next one lacks, as "<think>"."""
    one, prompt = talks(), [*range(1, 21)]
    one.ended(chain([*prompt, *range(50, 90)]), 20, Ended(), "a")
    left = one.requested(chain([*prompt[:-3], 70, 71, 72, *range(200, 230)]))
    assert one.learned == [("a", None, 40, 0)]
    assert len(left) == 11  # all blocks from the first that differs on


def test_questions_behind_the_same_instructions_are_told_apart() -> None:
    one, system = talks(), [*range(1, 33)]
    for question in (100, 200, 300):
        prompt = [*system, question, question + 1, 91, 92, 93, 94, 95]
        one.ended(chain([*prompt, question + 5]), len(prompt), Ended(str(question)), "a")
    one.requested(chain([*system, 200, 201, 91, 92, 93, 94, 95, 205, 91]))
    assert one.learned == [("a", "200", 1, 1)]
    one.requested(chain([*system, 400, 401, 91, 92, 93, 94, 95, 405, 91]))
    assert len(one.learned) == 1  # a new conversation


def test_without_tokens_whole_blocks_are_compared() -> None:
    one, prompt = talks(), [*range(1, 19)]
    answer = [*range(50, 62)]
    one.ended(chain([*prompt, *answer], rows=False), 18, Ended(), "a")
    one.requested(chain([*prompt, *answer[:8], 99, *range(100, 110)], rows=False))
    assert one.learned == [("a", None, 12, 6)]  # up to the end of the last whole block


def test_without_tokens_a_common_place_says_nothing() -> None:
    one, system = talks(), [*range(1, 17)]
    for at in range(6):
        one.requested(chain([*system, 100 + at, *range(60)], rows=False))
        one.ended(chain([*system, 100 + at, *range(60)], rows=False), 17, Ended(), "a")
    assert len(one.learned) == 1  # until a second conversation waited there
    one.requested(chain([*system, 105, *range(60), 3], rows=False))
    assert one.learned[1:] == [("a", None, 60, 60)]


def test_long_answers_are_compared_by_blocks_behind_their_first_tokens() -> None:
    one, prompt, answer = talks(), [*range(1, 9)], [*range(10, 3010)]
    one.ended(chain([*prompt, *answer]), 8, Ended(), "a")
    one.requested(chain([*prompt, *answer[:2001], 5, 5, 5, 5, 5]))
    assert one.learned == [("a", None, 3000, 2000)]
    one.ended(chain([*prompt, *answer]), 8, Ended(), "a")
    one.requested(chain([*prompt, *answer, 5]))
    assert one.learned[1:] == [("a", None, 3000, 3000)]


def test_removed_prompts_are_forgotten() -> None:
    one = talks()
    tokens = [*range(1, 30)]
    one.ended(chain(tokens), 20, Ended(), "a")
    one.forget(chain(tokens), 28)
    assert len(one) == 1
    one.forget(chain(tokens), 4)
    assert not len(one)
    one.check()
