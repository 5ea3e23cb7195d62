"""What holds for the connector and for the tier below vLLM's offloading alike."""

from __future__ import annotations

import logging
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import pytest
import torch
from engines import PROMPTS, Answer, Engine, engine, prompt, same
from models import make_adapter, make_llama
from tiered import tiered
from vllm import PoolingParams, SamplingParams
from vllm.config import PoolerConfig
from vllm.lora.request import LoRARequest
from vllm.v1.request import Request

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

    from conftest import Server


class Kept(Protocol):
    """An engine that keeps its KV in a tier, behind a little memory."""

    def __call__(
        self, model: str, tier: str, *, options: dict[str, Any] = ..., **more: Any
    ) -> AbstractContextManager[Engine]: ...


@contextmanager
def connected(model: str, tier: str, **more: Any) -> Iterator[Engine]:
    options = more.pop("options", {})
    with engine(
        model, [f"memory://{options.pop('buffer', '64MiB')}", tier], extra=options, **more
    ) as one:
        yield one


both = pytest.mark.parametrize("kept", [connected, tiered], ids=["connector", "tier"])


@both
def test_adapters_do_not_cross(tmp_path: Path, llama: str, kept: Kept) -> None:
    """Not with the model, not with each other, not with what they were before training."""
    mine = [prompt(200, seed=6)]
    path = make_adapter(tmp_path / "one", 1)
    first, other = LoRARequest("a", 1, path), LoRARequest("b", 2, make_adapter(tmp_path / "two", 2))
    disk = f"file://{tmp_path}/kv?size=64MiB"
    settings = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2}
    with kept(llama, disk, **settings) as one:
        cold = {who: one.ask(mine, lora=who) for who in (None, first, other)}
        assert cold[None][0].differs(cold[first][0]) > 0.01
        assert cold[first][0].differs(cold[other][0]) > 0.01
        for who, expected in cold.items():
            one.forget_all()
            warm = one.ask(mine, lora=who)
            same(expected, warm)
            assert warm[0].cached == 192
    make_adapter(tmp_path / "one", 3)  # trained anew, at the same path
    with kept(llama, disk, **settings) as one:
        anew = one.ask(mine, lora=first)
        assert anew[0].cached == 0
        assert anew[0].differs(cold[first][0]) > 0.01
        warm = one.ask(mine, lora=other)
        assert warm[0].cached == 192
        same(cold[other], warm)
        # Now the files change while it runs: nobody knows which of them vLLM uses.
        make_adapter(tmp_path / "two", 4)
        for _ in range(2):
            one.forget_all()
            assert one.ask(mine, lora=other)[0].cached == 0


@both
def test_other_weights_and_settings_do_not_cross(tmp_path: Path, llama: str, kept: Kept) -> None:
    """What has the same prompt and shapes, and another KV."""
    mine = [prompt(200, seed=7)]
    disk = f"file://{tmp_path}/kv?size=64MiB"
    with kept(llama, disk) as one:
        cold = one.ask(mine)
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 99.0}}
    settings: list[tuple[str, dict[str, Any]]] = [
        (make_llama(tmp_path / "other" / "llama", seed=1), {}),
        (llama, {"dtype": "bfloat16"}),
        (llama, {"hf_overrides": rope}),
        (llama, {"options": {"tenant": "somebody else"}}),
        (llama, {"load_format": "dummy"}),
        (llama, {"load_format": "dummy"}),  # weights that nothing names are those of one process
    ]
    for model, more in settings:
        with kept(model, disk, **more) as one:
            assert one.ask(mine)[0].cached == 0, more
    with kept(llama, disk) as one:
        warm = one.ask(mine)
        assert warm[0].cached == 192
        same(cold, warm)


@both
def test_prompts_with_embeddings_are_not_kept(tmp_path: Path, llama: str, kept: Kept) -> None:
    """vLLM's hashes do not tell which positions are embeddings, and which are tokens."""
    rows = torch.randn(100, 128, generator=torch.Generator().manual_seed(1)) * 0.5
    tokens, disk = [0] * 64 + prompt(36, seed=8), f"file://{tmp_path}/kv?size=64MiB"
    settings = {"enable_prompt_embeds": True, "enable_prefix_caching": False}

    def ask(one: Engine, are_tokens: list[bool] | None) -> tuple[tuple[int, ...], int]:
        asked: dict[str, Any] = {"prompt_embeds": rows}
        if are_tokens is not None:
            asked |= {"prompt_token_ids": tokens, "prompt_is_token_ids": are_tokens}
        sampling = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
        (said,) = one.llm.generate([asked], sampling, use_tqdm=False)
        return tuple(said.outputs[0].token_ids), said.num_cached_tokens or 0

    mixed, alike = [False] * 64 + [True] * 36, [True] * 100
    with engine(llama, **settings) as one:
        right = ask(one, alike)
    with kept(llama, disk, **settings) as one:
        assert ask(one, mixed)[0] != right[0]
        assert [ask(one, None)[1] for _ in range(2)] == [0, 0]
    with kept(llama, disk, **settings) as one:
        assert ask(one, alike) == right
        mine = [prompt(100, seed=9)]
        one.ask(mine)
        assert one.ask(mine)[0].cached == 96, "prompts of tokens are kept in such an engine"


@both
@pytest.mark.parametrize(("pooling", "cached"), [("MEAN", 0), ("CLS", 0), ("LAST", 96)])
def test_poolers_over_whole_prompts_load_nothing(
    tmp_path: Path, llama: str, kept: Kept, pooling: str, cached: int
) -> None:
    """vLLM itself reuses nothing for such a model: its pooler needs the states of all tokens."""
    settings: dict[str, Any] = {
        "runner": "pooling", "convert": "embed", "enable_prefix_caching": None,
        "pooler_config": PoolerConfig(pooling_type=pooling),
    }  # fmt: skip

    def ask(one: Engine, seed: int = 0) -> tuple[list[float], int]:
        asked = [{"prompt_token_ids": prompt(100, seed)}]
        (said,) = one.llm.encode(asked, PoolingParams(), pooling_task="embed", use_tqdm=False)
        return said.outputs.data.tolist(), said.num_cached_tokens or 0

    with engine(llama, **settings) as one:
        right, _ = ask(one)
    with kept(llama, f"file://{tmp_path}/kv?size=64MiB", **settings) as one:
        for at in range(3):
            said, found = ask(one)
            assert said == pytest.approx(right, abs=1e-4)
            assert found == (cached if at else 0)
            for other in (1, 2, 3):  # vLLM offloads in later steps
                ask(one, seed=3 * at + other)
            one.forget_all()


@both
def test_parameters_that_are_no_object_are_ignored(
    llama: str, tmp_path: Path, kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the scheduler: vLLM's own front end, where it is in front, has no answer to them."""
    mine, wrong = prompt(100, seed=10), (5, "x", [1], True)
    told: list[str] = []
    monkeypatch.setattr(
        logging.getLogger("kvkeep.vllm"), "warning", lambda text, *more: told.append(text % more)
    )
    with kept(llama, f"file://{tmp_path}/kv?size=64MiB") as one:
        cold = one.ask([mine])
        one.forget_all()
        for params in wrong:
            sampling = SamplingParams(
                max_tokens=2, temperature=0.0, extra_args={"kv_transfer_params": params}
            )
            hasher = one.core.request_block_hasher
            request = Request(f"has {params}", mine, sampling, None, block_hasher=hasher)
            one.core.add_request(request)
            while one.core.scheduler.has_unfinished_requests():
                one.core.step_fn()
            assert list(request.output_token_ids) == list(cold[0].tokens[:2])
    for params in wrong:
        assert sum(f"they are {params!r}; an object is needed" in text for text in told) == 1


@both
def test_a_server_that_hangs_or_is_dead(
    llama: str, cold: list[Answer], server: Server, kept: Kept
) -> None:
    limits = {"load_timeout": 0.5, "buffer": "1MiB"}
    with kept(llama, server.url(timeout="60s"), options=limits) as one:
        began = time.monotonic()
        one.ask(PROMPTS)
        computed = time.monotonic() - began
        assert one.store.flush(60)
        one.forget_all()
        same(cold, one.ask(PROMPTS))
        assert one["loaded_tokens"] > 0
        server.hang()
        one.forget_all()
        began = time.monotonic()
        same(cold, one.ask(PROMPTS))
        # The tier's own patience is a minute; twenty requests wait side by side.
        assert time.monotonic() - began < 2 * computed + 30
        assert one["late_lookups"] + one["late_tokens"] > 0
        server.go_on()
        server.close()
        one.forget_all()
        same(cold, one.ask(PROMPTS))
