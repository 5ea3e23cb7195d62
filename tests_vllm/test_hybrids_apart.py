"""Models with states in engines of their own: after a restart, in pieces, with too few pages."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engines import Answer, apart, engine, prompt, same
from hybrids import STATES, Hybrid, described, each, exactly, make_hybrid, state_bytes
from models import make_gpt_oss


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Hybrid:
    return make_hybrid("qwen3_next", tmp_path_factory.mktemp("models"))


def asked(hybrid: Hybrid) -> list[list[int]]:
    return [prompt(n * hybrid.block + 9, seed=40) for n in (1, 3, 6)]


def fill(path: str, tier: str, answers: str) -> None:
    """In a process of its own: store prompts, and write down what hits in vLLM say."""
    hybrid = described("qwen3_next", path)
    with hybrid.engine(["memory://64MiB", tier]) as one:
        each(one, asked(hybrid))
        said = each(one, asked(hybrid))
    Path(answers).write_text(
        json.dumps(
            [[a.tokens, [list(step.items()) for step in a.logprobs], a.cached] for a in said]
        )
    )


def said_by(answers: Path) -> list[Answer]:
    return [
        Answer(tuple(tokens), tuple({int(t): p for t, p in step} for step in logprobs), cached)
        for tokens, logprobs, cached in json.loads(answers.read_text())
    ]


def records(disk: Path, size: int) -> list[Path]:
    """The files of records with so many bytes, and a header."""
    files = sorted(disk.glob("?" * 32 + "/" + "?" * 64))
    return [path for path in files if size <= path.stat().st_size < size + 4096]


def test_after_a_restart_and_with_damaged_states(hybrid: Hybrid, tmp_path: Path) -> None:
    disk, answers = tmp_path / "kv", tmp_path / "answers.json"
    tier = f"file://{disk}?size=256MiB"
    apart("test_hybrids_apart:fill", hybrid.path, tier, str(answers))
    local, prompts = said_by(answers), asked(hybrid)
    assert [answer.cached for answer in local] == [hybrid.cut(one) for one in prompts]
    with hybrid.engine(["memory://64MiB", tier]) as one:
        exactly(each(one, prompts), local)
        assert one["loaded_tokens"] == sum(hybrid.cut(each_one) for each_one in prompts)
        assert one["failed_tokens"] == 0
        size = state_bytes(one)
    states = records(disk, size)
    assert len(states) == STATES * len(prompts)
    for at, path in enumerate(states):
        raw = bytearray(path.read_bytes())
        raw[len(raw) // 2] ^= 1
        path.write_bytes(raw if at % 2 else raw[: len(raw) // 2])
    with hybrid.engine(["memory://64MiB", tier]) as one:
        # Each load ends at a damaged record, and what is computed instead is saved again.
        for _ in range(STATES + 1):
            one.forget()
            computed = each(one, prompts)
            exactly([replace(answer, cached=0) for answer in computed],
                    [replace(answer, cached=0) for answer in local])  # fmt: skip
        assert one["failed_tokens"] > 0
        exactly(computed, local)


def test_in_pieces_smaller_than_a_block(hybrid: Hybrid) -> None:
    """States are moved and saved only where a block ends, whatever else is computed beside them."""
    prompts = [prompt(n, seed=41) for n in (90, 200, 330, 420)]
    with hybrid.engine(["memory://64MiB"], max_num_batched_tokens=48, max_num_seqs=3) as one:
        one.ask(prompts)
        local = each(one, prompts)
        assert [answer.cached for answer in local] == [hybrid.cut(one) for one in prompts]
        one.forget()
        exactly(each(one, prompts), local)
        assert one["failed_tokens"] == 0


def test_states_of_answers(hybrid: Hybrid) -> None:
    """vLLM keeps them if it is told to; the next turn continues from one."""
    first = prompt(3 * hybrid.block + 9, seed=43)
    alone = {"load": False, "store": False}
    with hybrid.engine(["memory://64MiB"], prefix_cache_retention_interval=hybrid.block) as one:
        (answer,) = each(one, [first], max_tokens=2 * hybrid.block)
        turn = first + list(answer.tokens) + prompt(20, seed=44)
        (local,) = each(one, [turn], kvkeep=alone)
        assert local.cached == 5 * hybrid.block
        one.forget()
        exactly(each(one, [turn]), [local])
        assert one["loaded_tokens"] == local.cached


def test_preempted(hybrid: Hybrid) -> None:
    """Every state that is stored is that of its prefix, although pages were taken away."""
    prompts = [prompt(150 + n, seed=n) for n in range(6)]
    few: dict[str, Any] = {"num_gpu_blocks_override": 26, "max_model_len": 512}
    with hybrid.engine(["memory://64MiB"], **few) as one:
        for _ in range(2):
            one.ask(prompts, max_tokens=120)
        metrics = {metric.name: getattr(metric, "value", 0) for metric in one.llm.get_metrics()}
        assert metrics["vllm:num_preemptions"] > 0
        assert one["failed_tokens"] == 0
        one.forget()
        warm = each(one, prompts)
        assert [answer.cached for answer in warm] == [128] * len(prompts)
        one.store.check()
        one.forget()
        alone = {"load": False, "store": False}  # as vLLM does it, one after another
        local = [each(one, [mine, mine], kvkeep=alone)[1] for mine in prompts]
        exactly(warm, local)


def test_windows_and_sinks_as_before(tmp_path: Path) -> None:
    prompts = [prompt(length, seed=42) for length in (40, 97, 192)]
    with engine(make_gpt_oss(tmp_path / "gpt_oss"), ["memory://64MiB"]) as one:
        assert len(one.core.scheduler.kv_cache_config.kv_cache_groups) > 1
        cold = each(one, prompts)
        one.forget()
        stored = each(one, prompts)
        assert [answer.cached for answer in stored] == [(len(p) - 1) // 32 * 32 for p in prompts]
        same(cold, stored)
