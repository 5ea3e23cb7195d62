"""The text that breaks prefixes: named where it was planted in prompts of agents, else nowhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from agent_prompts import PLANTED, Agent, Words
from served import Served

from kvkeep.observe.explain import around

if TYPE_CHECKING:
    from kvkeep.observe.explain import Cause


def send(
    served: Served, words: Words, agent: Agent, name: str, *, sessions: int, turns: int
) -> int:
    """Send the prompts of an agent, one every 20 seconds, in a namespace of its own."""
    sent = 0
    for _ in range(sessions):
        for prompt in agent.session(turns):
            served.run(f"{name}-{sent}", words.encode(prompt), name)
            served.now += 20
            sent += 1
    return sent


def breaking(served: Served) -> list[Cause]:
    summary = served.explainer.summary(2000)
    assert sum(cause.tokens for cause in summary.causes) == sum(summary.computed.values())
    return [cause for cause in summary.causes if cause.reason == "diverged"]


@pytest.mark.parametrize("planted", PLANTED)
def test_planted_changes_are_named(planted: str) -> None:
    agents, named = 20, 0
    for seed in range(agents):
        with Served(4000, 16) as served:
            words = Words()
            sent = send(served, words, Agent(seed, planted), "a", sessions=3, turns=4)
            for cause in breaking(served):
                assert cause.difference is not None
                text = around(cause.difference, words.decode)
                named += (
                    PLANTED[planted] in text["given_text"]
                    and PLANTED[planted] in text["cached_text"]
                    and cause.requests >= sent / 2
                )
    assert named >= 0.95 * agents


def test_clean_prompts_have_none() -> None:
    """Conversations that share a head, quote the same files, and end in the same words."""
    with Served(60_000, 16, requests=2000) as served:
        words = Words()
        sent = sum(
            send(served, words, Agent(seed), f"t{seed}", sessions=8, turns=6)
            for seed in range(1000, 1021)
        )
        assert sent >= 1000
        assert breaking(served) == []
        assert served.explainer.computed().keys() <= {"new", "page_remainder"}


def test_what_it_costs_and_whose_it_is() -> None:
    with Served(20_000, 16) as served:
        words = Words()
        for tenant, planted in (("red", "date"), ("blue", "header")):
            send(served, words, Agent(7, planted), tenant, sessions=3, turns=4)
        causes = breaking(served)
        assert {cause.tenant for cause in causes} == {"red", "blue"}
        for cause in causes:
            assert cause.difference is not None
            assert str(cause.difference["nearest"]).startswith(f"{cause.tenant}-")
            assert cause.example.startswith(f"{cause.tenant}-")
            text = around(cause.difference, words.decode)["given_text"]
            assert (PLANTED["date"] in text) == (cause.tenant == "red")
            assert cause.tokens_per_hour == pytest.approx(cause.tokens * 3600 / (24 * 20))


def test_one_place_has_one_cause_wherever_it_stands() -> None:
    with Served(20_000, 16) as served:
        words = Words()
        sent = send(served, words, Agent(3, "reminder"), "a", sessions=5, turns=4)
        (cause,) = breaking(served)
        assert cause.requests >= sent / 2
        assert cause.position is None
        assert "differ at several positions" in cause.sentence
