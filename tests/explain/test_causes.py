"""Causes over many requests: what can be done, and one line for what many tenants share."""

from __future__ import annotations

import re
from itertools import permutations
from pathlib import Path

import pytest
from served import Served, tokens

from kvkeep.observe.explain import REASONS, Cause
from kvkeep.observe.explain.summary import _in_order, advice

ROOT = Path(__file__).parents[2]
NOTHING = {"new", "last_token", "page_remainder", "computing", "not_loaded", "not_resumable"}
WHY = {  # what evidence says of each reason, as docs/explain.md lists it
    "evicted": [{"cause": one} for one in ("pressure", "asked", "cleared", "dropped")],
    "not_admitted": [
        {"why": one}
        for one in ("reuse_off", "store_false", "answer", "admission", "lossy", "queue_full",
                    "no_room", "write_failed", "given_up")
    ],
    "tier_unavailable": [{"why": one} for one in ("breaker", "late", "error")],
    "diverged": [{"public": True}],
}  # fmt: skip


@pytest.mark.parametrize("reason", sorted(set(REASONS) - NOTHING))
def test_there_is_advice_where_something_can_be_done(reason):
    for evidence in WHY.get(reason, [{}]):
        said = advice(reason, evidence)
        assert said, evidence
        assert said[0].isupper()
        assert said.endswith(".")
        assert len(said) < 100


@pytest.mark.parametrize("reason", sorted(NOTHING))
def test_there_is_none_where_all_is_as_it_should_be(reason):
    assert advice(reason, {}) is None


@pytest.mark.parametrize("evidence", [{"why": "unread"}, {"why": "unknown"}, {}])
def test_what_was_left_out_on_purpose_needs_nothing(evidence):
    assert advice("not_admitted", evidence) is None


def test_options_that_are_named_exist():
    text = (ROOT / "src/kvkeep/observe/explain/summary.py").read_text("utf-8")
    known = "".join(
        (ROOT / page).read_text("utf-8") for page in ("docs/serving.md", "docs/store.md")
    )
    named = set(re.findall(r"--[a-z-]+|\b[a-z]+=(?=[ ).])", text))
    assert {"--load-timeout", "size="} <= named
    assert {one for one in named if one not in known} == set()


def run(served, tenants):
    for tenant in range(tenants):
        text = range(1000 * tenant + 10_000, 1000 * tenant + 10_400)
        for at in range(2):
            served.run(f"{tenant}-{at}", tokens(range(2), [5000 + at], text), f"t{tenant}")
        served.now += 1
    return served.explainer.summary()


def test_few_tenants_have_causes_of_their_own():
    with Served(2000) as served:
        summary = run(served, 3)
        differs = [one for one in summary.causes if one.reason == "diverged"]
        found = {(one.tenant, one.tenants, one.requests, one.position) for one in differs}
        assert found == {(f"t{tenant}", 1, 1, 2) for tenant in range(3)}
        name = differs[0].tenant
        assert f"cache_salt '{name}' differ at token 2" in differs[0].sentence


def test_what_many_tenants_share_is_one_cause():
    with Served(2000) as served:
        summary = run(served, 9)
        (differs,) = [one for one in summary.causes if one.reason == "diverged"]
        assert (differs.tenant, differs.tenants, differs.requests, differs.position) == (
            None,
            9,
            9,
            2,
        )
        assert "prompts of 9 tenants differ at token 2" in differs.sentence
        assert differs.advice.startswith("Move what changes")
        (new,) = [one for one in summary.causes if one.reason == "new"]
        assert new.advice is None
        assert sum(one.tokens for one in summary.causes) == sum(summary.computed.values())
        assert sum(one.share for one in summary.causes) == pytest.approx(1)


def test_what_can_be_changed_comes_first_and_what_was_never_seen_last():
    with Served(2000) as served:
        first, second = tokens(range(30)), tokens(range(600, 640))
        served.run("new", tokens(range(1000, 1400)))
        served.end(served.open("off", first, store=False))
        served.run("again", first)
        served.run("begin", second)
        for at in range(3):
            served.run(f"last-{at}", second)
        served.run("differs", tokens([7], range(601, 640)))
        causes = served.explainer.summary().causes
    done = [one for one in causes if one.advice is None]
    assert {"diverged", "not_admitted"} <= {one.reason for one in causes if one.advice}
    assert [*(one for one in causes if one.advice), *done] == [*causes]
    ranked = [one.tokens for one in causes if one.advice]
    assert ranked == sorted(ranked, reverse=True)
    assert [one.reason for one in done][-1] == "new"
    assert done[-1].tokens == max(one.tokens for one in causes)  # it would lead by tokens
    assert "last_token" in {one.reason for one in done[:-1]}


def test_of_what_is_as_it_should_be_reasons_rank_by_all_their_tokens():
    def cause(reason, tenant, tokens):
        return Cause(reason, tokens, 0.1, 1, tenant, None, "x", "said", advice=advice(reason, {}))

    causes = [
        cause("last_token", "a", 40),
        cause("not_loaded", "a", 30),
        cause("not_loaded", "b", 25),
        cause("new", "a", 900),
        cause("computing", "a", 40),
        cause("diverged", "a", 1),
        cause("evicted", "a", 1),
    ]
    for shuffled in permutations(causes):
        ranked = [(one.reason, one.tenant) for one in _in_order([*shuffled])]
        assert ranked == [
            ("diverged", "a"),
            ("evicted", "a"),
            ("not_loaded", "a"),
            ("not_loaded", "b"),
            ("computing", "a"),
            ("last_token", "a"),
            ("new", "a"),
        ]


def test_causes_with_other_remedies_are_apart():
    with Served(1000) as served:
        first, second = tokens(range(40)), tokens(range(100, 140))
        served.end(served.open("a", first, store=False))
        served.run("b", first)
        served.run("c", second)
        served.cache.clear()
        served.run("d", second)
        causes = {one.reason: one for one in served.explainer.summary().causes}
        assert "store: false" in causes["not_admitted"].advice
        assert "cleared" in causes["evicted"].advice
