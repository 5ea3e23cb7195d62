"""Prompts with bytes at token positions: what differs is told, and only tokens are shown."""

from __future__ import annotations

from typing import Any

from served import SIZE, Served

from kvkeep.core.keys import as_namespace

PROMPT = list(range(100, 164))
CAT, DOG = [(9, b"a cat")], [(9, b"a dog")]
EMPTY = as_namespace("")


def ask(served: Served, name: str, extra: Any) -> Any:
    sequence = served.cache.open(PROMPT, extra=extra)
    sequence.copies()
    served.explainer.opened(name, PROMPT, EMPTY, sequence.miss, sequence=sequence.id, extra=extra)
    sequence.publish()
    sequence.close()
    served.explainer.ended(name, outcome="done", generated=0, ttft_s=0.1, seconds=0.1)
    return served.why(name)


def test_other_bytes_are_what_differs() -> None:
    with Served() as served:
        assert {span.reason for span in ask(served, "first", CAT).spans} == {"new"}
        second = ask(served, "second", DOG)
        told = next(span for span in second.spans if span.reason == "diverged")
        assert second.spans[0].source == "pool"
        assert (told.evidence["position"], told.evidence["nearest"]) == (9, "first")
        assert told.evidence["extra"] is True
        assert told.evidence["given"] == told.evidence["cached"]
        assert min(told.evidence["given"]) >= 0
        assert "in the bytes of token 9" in second.sentence
        again = ask(served, "again", CAT)
        assert [span.source for span in again.spans] == ["pool", None]


def test_what_would_be_said_of_a_prompt_takes_its_bytes() -> None:
    with Served() as served:
        ask(served, "first", CAT)
        for extra, cached in ((CAT, 63), (DOG, 9)):
            match = served.cache.match(PROMPT[:-1], extra=extra)
            assert match.num_tokens == cached
            told = served.explainer.prompt(PROMPT, EMPTY, match.miss, extra=extra)
            assert sum(span.tokens for span in told.spans if span.source) == cached
            reasons = {span.reason for span in told.spans if span.reason}
            assert reasons == ({"last_token"} if extra is CAT else {"diverged", "new"} & reasons)


def test_evicted_pages_are_told_apart_by_their_bytes() -> None:
    with Served() as served:
        ask(served, "first", CAT)
        served.cache.evict(len(PROMPT) // SIZE)
        again = ask(served, "again", CAT)
        assert again.spans[0].reason == "evicted"
        served.cache.clear()
        other = ask(served, "other", DOG)
        assert [span.reason for span in other.spans][:2] == ["evicted", "page_remainder"]
