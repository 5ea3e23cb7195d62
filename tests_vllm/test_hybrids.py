"""Models with states: a hit in the store equals vLLM's own hit at the same place, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from engines import prompt
from hybrids import (
    STATES,
    Hybrid,
    counters,
    each,
    exactly,
    loads_checked,
    make_hybrid,
    state_bytes,
    zeroed,
)
from versions import OLD
from vllm import SamplingParams
from vllm.distributed.parallel_state import destroy_model_parallel

if TYPE_CHECKING:
    from collections.abc import Iterator

    from engines import Engine
    from hybrids import Written


@pytest.fixture(scope="module", params=["qwen3_next", "lfm2"])
def hybrid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Hybrid:
    return make_hybrid(request.param, tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def running(hybrid: Hybrid) -> Iterator[Engine]:
    # vLLM keeps the groups of ranks of this process: those of a model without experts have no
    # group for experts.
    destroy_model_parallel()
    with hybrid.engine(["memory://64MiB"]) as one:
        yield one


def prompts(hybrid: Hybrid) -> list[list[int]]:
    """Around the ends of blocks."""
    size = hybrid.block
    lengths = [1, size - 1, size, size + 1, 2 * size, 3 * size + 5, 5 * size - 1, 5 * size,
               5 * size + 20]  # fmt: skip
    if OLD:  # the first pass of a prompt that ends with a block leaves no state, the second does
        lengths = [length for length in lengths if length % size or length == size]
    return [prompt(length, seed=30) for length in lengths]


def test_the_same_as_a_hit_of_vllm(hybrid: Hybrid, running: Engine) -> None:
    asked = prompts(hybrid)
    with hybrid.watched(running) as written:
        _hits(hybrid, running, asked, written)
    everything = written.blocks + written.states
    assert len(set(everything)) == len(everything), "a record was saved twice"
    # As large as the states are, without what vLLM pads them with.
    sizes = running.core.scheduler.connector._scheduler._shared.sizes
    assert sorted(sizes)[:STATES] == [state_bytes(running)] * STATES


def _hits(hybrid: Hybrid, running: Engine, asked: list[list[int]], written: Written) -> None:
    cold = each(running, asked)
    assert [answer.cached for answer in cold] == [0] * len(asked)
    # A state for every prompt that has a boundary before its last token, and nothing twice.
    assert len(written.states) == STATES * sum(hybrid.cut(one) > 0 for one in asked)
    # Of six tokens of an answer, the last is not computed.
    assert len(written.blocks) == sum((len(one) + 5) // hybrid.block for one in asked)
    local = each(running, asked)
    assert [answer.cached for answer in local] == [hybrid.cut(one) for one in asked]
    loaded = running["loaded_tokens"]
    for _ in range(2):
        running.forget()
        exactly(each(running, asked), local)
    assert running["loaded_tokens"] - loaded == 2 * sum(hybrid.cut(one) for one in asked)
    assert running["failed_tokens"] == 0
    if hybrid.exact:  # a cold pass is cut there, too
        exactly([replace(answer, cached=0) for answer in local], cold)


def test_a_wrong_state_would_be_seen(hybrid: Hybrid, running: Engine) -> None:
    """Else these tests would say nothing: the state of each layer is in the answer."""
    mine = prompt(3 * hybrid.block + 9, seed=31)
    with hybrid.watched(running) as written:
        (cold,) = each(running, [mine])
    assert len(written.states) == STATES
    for key in written.states:
        with zeroed(running, key, state_bytes(running)):
            running.forget()
            (wrong,) = each(running, [mine])
            assert wrong.cached == hybrid.cut(mine)
            assert wrong.differs(cold) > 1e-3


def test_part_in_vllm_and_the_rest_in_the_store(hybrid: Hybrid, running: Engine) -> None:
    size, states = hybrid.block, running.core.scheduler.connector._scheduler._groups.states
    long = prompt(9 * size + 3, seed=32)
    each(running, [long])
    (local,) = each(running, [long])
    for first in (1, 3, 8):
        running.forget()
        # vLLM has blocks and a state at `first`, kvkeep blocks and a state at the end.
        begun = each(running, [long[: first * size + 5]], kvkeep={"load": False})
        assert begun[0].cached == 0
        loaded = running["loaded_tokens"]
        with loads_checked(running) as counted:
            again = each(running, [long])
        assert again[0].cached == 9 * size
        if hybrid.exact:
            exactly(again, [local])
        assert running["loaded_tokens"] - loaded == (9 - first) * size
        assert counted == [1 if at in states else 9 - first for at in range(len(counted))]


def test_more_in_vllm_than_in_the_store(hybrid: Hybrid, running: Engine) -> None:
    size = hybrid.block
    long = prompt(9 * size + 3, seed=39)
    each(running, [long[: 3 * size + 5]])
    each(running, [long], kvkeep={"store": False})
    loaded = running["loaded_tokens"]
    (local,) = each(running, [long])
    assert running["loaded_tokens"] == loaded
    # That hit in vLLM was stored, its state too.
    running.forget()
    exactly(each(running, [long]), [local])
    assert running["loaded_tokens"] - loaded == 9 * size


def test_prompts_that_branch(hybrid: Hybrid, running: Engine) -> None:
    """Where the second leaves the first a state is kept, and the others find it."""
    size = hybrid.block
    shared = prompt(3 * size + size // 2, seed=33)
    asked = [shared + prompt(2 * size, seed=n) for n in range(5)]
    found = []
    for one in asked:
        running.forget()  # vLLM has nothing: only what is in the store can say where they branch
        found += each(running, [one])
    assert [answer.cached for answer in found] == [0, 0, 3 * size, 3 * size, 3 * size]
    assert running["failed_tokens"] == 0
    # As vLLM alone does it: the second computes the state, and the third finds it.
    more, alone = shared + prompt(2 * size, seed=9), {"load": False, "store": False}
    running.forget()
    locally = each(running, [asked[0], asked[1], more], kvkeep=alone)
    assert [answer.cached for answer in locally] == [0, 0, 3 * size]
    running.forget()
    stored = each(running, [more])
    assert stored[0].cached == 3 * size
    if hybrid.exact:
        exactly(stored, locally[2:])


def test_a_state_that_is_not_there(hybrid: Hybrid, running: Engine) -> None:
    """A miss, and the next request finds it again; KV alone is of no use."""
    mine = prompt(4 * hybrid.block + 7, seed=34)
    with hybrid.watched(running) as written:
        (cold,) = each(running, [mine])
    for key in written.states:
        running.store.remove([key])
        running.forget()
        (answer,) = each(running, [mine])
        exactly([answer], [cold])
        running.forget()
        (warm,) = each(running, [mine])
        assert warm.cached == hybrid.cut(mine)
    assert running["failed_tokens"] == 0


def test_a_load_that_fails_is_computed(hybrid: Hybrid, running: Engine) -> None:
    mine = prompt(4 * hybrid.block + 7, seed=35)
    (cold,) = each(running, [mine])
    read = running.store.read
    for states in (True, False):
        failed = running["failed_tokens"]

        def short(
            keys: list[bytes], sizes: list[int], *more: Any, states: bool = states, **named: Any
        ) -> int:
            if states == (sizes[0] == state_bytes(running)):
                keys, sizes = keys[:-1], sizes[:-1]
            return read(keys, sizes, *more, **named) if keys else 0

        running.store.read = short  # type: ignore[method-assign, assignment]
        try:
            running.forget()
            exactly(each(running, [mine]), [cold])
        finally:
            running.store.read = read  # type: ignore[method-assign]
        assert running["failed_tokens"] - failed == hybrid.cut(mine)
    running.forget()
    assert each(running, [mine])[0].cached == hybrid.cut(mine)


def test_options_of_a_request(hybrid: Hybrid, running: Engine) -> None:
    size = hybrid.block
    mine, other = prompt(2 * size + 9, seed=36), prompt(2 * size + 9, seed=37)
    with hybrid.watched(running) as written:
        each(running, [mine], kvkeep={"store": False})
        assert not written.states
        each(running, [mine], kvkeep={"pin": True, "ttl": 600})  # a hit in vLLM
    assert len(written.states) == STATES
    sizes = running.core.scheduler.connector._scheduler._shared.sizes
    (kv,) = set(sizes) - {state_bytes(running)}
    pinned = 2 * kv + STATES * state_bytes(running)
    each(running, [other])
    assert pinned <= running.store.stats()[0].pinned_bytes <= 1.3 * pinned
    running.forget()
    assert each(running, [mine], salt="another's")[0].cached == 0
    assert each(running, [mine])[0].cached == 2 * size


def test_aborted_before_its_state_is_complete(hybrid: Hybrid, running: Engine) -> None:
    size = hybrid.block
    long, core = prompt(6 * size + 5, seed=38), running.llm.llm_engine
    running.forget()
    for steps in (1, 2, 3):
        sampling = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
        core.add_request(f"gone {steps}", {"prompt_token_ids": long[:]}, sampling)
        for _ in range(steps):
            core.step()
        core.abort_request([f"gone {steps}"], internal=False)
    assert not running.core.scheduler.requests
    (local,) = each(running, [long])
    running.forget()
    exactly(each(running, [long]), [local])
    assert local.cached == hybrid.cut(long)
    running.store.check()
    assert counters(running, "damaged") == [0]
