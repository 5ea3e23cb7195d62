"""Public prefixes in explanations: what came from the one copy, and who misses it, and why."""

from __future__ import annotations

from served import Served, evidence, tokens, told

SYSTEM = list(range(100, 200))  # 25 pages
SECRET = list(range(300, 320))


def served(*rows: list[int], pages: int = 400) -> Served:
    one = Served(pages)
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
        assert told(other) == [(0, 100, "pool"), (100, 120, "other_namespace"), (120, 121, "new")]
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


def test_text_is_shown_by_tokens_alone() -> None:
    with served() as one:
        found = one.run("one", tokens(SYSTEM, [1]), "a")
        assert found.reused == {}
