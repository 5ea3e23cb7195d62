"""An observer of an engine receives each event once, in order, and every event is true."""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from faults import FaultyBackend
from kvkeep.core.cache import PagedCache
from kvkeep.observe.usage import (
    LoadReport,
    PromptComputed,
    PromptStored,
    RequestAdmitted,
    RequestBegun,
    RequestEnded,
    RequestLoaded,
)
from kvkeep.serve.engine import Engine, Limits, SamplingParams
from kvkeep.store import KVStore
from kvkeep.store.backends.disk import DiskBackend
from kvkeep.store.backends.memory import MemoryBackend
from kvkeep.store.tiers import Inclusive

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("load_first")]

PAGE = 4
BLOCK = 16
BLOCK_BYTES = 3 * 2 * 2 * 16 * 4 * BLOCK  # layers, K and V, heads, dim, float32


class Witness:
    """An observer that checks the order of events, and what must hold in each."""

    def __init__(self, *, store: bool):
        self.store = store
        self.aborts = False  # whether reports may cover a part, since requests are aborted
        self.pool, self.reports, self.outcomes = {}, {}, {}
        self.tokens, self.seconds = defaultdict(int), defaultdict(float)
        self.kept = 0
        self.begun = set()
        self.thread = threading.get_ident()

    def __call__(self, event):
        request, number = event.request, int(event.request.id)
        assert threading.get_ident() == self.thread
        assert number not in self.outcomes, "it has ended"
        match event:
            case RequestBegun():
                assert number not in self.begun, "twice"
                self.begun.add(number)
            case RequestAdmitted():
                assert number not in self.pool, "twice"
                assert event.match_s > 0
                self.pool[number] = event.cached_tokens
            case RequestLoaded():
                self.loaded(request, number, event.report)
            case PromptComputed():
                assert number in self.pool
                assert event.tokens > 0
                assert event.seconds > 0
                self.tokens[number] += event.tokens
                self.seconds[number] += event.seconds
            case PromptStored():
                assert self.store
                assert number in self.pool
                assert event.tokens > 0
                assert event.seconds > 0
                self.kept += event.tokens
            case RequestEnded():
                assert not self.store or (number in self.pool) == (number in self.reports)
                assert event.seconds >= (event.ttft_s or 0.0)
                self.outcomes[number] = event.outcome

    def loaded(self, request, number, report):
        assert self.store
        assert number in self.pool
        assert number not in self.reports, "twice"
        self.reports[number] = report
        whole = len(request.prompt) - 1 - self.pool[number]
        assert covers(report, self.pool[number]) in {0, whole} or self.aborts

    def only(self) -> LoadReport:
        (report,) = self.reports.values()
        return report


def covers(report: LoadReport, pool: int) -> int:
    """How many tokens sources and missing ranges have; they are in order, and have no gap."""
    at = pool
    missing = [(one.start, one.stop, one.tier) for one in report.missing]
    assert sorted(missing) == missing
    assert [*report.sources] == sorted(report.sources)
    for start, stop, _ in sorted([*report.sources, *missing]):
        assert start == at < stop
        at = stop
    assert report.seconds >= 0
    assert report.late == any(one.what == "late" for one in report.missing)
    return at - pool


class House:
    """A model under engines that come and go, each with its own cache, store and witness."""

    def __init__(self, bench):
        self.bench = bench
        self.runner = bench.runner
        self.engines = []

    def engine(self, store=None, *, observed=True, **more):
        cache = PagedCache(self.runner.num_pages, self.runner.page_size)
        witness = Witness(store=store is not None)
        if observed:
            more["observers"] = [witness]
        engine = Engine(self.runner, cache, store=store, **more)
        self.engines.append(engine)
        return engine, witness

    def content(self):
        """No witness saw a violation; errors of observers harm no request."""
        assert [engine.stats().observer_errors for engine in self.engines] == [0] * len(
            self.engines
        )

    def store(self, *tiers, **more):
        shape = self.runner.geometry
        return KVStore(shape, model="tiny@1", tiers=tiers, block_tokens=BLOCK, **more)

    def keep(self, store, *prompts):
        """Compute ``prompts`` and leave them in all tiers of the store."""
        engine, _ = self.engine(store)
        engine.generate(prompts, SamplingParams(max_tokens=1))
        assert engine.close()

    def ask(self, store, prompt, then=None, *, hangs=None, **more):
        """Return what a new engine reports of one request; its answer is the model's.

        ``hangs``: whether all has come that does. The engine waits for 0.2 s from then on, and for
        most of the time in all: so it is the tier that is late.
        """
        engine, witness = self.engine(store, **more)
        request, done = engine.add(prompt, SamplingParams(max_tokens=2)), []
        if hangs is not None:
            end = time.monotonic() + 20
            planner = engine._offload._planner
            planner.timeout = 60.0
            while not (request.live and request.live[0].load and hangs(request.live[0].load)):
                assert engine.step() == []
                assert time.monotonic() < end
            took = time.monotonic() - request.live[0].load.alive_at
            planner.timeout = 0.2 + 5 * took
        while engine.has_work:
            done += [delta.completion for delta in engine.step() if delta.completion]
        (answer,) = done
        assert [*answer.tokens] == self.bench.greedy(prompt, 2)
        assert witness.outcomes == {1: "done"}
        report = witness.only()
        came = sum(stop - start for start, stop, _ in report.sources)
        assert answer.loaded_tokens == came
        assert witness.tokens[1] == len(prompt) - came - witness.pool[1]
        if then is not None:
            then()
        engine.close()
        self.content()
        return report


@pytest.fixture
def house(make_bench):
    house = House(make_bench("llama", page_size=PAGE, num_pages=96))
    yield house
    house.content()


def forget(store):
    """Drop from memory what a tier below has."""
    front = store._tiered.memory
    front.remove(list(front.catalogue.blocks()))


def words(report):
    return [(one.start, one.stop, one.tier, one.what) for one in report.missing]


# --- without a store -------------------------------------------------------------------------


def test_each_request_from_admission_to_its_end(house, prompt):
    engine, witness = house.engine()
    texts = [prompt(30 + 7 * at, at) for at in range(4)]
    done = engine.generate([*texts, texts[0]], SamplingParams(max_tokens=5))
    assert witness.outcomes == dict.fromkeys(range(1, 6), "done")
    assert witness.reports == {}
    for number, answer in enumerate(done, start=1):
        assert witness.pool[number] == answer.cached_tokens
        assert witness.tokens[number] == answer.prompt_tokens - answer.cached_tokens
        assert 0 < witness.seconds[number] < answer.seconds


def test_many_answers_are_one_request(house, prompt):
    engine, witness = house.engine()
    engine.generate([prompt(41, 1)], SamplingParams(max_tokens=6, n=3, temperature=1.0))
    assert witness.outcomes == {1: "done"}
    assert witness.tokens == {1: 41}


def test_prompts_in_chunks(house, prompt):
    engine, witness = house.engine(limits=Limits(max_running=4, step_tokens=16))
    engine.generate([prompt(50, 1), prompt(50, 2)], SamplingParams(max_tokens=3))
    assert witness.tokens == {1: 50, 2: 50}


def test_who_gives_way_is_admitted_once(make_bench, prompt):
    house = House(make_bench("llama", page_size=PAGE, num_pages=24))
    engine, witness = house.engine()
    engine.generate([prompt(30, at) for at in range(3)], SamplingParams(max_tokens=30))
    assert engine.stats().preempted
    assert witness.outcomes == dict.fromkeys((1, 2, 3), "done")
    assert all(witness.tokens[number] >= 30 - witness.pool[number] for number in (1, 2, 3))
    house.content()


def test_those_who_go_before_their_turn(house, prompt):
    engine, witness = house.engine(limits=Limits(max_running=1))
    one, two, three = (engine.add(prompt(20, at), SamplingParams(max_tokens=9)) for at in range(3))
    engine.step()
    engine.abort(two)
    engine.abort(two)
    engine.abort(one)
    assert witness.outcomes == {1: "aborted", 2: "aborted"}
    assert set(witness.pool) == {1}
    engine.step()
    engine.close()
    engine.close()
    assert witness.outcomes == {1: "aborted", 2: "aborted", three.id: "aborted"}


def test_what_is_handed_to_the_store_is_told(house, prompt):
    with house.store("memory://4MiB") as store:
        engine, witness = house.engine(store)
        engine.generate([prompt(70, at) for at in range(3)], SamplingParams(max_tokens=9))
        assert witness.kept == engine.stats().kept_tokens > 0
        engine.generate([prompt(70, 1)], SamplingParams(max_tokens=1))
        assert witness.kept == engine.stats().kept_tokens
        assert engine.close()


class Raises:
    """An observer that raises."""

    def __call__(self, event):
        raise LookupError(type(event).__name__)


def test_an_observer_that_raises_hurts_nobody(house, prompt, caplog):
    with house.store("memory://4MiB") as store:
        engine, _ = house.engine(store)
        engine.observe(Raises())
        texts = [prompt(40, at) for at in range(3)]
        with caplog.at_level(logging.ERROR, "kvkeep"):
            done = engine.generate(texts, SamplingParams(max_tokens=4))
        for text, answer in zip(texts, done, strict=True):
            assert [*answer.tokens] == house.bench.greedy(text, 4)
        assert engine.stats().observer_errors == 21  # of each, a block and a tail are stored
        house.engines.clear()
        assert sorted(record.getMessage().split()[-1] for record in caplog.records) == [
            "PromptComputed", "PromptStored", "RequestAdmitted", "RequestBegun", "RequestEnded",
            "RequestLoaded",
        ]  # fmt: skip
        assert engine.close()


def test_who_comes_later_hears_of_the_rest(house, prompt):
    with house.store("memory://4MiB") as store:
        engine, witness = house.engine(store, observed=False)
        engine.generate([prompt(20, 1)], SamplingParams(max_tokens=2))
        assert witness.outcomes == {}
        engine.observe(witness)
        engine.generate([prompt(20, 2)], SamplingParams(max_tokens=2))
        assert witness.outcomes == {2: "done"}
        engine.observe()
        engine.generate([prompt(20, 3)], SamplingParams(max_tokens=2))
        assert witness.outcomes == {2: "done"}
        assert engine.close()


def test_who_comes_while_it_is_sought_hears_that_nothing_is_known(house, prompt):
    place = FaultyBackend(MemoryBackend(1 << 22))
    place.shared = True
    with house.store("memory://4MiB", place) as store:
        engine, witness = house.engine(store, observed=False)
        place.hang("sizes")
        engine.add(prompt(60, 1), SamplingParams(max_tokens=1))
        engine.step()
        witness.pool[1] = 0  # it was admitted before
        engine.observe(witness)
        place.heal()
        while engine.has_work:
            engine.step()
        assert witness.only() == LoadReport()
        assert engine.close()


# --- with a store ----------------------------------------------------------------------------


def test_nothing_is_known(house, prompt):
    with house.store("memory://4MiB") as store:
        report = house.ask(store, prompt(60, 1))
    assert report.sources == ()
    assert words(report) == [(0, 59, "", "never")]


def test_less_than_a_page_is_not_asked_for(house, prompt):
    with house.store("memory://4MiB") as store:
        report = house.ask(store, prompt(PAGE, 1))
    assert (report.sources, report.missing) == ((), ())


def test_all_but_the_last_token_comes_from_disk(house, prompt, tmp_path):
    text = prompt(70, 1)
    tiers = "memory://4MiB", f"file://{tmp_path}/tier?size=64MiB"
    with house.store(*tiers) as store:
        house.keep(store, text)
        assert house.ask(store, text).sources == ((0, 69, "memory"),)
    with house.store(*tiers) as store:
        report = house.ask(store, text)
        assert report.sources == ((0, 69, "file"),)
        assert report.missing == ()
        assert report.seconds > 0
        assert house.ask(store, text).sources == ((0, 69, "memory"),)


def test_the_pool_first_then_two_tiers_then_nothing(house, prompt, tmp_path):
    text = prompt(5 * BLOCK, 1)
    longer = np.concatenate((text, prompt(20, 2)))
    with house.store("memory://4MiB", f"file://{tmp_path}/tier?size=64MiB") as store:
        house.keep(store, text)
        blocks = store._names.of(None).full(text)
        store._tiered.memory.remove(blocks[3:])
        engine, witness = house.engine(store)
        other = np.concatenate((text[:10], prompt(10, 3)))
        engine.generate([other], SamplingParams(max_tokens=1))
        (answer,) = engine.generate([longer], SamplingParams(max_tokens=2))
        assert [*answer.tokens] == house.bench.greedy(longer, 2)
        report = witness.reports[2]
        assert witness.pool[2] == 8 + 2  # two pages, and two tokens of the third
        assert report.sources == ((10, 48, "memory"), (48, 80, "file"))
        assert words(report) == [(80, 99, "", "never")]
        assert engine.close()


@pytest.mark.parametrize("call", ["sizes", "get"])
def test_a_tier_that_hangs(house, prompt, call):
    text = prompt(100, 1)
    place = FaultyBackend(MemoryBackend(1 << 24))
    place.shared = True
    place.timeout = 30.0
    with house.store("memory://4MiB", place) as store:
        house.keep(store, text)
        forget(store)
        store._tiered.tiers[0].catalogue.forget(store._names.of(None).full(text)[0])
        place.hang(call)
        report = house.ask(store, text, place.heal, hangs=lambda _: place.inside[call])
        assert words(report) == [(0, 99, "faulty", "late")]
        assert report.late
        assert report.seconds >= 0.2


def test_who_is_aborted_while_it_is_loaded(house, prompt):
    """What was found is evicted from memory before it is read, and the tier below hangs."""
    text = prompt(100, 1)
    place = FaultyBackend(MemoryBackend(1 << 24))
    with house.store("memory://4MiB", place) as store:
        house.keep(store, text)
        engine, witness = house.engine(store, limits=Limits(max_running=1), load_timeout=60.0)
        first = engine.add(prompt(20, 2), SamplingParams(max_tokens=99))
        request = engine.add(text, SamplingParams(max_tokens=2))
        end = time.monotonic() + 20
        while not (witness.tokens[1] and request.live[0].load.answered):  # it is prefetched
            engine.step()
            assert time.monotonic() < end
        store._tiered.memory.remove(store._names.of(None).full(text)[2:])
        place.hang("get")
        engine.abort(first)
        engine.step()
        witness.aborts = True
        assert request.live[0].loading
        engine.abort(request)
        assert witness.outcomes == {1: "aborted", 2: "aborted"}
        report = witness.reports[2]
        assert report.missing == ()
        assert report.tokens < 99
        place.heal()
        engine.close()


@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_whatever_happens_all_that_was_asked_is_told(house, prompt, tmp_path_factory, data):
    """Prompts with common prefixes, over tiny tiers that fail, lie, hang and are cleared."""
    place = FaultyBackend(DiskBackend(tmp_path_factory.mktemp("t"), 12 * 16384, sync="never"))
    place.timeout = 0.1
    memory = f"memory://{5 * (BLOCK_BYTES + 4096)}"
    texts = [np.concatenate((prompt(37, 1), prompt(60, at))) for at in range(3)]
    with house.store(memory, place, policy=Inclusive(data.draw(st.integers(1, 2)))) as store:
        engine, witness = house.engine(store, load_timeout=0.15, limits=Limits(max_running=3))
        count = 0
        for _ in range(data.draw(st.integers(2, 5))):
            fault = data.draw(
                st.sampled_from(["", "fail", "flip", "lose", "hang", "clear", "pool"])
            )
            if fault == "clear":
                store.clear()
            elif fault == "pool":
                engine.cache.clear()
            elif fault:
                getattr(place, fault)(*["get"] * (fault in {"fail", "hang"}), times=2)
            asked = [
                texts[data.draw(st.integers(0, 2))][: data.draw(st.integers(1, 97))]
                for _ in range(data.draw(st.integers(1, 3)))
            ]
            done = engine.generate(asked, SamplingParams(max_tokens=1))
            for text, answer in zip(asked, done, strict=True):
                assert [*answer.tokens] == house.bench.greedy(text, 1)
                count += 1
                came = sum(stop - start for start, stop, _ in witness.reports[count].sources)
                assert came == answer.loaded_tokens == answer.cached_tokens - witness.pool[count]
            place.heal()
        assert set(witness.outcomes) == set(range(1, count + 1))
        house.content()
        engine.close()
