"""The same small workload through the real engine and through replay: the same hits, each token.

One request at a time, in a pool so small that most of what was stored is evicted again.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np
import pytest
from replaying import Listed

from kvkeep.bench.replay import Workload, simulate
from kvkeep.bench.traces import Capture, Seen, Served, open_trace
from kvkeep.core.cache import PagedCache
from kvkeep.core.keys import as_namespace
from kvkeep.serve.engine import Engine, Runner, SamplingParams
from kvkeep.serve.models import bundled_model

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from kvkeep.bench.traces import Trace

pytestmark = pytest.mark.model

PAGE, PAGES = 16, 24
CAPACITY = PAGE * PAGES
REQUESTS = 40


@pytest.fixture(scope="module")
def runner() -> Runner:
    return Runner.load(bundled_model(), num_pages=PAGES, page_size=PAGE, device="cpu")


@dataclass
class Asked:
    prompt: list[int]
    answered: int
    """Tokens to generate."""
    namespace: str
    store: bool
    answer: Sequence[int] = ()
    cached: int = -1


def asked(runner: Runner, seed: int, *, answers: bool) -> Iterator[Asked]:
    """Conversations that take turns, whose beginnings are alike and fork within pages.

    Each goes on from its own answer, as the engine gave it; so what is yielded has to be answered
    before the next one is asked for. Each conversation has one fork at most: of several pages that
    begin alike the index copies one, and which one is decided by tokens that ids do not keep.
    """
    rng = np.random.default_rng(seed)
    some = partial(rng.integers, 5, runner.vocabulary)
    system = some(size=40).tolist()
    talks: list[list[int]] = []
    forked: set[int] = set()
    for _ in range(REQUESTS):
        if len(talks) < 6 or rng.random() < 0.2:
            new = system[: int(rng.choice([0, 16, 32]))]
            if talks and rng.random() < 0.5:
                other = int(rng.integers(len(talks)))
                if other not in forked:
                    forked |= {other, len(talks)}
                    new = talks[other][: int(rng.integers(1, len(talks[other]) + 1))]
            talks.append([*new, *some(size=9).tolist()])
        at = int(rng.integers(max(0, len(talks) - 6), len(talks)))
        if rng.random() < 0.9 and len(talks[at]) < 240:  # else the very same again
            talks[at] = talks[at] + some(size=rng.integers(1, 50)).tolist()
        count = int(rng.choice([1, 2, 5, 18])) if answers else 1
        namespace = "other" if rng.random() < 0.15 else ""
        store = not answers or rng.random() < 0.9
        one = Asked(talks[at], count, namespace, store=bool(store))
        yield one
        talks[at] = talks[at] + list(one.answer)


def serve(runner: Runner, cache: PagedCache, seed: int, **how: bool) -> list[Asked]:
    """What came of each, one after the other."""
    engine = Engine(runner, cache)
    served = []
    for one in asked(runner, seed, **how):
        params = SamplingParams(max_tokens=one.answered, ignore_eos=True)
        request = engine.add(one.prompt, params, namespace=one.namespace, store=one.store)
        while engine.has_work:
            done = [delta.completion for delta in engine.step() if delta.completion]
        one.answer, one.cached = done[0].tokens, done[0].cached_tokens
        assert request.prompt_tokens == len(one.prompt)
        served.append(one)
    cache.check()
    return served


def hits(trace: Trace, policy: str) -> list[int]:
    """Of each request, by replays that end with it."""
    requests, totals = list(trace), [0]
    for count in range(1, 1 + len(requests)):
        work = Workload.read(Listed(requests[:count], trace.unit_tokens))
        outcome = simulate(work, CAPACITY, policy, page_tokens=PAGE)
        totals.append(outcome.hit_tokens)
    assert outcome.evicted_pages > 2 * PAGES, "it is not about eviction if nothing is evicted"
    return [after - before for before, after in pairwise(totals)]


def captured(path: Path, served: list[Asked], unit_tokens: int) -> Trace:
    """As a server's capture has it, a request a second."""
    capture = Capture(path, name="tiny", page_size=PAGE, pages=PAGES, unit_tokens=unit_tokens)
    begun = perf_counter()
    for second, one in enumerate(served):
        prompt = np.array(one.prompt, np.int32)
        space = as_namespace(one.namespace)
        seen = Seen(
            arrived=begun + second,
            prompt=prompt,
            namespace=space,
            answer=one.answer,
            store=one.store,
            served=Served(one.cached),
        )
        capture.note(seen)
    assert capture.close()
    return open_trace(path)


@pytest.mark.parametrize("policy", ["lru", "priority"])
def test_a_captured_trace_is_served_again_as_it_was(runner, policy, tmp_path):
    cache = PagedCache(PAGES, PAGE, eviction=policy)
    served = serve(runner, cache, seed=1, answers=True)
    trace = captured(tmp_path / "served.jsonl", served, 1)
    cached = [one.cached for one in served]
    assert hits(trace, policy) == cached
    assert sum(cached) > 0.2 * sum(len(one.prompt) for one in served)
    assert any(one % PAGE for one in cached), "no page was reused in part"
    # What the trace says of how it was served is what replay finds.
    assert [request.served.cached_tokens for request in trace] == cached


@pytest.mark.parametrize("policy", ["lru", "priority"])
def test_a_trace_of_prompts_is_served_as_replay_says(runner, policy, tmp_path):
    """Of answers of one token nothing is kept, so that prompts tell everything."""
    cache = PagedCache(PAGES, PAGE, eviction=policy)
    served = serve(runner, cache, seed=2, answers=False)
    path = tmp_path / "prompts.jsonl"
    with path.open("w") as file:
        for one in served:
            file.write(json.dumps({"tokens": one.prompt, "namespace": one.namespace}) + "\n")
    assert hits(open_trace(path), policy) == [one.cached for one in served]
