"""Models of other kinds, and what is not kept."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from engines import Answer, apart, engine, prompt, same
from models import make_gemma, make_mistral

if TYPE_CHECKING:
    from pathlib import Path

    from engines import Engine

# Around the edges of blocks, and of windows of 48 and 80 tokens.
ASKED = [prompt(length, seed=5) for length in (40, 64, 65, 79, 80, 96, 97, 160, 161, 191, 192, 420)]


def test_sliding_and_full_attention_in_one_model(tmp_path: Path) -> None:
    gemma = make_gemma(tmp_path / "gemma")
    tiers = ["memory://64MiB", f"file://{tmp_path}/kv?size=256MiB"]
    with engine(gemma) as plain:
        cold = plain.ask(ASKED)
    with engine(gemma, tiers) as one:
        assert len(one.core.scheduler.kv_cache_config.kv_cache_groups) > 1
        same(cold, one.ask(ASKED))
        one.forget()
        _warm(one, cold)
    with engine(gemma, tiers) as one:
        _warm(one, cold)
        # One record of any layer is lost: all of that request is computed, and no other.
        one.forget()
        store, read = one.store, one.store.read

        def short(keys: list[bytes], *args: object, **more: object) -> int:
            return read(keys[: len(keys) // 2], *args, **more)  # type: ignore[arg-type]

        def shorter(keys: list[bytes], sizes: list[int], *args: object, **more: object) -> int:
            return short(keys, sizes[: len(keys) // 2], *args, **more)

        store.read = shorter  # type: ignore[method-assign, assignment]
        same(cold, one.ask(ASKED))
        assert one["failed_tokens"] > 0


def _warm(one: Engine, cold: list[Answer]) -> None:
    loaded = one["loaded_tokens"]
    warm = one.ask(ASKED)
    same(cold, warm)
    # With windows the last token's block is computed.
    expected = [(len(asked) - 1) // 32 * 32 for asked in ASKED]
    assert [answer.cached for answer in warm] == expected
    assert one["loaded_tokens"] > loaded
    assert one["failed_tokens"] == 0


def test_sliding_attention_alone(tmp_path: Path) -> None:
    mistral = make_mistral(tmp_path / "mistral")
    with engine(mistral) as plain:
        cold = plain.ask(ASKED)
    with engine(mistral, ["memory://64MiB"]) as one:
        same(cold, one.ask(ASKED))
        one.forget()
        warm = one.ask(ASKED)
        same(cold, warm)
        assert one["loaded_tokens"] > 0
        assert one["failed_tokens"] == 0


def test_several_ranks(llama: str, tmp_path: Path) -> None:
    apart("test_models:two_ranks", llama, str(tmp_path / "kv"))


def two_ranks(llama: str, disk: str) -> None:
    """Two workers with stores of their own: the scheduler has to ask both."""
    import time

    from vllm import LLM, SamplingParams

    llm = LLM(
        llama, enforce_eager=True, max_model_len=1024, dtype="float32", block_size=32,
        tensor_parallel_size=2, distributed_executor_backend="mp", num_gpu_blocks_override=512,
        kv_transfer_config={
            "kv_connector": "KVKeepConnector", "kv_role": "kv_both",
            "kv_connector_module_path": "kvkeep.integrations.vllm",
            "kv_connector_extra_config": {
                "tiers": ["memory://16MiB", f"file://{disk}?size=64MiB"],
                "load_timeout": 60.0, "compare_costs": False,
            },
        },
    )  # fmt: skip

    def ask() -> list[Answer]:
        sampling = SamplingParams(temperature=0, max_tokens=6, logprobs=5, ignore_eos=True)
        outputs = llm.generate(
            [{"prompt_token_ids": one} for one in ASKED], sampling, use_tqdm=False
        )
        return [
            Answer(
                tuple(out.outputs[0].token_ids),
                tuple({t: p.logprob for t, p in step.items()} for step in out.outputs[0].logprobs),
                out.num_cached_tokens,
            )
            for out in outputs
        ]

    cold = ask()
    assert llm.reset_prefix_cache()
    warm = ask()
    same(cold, warm)
    blocks = [len(one) // 32 for one in ASKED]
    assert [answer.cached // 32 for answer in warm] == blocks, [a.cached for a in warm]
    assert llm.reset_prefix_cache(reset_connector=True)
    time.sleep(0.1)
    assert [answer.cached for answer in ask()] == [0] * len(ASKED)
    llm.llm_engine.engine_core.shutdown()


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"tier": []}, "options are tiers, revision"),
        ({"load_timeout": "soon"}, "load_timeout: 'soon' is no time"),
        ({"tiers": "memory://1GiB"}, "a list of URLs"),
        ({"tiers": ["nowhere://"]}, "no tier is called nowhere"),
    ],
)
def test_wrong_options_are_told_at_the_start(
    llama: str, extra: dict[str, object], said: str
) -> None:
    with (
        pytest.raises(Exception, match=said),
        engine(llama, ["memory://1MiB"], extra=extra),
    ):
        pass
