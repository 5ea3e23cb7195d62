"""What a cache without limits would reuse, checked against counting tokens and all replays."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.bench.replay import ReplayRun, Workload, infinite, simulate, summarise
from kvkeep.bench.traces import KINDS, Served, TraceRequest, generate
from kvkeep.bench.traces.chain import Growing
from kvkeep.core.errors import InvalidValue

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvkeep.bench.traces import Trace


class Made:
    """A trace of a third party's, as docs/traces.md says that one is written."""

    name = "made"

    def __init__(self, unit_tokens: int, *given: TraceRequest) -> None:
        self.unit_tokens = unit_tokens
        self._requests = given

    def __iter__(self) -> Iterator[TraceRequest]:
        return iter(self._requests)


def request(unit: int, tokens: list[int], answer: list[int], **more: object) -> TraceRequest:
    prompt = Growing(unit)
    prompt.append(np.array(tokens, np.int32))
    whole = prompt.fork()
    whole.append(np.array(answer[:-1], np.int32))
    ids = whole.full(len(tokens) // unit)
    return TraceRequest(0, prompt.units(), len(tokens), len(answer), answer=ids, **more)  # type: ignore[arg-type]


few = st.lists(st.integers(0, 1), min_size=1, max_size=9)


@given(
    st.lists(st.tuples(few, few, st.sampled_from("ab"), st.booleans()), max_size=8),
    st.integers(1, 3),
)
def test_what_is_reusable_is_what_was_there_before(
    given: list[tuple[list[int], list[int], str, bool]], unit: int
) -> None:
    requests, held, asked, anywhere = [], set(), set(), set()
    reusable = elsewhere = 0
    for tokens, answer, space, store in given:
        requests.append(request(unit, tokens, [*answer, 5], namespace=space, store=store))
        ends = [*range(unit, len(tokens) + 1, unit)]
        if len(tokens) % unit:
            ends.append(len(tokens))
        prefixes = [tuple(tokens[:end]) for end in ends]
        own = [(space, prefix) in held for prefix in prefixes]
        leading = own.index(False) if False in own else len(own)
        reusable += leading
        ends = [0, *ends]
        elsewhere += sum(
            end - before
            for before, end in pairwise(ends)
            if (space, tuple(tokens[:end])) not in asked and tuple(tokens[:end]) in anywhere
        )
        whole = [*tokens, *answer]
        full = [tuple(whole[:end]) for end in range(unit, len(whole) + 1, unit)]
        anywhere |= {*prefixes, *full}
        asked |= {(space, prefix) for prefix in (*prefixes, *full)}
        if store:
            held |= {(space, prefix) for prefix in (*prefixes, *full)}
    if not requests:
        with pytest.raises(InvalidValue, match="made has no requests"):
            summarise(Made(unit))
        return
    found = summarise(Made(unit, *requests))
    assert (found.reusable_units, found.elsewhere_tokens) == (reusable, elsewhere)
    assert not found.warnings


def endless_replays(trace: Trace) -> None:
    """No replay finds more than the summary says, and those with its block size as much."""
    found, work = summarise(trace), Workload.read(trace)
    most = 2 * int(work.tokens.sum() + work.output_tokens.sum())
    most += 2 * work.unit_tokens * len(work.ids) + 128 * (len(work) + 1)  # pages that are not full
    assert infinite(work).hit_blocks == found.reusable_units
    for policy in ("lru", "returns"):
        outcome = simulate(work, most, policy)
        assert (outcome.hit_blocks, outcome.hit_tokens, outcome.blocks) == (
            found.reusable_units, found.reusable_tokens, found.units,
        )  # fmt: skip
    below = ReplayRun("lru", most, below=(most,), tiering="exclusive").on(work)
    assert below.hit_blocks == found.reusable_units
    for page in (1, 3, 16, 64):
        paged = simulate(work, most, page_tokens=page)
        assert paged.hit_tokens <= found.reusable_tokens
        assert paged.hit_blocks <= found.reusable_units


@pytest.mark.parametrize("unit", [1, 5, 16])
@pytest.mark.parametrize("kind", KINDS)
def test_no_replay_finds_more(kind: str, unit: int) -> None:
    fewer = {1: 6, 5: 12}.get(unit, 40)
    endless_replays(generate(kind, seed=3, requests=fewer, unit_tokens=unit))


@given(st.lists(st.tuples(few, few), min_size=1, max_size=6), st.integers(1, 3))
def test_no_replay_of_short_prompts_finds_more(
    given: list[tuple[list[int], list[int]]], unit: int
) -> None:
    endless_replays(Made(unit, *(request(unit, *one) for one in given)))


def test_a_bound_is_exact_to_the_token() -> None:
    """Half a step of 16 tokens, which two prompts share, counts, too."""
    one = list(range(100))
    shared = request(1, one, [1]), request(1, [*one[:7], 500], [1])
    assert summarise(Made(1, *shared)).reusable_tokens == 7
    turn = request(1, one, list(range(200, 300)))
    after = request(1, [*one, *range(200, 300), 7], [1])
    assert summarise(Made(1, turn, after)).reusable_tokens == 199


def timed(time: float, tokens: int, output: int, session: str) -> TraceRequest:
    ids = np.arange(-(-tokens // 512))
    return TraceRequest(time, ids, tokens, output, session=session)


def test_figures() -> None:
    trace = Made(512, timed(0, 1000, 3, "a"), timed(1, 600, 4, "b"), timed(60, 2000, 5, "b"))
    found = summarise(trace)
    assert (found.requests, found.tokens, found.output_tokens, found.span_s) == (3, 3600, 12, 60)
    assert (found.units, found.reusable_units) == (2 + 2 + 4, 0 + 2 + 2)
    assert found.reusable_tokens == 600 + 1024
    assert (found.prompt_p50, found.prompt_p90, found.prompt_max) == (1000, 2000, 2000)
    assert (found.sessions, found.namespaces, found.skipped) == (2, 1, 0)
    assert found.as_dict()["reusable_share"] == 0.5


def test_what_was_served_is_summed() -> None:
    one, other = (request(16, [1] * 40, [1], served=Served(cached)) for cached in (0, 32))
    found = summarise(Made(16, one, other, request(16, [1] * 9, [1])))
    assert (found.served_tokens, found.cached_tokens) == (80, 32)
