"""vLLM's ways to compute a prompt: in chunks, preempted, guessing ahead. KV is the same."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch
from engines import PROMPTS, Answer, apart, engine, found, prompt, same

if TYPE_CHECKING:
    from pathlib import Path


def test_chunked_prefill(llama: str, cold: list[Answer]) -> None:
    with engine(llama, ["memory://64MiB"], max_num_batched_tokens=48, max_num_seqs=4) as one:
        same(cold, one.ask(PROMPTS))
        one.forget()
        warm = one.ask(PROMPTS)
        same(cold, warm)
        assert [answer.cached for answer in warm] == [found(len(p)) for p in PROMPTS]


def test_preemption(llama: str) -> None:
    """Eight that need ten pages each, of thirty that there are."""
    asked = [prompt(100 + n, seed=n) for n in range(8)]
    with engine(llama) as plain:
        expected = plain.ask(asked, max_tokens=180)
    with engine(llama, ["memory://64MiB"], num_gpu_blocks_override=30, max_model_len=512) as one:
        for _ in range(2):
            same(expected, one.ask(asked, max_tokens=180))
        (preempted,) = [
            metric for metric in one.llm.get_metrics() if metric.name == "vllm:num_preemptions"
        ]
        assert preempted.value > 0
        assert one["loaded_tokens"] > 0
        assert one["failed_tokens"] == 0


def test_guessing_ahead(llama: str) -> None:
    """In a process of its own: what vLLM imports for it keeps it from making a second engine."""
    apart("test_scheduling:guess_ahead", llama)


def guess_ahead(llama: str) -> None:
    """Tokens that were guessed and refused were written into pages: none of them is kept."""
    # What makes guesses and refuses them takes 20 s to compile.
    os.environ["NUMBA_DISABLE_JIT"] = "1"
    torch.compiler.set_stance("force_eager")
    start = prompt(7, seed=1) * 12
    asked = [start + prompt(10 + n, seed=n) + start[:30] for n in range(6)]
    with engine(llama) as plain:
        expected = plain.ask(asked, max_tokens=100)
        turns = [
            question + list(answer.tokens) + [5, 6, 7]
            for question, answer in zip(asked, expected, strict=True)
        ]
        later = plain.ask(turns, skip_reading_prefix_cache=True)
    guesses = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 2}
    with engine(llama, ["memory://64MiB"], speculative_config=guesses) as one:
        answers = one.ask(asked, max_tokens=100)
        assert [a.tokens for a in answers] == [e.tokens for e in expected]
        one.forget()
        warm = one.ask(turns)
        same(later, warm)
        # All but what the last token of an answer would have completed.
        assert [w.cached for w in warm] == [(len(t) - 4) // 32 * 32 for t in turns]
        metrics = {metric.name: getattr(metric, "value", 0) for metric in one.llm.get_metrics()}
        assert metrics["vllm:spec_decode_num_draft_tokens"] > 0
        assert (
            metrics["vllm:spec_decode_num_accepted_tokens"]
            < metrics["vllm:spec_decode_num_draft_tokens"]
        )


def test_scheduling_ahead(llama: str, cold: list[Answer], tmp_path: Path) -> None:
    """A step is planned before the last one's tokens are known."""
    tiers = ["memory://64MiB", f"file://{tmp_path}/kv?size=64MiB"]
    with engine(llama, tiers, async_scheduling=True) as one:
        same(cold, one.ask(PROMPTS))
        one.forget()
        same(cold, one.ask(PROMPTS))
        assert one["loaded_tokens"] > 0
