"""Below vLLM's offloading: what must not be found is not, and what a user says is listened to."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest
from engines import Answer, apart, engine, prompt, same
from models import make_gemma
from tiered import kvkeep_tier, offloading, tiered

from kvkeep.core.errors import InvalidValue

if TYPE_CHECKING:
    from pathlib import Path

MINE = [prompt(200, seed=7)]


@pytest.mark.parametrize(
    "extra",
    [
        {"canonical_layout": False},
        {"blocks_per_chunk": 2},
    ],
    ids=["direct", "two blocks"],
)
def test_other_layouts_of_rows(tmp_path: Path, llama: str, extra: dict[str, Any]) -> None:
    """vLLM's direct layout, and longer chunks."""
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
        (whole,) = one.ask([long], max_tokens=70, kvkeep={"store": False})
        turn = long + list(whole.tokens)
        one.forget_all()
        assert one.ask([turn], kvkeep={"ttl": 1.5, "pin": False})[0].cached == 96
        one.forget_all()
        assert one.ask([turn], kvkeep={"pin": True})[0].cached == 160
        time.sleep(1.6)
        one.ask([prompt(40, seed=12)])  # vLLM says that a request is over in its next step
        until = time.monotonic() + 60
        while not one.store.stats()[1].pinned_bytes:  # pinned in the background
            assert time.monotonic() < until
            time.sleep(0.01)
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
    ],
)
def test_what_is_wrong_is_told_at_the_start(llama: str, tier: dict[str, Any], said: str) -> None:
    with (
        pytest.raises(Exception, match=said),
        engine(llama, kv_transfer_config=offloading([tier])),
    ):
        pass


def test_vllm_is_told_before_it_loads_weights() -> None:
    """It asks the connector's class about its CUDA graphs then, also of each in MultiConnector."""
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

    from kvkeep.integrations.vllm.tier import KVKeepOffloadingConnector

    wrong = offloading([kvkeep_tier("file:///tmp/x")], spec_name="TieringOffloadingSpec")
    with pytest.raises(InvalidValue, match='"spec_name": "KVKeepSpec"'):
        KVKeepOffloadingConnector.requires_piecewise_for_cudagraph(
            wrong["kv_connector_extra_config"]
        )
    inner = {
        "kv_connector": "KVKeepConnector", "kv_role": "kv_both",
        "kv_connector_module_path": "kvkeep.integrations.vllm",
        "kv_connector_extra_config": {"load_timout": 1},
    }  # fmt: skip
    with pytest.raises(InvalidValue, match="did you mean 'load_timeout'"):
        MultiConnector.requires_piecewise_for_cudagraph({"connectors": [inner]})


def test_a_tier_that_cannot_see_its_engine_is_refused(llama: str, tmp_path: Path) -> None:
    transfer = offloading([kvkeep_tier(f"file://{tmp_path}/kv?size=64MiB")])
    transfer |= {"kv_connector": "OffloadingConnector", "kv_connector_module_path": None}
    with (
        pytest.raises(Exception, match='give "kv_connector": "KVKeepOffloadingConnector"'),
        engine(llama, kv_transfer_config=transfer),
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
