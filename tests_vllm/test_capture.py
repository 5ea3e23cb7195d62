"""What vLLM was asked for, captured and replayed: the same hits, token for token."""

from __future__ import annotations

import gzip
from typing import TYPE_CHECKING

import pytest
from engines import BLOCK, engine, prompt

from kvkeep.bench.replay import Workload, simulate
from kvkeep.bench.traces import open_trace

if TYPE_CHECKING:
    from pathlib import Path


def test_captured_and_replayed(llama: str, tmp_path: Path) -> None:
    file = tmp_path / "served.jsonl.gz"
    start = prompt(3 * BLOCK + 5, seed=1)
    asked = [
        start,
        start + prompt(40, seed=2),
        prompt(BLOCK, seed=3),  # all of it is in full blocks, and the last is computed again
        start + prompt(40, seed=2) + prompt(70, seed=4),
        prompt(BLOCK, seed=3),
        prompt(7, seed=5),
    ]
    with engine(llama, ["memory://64MiB"], extra={"capture": str(file)}) as one:
        cached = [one.ask([tokens])[0].cached for tokens in asked]
        one.ask([start], salt="other")
        one.ask([asked[1]], kvkeep={"store": False})
        # The end token alone; behind t0, the only token that was added by name; a length.
        for tokens in (1, 3):
            bias = {7: 100.0, 0: 90.0}
            one.ask([asked[5]], stop_token_ids=[7], min_tokens=tokens - 1, logit_bias=bias)
        one.forget()
        loaded = one.ask([asked[3]])[0].cached
    work = Workload.read(trace := open_trace(file))
    requests = list(trace)
    assert trace.unit_tokens == BLOCK
    assert [one.tokens for one in requests[:6]] == [len(tokens) for tokens in asked]
    assert [one.served.cached_tokens for one in requests[:6] if one.served] == cached
    assert len({one.namespace for one in requests[:6]}) == 1
    assert requests[6].namespace != requests[0].namespace
    assert not requests[7].store
    assert [one.stop for one in requests[8:10]] == ["stop 7", "stop 7 after 0"]
    assert [one.output_tokens for one in requests[8:10]] == [1, 3]
    assert requests[10].served is not None
    assert requests[10].served.cached_tokens == requests[10].served.loaded_tokens == loaded > 0
    assert {one.stop for one in [*requests[:8], requests[10]]} == {"length"}
    assert all(one.served.seconds >= one.served.ttft_s > 0 for one in requests if one.served)
    # Nothing was evicted: a cache with room for all finds what vLLM's pool and the store found.
    found = simulate(work, 10_000, page_tokens=BLOCK)
    served = sum(one.served.cached_tokens for one in requests if one.served)
    assert found.hit_tokens == served
    text = gzip.decompress(file.read_bytes()).decode()
    assert str(start[:2])[1:-1] not in text
    assert "other" not in text


def test_a_file_that_is_there_is_not_written_over(llama: str, tmp_path: Path) -> None:
    file = tmp_path / "served.jsonl"
    file.write_text("mine", encoding="utf-8")
    with (
        pytest.raises(Exception, match=r"served\.jsonl"),
        engine(llama, ["memory://64MiB"], extra={"capture": str(file)}),
    ):
        pass
    assert file.read_text(encoding="utf-8") == "mine"
