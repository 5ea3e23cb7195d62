"""Logits over pages equal those of the model by itself, however the pages were filled."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from kvkeep.core.errors import InvalidValue
from kvkeep.serve.engine import Piece, Runner

pytestmark = pytest.mark.model

FAMILIES = ["llama", "qwen2", "qwen3"]


@pytest.fixture(params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture(params=[1, 16])
def bench(request, family, make_bench):
    page_size = request.param
    return make_bench(family, page_size=page_size, num_pages=192 // page_size)


def test_cold_prompt(bench, prompt):
    sequence = bench.cache.open(prompt(45, 1))
    logits = bench.compute(sequence)
    assert len(logits) == 45
    bench.assert_right(sequence, logits)


def test_hit_at_a_page_boundary(bench, prompt):
    bench.keep(prompt(48, 1))
    sequence = bench.cache.open(np.concatenate((prompt(48, 1)[:32], prompt(9, 2))))
    assert sequence.num_cached == 32
    bench.assert_right(sequence, bench.compute(sequence))


def test_hit_inside_a_page(bench, prompt):
    bench.keep(prompt(48, 1))
    sequence = bench.cache.open(np.concatenate((prompt(48, 1)[:37], prompt(9, 2))))
    assert sequence.num_cached == 37
    bench.assert_right(sequence, bench.compute(sequence))


def test_full_prompt_hit(bench, prompt):
    bench.keep(prompt(48, 1))
    sequence = bench.cache.open(prompt(48, 1))
    assert sequence.num_cached == 47
    logits = bench.compute(sequence)
    assert len(logits) == 1
    bench.assert_right(sequence, logits)


def test_after_eviction(bench, prompt):
    bench.keep(prompt(96, 1))
    bench.keep(prompt(128, 2))  # 224 tokens in a pool of 192: the tail of the first is evicted
    sequence = bench.cache.open(prompt(96, 1))
    assert 0 < sequence.num_cached < 80
    bench.assert_right(sequence, bench.compute(sequence))


def test_after_fork(bench, prompt):
    one = bench.cache.open(prompt(40, 1))
    bench.compute(one)
    two = one.fork()
    for turn in range(3):
        for seed, sequence in enumerate((one, two)):
            sequence.append(prompt(3, 10 * turn + seed))
        start = one.num_tokens - 3
        logits = bench.runner.forward([bench.piece(one, start), bench.piece(two, start)])
        bench.assert_right(one, logits[:3])
        bench.assert_right(two, logits[3:])


@pytest.mark.parametrize("kept", [46, 32, 21])
def test_after_truncate(bench, prompt, kept):
    """Rejected drafts truncate the sequence back into a page that is published and shared."""
    bench.keep(prompt(30, 1))
    sequence = bench.cache.open(prompt(40, 1))
    bench.compute(sequence)
    sequence.append(prompt(8, 2))
    bench.compute(sequence, 40)
    sequence.truncate(kept)
    sequence.append(prompt(11, 3))
    bench.assert_right(sequence, bench.compute(sequence, kept))
    # Another request still finds the published pages, unchanged.
    again = bench.cache.open(prompt(40, 1))
    assert again.num_cached >= 32
    bench.assert_right(again, bench.compute(again))


def test_batch_of_mixed_hits(bench, prompt):
    bench.keep(prompt(48, 1))
    decoding = [bench.cache.open(prompt(length, 3)) for length in (5, 17)]
    for sequence in decoding:
        bench.compute(sequence)
        sequence.append(int(prompt(1, sequence.num_tokens)[0]))
    prompts = [
        prompt(23, 4),  # cold
        np.concatenate((prompt(48, 1)[:32], prompt(7, 5))),  # to a page boundary
        prompt(48, 1),  # full
        np.concatenate((prompt(48, 1)[:21], prompt(12, 6))),  # inside a page
    ]
    opened = [bench.cache.open(tokens) for tokens in prompts]
    assert [sequence.num_cached for sequence in opened] == [0, 32, 47, 21]
    pieces = [
        bench.piece(decoding[0], 5),
        *(bench.piece(sequence, sequence.num_cached) for sequence in opened),
        bench.piece(decoding[1], 17),
    ]
    sequences = [decoding[0], *opened, decoding[1]]
    lasts = bench.runner.forward([replace(piece, outputs=1) for piece in pieces])
    every = bench.runner.forward(pieces)
    ends = np.cumsum([len(piece.tokens) for piece in pieces])
    assert len(every) == ends[-1]
    for sequence, piece, end, last in zip(sequences, pieces, ends, lasts, strict=True):
        bench.assert_right(sequence, every[end - len(piece.tokens) : end])
        bench.assert_right(sequence, last[None])


def test_prefill_in_parts(bench, prompt):
    sequence = bench.cache.open(prompt(45, 1))
    parts = []
    for start in range(0, 45, 13):
        tokens = sequence.tokens[start : start + 13]
        parts.append(
            bench.runner.forward([Piece(tokens, start, sequence.pages, outputs=len(tokens))])
        )
    bench.assert_right(sequence, torch.cat(parts))


def test_logits_of_the_tokens_that_are_asked_for(bench, prompt):
    sequences = [bench.cache.open(prompt(length, length)) for length in (12, 9, 20)]
    pieces = [
        replace(bench.piece(sequence, 0), outputs=outputs)
        for sequence, outputs in zip(sequences, (0, 4, 1), strict=True)
    ]
    logits = bench.runner.forward(pieces)
    assert logits.shape == (5, bench.runner.vocabulary)
    bench.assert_right(sequences[1], logits[:4])
    bench.assert_right(sequences[2], logits[4:])


def test_no_logits_at_all(bench, prompt):
    """The middle of a prompt: the head does not run, and the KV is in the pages."""
    tokens = prompt(24, 1)
    sequence = bench.cache.open(tokens)
    seen = []
    handle = bench.runner.model.lm_head.register_forward_hook(
        lambda _, given, __: seen.append(given[0].numel())
    )
    logits = bench.runner.forward([replace(bench.piece(sequence, 0), outputs=0)])
    handle.remove()
    assert logits.shape == (0, bench.runner.vocabulary)
    assert sum(seen) == 0
    bench.assert_right(sequence, bench.runner.forward([bench.piece(sequence, 23)]))


@pytest.mark.parametrize("part", ["k", "v"])
def test_a_wrong_byte_in_a_page_shows(bench, prompt, part):
    """Checks the tests above: they fail when a page holds something else."""
    bench.keep(prompt(48, 1))
    sequence = bench.cache.open(prompt(48, 1))
    piece = bench.piece(sequence, 47)
    page, offset = divmod(45, bench.cache.page_size)  # within reach of every window
    memory = getattr(bench.runner.tensors, part)(2)
    memory[sequence.pages[page], offset, 0, 0] += 1.0
    logits = bench.runner.forward([piece])
    assert (logits - bench.expected(sequence.tokens)[-1]).abs().max() > 1e-3
    with pytest.raises(AssertionError):
        bench.assert_right(sequence, logits)


def test_pages_of_others_do_not_show(bench, prompt):
    """Keys beyond a sequence's end are masked, whatever they are."""
    sequence = bench.cache.open(prompt(21, 1))
    bench.compute(sequence)
    sequence.append(3)
    memory = bench.runner.tensors
    for layer in range(3):
        for part in (memory.k(layer), memory.v(layer)):
            kept = part[sequence.pages.astype(np.int64)].clone()
            part.fill_(1e4)
            part[sequence.pages.astype(np.int64)] = kept
    bench.assert_right(sequence, bench.compute(sequence, 21))


def test_the_longest_sequence_is_what_pool_and_model_allow(make_bench, make_model):
    assert make_bench("llama", page_size=4, num_pages=10).runner.max_tokens == 40
    runner = make_bench("llama", page_size=16, num_pages=100).runner
    assert (runner.max_tokens, runner.context_tokens) == (512, 512)


@pytest.mark.parametrize("measures", [{}, {"memory": "1MiB", "num_pages": 4}])
def test_load_wants_memory_or_pages(tmp_path, measures):
    with pytest.raises(InvalidValue, match="memory or num_pages"):
        Runner.load(tmp_path, **measures)


def test_load_a_directory(tmp_path, make_model, prompt):
    model = make_model("qwen3")
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    runner = Runner.load(tmp_path, memory="1MiB", page_size=8, device="cpu")
    assert runner.geometry.dtype == "float32"  # on a CPU
    assert runner.num_pages == 2**20 // (8 * 2 * 3 * 2 * 16 * 4)
    half = Runner.load(tmp_path, num_pages=6, page_size=8, device="cpu", dtype="bfloat16")
    assert half.num_pages == 6
    tokens = prompt(20, 1)
    pages = np.arange(3, dtype=np.int32)
    full, rounded = (one.forward([Piece(tokens, 0, pages)]) for one in (runner, half))
    assert full.dtype == torch.float32
    assert rounded.dtype == torch.bfloat16
    assert torch.cosine_similarity(full[0], rounded[0].float(), dim=0) > 0.99
