"""Blocks in memory in front of blocks on a disk: read first, all into the same memory."""

from __future__ import annotations

import pytest

from kvkeep.serve.engine import Engine, SamplingParams
from kvkeep.serve.engine.offload import loads
from kvkeep.store import KVStore

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("load_first")]

BLOCK = 16


@pytest.mark.parametrize("kept", [0, 5], ids=["at a block", "within one"])
def test_a_front_is_read_into_the_same_memory(make_bench, prompt, tmp_path, monkeypatch, kept):
    bench = make_bench("llama", page_size=8, num_pages=128)
    runner, tokens = bench.runner, prompt(400, 3)
    expected = bench.greedy(tokens, 5)
    monkeypatch.setattr(loads, "_FRONT", 2)
    given, get = [], KVStore.get

    def noted(self, *args, out=None, **how):
        given.append(out)
        return get(self, *args, out=out, **how)

    def opened(memory):
        return KVStore(
            runner.geometry, model="tiny@1", block_tokens=BLOCK,
            tiers=[f"memory://{memory}", f"file://{tmp_path}?size=64MiB&sync=never"],
        )  # fmt: skip

    def ask(store, cache):
        engine = Engine(runner, cache, store=store, load_timeout=30.0)
        (done,) = engine.generate([tokens], SamplingParams(max_tokens=5))
        assert engine.close(30)
        assert [*done.tokens] == expected
        return done

    with opened("16MiB") as store:
        ask(store, runner.cache())
        assert store.flush(30)
    with opened("1MiB") as store:
        _, count = store.get(tokens[: 12 * BLOCK])
        assert count == 12 * BLOCK
        runs = store.load_tail(tokens).runs
        assert [tier for tier, _ in runs] == list(store.tiers)
        bench.spoil()
        cache = runner.cache()
        if kept:  # the pool has some tokens of a block already
            with cache.open(tokens[: 3 * BLOCK + kept]) as sequence:
                bench.compute(sequence)
        monkeypatch.setattr(KVStore, "get", noted)
        done = ask(store, cache)
    assert done.loaded_tokens >= 400 - 4 * BLOCK
    assert len(given) >= 4
    assert given[0] is None
    rest = [one for one in given[2 if kept else 1 :] if one is not None]
    assert len(rest) >= len(given) - 3, "most go where another one went"
    assert len({one.data_ptr() for one in rest}) == 1
