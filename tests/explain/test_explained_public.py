"""Public prefixes in explanations: what came from the one copy, and who misses it, and why."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from served import SIZE, Served, check, evidence, tokens, told

from kvkeep.core.keys import Namespace
from kvkeep.core.public import PublicPrefixes, public_namespace
from kvkeep.core.tokens import common_length
from kvkeep.observe.explain.alike import Anchors
from kvkeep.observe.explain.declared import DeclaredRows

SYSTEM = list(range(100, 200))  # 25 pages
SECRET = list(range(300, 320))


def served(*rows: list[int], pages: int = 400) -> Served:
    one = Served(pages)
    one.explainer.share(one.cache.public)
    one.cache.public.declare(*(rows or [SYSTEM]))
    return one


def test_the_first_computes_it_and_the_others_read_it() -> None:
    with served() as one:
        first = one.run("first", [*SYSTEM, 1, 2, 3], "a")
        assert told(first) == [(0, 100, "new"), (100, 103, "new")]
        assert first.sentence == (
            "103 of 103 tokens computed, 100 of them because they are of a public prefix, which "
            "was not cached yet"
        )
        other = one.run("other", [*SYSTEM, 1, 2, 3], "b")
        assert told(other) == [(0, 100, "pool"), (100, 103, "new")]
        assert dict(other.spans[0].evidence) == {"public": True}
        assert other.sentence == (
            "3 of 103 tokens computed: they were never seen before; 100 were read from the public "
            "prefix, shared by all tenants"
        )
        causes = one.explainer.summary().causes
        assert {(one.tenant, one.tokens) for one in causes} == {("a", 100), ("a", 3), ("b", 3)}
        assert causes[0].sentence.endswith("begin with a public prefix that was not cached yet")


def test_private_pages_behind_it_are_the_tenants_own() -> None:
    """Hits, evictions and differences behind the public part are found as without one."""
    with served(pages=40) as one:
        one.run("first", [*SYSTEM, *SECRET, 1], "a")
        assert told(one.run("again", [*SYSTEM, *SECRET, 2], "a")) == [
            (0, 100, "pool"), (100, 120, "pool"), (120, 121, "last_token"),
        ]  # fmt: skip
        late = one.run("moved", [*SYSTEM, 9, *SECRET, 2], "a")
        assert evidence(late, "diverged")["nearest"] == "again"
        assert evidence(late, "diverged")["position"] == 100
        other = one.run("other", [*SYSTEM, *SECRET, 1], "b")
        assert told(other) == [(0, 100, "pool"), (100, 121, "new")]
        one.run("flood", list(range(1000, 1060)), "c")
        gone = one.run("gone", [*SYSTEM, *SECRET, 1], "a")
        assert gone.computed.get("evicted", 0) >= 16


def test_an_evicted_public_part() -> None:
    with served(pages=30) as one:
        one.run("first", [*SYSTEM, 1], "a")
        one.now += 3
        one.run("flood", list(range(1000, 1120)), "b")
        found = one.run("again", [*SYSTEM, 2], "c")
        assert told(found)[0] == (0, 100, "evicted")
        assert evidence(found, "evicted")["public"] is True
        assert "they are of a public prefix, and were evicted" in found.sentence


@pytest.mark.parametrize("position", [1, 7, 50, 97])
def test_a_prompt_that_differs_from_it_somewhere(position: int) -> None:
    """As a date in a system prompt does."""
    with served() as one:
        one.run("right", [*SYSTEM, 1], "a")
        wrong = [*SYSTEM[:position], 5, *SYSTEM[position + 1 :], 1]
        found = one.run("wrong", wrong, "b")
        assert found.sentence.endswith(
            f"the prompt differs from the public prefix at token {position}"
        )
        said = evidence(found, "diverged")
        assert (said["position"], said["public"], said["nearest"]) == (position, True, None)
        assert said["cached"] == SYSTEM[max(0, position - 8) : position + 16]
        assert said["would_reuse"] == found.computed["diverged"] >= 97
        asked = one.explainer.prompt(wrong, Namespace(tenant="c"), 0)
        assert asked.sentence == found.sentence.replace("wrong", "")
        assert "differ from the public prefix" in "".join(
            cause.sentence for cause in one.explainer.summary().causes
        )


def test_another_tenants_mistake_is_not_shown() -> None:
    """Two tenants send the same wrong prompt: each is told of the declared one alone."""
    wrong = [*SYSTEM[:40], 5, *SYSTEM[41:], *SECRET]
    with served() as one:
        one.run("a's", wrong, "a")
        found = one.run("b's", wrong, "b")
        assert all("a's" not in str(span.evidence) for span in found.spans)
        said = evidence(found, "diverged")
        assert not set(said["cached"]) & set(SECRET)
        assert said["would_reuse"] == 0  # nobody sent the right one
        check(found)


def test_short_and_unlike_prompts_are_not_called_wrong() -> None:
    with served() as one:
        for number, prompt in enumerate(
            (SYSTEM[:30], [*SYSTEM[:3], *range(500, 560)], list(range(600, 680)), [1])
        ):
            found = one.run(f"r{number}", prompt, "a")
            assert "diverged" not in found.computed


def test_a_tenant_that_sends_nothing_else_is_not_remembered() -> None:
    with served() as one:
        for number in range(50):
            one.run(f"r{number}", SYSTEM, f"tenant {number}")
        assert set(one.explainer._mirror.ledger.spaces) == {public_namespace(Namespace())}


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=30), max_size=6),
    st.lists(st.integers(0, 2), min_size=1, max_size=40),
)
def test_the_prefix_with_the_longest_common_beginning_is_found(
    rows: list[list[int]], prompt: list[int]
) -> None:
    row = np.array(prompt, np.int32)
    found = DeclaredRows(PublicPrefixes(rows), SIZE).nearest(row, Anchors.of(row))
    whole = [one[: len(one) // SIZE * SIZE] for one in rows]
    common = [common_length(np.array(one, np.int32), row) for one in whole]
    differing = [
        at for one, at in zip(whole, common, strict=True) if SIZE <= at < min(len(one), len(prompt))
    ]
    if max(common, default=0) in differing:
        assert found is not None
        assert found.tokens >= max(differing)


def test_text_is_shown_by_tokens_alone() -> None:
    with served() as one:
        found = one.run("one", tokens(SYSTEM, [1]), "a")
        assert found.reused == {}
