"""What an explainer forgets, what it survives, and what it does not do: change, block, or grow."""

from __future__ import annotations

import threading
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import pytest
from served import SIZE, Served, check, evidence, tokens, told

from kvkeep import InvalidValue, Namespace, PagedCache
from kvkeep.observe.explain import Explainer, Missing, around
from kvkeep.observe.explain import explainer as inbox_module

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
    """All that an explainer remembers, in short."""
    explainer.recent(0)
    mirror = explainer._mirror
    ledger = mirror.ledger
    return (
        len(ledger),
        {space: dict(one.rows) for space, one in ledger.spaces.items()},
        ledger.page[: len(ledger)].tolist(),
        [id(one) for one in ledger.state[: len(ledger)].tolist()],
        ledger.prompt[: len(ledger)].tolist(),
        ledger.stamp[: len(ledger)].tolist(),
        list(mirror.prompts._prompts),
        list(explainer._records),
        explainer.computed(),
    )


def test_a_question_changes_nothing(served: Served) -> None:
    served.run("a", A)
    served.run("b", tokens([4, 5, 6], A[:30]), "x")
    before = state(served.explainer)
    for prompt in (A, A[:7], tokens([1], A), tokens(A[:11], [3], A[11:]), tokens([9] * 50)):
        for space in ("", "x", "nobody"):
            cached = served.cache.match(prompt, space).num_tokens
            found = served.explainer.prompt(prompt, Namespace(tenant=space), cached)
            check(found)
            assert found.id == ""
    assert state(served.explainer) == before


def test_a_question_is_answered_as_the_request_would_be(served: Served) -> None:
    served.run("a", A)
    ours = tokens(A[:11], [3, 4], A[13:])
    asked = served.explainer.prompt(ours.tolist(), NOWHERE, served.cache.match(ours).num_tokens)
    assert asked.spans == served.run("b", ours).spans
    assert told(served.explainer.prompt(A, NOWHERE, 40)) == [
        (0, 39, "pool"),
        (39, 40, "last_token"),
    ]


@pytest.mark.parametrize(("prompt", "cached"), [([], 0), ([1], -1), ([1], 2), (["x"], 0)])
def test_what_is_no_prompt_is_refused(served: Served, prompt: Any, cached: int) -> None:
    with pytest.raises(InvalidValue):
        served.explainer.prompt(prompt, NOWHERE, cached)
    with pytest.raises(InvalidValue):
        served.explainer.opened("a", prompt, NOWHERE, cached=cached)


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
    for field in fields(Namespace):
        if field.name == "scope":
            continue  # no prompt has one
        served.cache.clear()
        served.run(f"a-{field.name}", A, Namespace(**{field.name: "theirs"}))
        found = served.run(f"b-{field.name}", A, Namespace(**{field.name: "ours"}))
        assert evidence(found, "other_namespace") == {"fields": {field.name: ["ours", "theirs"]}}


def test_namespaces_that_look_alike_are_not_mixed(served: Served) -> None:
    served.run("a", A, Namespace(tenant="x", model="y"))
    found = served.run("b", A, Namespace(tenant="xy"))
    assert evidence(found, "other_namespace")["fields"] == {
        "tenant": ["xy", "x"],
        "model": ["", "y"],
    }


def test_a_new_namespace_with_each_request_does_not_add_up() -> None:
    with Served(8, units=200, prompt_tokens=400, requests=10) as served:
        for at in range(400):
            served.run(f"r{at}", [at, at + 1, at + 2], f"salt-{at}")
        mirror = served.explainer._mirror
        served.explainer.recent(0)
        assert len(mirror.ledger.spaces) <= 200 // 8
        assert mirror.prompts.tokens <= 400
        assert served.explainer.forgotten > 300


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


def test_what_is_in_the_cache_is_never_forgotten() -> None:
    with Served(64, units=9) as served:
        served.run("a", A)
        for at in range(50):
            served.end(served.open(f"x{at}", tokens(range(1000 + 50 * at, 1020 + 50 * at))))
        served.cache.clear()
        found = served.explainer.prompt(A, NOWHERE, 0)
        assert told(found)[0] == (0, 4, "evicted")


# --- what is told out of order, twice, or never ------------------------------------------------


def test_too_much_at_once_is_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvkeep.observe.explain import explainer as module

    monkeypatch.setattr(module, "_MOST_QUEUED", 5)
    monkeypatch.setattr(inbox_module, "_PAUSE_S", 1000.0)
    cache = PagedCache(8, SIZE)
    explainer = Explainer(SIZE)
    cache.subscribe(explainer.see)
    for at in range(30):
        with cache.open(tokens(range(100 * at, 100 * at + 16))) as sequence:
            explainer.opened(
                f"r{at}",
                sequence.tokens,
                NOWHERE,
                cached=sequence.num_cached,
                sequence=sequence.id,
            )
            sequence.publish()
    assert explainer.lost > 50
    explainer.recent()
    with cache.open(A[:16]) as sequence:
        explainer.opened("b", A[:16], NOWHERE, cached=0, sequence=sequence.id)
        sequence.publish()
    found = explainer.explain("b")
    assert found is not None
    check(found)
    assert explainer.failed == 0
    explainer._mirror.ledger.check()
    explainer.close()


def test_strangers_and_repeats(served: Served) -> None:
    explainer = served.explainer
    explainer.loaded("nobody", [(0, 4, "disk")], [Missing(0, 4, "damaged")])
    explainer.ended("nobody", outcome="done", generated=1, ttft_s=None, seconds=1.0)
    assert explainer.explain("nobody") is None
    served.run("a", A)
    again = served.run("a", A[:20])
    assert again.prompt_tokens == 20  # the same id: the later one counts
    served.explainer.ended("a", outcome="failed", generated=9, ttft_s=None, seconds=1.0)
    assert served.why("a").outcome == "done"
    assert [one.id for one in explainer.recent()] == ["a"]


def test_spans_from_a_store_that_cannot_be(served: Served) -> None:
    served.open("a", A).close()
    for start, stop in ((-5, 3), (38, 90), (50, 60), (7, 7), (9, 2)):
        served.explainer.loaded("a", [(start, stop, "disk")], [Missing(stop, start, "damaged")])
        check(served.why("a"))
        assert served.why("a").spans[-1].reason == "new"  # the last token is computed anyway
    assert served.why("a").computed == {"new": 33, "damaged": 7}


def test_what_is_asked_is_copied(served: Served) -> None:
    prompt = A.copy()
    served.explainer.opened("a", prompt, NOWHERE, cached=0)
    prompt[:] = 0
    served.explainer.opened("b", A, NOWHERE, cached=0)
    assert told(served.why("b")) == [(0, 40, "computing")]


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
                    served.explainer.prompt(A, NOWHERE, 0)
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
        # 447 tokens are 111 pages and three more, which are not reusable in any of them.
        assert (first.tokens, first.requests) == (7 * 397, 7)
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
    served.explainer.loaded("a", [(0, 16, "disk")], [])
    served.end(sequence)
    served.explainer.computed().clear()
    assert served.explainer.computed() == {"new": 24}
    served.run("b", A, "b")
    assert served.explainer.computed() == {"new": 64}


@pytest.mark.parametrize("bound", ["page_size", "requests", "prompt_tokens", "units"])
def test_bounds_that_are_none(bound: str) -> None:
    options: dict[str, Any] = {"page_size": 16, bound: 0}
    with pytest.raises(InvalidValue, match=bound):
        Explainer(**options)
