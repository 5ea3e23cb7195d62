"""Public prefixes in the router: a prompt of a new salt goes where the public part is cached."""

from __future__ import annotations

import json
import os
import re
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import Instance, route
from standing_in import eventually

from kvkeep import PagedCache
from kvkeep.cli import main
from kvkeep.core.public import PublicPrefixes
from kvkeep.core.tokens import as_tokens
from kvkeep.serve.kv_events.blocks import CacheBlocks
from kvkeep.serve.kv_events.wire import AllBlocksCleared, BlockStored
from kvkeep.serve.router import PrefixRouter

if TYPE_CHECKING:
    from pathlib import Path

PAGE = 4
SYSTEM = list(range(100, 118))  # four pages and a half
LONGER = [*SYSTEM, *range(200, 208)]

prompts = st.tuples(
    st.sampled_from([SYSTEM, LONGER, SYSTEM[:8], []]),
    st.lists(st.integers(1, 2), max_size=12),
).map(lambda parts: [*parts[0], *parts[1], 3])
requests = st.tuples(prompts, st.sampled_from(["", "a", "b"]))


@given(st.lists(requests, max_size=12), requests)
@settings(max_examples=200, deadline=None)
def test_the_router_knows_what_the_cache_would_reuse(
    served: list[tuple[list[int], str]], asked: tuple[list[int], str]
) -> None:
    """Of one of our servers, followed by its events."""
    cache = PagedCache(500, PAGE, prefix="chain")
    cache.public.declare(SYSTEM, LONGER)
    mirror, events = CacheBlocks(PAGE), []
    cache.subscribe(lambda event: events.extend(mirror.take(event)))
    router = PrefixRouter(["one"], public=PublicPrefixes([SYSTEM, LONGER]))
    for tokens, salt in served:
        with cache.open(tokens, salt) as sequence:
            sequence.copies()
            sequence.publish()
    router.apply("one", events)
    tokens, salt = asked
    (score,) = router.score(tokens, salt=salt)
    known, public = (
        cache.match(tokens, salt).num_tokens,
        cache.public.length(as_tokens(tokens), PAGE),
    )
    # A tenant's own prompt that diverges within the prefix is taken for a beginning of this one.
    assert score.tokens == known or known == 0 < score.tokens < public
    # Its runs have keys alone: what was announced stays.
    assert mirror.reconcile((space, cache.runs(space)) for space in cache.namespaces()) == []
    router.check()


def stored(tokens: list[int], salt: str, parent: int | None = None, first: int = 1) -> BlockStored:
    """As vLLM tells it: the salt is in a prompt's first block."""
    count = len(tokens) // PAGE
    extra: list[Any] = [None] * count
    if parent is None and salt:
        extra[0] = [salt]
    hashes = [hash((salt, first, at)) for at in range(count)]
    return BlockStored(hashes, parent, tokens[: count * PAGE], PAGE, None, None, None, extra)  # type: ignore[arg-type]


def test_what_one_salt_sent_to_vllm_counts_for_all() -> None:
    """The public part alone; in several events, and until it is cleared."""
    router = PrefixRouter(["one", "two"], public=PublicPrefixes([SYSTEM]))
    first = stored(SYSTEM[:8], "a")
    rest = stored([*SYSTEM[8:], 1, 2, 5, 5, 5, 5], "a", first.block_hashes[-1], 2)  # type: ignore[arg-type]
    router.apply("two", [first, rest])
    for salt, tokens in (("b", 16), ("", 16), ("a", 24)):
        best = router.score([*SYSTEM, 1, 2, 5, 5, 5, 5, 9], salt=salt)[0]
        assert (best.place.instance, best.tokens) == ("two", tokens)
    assert router.score([*SYSTEM[:12], 9, 9, 9, 9], salt="b")[0].tokens == 0
    router.apply("two", [AllBlocksCleared()])
    assert router.score([*SYSTEM, 1], salt="b")[0].tokens == 0
    undeclared = PrefixRouter(["one"])
    undeclared.apply("one", [first, rest])
    assert undeclared.score([*SYSTEM, 1], salt="b")[0].tokens == 0


def test_a_prompt_on_its_way_counts_for_other_salts() -> None:
    system = list(range(600))
    router = PrefixRouter(["one", "two"], public=PublicPrefixes([system]))
    two = next(score for score in router.score([1]) if score.place.instance == "two")
    ticket = router.begin(two, [*system, 1], salt="a")
    best = router.score([*system, 2], salt="b")
    assert {score.place.instance: score.tokens for score in best} == {"one": 0, "two": 576}
    router.end(ticket)
    assert {score.tokens for score in router.score([*system, 2], salt="b")} == {0}
    router.check()


@given(st.lists(st.integers(-(2**70), 2**70), max_size=9), st.integers(-9, 9))
def test_no_event_of_an_instance_makes_it_fail(tokens: list[int], size: int) -> None:
    router = PrefixRouter(["one"], public=PublicPrefixes([SYSTEM]))
    router.apply("one", [BlockStored([1, 2], None, tokens, size, None, None, None, [["s"], None])])
    assert router.score(SYSTEM, salt="s")[0].tokens == 0


def test_texts_need_a_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "public.jsonl"
    file.write_text('"You help."\n')
    options = ["--instances", "http://127.0.0.1:1", "--public-prefixes", str(file)]
    assert main(["route", *options]) != 0
    assert "give --model" in capsys.readouterr().err


def known(url: str) -> float:
    """How many blocks the router knows."""
    text = httpx.get(f"{url}/metrics").text
    return float(re.findall(r'^kvkeep_router_blocks{kind="blocks"} (\S+)$', text, re.M)[0])


@pytest.mark.model
@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_new_tenants_go_where_the_public_part_is(tmp_path: Path) -> None:
    """Two real servers behind a real router, which knows them by their events alone."""
    system = list(range(50, 450))
    file = tmp_path / "public.jsonl"
    file.write_text(f"{json.dumps(system)}\n")
    declared = ("--public-prefixes", str(file))
    made = [Instance(*declared), Instance(*declared)]
    proxy, url = route(made, *declared)
    try:
        for one in made:
            eventually(one.ready, 180)
        eventually(lambda: "kvkeep routes at" in proxy.text, 60)
        eventually(lambda: {*httpx.get(f"{url}/health").json()["each"].values()} == {"up"})

        def cached(at: str, salt: str, question: list[int]) -> int:
            asked = {"prompt": [*system, *question], "max_tokens": 1, "cache_salt": salt}
            answer = httpx.post(f"{at}/v1/completions", json=asked, timeout=60).json()
            found: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            return found

        assert cached(made[1].url, "somebody", [1, 2]) == 0
        eventually(lambda: known(url) >= 25)
        before = made[1].requests()
        assert [cached(url, f"tenant {n}", [3, n + 1]) for n in range(6)] == [400] * 6
        assert made[1].requests() - before == 6
        # What follows is the tenant's own.
        assert cached(url, "tenant 0", [3, 1, *range(40)]) == 400
        assert cached(url, "tenant 1", [3, 1, *range(40)]) == 400
    finally:
        for one in made:
            one.process.end()
        proxy.end()
