"""Every reason, produced by what really happens in a cache, and named as it should be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from served import SIZE, Served, evidence, tokens, told

from kvkeep import Namespace
from kvkeep.core.prefix import INDICES
from kvkeep.observe.explain import REASONS
from kvkeep.observe.usage import LoadReport
from kvkeep.store import Miss

if TYPE_CHECKING:
    from collections.abc import Iterator

A = tokens(range(100, 140))


@pytest.fixture(params=INDICES)
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    with Served(prefix=request.param) as made:
        yield made


@pytest.fixture
def radix() -> Iterator[Served]:
    with Served() as made:
        yield made


@pytest.fixture
def chain() -> Iterator[Served]:
    with Served(prefix="chain") as made:
        yield made


# --- the pool's own --------------------------------------------------------------------------


def test_the_first_prompt_is_new(served: Served) -> None:
    found = served.run("a", A)
    assert told(found) == [(0, 40, "new")]
    assert found.sentence == "40 of 40 tokens computed: they were never seen before"
    assert found.outcome == "done"


def test_the_same_again_needs_its_last_token(radix: Served) -> None:
    radix.run("a", A)
    found = radix.run("b", A)
    assert told(found) == [(0, 39, "pool"), (39, 40, "last_token")]
    assert found.reused == {"pool": 39}
    assert "all others came from the pool" in found.sentence


def test_one_token_alone_is_the_last(served: Served) -> None:
    assert told(served.run("a", A[:1])) == [(0, 1, "last_token")]


def test_whole_pages_leave_the_rest_of_the_last_one(chain: Served) -> None:
    chain.run("a", A)
    found = chain.run("b", A)
    assert told(found) == [(0, 36, "pool"), (36, 39, "page_remainder"), (39, 40, "last_token")]
    assert evidence(found, "page_remainder") == {"page_size": SIZE}


def test_a_last_page_that_was_not_full_is_computed_again(served: Served) -> None:
    served.run("a", A[:38])
    found = served.run("b", A[:38])
    assert told(found) == [(0, 36, "pool"), (36, 37, "page_remainder"), (37, 38, "last_token")]
    found = served.run("c", tokens(A[:38], range(900, 910)))
    assert told(found) == [(0, 36, "pool"), (36, 38, "page_remainder"), (38, 48, "new")]


def test_a_page_shared_in_part_is_a_remainder_for_whole_pages(chain: Served) -> None:
    chain.run("a", A)
    found = chain.run("b", tokens(A[:22], range(900, 918)))
    assert told(found) == [(0, 20, "pool"), (20, 22, "page_remainder"), (22, 40, "new")]


def test_a_difference_is_found_and_what_goes_on_the_same(radix: Served) -> None:
    radix.run("a", A)
    radix.run("x", tokens(range(500, 540)))
    ours = tokens(A[:10], [7, 8, 9], A[12:])
    found = radix.run("b", ours)
    assert told(found) == [(0, 10, "pool"), (10, 13, "new"), (13, 41, "diverged")]
    assert evidence(found, "diverged") == {
        "position": 10,
        "nearest": "a",
        "would_reuse": 28,
        "given": ours[2:26].tolist(),
        "cached": A[2:26].tolist(),
        "differs": 3,
    }
    assert found.sentence == (
        "31 of 41 tokens computed, 28 of them because they differ from request a at token 10, "
        "and go on the same behind it"
    )


def test_a_difference_at_the_very_beginning(served: Served) -> None:
    served.run("a", tokens([1, 2, 3, 4], A))
    found = served.run("b", tokens([5, 6], A))
    assert told(found) == [(0, 2, "new"), (2, 42, "diverged")]
    said = evidence(found, "diverged")
    assert (said["position"], said["differs"], said["would_reuse"]) == (0, 2, 40)


def test_several_differences_count_from_the_first(radix: Served) -> None:
    text = tokens(range(1000, 1200))
    radix.run("a", text)
    ours = text.copy()
    ours[[20, 90, 150]] = 7
    found = radix.run("b", ours)
    assert [span for span in told(found) if span[2] != "diverged"] == [
        (0, 20, "pool"), (20, 21, "new"), (90, 91, "new"), (150, 151, "new"),
    ]  # fmt: skip
    said = evidence(found, "diverged")
    assert (said["position"], said["would_reuse"], said["differs"]) == (20, 177, 1)


def test_nothing_alike_is_new(radix: Served) -> None:
    radix.run("a", A)
    assert told(radix.run("b", tokens(A[:9], range(600, 640)))) == [(0, 9, "pool"), (9, 49, "new")]


def test_pressure_evicts() -> None:
    with Served(12, requests=10) as served:
        served.run("a", A)
        served.now += 5
        other = served.open("b", tokens(range(200, 244)))
        other.publish()
        served.end(other)
        served.now += 7
        found = served.run("c", A)
        assert told(found) == [(0, 4, "pool"), (4, 40, "evicted")]
        assert evidence(found, "evicted") == {
            "at": 1005.0,
            "ago_s": 7.0,
            "policy": "lru",
            "cause": "pressure",
            "tier": "pool",
        }
        assert found.sentence == (
            "36 of 40 tokens computed: they were evicted 7 s ago, when memory was short"
        )


@pytest.mark.parametrize("cause", ["asked", "cleared", "dropped"])
def test_what_else_takes_pages_away(served: Served, cause: str) -> None:
    if cause == "dropped":
        sequence = served.open("a", A)
        sequence.publish()
        sequence.close(keep=False)
        served.explainer.ended("a", outcome="done", generated=0, ttft_s=None, seconds=1.0)
    else:
        served.run("a", A)
        if cause == "asked":
            served.cache.evict(100)
        else:
            served.cache.clear()
    found = served.run("b", A)
    assert told(found) == [(0, 40, "evicted")]
    said = evidence(found, "evicted")
    assert said["cause"] == cause
    assert said["policy"] == ("lru" if cause == "asked" else None)


def test_an_answer_that_filled_the_page_and_went(radix: Served) -> None:
    """The prompt's last tokens were reusable, since the answer had filled their page."""
    radix.run("a", A[:38], answer=[1, 2, 3])
    assert told(radix.run("b", A[:38])) == [(0, 37, "pool"), (37, 38, "last_token")]
    radix.cache.clear()
    assert told(radix.run("c", A[:38])) == [(0, 36, "evicted"), (36, 38, "page_remainder")]


def test_not_stored_on_purpose(served: Served) -> None:
    served.end(served.open("a", A, store=False))
    found = served.run("b", A)
    assert told(found) == [(0, 40, "not_admitted")]
    assert evidence(found, "not_admitted") == {"why": "store_false", "tier": None}


def test_never_published(served: Served) -> None:
    served.end(served.open("a", A), "aborted")
    found = served.run("b", A)
    assert told(found) == [(0, 40, "not_admitted")]
    assert evidence(found, "not_admitted")["why"] == "given_up"


def test_lost_without_a_record(served: Served) -> None:
    """The pool forgot that it evicted a prompt of which a recent request is remembered."""
    served.end(served.open("a", A))
    found = served.run("b", A)
    assert told(found) == [(0, 40, "evicted")]
    assert evidence(found, "evicted")["cause"] == "unknown"


def test_tokens_behind_evicted_ones_are_new(served: Served) -> None:
    served.run("a", A, answer=range(50, 58))
    served.cache.clear()
    found = served.run("b", tokens(A, range(50, 58), range(60, 72)))
    assert told(found) == [(0, 48, "evicted"), (48, 60, "new")]


def test_just_being_computed(served: Served) -> None:
    first = served.open("a", A)
    first.publish(16)
    second = served.open("b", A)
    assert told(served.why("b")) == [(0, 16, "pool"), (16, 40, "computing")]
    assert evidence(served.why("b"), "computing") == {"by": "a"}
    assert served.why("a").outcome is None
    served.end(first)
    served.end(second)


def test_another_namespace_has_it(served: Served) -> None:
    theirs = Namespace(tenant="b", model="m", lora="x@1")
    ours = Namespace(tenant="a", model="m", lora="x@2")
    served.run("a", A, theirs)
    found = served.run("b", A, ours)
    assert told(found) == [(0, 40, "other_namespace")]
    assert evidence(found, "other_namespace") == {
        "fields": {"tenant": ["a", "b"], "lora": ["x@2", "x@1"]}
    }
    assert "whose cache_salt and LoRA adapter differs" in found.sentence


def test_the_namespace_that_has_most_is_named(served: Served) -> None:
    near, far = Namespace(tenant="b"), Namespace(tenant="c", lora="x")
    served.run("a", A[:8], near)
    served.run("b", A[:24], far)
    found = served.run("c", A, Namespace(tenant="a"))
    assert told(found) == [(0, 24, "other_namespace"), (24, 40, "new")]
    assert evidence(found, "other_namespace")["fields"].keys() == {"tenant", "lora"}


def test_what_another_namespace_has_in_part(served: Served) -> None:
    served.run("a", A[:22], "one")
    served.run("b", A[:8], "two")
    found = served.run("c", A[:30], "two")
    assert told(found) == [(0, 8, "pool"), (8, 20, "other_namespace"), (20, 30, "new")]


# --- with a store behind it ------------------------------------------------------------------

STORE = {
    "evicted": Miss(16, 32, "disk", "evicted", 990.0, "lru"),
    "not_admitted": Miss(16, 32, "disk", "dropped", 990.0, "queue full"),
    "not_loaded": Miss.slower(16, 32, "disk", load_s=0.08, compute_s=0.055),
    "tier_unavailable": Miss(16, 32, "disk", "late", 990.0, "no answer"),
    "damaged": Miss(16, 32, "disk", "damaged", 990.0, "checksum"),
}


@pytest.mark.parametrize(
    ("miss", "said"),
    [
        (
            STORE["not_loaded"],
            "loading them from tier 'disk' would have taken 80 ms, computing 55 ms",
        ),
        (
            Miss.slower(0, 36, "disk", load_s=1.234, compute_s=0.055),
            "would have taken 1.23 s, computing 55 ms",
        ),
        (
            Miss.slower(0, 36, "", load_s=0, compute_s=0),
            "loading them from a tier would have taken",
        ),
        (
            Miss.slower(0, 36, "disk", load_s=0, compute_s=0, overtaken=True),
            "they were computed, since loading them from tier 'disk' turned slow",
        ),
    ],
)
def test_why_stored_tokens_were_computed(served: Served, miss: Miss, said: str) -> None:
    served.open("b", A).close()
    served.explainer.loaded("b", LoadReport((), (replace(miss, start=0, stop=36),)))
    assert said in served.why("b").sentence
    summary = served.explainer.summary(10).causes[0].sentence
    assert f"were faster to compute: {served.why('b').sentence.partition('because ')[2]}" in summary


@pytest.mark.parametrize(
    ("what", "detail"), [("unavailable", "breaker"), ("unavailable", "errno 5"), ("late", "")]
)
def test_what_a_tier_that_does_not_answer_has_is_not_claimed(
    served: Served, what: Any, detail: str
) -> None:
    served.open("b", A).close()
    served.explainer.loaded("b", LoadReport((), (Miss(0, 36, "valkey", what, None, detail),)))
    assert "because tier 'valkey' may have them and " in served.why("b").sentence


@pytest.mark.parametrize("reason", STORE)
def test_what_a_store_says(served: Served, reason: str) -> None:
    served.run("a", A)
    served.cache.clear()
    served.open("b", A).close()
    served.explainer.loaded("b", LoadReport(((0, 16, "disk"),), (STORE[reason],), 0.5))
    found = served.why("b")
    assert told(found) == [(0, 16, "disk"), (16, 32, reason), (32, 40, "evicted")]
    said = evidence(found, reason)
    assert said["tier"] == "disk"
    if reason == "evicted":
        assert said["ago_s"] == 10.0
        assert set(said) == set(dict(found.spans[2].evidence))  # the same words as of the pool
    if reason == "tier_unavailable":
        assert said["waited_s"] == 0.5
    assert found.reused == {"disk": 16}


def test_a_store_that_was_not_waited_for(served: Served) -> None:
    served.run("a", A[:20])
    served.open("b", A).close()
    served.explainer.loaded("b", LoadReport(seconds=2.0, late=True))
    found = served.why("b")
    assert told(found) == [(0, 20, "pool"), (20, 39, "tier_unavailable"), (39, 40, "new")]
    assert evidence(found, "tier_unavailable") == {"tier": None, "why": "late", "waited_s": 2.0}


def test_all_of_it_from_tiers(served: Served) -> None:
    served.run("a", A)
    served.cache.clear()
    served.open("b", A).close()
    served.explainer.loaded("b", LoadReport(((0, 16, "memory"), (16, 40, "disk"))))
    found = served.why("b")
    assert told(found) == [(0, 16, "memory"), (16, 39, "disk"), (39, 40, "last_token")]
    assert found.sentence.endswith("all others came from 'memory' and 'disk'")


def test_what_a_store_knows_does_not_undo_what_the_pool_gave(served: Served) -> None:
    served.run("a", A[:20])
    other = served.open("x", tokens(A[:20], range(900, 920)))
    second = served.open("b", A)
    served.explainer.loaded(
        "b", LoadReport(((8, 24, "disk"),), (Miss(0, 40, "disk", "damaged", None, ""),))
    )
    assert told(served.why("b"))[:2] == [(0, 20, "pool"), (20, 24, "disk")]
    assert served.why("b").computed == {"damaged": 16}
    for sequence in (other, second):
        served.end(sequence)


def test_no_reason_is_without_a_test() -> None:
    """The list is closed; all of it is produced above, and one in tests/groups."""
    source = Path(__file__).read_text("utf-8")
    assert all(f'"{reason}"' in source for reason in REASONS if reason != "not_resumable")


def test_long_prompts_differ_by_a_timestamp() -> None:
    """As people have it: 8,000 tokens, of which six near the beginning change each time."""
    random = np.random.default_rng(1)
    head, body = random.integers(0, 32_000, 41), random.integers(0, 32_000, 7953)
    with Served(8000, 16) as served:
        for at in range(6):
            stamp = random.integers(0, 32_000, 6)
            served.run(f"cmpl-{at}", np.concatenate((head, stamp, body)).astype(np.int32))
            question = random.integers(0, 32_000, 500).astype(np.int32)
            served.run(f"noise-{at}", question)
        found = served.why("cmpl-5")
        assert told(found) == [(0, 41, "pool"), (41, 47, "new"), (47, 8000, "diverged")]
        causes = served.explainer.summary().causes
        assert causes[0].sentence.endswith(
            "of all computed tokens: prompts without cache_salt differ at token 41 "
            "(a difference of 6 tokens)"
        )
        assert (causes[0].requests, causes[0].position) == (5, 41)
