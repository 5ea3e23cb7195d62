"""Below vLLM's offloading: what must not be found is not, and what a user says is listened to."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest
from engines import Answer, apart, engine, prompt, same
from models import make_adapter, make_gemma, make_llama
from tiered import kvkeep_tier, offloading, tiered
from vllm.lora.request import LoRARequest

from kvkeep.integrations.vllm.offload.requests import TierRequest
from kvkeep.integrations.vllm.options import RequestOptions

if TYPE_CHECKING:
    from pathlib import Path

MINE = [prompt(200, seed=7)]


def test_adapters_do_not_cross(tmp_path: Path, llama: str) -> None:
    """Not with the model, not with each other, not with what they were before training."""
    path = make_adapter(tmp_path / "one", 1)
    first, other = LoRARequest("a", 1, path), LoRARequest("b", 2, make_adapter(tmp_path / "two", 2))
    disk = f"file://{tmp_path}/kv?size=64MiB"
    settings = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2}
    with tiered(llama, disk, **settings) as one:
        cold = {who: one.ask(MINE, lora=who) for who in (None, first, other)}
        assert cold[None][0].differs(cold[first][0]) > 0.01
        assert cold[first][0].differs(cold[other][0]) > 0.01
        for who, expected in cold.items():
            one.forget_all()
            warm = one.ask(MINE, lora=who)
            same(expected, warm)
            assert warm[0].cached == 192
    make_adapter(tmp_path / "one", 3)  # trained anew, at the same path
    with tiered(llama, disk, **settings) as one:
        anew = one.ask(MINE, lora=first)
        assert anew[0].cached == 0
        assert anew[0].differs(cold[first][0]) > 0.01
        warm = one.ask(MINE, lora=other)
        assert warm[0].cached == 192
        same(cold[other], warm)
        # Now the files change while it runs: nobody knows which of them vLLM uses.
        make_adapter(tmp_path / "two", 4)
        for _ in range(2):
            one.forget_all()
            assert one.ask(MINE, lora=other)[0].cached == 0
        # And a vLLM that does not tell which adapter a request has.
        tier, connector = one.tier, one.core.scheduler.connector
        scheduler, connector.connector_scheduler = connector.connector_scheduler, None
        assert not tier._known(TierRequest(RequestOptions()), "anything")
        connector.connector_scheduler = scheduler


def test_other_weights_and_settings_do_not_cross(tmp_path: Path, llama: str) -> None:
    disk = f"file://{tmp_path}/kv?size=64MiB"
    others = make_llama(tmp_path / "other" / "llama", seed=1)
    with tiered(llama, disk) as one:
        cold = one.ask(MINE)
    settings: list[tuple[str, dict[str, Any]]] = [
        (others, {}),
        (llama, {"dtype": "bfloat16"}),
        (
            llama,
            {"hf_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 99.0}}},
        ),
        (llama, {"options": {"tenant": "somebody else"}}),
        (llama, {"extra": {"blocks_per_chunk": 2}}),
        (llama, {"load_format": "dummy"}),
        (llama, {"load_format": "dummy"}),
    ]
    for model, more in settings:
        with tiered(model, disk, **more) as one:
            assert one.ask(MINE)[0].cached == 0, more
    with tiered(llama, disk) as one:
        warm = one.ask(MINE)
        assert warm[0].cached == 192
        same(cold, warm)


@pytest.mark.parametrize(
    "extra",
    [{"canonical_layout": False}, {"spec_name": "WholeRows", "spec_module_path": "whole_rows"}],
    ids=["direct", "vLLM's spec"],
)
def test_other_layouts_of_rows(tmp_path: Path, llama: str, extra: dict[str, Any]) -> None:
    """vLLM's direct layout; and its own spec, under which workers tell nothing."""
    disk = f"file://{tmp_path}/kv?size=64MiB"
    with tiered(llama, disk) as one:
        cold = one.ask(MINE)
    for cached in (0, 192):
        with tiered(llama, disk, extra=extra) as one:
            warm = one.ask(MINE)
            assert warm[0].cached == cached
            same(cold, warm)


def two_ranks(llama: str, disk: str) -> None:
    """Workers in processes of their own, in the direct layout: a record is of just these ranks."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        llama, enforce_eager=True, max_model_len=1024, dtype="float32", block_size=32,
        tensor_parallel_size=2, distributed_executor_backend="mp", num_gpu_blocks_override=512,
        kv_transfer_config=offloading(
            [kvkeep_tier(f"file://{disk}?size=64MiB")], canonical_layout=False
        ),
    )  # fmt: skip

    def ask() -> Answer:
        sampling = SamplingParams(temperature=0, max_tokens=6, logprobs=5, ignore_eos=True)
        (said,) = llm.generate([{"prompt_token_ids": MINE[0]}], sampling, use_tqdm=False)
        (out,) = said.outputs
        steps = ({token: found.logprob for token, found in step.items()} for step in out.logprobs)
        return Answer(tuple(out.token_ids), tuple(steps), said.num_cached_tokens)

    core: Any = llm.llm_engine.engine_core.engine_core
    (tier,) = core.scheduler.connector.connector_scheduler.manager.secondary_tiers
    assert tier._store.store.namespace.rank.startswith("all of tp2")
    assert tier._jobs._rows.runs, "the workers told of their pages"
    cold = ask()
    assert cold.cached == 0
    assert llm.reset_prefix_cache(reset_connector=True)
    warm = ask()
    assert warm.cached == 192
    same([cold], [warm])
    core.shutdown()


def test_several_ranks(llama: str, tmp_path: Path) -> None:
    """In the direct layout, rows of two ranks are not those of one."""
    extra = {"canonical_layout": False}
    with tiered(llama, f"file://{tmp_path}/kv?size=64MiB", extra=extra) as one:
        one.ask(MINE)
    apart("test_tier_identity:two_ranks", llama, str(tmp_path / "kv"))


def test_what_a_request_says(llama: str, tmp_path: Path) -> None:
    long = prompt(100, seed=11)
    disk = f"file://{tmp_path}/kv?size=64MiB"
    with tiered(llama, disk, extra={"offload_prompt_only": False}) as one:
        one.ask([long], kvkeep={"store": False})
        one.forget_all()
        assert one.ask([long], kvkeep={"lod": False})[0].cached == 0
        assert one["ignored_params"] == 1
        one.forget_all()
        assert one.ask([long], kvkeep={"load": False})[0].cached == 0
        (whole,) = one.ask([long], max_tokens=70, kvkeep={"answers": False})
        turn = long + list(whole.tokens)
        one.forget_all()
        assert one.ask([turn], kvkeep={"ttl": 1.5, "pin": False})[0].cached == 96
        one.forget_all()
        assert one.ask([turn], kvkeep={"pin": True})[0].cached == 160
        time.sleep(1.6)
        one.ask([prompt(40, seed=12)])  # vLLM says that a request is over in its next step
        assert one.store.stats()[1].pinned_bytes > 0
        until = time.monotonic() + 20
        while True:
            one.forget_all()
            # What the request was the first to store is gone.
            if one.ask([turn], kvkeep={"store": False})[0].cached == 96:
                break
            assert time.monotonic() < until


@pytest.mark.parametrize(
    ("tier", "said"),
    [
        (kvkeep_tier("file:///tmp/x", load_timout=1), "did you mean 'load_timeout'"),
        (kvkeep_tier("memory://1GiB"), "give vLLM that memory"),
        ({**kvkeep_tier(), "tiers": None}, "tiers are a list of URLs"),
        ({key: one for key, one in kvkeep_tier().items() if key != "tiers"}, "has no tiers"),
        (kvkeep_tier("file:///tmp/x", buffer="1KiB"), "at least 1MiB"),
    ],
)
def test_what_is_wrong_is_told_at_the_start(llama: str, tier: dict[str, Any], said: str) -> None:
    with (
        pytest.raises(Exception, match=said),
        engine(llama, kv_transfer_config=offloading([tier])),
    ):
        pass


def test_chunks_of_several_blocks_are_refused_where_blocks_leave_a_window(tmp_path: Path) -> None:
    """vLLM stores the rest of such a chunk, and loads all of it."""
    path = make_gemma(tmp_path / "gemma3")
    transfer = offloading([kvkeep_tier(f"file://{tmp_path}/kv")], blocks_per_chunk=2)
    with (
        pytest.raises(Exception, match="blocks_per_chunk is 2 for a model with windows"),
        engine(path, kv_transfer_config=transfer),
    ):
        pass
