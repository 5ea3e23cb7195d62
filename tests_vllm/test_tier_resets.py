"""A reset of vLLM's caches while requests run: no KV of another request is stored or loaded."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING

import torch
from engines import Engine, engine, prompt, same
from hybrids import each
from models import make_gpt_oss
from tiered import TieredEngine, tiered
from versions import VERSION
from vllm import SamplingParams
from vllm.distributed.kv_transfer import get_kv_transfer_group

if TYPE_CHECKING:
    from pathlib import Path

    from vllm.v1.kv_offload.tiering.base import TransferJob

LONG, SHORT = prompt(201, seed=61), prompt(9, seed=60)
OTHERS = [prompt(length, seed=63) for length in (160, 170, 180)]
FEW = {"num_gpu_blocks_override": 30, "max_model_len": 416, "max_num_batched_tokens": 416}


def begin(one: TieredEngine, name: str, tokens: list[int], most: int, **wishes: object) -> None:
    said = {"kv_transfer_params": {"kvkeep": wishes}} if wishes else None
    sampling = SamplingParams(max_tokens=most, temperature=0.0, ignore_eos=True, extra_args=said)
    one.llm.llm_engine.add_request(name, {"prompt_token_ids": tokens}, sampling)


def until_ended(one: TieredEngine, *names: str) -> None:
    waiting, until = set(names), time.monotonic() + 60
    while waiting:
        waiting -= {said.request_id for said in one.llm.llm_engine.step() if said.finished}
        assert time.monotonic() < until


def reset(one: TieredEngine) -> None:
    """Empty vLLM's memory although requests run, as its server does when it is told to."""
    assert not one.core.scheduler.reset_prefix_cache(reset_connector=True)


def test_pages_that_left_a_window_are_not_stored_for_their_last_owner(
    tmp_path: Path,
) -> None:
    path, disk = make_gpt_oss(tmp_path / "gpt_oss"), f"file://{tmp_path}/kv?size=64MiB"
    with engine(path) as vllm:
        cold = each(vllm, [LONG])
    with tiered(path, disk, **FEW) as one:
        begin(one, "goes on", LONG, 190)
        for _ in range(80):  # the end of its prompt leaves the window
            one.llm.llm_engine.step()
        for at, other in enumerate(OTHERS):
            begin(one, f"other {at}", other, 1, store=False)
            until_ended(one, f"other {at}")
        one.store.clear()
        reset(one)
        until_ended(one, "goes on")
        assert one.core.scheduler.reset_prefix_cache()
        same(cold, each(one, [LONG]))
        one.forget_all()
        (again,) = each(one, [LONG])
        same(cold, [again])
        one.ask([SHORT])
        one.forget_all()
        (warm,) = each(one, [LONG])
        same(cold, [warm])
        assert warm.cached == 192, "it is stored anew by a request that computes it"


def test_no_row_is_filled_while_workers_may_write_it(tmp_path: Path, llama: str) -> None:
    disk = f"file://{tmp_path}/kv?size=64MiB"
    with tiered(llama, disk) as one:
        cold = each(one, [LONG])
        one.forget_all()
        worker = get_kv_transfer_group().connector_worker
        load, written = one.tier.submit_load, []
        before: set[int] = set()

        def watched(job: TransferJob) -> None:
            due = {number for number, *_ in worker._unsubmitted_store_jobs}
            written.append((due | worker.worker._saving.keys()) & before)
            load(job)

        one.tier.submit_load = watched  # type: ignore[method-assign, assignment]
        begin(one, "goes on", OTHERS[0], 40)
        while not worker._unsubmitted_store_jobs:  # its prompt is copied in the next step
            one.llm.llm_engine.step()
        before = {number for number, *_ in worker._unsubmitted_store_jobs}
        reset(one)
        begin(one, "loads", LONG, 6)
        until_ended(one, "loads", "goes on")
        if VERSION < (0, 33):  # which itself holds back what a reset interrupts, as a miss
            assert written == [set()]
            assert one["loaded_tokens"] == 192
        assert not any(written)
        assert one.core.scheduler.reset_prefix_cache()
        same(cold, each(one, [LONG]))


def test_weights_that_change_in_place(tmp_path: Path, llama: str) -> None:
    """A trainer changes them and resets all caches: nothing of before is loaded, what comes is."""

    def train(one: Engine) -> None:
        worker = one.core.model_executor.driver_worker
        model = getattr(worker, "worker", worker).model_runner.model
        generator = torch.Generator().manual_seed(1)
        for name, rows in model.named_parameters():
            if "norm" in name:
                rows.data.mul_(1 + 0.4 * torch.randn(rows.shape, generator=generator))

    with engine(llama) as vllm:
        train(vllm)
        right = each(vllm, [LONG])
    with tiered(llama, f"file://{tmp_path}/kv?size=64MiB", options={"resets": True}) as one:
        assert each(one, [LONG])[0].tokens != right[0].tokens
        one.ask([SHORT])  # vLLM offloads in later steps
        assert one.store.flush(60)
        train(one)
        one.forget_all()
        (anew,) = each(one, [LONG])
        same(right, [anew])
        assert anew.cached == 0
        one.ask([SHORT])
        one.forget()  # and vLLM's memory, without a reset of the tier
        one.core.scheduler.connector.connector_scheduler.manager.primary_tier.reset_cache()
        (warm,) = each(one, [LONG])
        same(right, [warm])
        assert warm.cached == 192
        assert one["loaded_tokens"] == 192


def test_a_storm_of_requests_and_resets(tmp_path: Path) -> None:
    """Few pages, windows, long and short answers, and a reset every few steps: no wrong token."""
    path, disk = make_gpt_oss(tmp_path / "gpt_oss"), f"file://{tmp_path}/kv?size=64MiB"
    rng = random.Random(7)
    prompts = [prompt(rng.randrange(40, 220), seed=64 + at) for at in range(8)]
    with engine(path) as vllm:
        said = [answer.tokens for answer in each(vllm, prompts, max_tokens=100)]
    with tiered(path, disk, **FEW, extra={"offload_prompt_only": False}) as one:
        running: dict[str, tuple[int, int]] = {}
        answers = 0
        while answers < 120:
            while len(running) < 4:
                name, at = f"{answers} {rng.random()}", rng.randrange(len(prompts))
                running[name] = at, rng.choice((1, 8, 40, 100))
                begin(one, name, prompts[at], running[name][1])
            for _ in range(rng.randrange(1, 25)):
                for output in one.llm.llm_engine.step():
                    if output.finished:
                        at, most = running.pop(output.request_id)
                        assert tuple(output.outputs[0].token_ids) == said[at][:most], answers
                        answers += 1
            if rng.random() < 0.5:
                one.core.scheduler.reset_prefix_cache(reset_connector=True)
        until_ended(one, *running)
        assert one["loaded_tokens"] > 0
