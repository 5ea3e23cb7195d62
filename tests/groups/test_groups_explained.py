"""Why tokens whose KV is cached are computed: no state is stored there, or a window is gone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from symbolic import BOTH, GRID, STATE, WINDOW, SymbolicEngine, prompt

from kvkeep.core.keys import as_namespace
from kvkeep.observe.explain import Explainer, Explanation

if TYPE_CHECKING:
    from kvkeep.core.groups import GroupLayout


class Explained:
    """A cache with groups and its explainer; requests are computed with tags for memory."""

    def __init__(self, pages: int, layout: GroupLayout, **options: Any) -> None:
        self.now = 1000.0
        self.engine = SymbolicEngine(pages, layout, **options)
        self.cache = self.engine.cache
        self.explainer = Explainer(
            layout.page_size, groups=self.cache.groups, clock=lambda: self.now
        )
        self.requests = 0

    def run(self, tokens: list[int]) -> Explanation:
        """A whole request; its explanation, which must agree with the cache."""
        self.requests += 1
        name = f"r{self.requests}"
        sequence = self.cache.open(tokens)
        self.explainer.opened(
            name,
            sequence.tokens,
            as_namespace(""),
            sequence.miss,
            sequence=sequence.id,
        )
        self.engine.finish(sequence)
        sequence.close()
        self.explainer.ended(name, outcome="done", generated=0, ttft_s=None, seconds=0.1)
        found = self.explainer.explain(name)
        assert found is not None
        assert self.explainer.failed == 0
        assert found.reused.get("pool", 0) == sequence.num_cached
        return found

    def asked(self, tokens: list[int]) -> Explanation:
        """The explanation of a prompt that is not run."""
        return self.explainer.prompt(tokens, as_namespace(""), self.cache.match(tokens[:-1]).miss)


def unresumed(found: Explanation) -> tuple[int, int, dict[str, Any]]:
    (span,) = [span for span in found.spans if span.reason == "not_resumable"]
    return span.start, span.stop, dict(span.evidence)


@pytest.mark.parametrize("layout", [STATE, BOTH], ids=["state", "state and window"])
@pytest.mark.parametrize("prefix", ["radix", "chain"])
def test_no_state_was_ever_kept_there(layout: GroupLayout, prefix: str) -> None:
    served = Explained(900, layout, prefix=prefix)
    served.run(prompt(1, 40))
    served.run(prompt(1, 40) + prompt(2, 60))
    tokens = prompt(1, 40) + prompt(2, 30) + prompt(3, 9)
    for found in (served.asked(tokens), served.run(tokens)):
        (pool, *_) = found.spans
        assert (pool.stop, pool.source) == (40, "pool")
        assert unresumed(found)[:2] == (40, 68)
        _, _, said = unresumed(found)
        assert (said["group"], said["stored"], said["nearest"], said["why"]) == (
            "state", 68, 40, "state",
        )  # fmt: skip
        assert found.sentence == (
            "39 of 79 tokens computed, 28 of them because their KV is cached up to token 68, but "
            "no state is stored there; the nearest is at 40"
        )
    (cause, *_) = served.explainer.summary().causes[1:]
    assert "prompts without cache_salt" in cause.sentence
    assert served.explainer.computed()["not_resumable"] == 28 + 4
    assert served.run(tokens[:-5] + prompt(4, 9)).reused == {"pool": 68}, "it branched there"


def test_the_state_was_evicted() -> None:
    served = Explained(900, STATE)
    served.run(prompt(1, 60))
    served.run(prompt(1, 60) + prompt(2, 20))  # its state replaces that of the first turn
    served.cache.evict(5)
    found = served.run(prompt(1, 56) + prompt(3, 9))
    start, stop, said = unresumed(found)
    assert (start, stop, said["why"]) == (0, 56, "state")
    assert found.sentence.endswith("no state is stored there; nor is there any before")


def test_a_state_lies_on_the_grid_alone() -> None:
    served = Explained(900, GRID)
    served.run(prompt(1, 47))
    found = served.run(prompt(1, 47) + prompt(2, 9))
    start, stop, said = unresumed(found)
    assert (start, stop, said["why"], said["grid"]) == (32, 44, "grid", 16)
    assert "the nearest is at 32; states are kept at multiples of 16 tokens" in found.sentence


def test_the_window_is_no_longer_kept() -> None:
    served = Explained(120, WINDOW)
    served.run(prompt(1, 96))
    served.run(prompt(2, 160))
    found = served.run(prompt(1, 60) + prompt(3, 9))
    start, stop, said = unresumed(found)
    assert (start, stop, said["group"], said["why"]) == (0, 60, "window", "window")
    assert found.sentence.endswith(
        "their KV is cached up to token 60, but the window before that is no longer kept; no "
        "other is"
    )


@pytest.mark.parametrize("layout", [STATE, WINDOW, BOTH, GRID])
def test_spans_are_right_under_eviction(layout: GroupLayout) -> None:
    served = Explained(90, layout)
    turns = {number: prompt(number, 24) for number in range(4)}
    for turn in range(40):
        number = turn * 7 % 4
        found = served.run(turns[number])
        kept = found.computed.get("not_resumable", 0)
        assert kept + found.reused.get("pool", 0) <= len(turns[number])
        turns[number] = (turns[number] + prompt(10 + turn, 17))[: 90 - turn % 3]
    served.cache.check()
