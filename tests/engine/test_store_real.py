"""The engine over the real store: restarts, damaged files, dead servers, too little memory."""

from __future__ import annotations

import socket
import threading
import time

import numpy as np
import pytest

from kvkeep.core.cache import PagedCache
from kvkeep.serve.engine import Engine, Limits, SamplingParams
from kvkeep.store import KVStore

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("load_first")]

PAGE = 4
BLOCK = 16


class House:
    """A model and tiers that stay, under engines that come and go."""

    def __init__(self, bench, tiers):
        self.bench, self.tiers = bench, tiers

    def store(self, **more):
        runner = self.bench.runner
        return KVStore(
            runner.geometry,
            model="tiny@1",
            tiers=self.tiers,
            block_tokens=BLOCK,
            snapshots=runner.layout is not None,
            **more,
        )

    def ask(self, *prompts, count=6, load_timeout=5.0, **more):
        """Return what a new engine over a new store answers; all threads end afterwards."""
        runner = self.bench.runner
        self.bench.spoil()
        cache = runner.cache()
        before = set(threading.enumerate())
        with self.store(**more) as store:
            engine = Engine(
                runner, cache, limits=Limits(max_running=4), store=store, load_timeout=load_timeout
            )
            done = engine.generate(prompts, SamplingParams(max_tokens=count))
            self.flushed = engine.close()
            store.check()
            self.stats = {tier.name: tier for tier in store.stats().tiers}
        cache.check()
        assert cache.stats().sequences == 0
        self.did = engine.stats()
        for prompt, completion in zip(prompts, done, strict=True):
            assert [*completion.tokens] == self.bench.greedy(prompt, count)
        end = time.monotonic() + 5  # a reader of the store may be at its last block
        while left := {*threading.enumerate()} - before:
            assert time.monotonic() < end, left
            time.sleep(0.005)
        return done


@pytest.fixture
def make_house(make_bench):
    def make(*tiers, family="llama", page_size=PAGE):
        return House(make_bench(family, page_size=page_size, num_pages=96), tiers)

    return make


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize(("family", "page_size"), [("llama", 1), ("gemma3", 4), ("mistral", 16)])
def test_a_restart(make_house, prompt, tmp_path, family, page_size, layout):  # noqa: PLR0917
    place = f"file://{tmp_path}/tier?size=64MiB"
    house = make_house("memory://4MiB", place, family=family, page_size=page_size)
    text = prompt(70 if page_size < 16 else 80, 1)
    (first,) = house.ask(text, layout=layout)
    assert house.flushed
    assert first.loaded_tokens == 0
    (again,) = house.ask(text, layout=layout)
    # Of models with windows, as far as whole pages reach.
    whole = 1 if family == "llama" else page_size
    assert again.loaded_tokens == (len(text) - 1) // whole * whole
    turn = np.concatenate((text, first.tokens, prompt(9, 2)))
    (second,) = house.ask(turn, layout=layout)
    assert second.loaded_tokens >= len(turn) // BLOCK * BLOCK - BLOCK


@pytest.mark.parametrize("codec", ["lossless", "raw"])
def test_many_at_once_on_disk_alone(make_house, prompt, tmp_path, codec):
    house = make_house(f"file://{tmp_path}/tier?size=64MiB&codec={codec}")
    common = prompt(48, 1)
    texts = [np.concatenate((common, prompt(20 + at, at + 2))) for at in range(6)]
    house.ask(*texts)
    house.ask(*texts)
    assert house.did.cached_tokens == sum(len(text) - 1 for text in texts)


def test_lossy_kv_reaches_no_exact_tier(make_house, prompt, tmp_path):
    """Neither of the request that loaded it, nor of one that shares its pages; others do."""
    lossy, exact = (
        f"file://{tmp_path}/{name}?size=64MiB&codec={name}" for name in ("int8", "lossless")
    )
    text = prompt(70, 1)

    def written():
        return sum(len(file.name) == 64 for file in (tmp_path / "lossless").glob("*/*"))

    make_house("memory://4MiB", lossy).ask(text)
    house = make_house("memory://4MiB", exact, lossy)
    with house.store() as store:
        engine = Engine(house.bench.runner, house.bench.runner.cache(), store=store)
        few = SamplingParams(max_tokens=20)
        (first,) = engine.generate([text], few)
        assert first.lossy_tokens == len(text) - 1
        shared = np.concatenate((text[:38], prompt(40, 2)))  # parts within a page
        (second,) = engine.generate([shared], few)
        assert second.cached_tokens == 38
        third = np.concatenate((shared[:61], prompt(30, 3)))
        assert engine.generate([third], few)[0].cached_tokens == 61
        begun = np.concatenate((text[:2], prompt(40, 6)))  # a part of a page alone
        assert engine.generate([begun], few)[0].cached_tokens == 2
        assert store.flush()
        assert not written()
        assert store.lookup(third).tokens >= len(third)  # the lossy tier has them
        engine.generate([prompt(70, 4)], few)
        assert store.flush()
        assert written() >= 70 // BLOCK
        engine.cache.evict(96)
        other = prompt(330, 5)  # over pages that were lossy
        engine.generate([other], few)
        assert store.flush()
        before = written()
        engine.generate([np.concatenate((other[:320], prompt(2 * BLOCK, 6)))], few)
        assert engine.close()
        assert store.flush()
        assert written() >= before + 2


def test_memory_that_holds_less_than_a_prompt(make_house, prompt, tmp_path):
    block = 3 * 2 * 2 * 16 * 4 * BLOCK  # layers, K and V, heads, dim, float32
    house = make_house(f"memory://{3 * (block + 8192)}", f"file://{tmp_path}/tier?size=64MiB")
    texts = [prompt(100, at) for at in range(3)]
    house.ask(*texts)
    for text in texts:
        # Blocks dropped because the disk was slow are stored when they are computed again.
        loaded = [house.ask(text)[0].loaded_tokens for _ in range(4)]
        assert max(loaded) == 99, loaded


def test_damaged_files_are_computed(make_house, prompt, tmp_path):
    house = make_house("memory://4MiB", f"file://{tmp_path}/tier?size=64MiB")
    text = prompt(100, 1)
    house.ask(text)
    files = [file for file in tmp_path.rglob("*") if file.is_file() and file.stat().st_size > 8192]
    assert len(files) >= 6
    for at, file in enumerate(sorted(files)):
        raw = bytearray(file.read_bytes())
        if at % 3 == 0:
            raw[5000] ^= 1
        elif at % 3 == 1:
            del raw[6000:]
        else:
            continue
        file.write_bytes(raw)
    (answer,) = house.ask(text)  # which compares with the model's own answer
    assert answer.loaded_tokens < 99
    # Blocks behind the first damaged one are not read: they are found damaged the next time.
    for _ in files:
        (healed,) = house.ask(text)
    assert healed.loaded_tokens == 99


def test_files_that_vanish_while_it_runs(make_house, prompt, tmp_path):
    house = make_house("memory://4MiB", f"file://{tmp_path}/tier?size=64MiB")
    text = prompt(100, 1)
    house.ask(text)
    runner = house.bench.runner
    with house.store() as store:
        for file in tmp_path.rglob("*"):
            if file.is_file() and file.stat().st_size > 8192:
                file.unlink()
        engine = Engine(runner, runner.cache(), store=store)
        (answer,) = engine.generate([text], SamplingParams(max_tokens=6))
        assert [*answer.tokens] == house.bench.greedy(text, 6)
        assert engine.close()


def test_a_server_that_is_not_there(make_house, prompt):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not accept connections
        port = taken.getsockname()[1]
        house = make_house("memory://4MiB", f"valkey://127.0.0.1:{port}?timeout=0.2s")
        text = prompt(60, 1)
        (answer,) = house.ask(text)
        assert answer.loaded_tokens == 0


def test_a_server_that_never_answers(make_house, prompt):
    """The load takes up to its timeout; the tokens are right."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        house = make_house("memory://4MiB", f"valkey://127.0.0.1:{port}?timeout=0.3s")
        done = house.ask(*[prompt(60, at) for at in range(3)], load_timeout=0.3)
    assert {one.loaded_tokens for one in done} == {0}


def test_the_pool_lets_go_and_memory_has_it(make_house, prompt):
    """One engine whose pool is too small for all prompts, with a store in memory that is not."""
    house = make_house("memory://16MiB")
    runner = house.bench.runner
    texts = [prompt(200, at) for at in range(3)]
    with house.store() as store:
        engine = Engine(runner, PagedCache(96, PAGE), store=store)
        want = {}
        for turn in range(2):
            for at, text in enumerate(texts):
                (answer,) = engine.generate([text], SamplingParams(max_tokens=4))
                assert want.setdefault(at, answer.tokens) == answer.tokens
                assert answer.cached_tokens == (199 if turn else 0)
        assert engine.stats().loaded_tokens > 199
        assert engine.close()


def test_what_the_pool_always_has_is_in_use_below(make_house, prompt):
    block = 3 * 2 * 2 * 16 * 4 * BLOCK  # layers, K and V, heads, dim, float32
    house = make_house(f"memory://{12 * (block + 8192)}")
    system = prompt(2 * BLOCK, 1)
    texts = [np.concatenate((system, prompt(BLOCK, at + 2))) for at in range(16)]
    with house.store() as store:
        runner = house.bench.runner
        engine = Engine(runner, runner.cache(), store=store)
        for text in texts:
            engine.generate([text], SamplingParams(max_tokens=2))
        engine.close()
        (memory,) = store.stats().tiers
        assert memory.counters["evictions"] > 0
        assert store.lookup(texts[0]).tokens == store.lookup(system).tokens == len(system)
        assert engine.stats().kept_tokens == len(system) + 16 * BLOCK  # it was never written again
