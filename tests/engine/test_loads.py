"""Loads that pay, and loads that fail on the way, in real engines.

Computing and loading are paced. The tokens are the model's.
"""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch
from dict_store import BLOCK, PAGE, House, Watched, few, finish
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer
from workload import drive

from faults import FaultyBackend
from kvkeep.core.cost import CostModel, PrefillCost, TransferCost
from kvkeep.serve.engine import Engine, Limits, Runner, SamplingParams
from kvkeep.serve.models import bundled_model
from kvkeep.store import KVStore
from kvkeep.store.backends.memory import MemoryBackend

pytestmark = pytest.mark.model

TOKEN_S = 0.002
TEXT = "The keeper of the light wrote down each ship that passed, and each that did not. " * 12


class Paced(Watched):
    """A runner that takes `TOKEN_S` a token."""

    def forward(self, pieces):
        began = time.monotonic()
        logits = super().forward(pieces)
        took = TOKEN_S * sum(len(piece.tokens) for piece in pieces)
        time.sleep(max(0.0, began + took - time.monotonic()))
        return logits


class PacedHouse(House):
    """Engines whose costs are known, over a store that takes ``block_seconds`` a block."""

    def __init__(self, bench, block_seconds, **more):
        super().__init__(bench, **more)
        self.block_seconds = block_seconds

    def paced(self, **limits):
        self.bench.spoil()
        store, geometry = self.store, self.bench.runner.geometry
        store.block_seconds = self.block_seconds
        each = self.block_seconds / (BLOCK * geometry.bytes_per_token)
        store.cost = CostModel(
            PrefillCost(seconds_per_token=TOKEN_S),
            reads={"dict": TransferCost(seconds_per_byte=each)},
        )
        runner = Paced(self.bench.runner)
        limits = {"step_tokens": 32, **limits}
        return Engine(runner, runner.cache(), limits=Limits(**limits), store=store), runner

    def again(self, *texts, params=None):
        """Ask what was asked before; returns the completions, the engine and its runner."""
        threads = {*threading.enumerate()}
        engine, runner = self.paced()
        free = engine.cache.stats().pages_free
        requests = [engine.add(text, params or few(4)) for text in texts]
        done = finish(engine)
        self.store.hung.clear()
        self.store.block_seconds = 0.0
        assert engine.close(10)
        engine.cache.check()
        engine.cache.clear()
        assert engine.cache.stats().pages_free == free
        ended = time.monotonic() + 5
        while left := {*threading.enumerate()} - threads:
            assert time.monotonic() < ended, left
            time.sleep(0.005)
        return [done[one.id] for one in requests], engine, runner


@pytest.fixture
def house(make_bench, prompt):
    bench = make_bench("llama", page_size=PAGE, num_pages=160)
    house = PacedHouse(bench, BLOCK * TOKEN_S, num_pages=160)
    house.text = prompt(200, 1)
    house.want = bench.greedy(house.text, 4)
    house.ask(house.text)
    return house


def test_what_pays_is_loaded(house):
    house.block_seconds = BLOCK * TOKEN_S / 8
    (answer,), engine, runner = house.again(house.text)
    assert [*answer.tokens] == house.want
    assert answer.loaded_tokens == 199
    assert runner.computed == 1 + 3
    assert engine.cost is house.store.cost
    assert engine.cost.prefill.observations


def test_a_slow_store_is_not_read(house):
    house.block_seconds = 100.0
    (answer,), engine, _ = house.again(house.text)
    assert [*answer.tokens] == house.want
    assert answer.loaded_tokens == 0
    assert engine.stats().late_loads == 0


def test_several_at_once(house, prompt):
    """Loads take turns; a prompt that would wait for too long is computed meanwhile."""
    texts = [prompt(120, at) for at in range(2, 6)]
    house.ask(*texts)
    house.block_seconds = BLOCK * TOKEN_S / 2
    done, _, runner = house.again(*texts)
    for text, answer in zip(texts, done, strict=True):
        assert [*answer.tokens] == house.bench.greedy(text, 4)
    loaded = sum(answer.loaded_tokens for answer in done)
    assert runner.computed == 4 * (120 + 3) - loaded
    assert done[0].loaded_tokens == 119
    assert loaded < 4 * 119


@pytest.mark.parametrize("fault", ["hangs", "slows down", "raises", "loses"])
def test_a_store_that_fails_in_the_middle(house, fault):
    """What came by the deadline is of use, and the rest is computed."""
    house.block_seconds = BLOCK * TOKEN_S / 4
    find = house.store.get

    def get(*given, sink, **how):
        def then(*chunk):
            more = sink(*chunk)
            if chunk[1] >= 40:
                if fault == "hangs":
                    house.store.hung.set()
                elif fault == "slows down":
                    house.store.block_seconds = 30.0
                elif fault == "raises":
                    raise OSError("planted")
                else:
                    house.store.holes = set(range(0, 200, BLOCK))
            return more

        return find(*given, sink=then, **how)

    house.store.get = get
    began = time.monotonic()
    (answer,), engine, _ = house.again(house.text)
    assert [*answer.tokens] == house.want
    assert answer.loaded_tokens == 40
    assert time.monotonic() - began < 20  # not the 30 s of a block
    assert engine.stats().late_loads == (fault in ("hangs", "slows down"))


@pytest.mark.parametrize("how", ["aborted", "late"])
def test_reads_that_hang_do_not_hold_up_others(house, prompt, how):
    """Of a prompt that is gone, or of as many as there are threads: what comes later answers."""
    long, *short = [prompt(120, 2), *(prompt(60, 10 + at) for at in range(4))]
    house.ask(long, *short)
    want = house.bench.greedy(long, 1)
    find, gate = house.store.get, threading.Event()

    def get(tokens, start=0, **more):
        if len(tokens) < 100:
            gate.wait(30)
        return find(tokens, start, **more)

    house.store.get = get
    house.block_seconds = BLOCK * TOKEN_S / 16
    engine, _ = house.paced()
    hanging = [engine.add(text, few(1)) for text in (short if how == "late" else short[:1])]
    if how == "aborted":
        ended = time.monotonic() + 10
        while not engine._offload._loads._running:
            engine.step()
            assert time.monotonic() < ended
        engine.abort(hanging[0])
    finish(engine)
    engine.add(long, few(1))
    began = time.monotonic()
    (answer,) = finish(engine).values()
    assert time.monotonic() - began < 2.0
    gate.set()
    assert [*answer.tokens] == want
    if how == "aborted":
        assert answer.loaded_tokens == 119
    assert engine.close(10)
    engine.cache.check()


def test_drafts_and_forks(house):
    house.block_seconds = BLOCK * TOKEN_S / 8
    text = np.tile(house.text[:20], 8)
    for params in (
        few(8, draft_tokens=3),
        few(8, n=3, temperature=0.8, seed=5),
    ):
        engine = Engine(house.bench.runner, house.bench.runner.cache())
        (want,) = engine.generate([text], params)
        house.store.blocks.clear()
        house.ask(text, params=params)
        (answer,), _, _ = house.again(text, params=params)
        assert answer.choices == want.choices
        assert answer.loaded_tokens


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_whatever_happens_the_tokens_are_the_models(make_bench, prompt, data):
    """Prompts with common prefixes over a small pool, a slow store with holes, and aborts."""
    bench = make_bench("llama", page_size=PAGE, num_pages=40)
    house = PacedHouse(bench, data.draw(st.sampled_from([0.0, 0.004, 0.016])), num_pages=40)
    common = prompt(40, 1)
    texts = [np.concatenate((common, prompt(30, at)))[: 70 - 9 * at] for at in range(3)]
    house.ask(*texts)
    house.store.holes = data.draw(st.sets(st.sampled_from(range(0, 72, BLOCK)), max_size=3))
    house.store.fetch_seconds = data.draw(st.sampled_from([0.0, 0.01]))
    engine, _ = house.paced(max_running=3)
    count = data.draw(st.integers(1, 4))
    asked = [(texts[data.draw(st.integers(0, 2))], few(3), {}) for _ in range(count)]
    joins = [data.draw(st.integers(0, 6)) for _ in asked]
    aborts = [data.draw(st.sampled_from([None, None, 1, 4])) for _ in asked]
    running, deltas = drive(engine, asked, joins, aborts, most_steps=5000)
    for number, (_, tokens, _, abort) in running.items():
        came = [token for delta in deltas.get(number, ()) for token in delta.tokens]
        want = bench.greedy(tokens, 3)
        assert came == want if abort is None else came == want[: len(came)]
    assert engine.close()
    engine.cache.check()
    assert engine.cache.stats().sequences == 0


# --- the bundled model over the real store --------------------------------------------------------


@pytest.fixture(scope="module")
def bundled():
    path = bundled_model()
    tokens = np.array(AutoTokenizer.from_pretrained(path)(TEXT)["input_ids"], np.int32)
    runner = Runner.load(path, num_pages=256, device="cpu")
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    want = plain.generate(torch.from_numpy(tokens)[None].long(), max_new_tokens=6, do_sample=False)
    return Paced(runner), tokens, want[0, len(tokens) :].tolist()


@pytest.mark.parametrize("fault", ["", "hang", "fail", "slow", "flip"])
def test_the_bundled_model_over_a_tier_that_fails_in_the_middle(bundled, fault):
    runner, tokens, want = bundled
    threads = {*threading.enumerate()}
    place = FaultyBackend(MemoryBackend(1 << 28))
    place.timeout = 30.0
    geometry = runner.geometry
    cost = CostModel(PrefillCost(seconds_per_token=TOKEN_S))

    def store():
        return KVStore(
            geometry, model="bundled@1", tiers=["memory://64MiB", place], block_tokens=16, cost=cost
        )

    with store() as kept:
        engine = Engine(runner, runner.cache(), store=kept)
        engine.generate([tokens], SamplingParams(max_tokens=1))
        assert engine.close()
        assert kept.flush(10)
        front = kept._tiered.memory
        front.remove(list(front.catalogue.blocks()))
        place.slow(0.002, "get")
        engine = Engine(runner, runner.cache(), limits=Limits(step_tokens=64), store=kept)
        free = engine.cache.stats().pages_free
        request, done = engine.add(tokens, SamplingParams(max_tokens=6)), []
        ended = time.monotonic() + 20
        while not request.live[0].computed and fault:
            done += engine.step()
            assert time.monotonic() < ended
        if fault:
            how = {"slow": (20.0, "get"), "flip": ()}.get(fault, ("get",))
            getattr(place, fault)(*how)
        while engine.has_work:
            done += engine.step()
        (answer,) = [delta.completion for delta in done if delta.completion is not None]
        place.heal()
        assert [*answer.tokens] == want[: len(answer.tokens)]
        assert fault or answer.loaded_tokens == len(tokens) // 16 * 16
        assert engine.close()
        engine.cache.check()
        engine.cache.clear()
        assert engine.cache.stats().pages_free == free
        kept.check()
    ended = time.monotonic() + 5
    while left := {*threading.enumerate()} - threads:
        assert time.monotonic() < ended, left
        time.sleep(0.005)
