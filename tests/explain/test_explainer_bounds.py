"""What an explainer forgets, what it survives, and what it does not do: change, block, or grow."""

from __future__ import annotations

import sys
import threading
from dataclasses import fields
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from served import SIZE, Served, check, evidence, tokens, told

from kvkeep import InvalidValue, Namespace
from kvkeep.core.events import PrefixMiss
from kvkeep.observe.explain import Explainer, Span, around
from kvkeep.observe.explain import explainer as module
from kvkeep.observe.explain.spans import painted
from kvkeep.observe.usage import LoadReport
from kvkeep.store import Miss

if TYPE_CHECKING:
    from collections.abc import Iterator

A = tokens(range(100, 140))
NOWHERE = Namespace()


@pytest.fixture
def served() -> Iterator[Served]:
    with Served() as made:
        yield made


# --- prompt(): as if it were asked now ---------------------------------------------------------


def state(explainer: Explainer) -> Any:
    """What an explainer tells of all that it remembers."""
    history = explainer.history
    return explainer.recent(), explainer.computed(), explainer.summary(), history.tokens


def test_a_question_changes_nothing(served: Served) -> None:
    served.run("a", A)
    served.run("b", tokens([4, 5, 6], A[:30]), "x")
    before = state(served.explainer)
    for prompt in (A, A[:7], tokens([1], A), tokens(A[:11], [3], A[11:]), tokens([9] * 50)):
        for space in ("", "x", "nobody"):
            miss = served.cache.match(prompt[:-1], space).miss
            found = served.explainer.prompt(prompt, Namespace(tenant=space), miss)
            check(found)
            assert found.id == ""
    assert state(served.explainer) == before


def test_a_question_is_answered_as_the_request_would_be(served: Served) -> None:
    served.run("a", A)
    ours = tokens(A[:11], [3, 4], A[13:])
    miss = served.cache.match(ours[:-1]).miss
    asked = served.explainer.prompt(ours.tolist(), NOWHERE, miss)
    assert asked.spans == served.run("b", ours).spans
    assert told(served.explainer.prompt(A, NOWHERE, None)) == [
        (0, 39, "pool"),
        (39, 40, "last_token"),
    ]


@pytest.mark.parametrize("prompt", [[], ["x"], [-1]])
def test_what_is_no_prompt_is_refused(served: Served, prompt: Any) -> None:
    with pytest.raises(InvalidValue):
        served.explainer.prompt(prompt, NOWHERE, None)
    with pytest.raises(InvalidValue):
        served.explainer.opened("a", prompt, NOWHERE, None)


# --- around(): text for people -----------------------------------------------------------------


def test_the_text_around_a_difference(served: Served) -> None:
    def decode(ids: Any) -> str:
        return bytes(ids).decode(errors="replace")

    theirs = "Today is Monday, the 3rd of May. You are a helpful assistant, and kind to all."
    served.run("a", tokens(theirs.encode()))
    ours = theirs.replace("Monday, the 3rd", "Tuesday, the 4th")
    found = served.run("b", tokens(ours.encode()))
    text = around(evidence(found, "diverged"), decode)
    assert text["given_text"][text["at_given"] :].startswith("Tuesday, the")
    assert text["cached_text"][text["at_cached"] :].startswith("Monday, the")
    assert text["at_given"] == text["at_cached"] == 8
    assert text["given_text"].startswith("oday is ")


def test_a_difference_within_a_character_begins_where_that_does(served: Served) -> None:
    def decode(ids: Any) -> str:
        return bytes(ids).decode(errors="replace")

    said = {"position": 3, "given": list("abéx".encode()), "cached": list("abèx".encode())}
    text = around(said, decode)
    assert (text["given_text"][text["at_given"]], text["cached_text"][text["at_cached"]]) == (
        "é",
        "è",
    )
    assert around({"position": 3}, decode) == {}


# --- what users chose is text, nothing else ----------------------------------------------------


def test_hostile_names_are_shown_not_obeyed(served: Served) -> None:
    salt = "</script>\x1b[31m\u202edlrow\n\0" + "x" * 500
    name = "cmpl-<img src=x>\x07\u2066"
    served.run(name, A, Namespace(tenant=salt, lora="\ud800"))
    found = served.run("b", tokens(A[:9], [1], A[10:]), Namespace(tenant=salt, lora="\ud800"))
    other = served.run("c", A, "\u202e")
    causes = served.explainer.summary().causes
    for sentence in (found.sentence, other.sentence, *(cause.sentence for cause in causes)):
        assert sentence.isprintable()
        assert len(sentence) < 400
    assert "\\u202e" in " ".join(cause.sentence for cause in causes)
    assert found.namespace.tenant == salt


def test_every_field_of_a_namespace_can_be_the_one_that_differs(served: Served) -> None:
    for at, field in enumerate(fields(Namespace)):
        if field.name == "scope":
            continue  # no prompt has one
        prompt = tokens(range(100 * at, 100 * at + 40))
        served.run(f"a-{field.name}", prompt, Namespace(**{field.name: "theirs"}))
        found = served.run(f"b-{field.name}", prompt, Namespace(**{field.name: "ours"}))
        assert evidence(found, "other_namespace") == {"fields": {field.name: ["ours", "theirs"]}}


def test_namespaces_that_look_alike_are_not_mixed(served: Served) -> None:
    served.run("a", A, Namespace(tenant="x", model="y"))
    found = served.run("b", A, Namespace(tenant="xy"))
    assert evidence(found, "other_namespace")["fields"] == {
        "tenant": ["xy", "x"],
        "model": ["", "y"],
    }


def test_no_tokens_of_another_namespace_are_told(served: Served) -> None:
    """What differs from a prompt of another tenant stays his."""
    secret = range(3000, 3030)
    served.run("theirs", tokens([1, 2], A, secret), Namespace(tenant="theirs"))
    found = served.run("ours", tokens([3, 4], A, secret), Namespace(tenant="ours"))
    assert told(found) == [(0, 72, "new")]
    found = served.run("same", tokens([1, 2], A, secret, [5]), Namespace(tenant="ours"))
    assert evidence(found, "other_namespace") == {"fields": {"tenant": ["ours", "theirs"]}}


# --- bounds ------------------------------------------------------------------------------------


def test_the_last_requests_are_remembered() -> None:
    with Served(requests=3) as served:
        for at in range(5):
            served.run(f"r{at}", [at])
        assert [one.id for one in served.explainer.recent()] == ["r4", "r3", "r2"]
        assert [one.id for one in served.explainer.recent(1)] == ["r4"]
        assert served.explainer.explain("r1") is None
        assert served.explainer.summary().requests == 3
        assert sum(served.explainer.computed().values()) == 5


def test_prompts_are_remembered_up_to_their_tokens() -> None:
    with Served(400, prompt_tokens=400) as served:
        for at in range(40):
            served.run(f"r{at}", tokens(range(100 * at, 100 * at + 100)))
            assert served.explainer.explain(f"r{at}") is not None
            assert served.explainer.history.tokens <= 400
        again = served.run("late", tokens([7], range(3900, 4000)))
        assert evidence(again, "diverged")["nearest"] == "r39"
        assert told(served.run("gone", tokens([7], range(100)))) == [
            (0, 1, "pool"),
            (1, 101, "new"),
        ]
    with Served(400, requests=2) as served:
        for at in range(40):
            served.run(f"r{at}", tokens(range(100 * at, 100 * at + 100)))
        served.explainer.recent(0)
        assert served.explainer.history.tokens == 200


def test_requests_of_many_parts_are_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt whose blocks come from a tier by turns has as many spans as blocks."""
    monkeypatch.setattr(module, "_MOST_SPANS", 100)
    with Served(400) as served:
        for at in range(10):
            sequence = served.open(f"r{at}", tokens(range(100 * at, 100 * at + 80)))
            parts = tuple((start, start + 4, "disk") for start in range(0, 80, 8))
            served.explainer.loaded(f"r{at}", LoadReport(parts))
            served.end(sequence)
        found = served.explainer.recent()
        assert [one.id for one in found] == ["r9", "r8", "r7", "r6", "r5"]
        assert {len(one.spans) for one in found} == {20}
        assert sum(served.explainer.computed().values()) == 10 * 40
        assert served.explainer.history.tokens == 5 * 80


def test_a_store_that_has_every_other_block_costs_no_more_than_its_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Counted in lines that run, not in time."""
    monkeypatch.setattr(module, "_PAUSE_S", 1000.0)  # none runs in another thread

    def lines(parts: int) -> int:
        with Served(4) as served:
            prompt = tokens(range(8 * parts + 1))
            count = 0

            def count_one(frame: Any, event: str, argument: Any) -> Any:
                nonlocal count
                count += 1
                return count_one

            served.explainer.opened("a", prompt, NOWHERE, PrefixMiss("unseen", 0))
            served.explainer.loaded(
                "a",
                LoadReport(
                    tuple((start, start + 4, "disk") for start in range(0, 8 * parts, 8)),
                    tuple(
                        Miss(start, start + 4, "disk", "evicted", None, "lru")
                        for start in range(4, 8 * parts, 8)
                    ),
                ),
            )
            before = sys.gettrace()
            sys.settrace(count_one)
            try:
                found = served.explainer.explain("a")
            finally:
                sys.settrace(before)
            assert found is not None
            check(found)
            assert found.reused == {"disk": 4 * parts}
            assert found.computed == {"evicted": 4 * parts, "new": 1}
            return count

    lines(10)  # imports
    assert lines(400) < 5 * lines(100)


@given(
    st.lists(st.tuples(st.integers(1, 9), st.sampled_from(["new", "evicted", None])), min_size=1),
    st.lists(st.tuples(st.integers(-3, 40), st.integers(-3, 40))),
)
def test_painting_is_that_of_single_tokens(
    parts: list[tuple[int, str | None]], brushes: list[tuple[int, int]]
) -> None:
    spans: list[Span] = []
    for length, reason in parts:
        start = spans[-1].stop if spans else 0
        spans.append(Span(start, start + length, None if reason else "pool", reason))
    row = [span.reason for span in spans for _ in range(span.tokens)]
    expected = list(row)
    ordered = sorted(brushes)
    for start, stop in ordered:
        for at in range(max(0, start), min(stop, len(row))):
            if row[at] == "new":
                expected[at] = "damaged"
    news = [Span(start, stop, None, "damaged") for start, stop in ordered]
    found = painted(spans, news, {"new"})
    assert [span.reason for span in found for _ in range(span.tokens)] == expected
    assert all(before.stop == span.start < span.stop for before, span in pairwise(found))


# --- what is told out of order, twice, or never ------------------------------------------------


def test_too_much_at_once_is_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_QUEUED", 5)
    monkeypatch.setattr(module, "_PAUSE_S", 1000.0)
    explainer = Explainer(SIZE)
    for at in range(30):
        explainer.opened(f"r{at}", A, NOWHERE, None)
    assert explainer.lost == 25
    assert [found.id for found in explainer.recent()] == [f"r{at}" for at in range(29, 24, -1)]
    assert explainer.failed == 0
    explainer.close()


def test_strangers_and_repeats(served: Served) -> None:
    explainer = served.explainer
    explainer.loaded("nobody", LoadReport(((0, 4, "disk"),)))
    explainer.ended("nobody", outcome="done", generated=1, ttft_s=None, seconds=1.0)
    assert explainer.explain("nobody") is None
    served.run("a", A)
    again = served.run("a", A[:20])
    assert again.prompt_tokens == 20  # the same id: the later one counts
    served.explainer.ended("a", outcome="failed", generated=9, ttft_s=None, seconds=1.0)
    assert served.why("a").outcome == "done"
    assert [one.id for one in explainer.recent()] == ["a"]


def test_sums_stay_those_of_what_has_ended(served: Served) -> None:
    """What is told after the end, or of two requests with one id, is counted once."""
    served.run("a", A)
    served.explainer.loaded("a", LoadReport(((0, 16, "disk"),)))
    assert served.why("a").computed == served.explainer.computed() == {"new": 40}
    for at in range(3):
        prompt = tokens(range(1000 * at, 1000 * at + 40))
        served.explainer.opened("b", prompt, NOWHERE, PrefixMiss("unseen", 0), sequence=90 + at)
    served.explainer.ended("b", outcome="done", generated=1, ttft_s=None, seconds=1.0)
    assert served.explainer.computed() == {"new": 160}


def test_spans_from_a_store_that_cannot_be(served: Served) -> None:
    served.open("a", A).close()
    for start, stop in ((-5, 3), (38, 90), (50, 60), (7, 7), (9, 2)):
        served.explainer.loaded(
            "a", LoadReport(((start, stop, "disk"),), (Miss(stop, start, "", "damaged", None, ""),))
        )
        check(served.why("a"))
        assert served.why("a").spans[-1].reason == "new"  # the last token is computed anyway
    assert served.why("a").computed == {"new": 33, "damaged": 7}


def test_what_is_asked_is_copied(served: Served) -> None:
    prompt = A.copy()
    unseen = PrefixMiss("unseen", 0)
    served.explainer.opened("a", prompt, NOWHERE, unseen, store=False)
    prompt[:] = 0
    served.explainer.opened("b", A, NOWHERE, unseen)
    assert told(served.why("b")) == [(0, 40, "not_admitted")]


# --- threads -----------------------------------------------------------------------------------


def test_many_threads_ask_and_question() -> None:
    with Served(400) as served:
        wrong: list[BaseException] = []

        def client(number: int) -> None:
            try:
                for at in range(25):
                    name = f"{number}-{at}"
                    parts = (A, [number], range(300, 330)) if at % 2 else (range(40), [at], A)
                    sequence = served.open(name, tokens(*parts), str(number % 2))
                    sequence.publish()
                    served.end(sequence)
                    found = served.explainer.explain(name)
                    assert found is not None
                    check(found)
                    assert found.reused.get("pool", 0) == sequence.num_cached
            except BaseException as error:  # noqa: BLE001 - told of in the main thread
                wrong.append(error)

        def reader() -> None:
            try:
                for _ in range(40):
                    served.explainer.summary()
                    served.explainer.computed()
                    for found in served.explainer.recent(20):
                        check(found)
                    served.explainer.prompt(A, NOWHERE, None)
            except BaseException as error:  # noqa: BLE001 - told of in the main thread
                wrong.append(error)

        threads = [threading.Thread(target=client, args=(number,)) for number in range(4)]
        threads.append(threading.Thread(target=reader))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        total = served.explainer.summary()
        assert total.requests == 100
        assert sum(total.reused.values()) + sum(total.computed.values()) == total.prompt_tokens
        assert served.explainer.lost == 0


# --- sums --------------------------------------------------------------------------------------


def test_a_summary_ranks_what_costs_most() -> None:
    with Served(1000) as served:
        text = range(1000, 1400)
        for at in range(8):
            served.run(f"a{at}", tokens(range(41), [5000 + at] * 6, text), "A")
        served.run("b", tokens(range(7000, 7050)), "B")
        served.end(served.open("c", tokens(range(8000, 8030)), store=False))
        served.end(served.open("d", tokens(range(8000, 8030))))
        summary = served.explainer.summary()
        assert summary.requests == 11
        assert [(one.reason, one.tenant, one.position) for one in summary.causes[:2]] == [
            ("diverged", "A", 41),
            ("not_admitted", "", None),
        ]
        assert summary.causes[-1].reason == "new"
        first = summary.causes[0]
        assert (first.tokens, first.requests) == (7 * 400, 7)
        assert first.share == first.tokens / sum(summary.computed.values())
        assert sum(one.share for one in summary.causes) == pytest.approx(1)
        assert sum(one.tokens for one in summary.causes) == sum(summary.computed.values())
        assert first.sentence == (
            f"{100 * first.share:.0f} % of all computed tokens: prompts of cache_salt 'A' differ "
            "at token 41 (a difference of 6 tokens)"
        )
        assert first.example.startswith("a")
        assert served.explainer.summary(1).requests == 1
        assert served.explainer.summary(0).causes == ()


def test_totals_count_what_has_ended_and_never_fall(served: Served) -> None:
    sequence = served.open("a", A)
    assert served.explainer.computed() == {}
    served.explainer.loaded("a", LoadReport(((0, 16, "disk"),)))
    served.end(sequence)
    served.explainer.computed().clear()
    assert served.explainer.computed() == {"new": 24}
    served.run("b", tokens(range(500, 540)), "b")
    assert served.explainer.computed() == {"new": 64}


@pytest.mark.parametrize("bound", ["page_size", "requests", "prompt_tokens"])
def test_bounds_that_are_none(bound: str) -> None:
    options: dict[str, Any] = {"page_size": 16, bound: 0}
    with pytest.raises(InvalidValue, match=bound):
        Explainer(**options)
