"""Beside vLLM's other connectors, in roles, and through sleep."""

from __future__ import annotations

import threading
import time
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest
import torch
from engines import LENGTHS, PROMPTS, Answer, Engine, engine, found, prompt, same
from test_multi import flip, kvkeep_in, multi
from vllm import SamplingParams
from vllm.distributed.kv_transfer import get_kv_transfer_group

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import Server

ALL = sum(map(found, LENGTHS))


def offloading(size: int = 64 << 20) -> dict[str, Any]:
    """vLLM's own tier in memory."""
    return {
        "kv_connector": "OffloadingConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "cpu_bytes_to_use": size, "spec_name": "CPUOffload", "spec_module_path": "cpu_offload",
        },
    }  # fmt: skip


def nixl() -> dict[str, Any]:
    """NIXL's, which transfers KV between engines; alone here, so it has nothing to transfer."""
    return {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}


needs_nixl = pytest.mark.skipif(find_spec("nixl") is None, reason="nixl is not installed")


@pytest.mark.parametrize("first", [True, False], ids=["kvkeep first", "kvkeep last"])
@pytest.mark.parametrize("other", [offloading, pytest.param(nixl, marks=needs_nixl)])
def test_hits_and_a_flipped_bit_beside_another(
    llama: str, cold: list[Answer], tmp_path: Path, other: Any, first: bool
) -> None:
    tiers = ["memory://64MiB", f"file://{tmp_path}/kv?size=256MiB"]
    connectors = [kvkeep_in(*tiers), other()]
    settings = multi(*(connectors if first else connectors[::-1]),
                     kv_load_failure_policy="recompute")  # fmt: skip
    with engine(llama, **settings) as one:
        same(cold, one.ask(PROMPTS))
        one.forget()
        again = one.ask(PROMPTS)
        same(cold, again)
        assert sum(answer.cached for answer in again) >= ALL - len(LENGTHS)
    # vLLM's own tiers are empty now, and every third record of ours is damaged.
    assert flip(tmp_path / "kv") > 20
    with engine(llama, **settings) as one:
        answers = one.ask(PROMPTS)
        assert all(len(answer.tokens) == 6 for answer in answers), "an empty answer"
        same(cold, answers)
        assert one["failed_tokens"] > 0
        assert one["loaded_tokens"] > 0


def test_one_engine_computes_and_another_one_answers(
    llama: str, cold: list[Answer], server: Server
) -> None:
    """P/D: a producer that loads nothing, and a consumer that stores nothing."""
    tiers = ["memory://16MiB", server.url()]

    def role(name: str) -> dict[str, Any]:
        return {"kv_transfer_config": kvkeep_in(*tiers, role=name)}

    for _ in range(2):
        with engine(llama, **role("kv_producer")) as producer:
            computed = producer.ask(PROMPTS, max_tokens=1)
            assert [answer.cached for answer in computed] == [0] * len(PROMPTS)
            assert producer["loaded_tokens"] == 0
            assert producer["saved_tokens"] > 0
    fresh = prompt(200, seed=50)
    with engine(llama, **role("kv_consumer")) as consumer:
        answers = consumer.ask(PROMPTS)
        same(cold, answers)
        assert [answer.cached for answer in answers] == [found(length) for length in LENGTHS]
        consumer.ask([fresh])
        assert consumer["saved_tokens"] == 0
    with engine(llama, **role("kv_consumer")) as consumer:
        assert consumer.ask([fresh])[0].cached == 0


# --- sleep ----------------------------------------------------------------------------------------


def test_no_page_is_written_while_vllm_sleeps(llama: str, cold: list[Answer]) -> None:
    """vLLM sleeps on GPUs alone: here its calls, while loads run that nobody waits for."""
    with engine(llama, ["memory://64MiB"]) as one:
        one.ask(PROMPTS)
        worker = get_kv_transfer_group()._worker
        connector = get_kv_transfer_group()
        read, begun, ending = one.store.read, threading.Event(), threading.Event()
        wake = worker._loaders.wake
        written: list[float] = []

        def slow(keys: Any, sizes: Any, sink: Any, **more: Any) -> int:
            def late(at: int, raw: memoryview) -> None:
                begun.set()
                assert ending.wait(60)
                time.sleep(0.05)
                sink(at, raw)
                written.append(time.monotonic())

            return read(keys, sizes, late, **more)

        def end() -> None:  # the loads are cancelled, and one is within a block
            ending.set()
            wake()

        one.store.read = slow  # type: ignore[method-assign]
        one.forget()
        one.llm.llm_engine.add_request(
            "aborted", {"prompt_token_ids": PROMPTS[-1]}, SamplingParams(max_tokens=1)
        )
        while not begun.wait(0.001):
            one.llm.llm_engine.step()
        worker._loaders.wake = end
        connector.unregister_kv_caches()
        ended = time.monotonic()
        assert not worker._running
        one.llm.llm_engine.abort_request(["aborted"])
        time.sleep(0.2)
        assert len(written) < found(LENGTHS[-1]) // 32, "it was not cancelled"
        assert max(written) <= ended
        if hasattr(connector, "restore_kv_caches"):
            connector.restore_kv_caches()
        one.store.read = read  # type: ignore[method-assign]
        one.ask([prompt(40, seed=61)])  # vLLM frees the pages of the aborted request in a step
        one.forget()
        again = one.ask(PROMPTS)
        same(cold, again)
        assert sum(answer.cached for answer in again) == ALL


@pytest.mark.parametrize("resets", [True, False])
def test_what_a_reset_of_vllm_deletes(llama: str, resets: bool) -> None:
    """Sleep and pauses call it, too: what is stored outlives them only if the option says so."""
    mine = prompt(200, seed=60)
    with engine(llama, ["memory://16MiB"], extra={"resets": resets}) as one:
        one.ask([mine])
        one.core._reset_caches()  # what `pause_scheduler` and `sleep` call
        assert one.ask([mine])[0].cached == (0 if resets else found(200))


def other_weights(one: Engine) -> None:
    """Put other weights in place, as a trainer does."""
    worker = one.core.model_executor.driver_worker
    model = getattr(worker, "worker", worker).model_runner.model
    generator = torch.Generator().manual_seed(1)
    for name, weights in model.named_parameters():
        if "norm" in name:
            weights.data.mul_(1 + 0.4 * torch.randn(weights.shape, generator=generator))


@pytest.mark.parametrize("restarts", [False, True])
def test_a_reset_after_a_change_of_weights_while_requests_run(llama: str, restarts: bool) -> None:
    """Nothing that has to do with the old weights is stored; what is computed anew is."""
    mine, beside = prompt(100, seed=62), prompt(100, seed=63)
    with engine(llama, None, enable_prefix_caching=False) as vllm:
        other_weights(vllm)
        (other,) = vllm.ask([mine + prompt(9, seed=64)])
    with engine(llama, ["memory://64MiB"]) as one:
        running, said = one.llm.llm_engine, list[int]()

        def begin(name: str, tokens: list[int], most: int) -> None:
            sampling = SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True)
            running.add_request(name, {"prompt_token_ids": tokens}, sampling)

        def step() -> None:
            for output in running.step():
                if output.request_id == "goes on":
                    said[:] = output.outputs[0].token_ids

        begin("goes on", mine, 100)
        for _ in range(20):
            step()
        other_weights(one)
        assert one.core.scheduler.reset_prefix_cache(restarts, True) == restarts
        # One that finds old KV in vLLM's own cache, unless that was emptied, computes more from it.
        begin("finds old", mine + beside, 40)
        while running.has_unfinished_requests():
            step()
        one.core.step()
        one.forget()
        blocks = one.store.stats()[0].blocks
        assert bool(blocks) == restarts
        (warm,) = one.ask([mine + prompt(9, seed=64)])
        same([other], [warm])
        assert warm.cached == (96 if restarts else 0)
        later = mine + said + prompt(5, seed=65)
        answers = []
        for _ in range(2):
            one.forget()
            answers += one.ask([later])
    with engine(llama, None, enable_prefix_caching=False) as vllm:
        other_weights(vllm)
        cold = vllm.ask([later])
    for answer in answers:
        same(cold, [answer])
    assert answers[1].cached == 192
