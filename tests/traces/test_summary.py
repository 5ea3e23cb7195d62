"""What a cache without limits would reuse, checked against counting tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from writing import mooncake, write

from kvkeep.bench.traces import Served, TraceRequest, open_trace, summarise
from kvkeep.bench.traces.chain import Growing

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Made:
    """A trace of a third party's, as docs/traces.md says that one is written."""

    name = "made"
    length = None

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
    """Units of one token's size here are looked at one by one; with 16 they are a trace's own."""
    requests, held, anywhere = [], set(), set()
    reusable = elsewhere = 0
    for tokens, answer, space, store in given:
        wide = [token for token in tokens for _ in range(16)]
        said = [token for token in answer for _ in range(16)] + [5]
        requests.append(request(16 * unit, wide, said, namespace=space, store=store))
        ends = [*range(unit, len(tokens) + 1, unit)]
        if len(tokens) % unit:
            ends.append(len(tokens))
        prefixes = [tuple(tokens[:end]) for end in ends]
        own = [(space, prefix) in held for prefix in prefixes]
        leading = own.index(False) if False in own else len(own)
        reusable += leading
        rest = [prefix in anywhere for prefix in prefixes[leading:]]
        elsewhere += rest.index(False) if False in rest else len(rest)
        if store:
            whole = [*tokens, *answer]
            full = [tuple(whole[:end]) for end in range(unit, len(whole) + 1, unit)]
            held |= {(space, prefix) for prefix in (*prefixes, *full)}
            anywhere |= {*prefixes, *full}
    found = summarise(Made(16 * unit, *requests))
    assert (found.reusable_units, found.elsewhere_units) == (reusable, elsewhere)
    assert found.unchained_units == 0


def test_fine_units_are_looked_at_in_steps() -> None:
    one = list(range(100))
    for unit in (1, 4, 16):
        found = summarise(
            Made(
                unit,
                request(unit, one, [1]),
                request(unit, one[:50], [1]),
                request(unit, [*one, 9], [1]),
            )
        )
        assert abs(found.reusable_tokens - (48 + 96)) <= 4
    turn = request(1, one, list(range(200, 300)))
    after = request(1, [*one, *range(200, 300), 7], [1])
    assert summarise(Made(1, turn, after)).reusable_tokens == 192


def test_figures(tmp_path: Path) -> None:
    lines = [
        mooncake(0, 1000, 3, session_id="a"),
        mooncake(1000, 600, 4, session_id="b"),
        "?",
        mooncake(60_000, 2000, 5, session_id="b"),
    ]
    found = summarise(open_trace(write(tmp_path / "m", *lines)))
    assert (found.requests, found.tokens, found.output_tokens, found.span_s) == (3, 3600, 12, 60)
    assert (found.units, found.reusable_units) == (2 + 2 + 4, 0 + 2 + 2)
    assert found.reusable_tokens == 600 + 1024
    assert (found.prompt_p50, found.prompt_p90, found.prompt_max) == (1000, 2000, 2000)
    assert (found.sessions, found.single_turn, found.namespaces, found.skipped) == (2, 1 / 3, 1, 1)
    assert found.as_dict()["reusable_share"] == 0.5


def test_ids_that_are_not_chained_are_found_out(tmp_path: Path) -> None:
    lines = [mooncake(hash_ids=[1, 2]), mooncake(hash_ids=[9, 2])]
    path = write(tmp_path / "m", *lines)
    assert summarise(open_trace(path)).unchained_units == 1
    assert summarise(open_trace(path, chained=False)).unchained_units == 0


def test_what_was_served_is_summed() -> None:
    one, other = (request(16, [1] * 40, [1], served=Served(cached)) for cached in (0, 32))
    found = summarise(Made(16, one, other, request(16, [1] * 9, [1])))
    assert (found.served_tokens, found.cached_tokens) == (80, 32)


def test_a_trace_of_nothing() -> None:
    found = summarise(Made(16))
    assert (found.requests, found.reusable_share, found.prompt_p90, found.single_turn) == (
        0,
        0,
        0,
        None,
    )
