"""The engine over a store: the same tokens as without it, what is loaded, and stores that fail.

The store is a dictionary (`dict_store.py`); `test_store_real.py` has the real one.
"""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch
from dict_store import BLOCK, PAGE, DictStore, House, few, finish

from kvkeep.core.cache import PagedCache
from kvkeep.core.errors import InvalidValue
from kvkeep.core.geometry import KVGeometry
from kvkeep.core.keys import Namespace
from kvkeep.core.pages.tensors import PagedTensors
from kvkeep.serve.engine import Engine
from kvkeep.serve.engine.offload.forms import Forms

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("load_first")]


@pytest.fixture
def house(make_bench):
    return House(make_bench("llama", page_size=PAGE, num_pages=96))


# --- the same answers ------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("page_size", [1, 2, 8])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_second_engine_computes_only_the_last_token(
    make_bench, prompt, family, page_size, layout
):
    house = House(make_bench(family, page_size=page_size, num_pages=64), layout=layout)
    for length in (3, 8, 9, 21):
        text = prompt(length, length)
        want = house.bench.greedy(text, 6)
        (first,), _, _ = house.ask(text)
        (again,), runner, stats = house.ask(text)
        assert [*first.tokens] == [*again.tokens] == want
        stored = length if length % BLOCK >= page_size else length // BLOCK * BLOCK
        found = min(stored, length - 1)  # the last token is computed for its logits
        if found >= page_size:
            assert runner.computed == length - found + 5
            assert again.loaded_tokens == again.cached_tokens == stats.loaded_tokens == found


def test_the_next_turn_finds_the_answer_too(house, prompt):
    text = prompt(19, 1)
    (first,), _, _ = house.ask(text, params=few(10))
    turn = np.concatenate((text, first.tokens, prompt(5, 2)))
    (second,), runner, _ = house.ask(turn)
    assert [*second.tokens] == house.bench.greedy(turn, 6)
    # All that was computed of the first turn, which excludes its last token.
    assert second.loaded_tokens == 19 + 10 - 1
    assert runner.computed == 1 + 5 + 5


def test_prompts_that_share_a_beginning(house, prompt):
    common = prompt(32, 1)
    texts = [np.concatenate((common, prompt(7 + at, at))) for at in range(5)]
    house.ask(texts[0])
    done, runner, stats = house.ask(*texts)
    for text, one in zip(texts, done, strict=True):
        assert [*one.tokens] == house.bench.greedy(text, 6)
    assert stats.cached_tokens >= 5 * 32
    # Each block was read once: answers that share it wait for it.
    assert stats.loaded_tokens <= 32 + 8
    assert runner.computed <= sum(len(text) - 32 for text in texts) + 5 * 6


def test_a_pool_that_has_more_or_less_than_the_store(house, prompt):
    cache = PagedCache(96, PAGE)
    text = prompt(45, 3)
    house.ask(text[:21])
    for engine_has in (text[:6], text[:30]):
        cache.clear()
        _, _, _ = house.ask(engine_has, cache=cache, store=True)
        (answer,), _, _ = house.ask(text, cache=cache)
        assert [*answer.tokens] == house.bench.greedy(text, 6)


def test_forks_and_drafts(house, prompt):
    text = np.tile(prompt(6, 1), 6)
    for params in (
        few(12, draft_tokens=3),
        few(12, n=3, temperature=0.8, seed=5),
    ):
        engine = Engine(house.bench.runner, PagedCache(96, PAGE))
        (want,) = engine.generate([text], params)
        house.store.blocks.clear()
        (first,), _, _ = house.ask(text, params=params)
        (again,), _, stats = house.ask(text, params=params)
        assert want.choices == first.choices == again.choices
        assert stats.loaded_tokens == 35


def test_preemption(make_bench, prompt):
    """Preempted answers load again what was written, though the pool has evicted it."""
    house = House(make_bench("llama", page_size=PAGE, num_pages=24))
    texts = [prompt(20, at) for at in range(4)]
    done, _, stats = house.ask(*texts, params=few(40))
    assert stats.preempted
    for text, one in zip(texts, done, strict=True):
        assert [*one.tokens] == house.bench.greedy(text, 40)


def test_the_latent_of_multi_head_latent_attention_has_its_form():
    geometry = KVGeometry(3, 1, 8, latent_dim=6, dtype="float16")
    tensors = PagedTensors(geometry, 5, PAGE)
    pages = tensors.read([4, 0, 2])
    pages.copy_((torch.arange(pages.numel()) % 120).to(torch.uint8).view(pages.shape))  # no NaN
    forms = Forms(tensors, "NHD")
    kv = forms.by_token(pages, 10)
    assert kv.shape == (3, 10, 8)
    tensors.write([1, 3, 0], pages)
    for layer in range(3):
        assert torch.equal(kv[layer], tensors.gather(layer, [1, 3, 0], 10)[0][:, 0])
    back = torch.full_like(pages, 255)
    forms.by_page(kv, 10, back)
    tensors.write([1, 3, 0], back)
    for layer in range(3):
        assert torch.equal(kv[layer], tensors.gather(layer, [1, 3, 0], 10)[0][:, 0])


@pytest.mark.parametrize("stored", ["NHD", "HND"])
@pytest.mark.parametrize("paged", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float8_e4m3fn"])
def test_forms_are_those_of_gather(dtype, paged, stored):
    geometry = KVGeometry(2, 3, 4, dtype)
    tensors = PagedTensors(geometry, 4, PAGE, layout=paged)
    pages = torch.randint(0, 256, (3, tensors.page_bytes), dtype=torch.uint8)
    tensors.write([2, 0, 3], pages)
    forms = Forms(tensors, stored)
    kv = forms.by_token(pages, 11)
    for layer in range(2):
        for part, expected in enumerate(tensors.gather(layer, [2, 0, 3], 11)):
            one = kv[layer, part]
            one = one.transpose(0, 1) if stored == "HND" else one
            assert torch.equal(one.view(torch.uint8), expected.view(torch.uint8))
    back = torch.zeros_like(pages)
    forms.by_page(kv, 11, back)
    tensors.write([1, 2, 0], back)
    for layer in range(2):
        for part in (0, 1):
            one = tensors.gather(layer, [1, 2, 0], 11)[part]
            expected = kv[layer, part]
            expected = expected.transpose(0, 1) if stored == "HND" else expected
            assert torch.equal(one.view(torch.uint8), expected.contiguous().view(torch.uint8))
    with pytest.raises(InvalidValue, match="12 tokens"):
        forms.by_page(kv, 12, back)


# --- what is written -------------------------------------------------------------------------


def test_nothing_is_written_twice(house, prompt):
    text = prompt(37, 1)
    engine, _ = house.engine()
    for _ in range(2):
        engine.add(text, few(6))
        engine.add(text, few(6))
        finish(engine)
    assert engine.close()
    assert house.store.written == 40 + 5  # full blocks, and the prompt's tail
    house.ask(text)
    assert house.store.written == 40 + 5 + 8  # a new engine does not know what is stored


def test_what_the_store_has_lost_is_written_again_from_the_pool(house, prompt):
    cache = PagedCache(96, PAGE)
    engine, runner = house.engine(cache=cache)
    text = prompt(37, 1)
    engine.add(text, few(2))
    finish(engine)
    assert engine._offload._mover.flush(5)
    house.store.blocks.clear()
    computed = runner.computed
    known, forward, looked_up = engine._offload._mover.known, runner.forward, threading.Event()
    found = known.found

    def noted(*given, **how):
        found(*given, **how)
        looked_up.set()

    def then(pieces):  # else it may be over before the store has said what it lacks
        assert looked_up.wait(20)
        return forward(pieces)

    known.found, runner.forward = noted, then
    engine.add(text, few(2))
    finish(engine)
    assert runner.computed == computed + 2
    assert engine.close()
    assert max(len(key) // 4 for _, key in house.store.blocks) >= 37


def test_requests_that_leave_nothing_behind(house, prompt):
    text = prompt(30, 1)
    house.ask(text, store=False)
    assert not house.store.blocks
    house.ask(text)
    before = dict(house.store.blocks)
    cache = PagedCache(96, PAGE)
    (answer,), _, _ = house.ask(text, store=False, cache=cache)
    assert answer.loaded_tokens == 29  # reused nevertheless
    assert house.store.blocks.keys() == before.keys()
    assert cache.stats().pages_cached == 0


def test_namespaces_share_nothing(house, prompt):
    text = prompt(30, 1)
    spaces = [
        Namespace(), Namespace(tenant="a"), Namespace(tenant="b"), Namespace(tenant="a", lora="x"),
        Namespace(tenant="a", model="another"), Namespace(tenant="namespace x"),
    ]  # fmt: skip
    for space in spaces:
        (answer,), _, _ = house.ask(text, namespace=space)
        assert answer.loaded_tokens == 0
    assert len({tenant for tenant, _ in house.store.blocks}) == len(spaces)
    for space in spaces:
        (answer,), _, _ = house.ask(text, namespace=space)
        assert answer.loaded_tokens == 29
    # What the store's own namespace separates needs no tenant of its own.
    ours = Namespace(tenant="a", model="tiny", dtype="float32")
    (answer,), _, _ = house.ask(text, namespace=ours)
    assert answer.loaded_tokens == 29


def test_what_the_store_drops_is_offered_again(house, prompt):
    engine, _ = house.engine()
    text = prompt(37, 1)
    house.store.drops = True
    engine.add(text, few(2))
    finish(engine)
    assert engine._offload._mover.flush(5)
    assert not house.store.blocks
    house.store.drops = False
    engine.add(text, few(2))
    finish(engine)
    assert engine.close()
    assert max(len(key) // 4 for _, key in house.store.blocks) >= 37


# --- stores that fail ------------------------------------------------------------------------


def test_others_go_on_while_one_is_fetched(house, prompt):
    text, other = prompt(40, 1), prompt(10, 2)
    house.ask(text)
    house.store.fetch_seconds = 0.3
    engine, _ = house.engine()
    slow = engine.add(text, few(4))
    quick = engine.add(other, few(4))
    order = []
    while engine.has_work:
        order += [delta.request.id for delta in engine.step() if delta.completion]
    assert order == [quick.id, slow.id]
    assert slow.loaded_tokens == 39
    assert engine.close()


@pytest.mark.parametrize("where", ["hung", "lookups_hang"])
def test_a_store_that_hangs_costs_the_deadline(house, prompt, where):
    texts = [prompt(40, at) for at in range(3)]
    house.ask(*texts)
    getattr(house.store, where).set()
    engine, _ = house.engine(load_timeout=0.2)
    requests = [engine.add(text, few(4)) for text in texts]
    began = time.monotonic()
    done = finish(engine)
    for text, request in zip(texts, requests, strict=True):
        assert [*done[request.id].tokens] == house.bench.greedy(text, 4)
        assert not done[request.id].loaded_tokens
    assert engine.stats().late_loads == 3
    assert time.monotonic() - began < 10  # of three times 0.2 s and a tiny model
    getattr(house.store, where).clear()
    assert engine.close()


@pytest.mark.parametrize("method", ["put", "lookup", "prefetch", "get"])
def test_a_store_that_raises_is_a_miss(house, prompt, method, monkeypatch, caplog):
    text = prompt(40, 1)
    house.ask(text)

    def broken(*given, **how):
        raise OSError("planted")

    monkeypatch.setattr(house.store, method, broken)
    texts = [prompt(9, 4), np.concatenate((text, prompt(9, 3)))]
    answers, _, _ = house.ask(*texts, max_running=1)
    for one, answer in zip(texts, answers, strict=True):
        assert [*answer.tokens] == house.bench.greedy(one, 6)
    assert "planted" in caplog.text


def test_a_store_that_loses_blocks_between_asking_and_reading(house, prompt):
    text = prompt(40, 1)
    house.ask(text)
    for holes, loaded in ({16}, 16), ({0, 16}, 0), ({8, 24, 32}, 8):
        house.store.holes = holes
        (answer,), runner, _ = house.ask(text)
        assert [*answer.tokens] == house.bench.greedy(text, 6)
        assert answer.loaded_tokens == loaded
        assert runner.computed == 40 - loaded + 5


def test_abort_at_every_point(house, prompt):
    text = prompt(40, 1)
    house.ask(text)
    house.store.fetch_seconds = 0.01
    before = {*threading.enumerate()}
    for steps in range(12):
        engine, _ = house.engine()
        request = engine.add(text, few(4))
        for _ in range(steps):
            engine.step()
        engine.abort(request)
        assert not engine.has_work
        assert engine.close()
        engine.cache.check()
        assert engine.cache.stats().sequences == 0
    assert {*threading.enumerate()} <= before


def test_wrong_bytes_would_show(house, prompt):
    """Checks the tests themselves: the model reads what the store returned."""
    text = prompt(40, 1)
    (first,), _, _ = house.ask(text, params=few(20))
    for kv in house.store.blocks.values():
        kv.mul_(-1)
    (again,), _, _ = house.ask(text, params=few(20))
    assert again.loaded_tokens == 39
    assert first.tokens != again.tokens


# --- what is refused -------------------------------------------------------------------------


def test_stores_that_do_not_fit(house):
    runner, cache = house.bench.runner, house.bench.cache
    other = DictStore(KVGeometry(1, 2, 4, "float32"))
    with pytest.raises(InvalidValue, match="geometry"):
        Engine(runner, cache, store=other)
    with pytest.raises(InvalidValue, match="multiple of the page size"):
        Engine(runner, cache, store=DictStore(runner.geometry, block_tokens=6))
    with pytest.raises(InvalidValue, match="seconds"):
        Engine(runner, cache, store=house.store, load_timeout=-1)
    cold = PagedCache(cache.num_pages, cache.page_size, reuse=False)
    with pytest.raises(InvalidValue, match="reuse"):
        Engine(runner, cold, store=house.store)
    uneven = PagedTensors(KVGeometry(2, 2, 8, "float32", value_dim=4), 4, PAGE)
    with pytest.raises(InvalidValue, match="alike"):
        Forms(uneven, "NHD")
