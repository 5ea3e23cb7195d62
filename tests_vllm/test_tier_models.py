"""kvkeep below vLLM's offloading: all kinds of models hit after a reset and in another process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from engines import Answer, apart, engine, prompt, same
from hybrids import each
from models import make_gemma, make_gpt_oss, make_llama, make_qwen_next
from tiered import tiered

if TYPE_CHECKING:
    from collections.abc import Callable

MODELS: dict[str, tuple[Callable[[Path], str], int, dict[str, Any]]] = {
    "llama": (make_llama, 32, {"extra": {"blocks_per_chunk": 2}}),
    "gemma3": (make_gemma, 32, {}),
    "gpt_oss": (make_gpt_oss, 32, {}),
    "qwen3_next": (make_qwen_next, 64, {"dtype": "bfloat16", "block_size": 64}),
}


def asked(block: int) -> list[list[int]]:
    return [prompt(n * block + 9, seed=40) for n in (2, 4, 6)]


def warm_apart(name: str, path: str, disk: str, answers: str) -> None:
    """In a process of its own: ask again what another process has stored."""
    _, block, settings = MODELS[name]
    with tiered(path, disk, **settings) as one:
        said = each(one, asked(block))
        failed = one["failed_tokens"]
    told = [[a.tokens, [list(step.items()) for step in a.logprobs], a.cached] for a in said]
    Path(answers).write_text(json.dumps([failed, told]))


@pytest.mark.parametrize("name", MODELS)
def test_after_a_reset_and_in_another_process(name: str, tmp_path: Path) -> None:
    make, block, settings = MODELS[name]
    path, disk = make(tmp_path / "model"), f"file://{tmp_path}/kv?size=256MiB"
    plain = {key: value for key, value in settings.items() if key != "extra"}
    with engine(path, **plain) as vllm:
        cold = each(vllm, asked(block))
        local = each(vllm, asked(block))  # hits of its own, which continue at the same place
    with tiered(path, disk, **settings) as one:
        groups = one.core.scheduler.kv_cache_config.kv_cache_groups
        assert (len(groups) > 1) == (name != "llama")
        same(cold, each(one, asked(block)))
        one.forget_all()
        stored = each(one, asked(block))
        same(local, stored)
        assert [answer.cached for answer in stored] == [n * block for n in (2, 4, 6)]
        assert one["loaded_tokens"] > 0
        assert one["failed_tokens"] == 0
        one.store.check()
    answers = tmp_path / "answers.json"
    apart("test_tier_models:warm_apart", name, path, disk, str(answers))
    failed, told = json.loads(answers.read_text())
    again = [
        Answer(tuple(tokens), tuple({int(t): p for t, p in step} for step in logprobs), cached)
        for tokens, logprobs, cached in told
    ]
    same(local, again)
    assert failed == 0
    assert [answer.cached for answer in again] == [n * block for n in (2, 4, 6)]


def test_prompts_that_branch_early_hit_where_vllm_keeps_the_boundary(tmp_path: Path) -> None:
    """With a retention interval, vLLM offloads the windows at each multiple of it, too."""
    path, first = make_gemma(tmp_path / "gemma"), prompt(6 * 32 + 9, seed=41)
    branch = first[: 3 * 32 + 5] + prompt(70, seed=42)
    disk = f"file://{tmp_path}/kv?size=256MiB"
    with tiered(path, disk, prefix_cache_retention_interval=32) as one:
        each(one, [first])
        one.forget_all()
        (hit,) = each(one, [branch])
        assert hit.cached == 3 * 32
        assert one["loaded_tokens"] == 3 * 32
    with engine(path) as vllm:
        same(each(vllm, [branch]), [hit])
