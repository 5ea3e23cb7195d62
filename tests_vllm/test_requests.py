"""What a request can say, and what must never cross from one to another."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest
from engines import PROMPTS, Answer, Engine, engine, found, prompt, same
from vllm import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture(scope="module")
def running(
    llama: str, cold: list[Answer], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    del cold  # it was there before
    disk = tmp_path_factory.mktemp("kv")
    with engine(llama, ["memory://2MiB", f"file://{disk}?size=64MiB"]) as one:
        yield one


def again(running: Engine, tokens: list[int], **more: object) -> Answer:
    running.forget()
    return running.ask([tokens], **more)[0]  # type: ignore[arg-type]


def test_salts_do_not_cross(running: Engine) -> None:
    mine = prompt(200, seed=1)
    running.ask([mine], salt="a")
    assert again(running, mine, salt="b").cached == 0
    assert again(running, mine).cached == 0
    assert again(running, mine, salt="a").cached == found(200)
    assert again(running, mine, salt="b").cached == found(200)


def test_reading_the_cache_can_be_skipped(running: Engine) -> None:
    mine = prompt(200, seed=2)
    first = running.ask([mine])[0]
    loaded = running["loaded_tokens"]
    answer = again(running, mine, skip_reading_prefix_cache=True)
    assert running["loaded_tokens"] == loaded
    assert answer.cached == 0
    same([first], [answer])
    # As it is with prompt logprobs, which need every token to be computed.
    assert again(running, mine, prompt_logprobs=1).cached == 0


def test_several_answers_to_one_prompt(running: Engine) -> None:
    mine = prompt(150, seed=3)
    sampled = {"n": 4, "temperature": 1.0, "seed": 11}
    first = running.ask([mine], **sampled)
    running.forget()
    second = running.ask([mine], **sampled)
    same(first, second)
    assert len({answer.tokens for answer in first}) > 1
    assert second[0].cached == found(150)


def test_not_to_be_stored(running: Engine) -> None:
    mine = prompt(200, seed=4)
    running.ask([mine], kvkeep={"store": False})
    assert again(running, mine).cached == 0
    assert again(running, mine, kvkeep={"load": False}).cached == 0
    assert again(running, mine).cached == found(200)


@pytest.mark.parametrize(
    "wrong",
    [
        {"stores": True},
        {"store": "no"},
        {"ttl": -1},
        {"pin": 3},
        [1],
        {"ttl": "soon"},
    ],
)
def test_wrong_wishes_are_not_followed_and_told(
    running: Engine, caplog: pytest.LogCaptureFixture, wrong: object
) -> None:
    mine, ignored = prompt(70, seed=5), running["ignored_params"]
    plain = again(running, mine)
    with caplog.at_level(logging.WARNING, logger="kvkeep.vllm"):
        same([plain], [again(running, mine, kvkeep=wrong)])
    (record,) = [one for one in caplog.records if one.name == "kvkeep.vllm"]
    assert "kv_transfer_params" in record.getMessage()
    assert running["ignored_params"] == ignored + 1


def test_deleted_after_its_time(running: Engine, ten_minutes_later: Callable[[], None]) -> None:
    shared, mine = prompt(64, seed=6), prompt(200, seed=7)
    running.ask([shared])
    running.ask([shared + mine], kvkeep={"ttl": 600})
    assert again(running, shared + mine).cached == found(264)
    ten_minutes_later()
    # What was there before stays.
    assert again(running, shared + mine, kvkeep={"store": False}).cached == 64


def test_pinned_blocks_stay(llama: str, running: Engine) -> None:
    pinned, other = prompt(96, seed=8), prompt(96, seed=9)
    running.ask([pinned], kvkeep={"pin": True, "ttl": 600})
    running.ask([other])
    assert sum(tier.pinned_bytes for tier in running.store.stats()) > 0
    front = running.store.stats()[0]
    for seed in range(30):  # twice what fits into memory and disk's part of it
        running.ask([prompt(700, seed=100 + seed)], max_tokens=1)
    assert running.store.stats()[0].counters["evictions"] > front.counters["evictions"]
    hits = running["hits memory"]
    assert again(running, pinned).cached == found(96)
    assert running["hits memory"] - hits == 3, "they were evicted from memory"


def test_a_reset_of_the_connector_deletes_everything(running: Engine) -> None:
    mine = prompt(300, seed=10)
    running.ask([mine])
    assert running.core.scheduler.reset_prefix_cache(reset_connector=True)
    assert [tier.blocks for tier in running.store.stats()] == [0, 0]
    assert running.ask([mine])[0].cached == 0
    assert again(running, mine).cached == found(300)


def test_aborted_while_it_is_loaded(running: Engine, cold: list[Answer]) -> None:
    long = prompt(1500, seed=11)
    running.ask([long], max_tokens=1)
    assert running.store.flush(30)
    llm_engine, connector = running.llm.llm_engine, running.core.scheduler.connector
    for steps in (1, 2, 3):
        running.forget()
        plans = []
        plan = connector.build_connector_meta

        def seen(output: object, plan: object = plan, plans: list[object] = plans) -> object:
            made = plan(output)  # type: ignore[operator]
            plans.extend(made.loads)
            return made

        connector.build_connector_meta = seen
        try:
            llm_engine.add_request(
                f"gone {steps}",
                {"prompt_token_ids": long},
                SamplingParams(max_tokens=4, temperature=0),
            )
            while not plans:
                llm_engine.step()
            llm_engine.abort_request([f"gone {steps}"], internal=False)
            same(cold, running.ask(PROMPTS))
        finally:
            connector.build_connector_meta = plan
    assert not running.core.scheduler.requests
    running.forget()
    same(cold, running.ask(PROMPTS))
    running.store.check()


def test_many_at_once_that_begin_alike(running: Engine) -> None:
    start = prompt(500, seed=12)
    asked = [start + prompt(40 + n, seed=n) for n in range(12)]
    first = running.ask(asked)
    running.forget()
    second = running.ask(asked)
    same(first, second)
    assert all(answer.cached >= 480 for answer in second)


def test_nothing_is_left_behind(running: Engine, tmp_path: Path) -> None:
    """Requests that ended are forgotten on both sides."""
    running.ask(PROMPTS[:4])
    connector = running.core.scheduler.connector
    assert connector._scheduler._followed == {}
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    worker = get_kv_transfer_group()._worker
    assert worker._loading == {}
    assert not worker._done
