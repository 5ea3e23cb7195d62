"""The arguments of flash kernels mean what the kernels document, shown by plain functions.

The kernels themselves run on GPUs only. Here a plain function for each does with block tables what
the kernel's documentation says; through it the results equal those of the CPU path.
"""

from __future__ import annotations

import importlib.util
import math

import pytest
import torch

from kvkeep.serve.engine.attention import flash
from kvkeep.serve.engine.attention.dense import Scoring

pytestmark = pytest.mark.model

GPU = [pytest.param("cuda", marks=pytest.mark.cuda)]
SPANS = [(33, 34, 32), (35, 40, 32), (0, 21), (20, 60), (3, 4), (0, 1)]


def by_the_documentation(q, k, v, *, bounds, lengths, table, scale, causal, window_size, softcap):
    """Query i of n over m keys sees keys i + m - n - left … i + m - n + right; -1: no bound."""
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    assert {one.dtype for one in (bounds, lengths, table)} == {torch.int32}
    assert table.stride(-1) == 1
    out = torch.empty_like(q)
    page_size, heads = k.shape[1], q.shape[1] // k.shape[2]
    for number, m in enumerate(lengths.tolist()):
        begin, end = bounds[number : number + 2].tolist()
        n = end - begin
        pages = table[number, : math.ceil(m / page_size)].long()
        keys, values = (
            part[pages].flatten(0, 1)[:m].repeat_interleave(heads, 1).transpose(0, 1)
            for part in (k, v)
        )
        scores = q[begin:end].transpose(0, 1).float() @ keys.float().transpose(1, 2)
        scores *= q.shape[-1] ** -0.5 if scale is None else scale
        if softcap > 0:
            scores = softcap * torch.tanh(scores / softcap)
        at = torch.arange(n)[:, None] + m - n
        left, right = window_size[0], 0 if causal else window_size[1]
        hidden = torch.zeros(n, m, dtype=torch.bool)
        if left >= 0:
            hidden |= torch.arange(m) < at - left
        if right >= 0:
            hidden |= torch.arange(m) > at + right
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        out[begin:end] = (weights @ values.float()).transpose(0, 1).to(q.dtype)
    return out


def flash_attn_varlen_func(  # noqa: PLR0917 - as it is
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
):
    """Takes FlashAttention 2's arguments."""
    lengths = cu_seqlens_k.diff()
    assert max_seqlen_q == cu_seqlens_q.diff().max()
    assert max_seqlen_k == lengths.max()
    assert len(lengths) == len(block_table) == len(cu_seqlens_q) - 1
    return by_the_documentation(
        q, k, v, bounds=cu_seqlens_q, lengths=lengths, table=block_table,
        scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap,
    )  # fmt: skip


def flash_attn_with_kvcache(  # noqa: PLR0917 - as it is
    q,
    k_cache,
    v_cache,
    cache_seqlens=None,
    page_table=None,
    cu_seqlens_q=None,
    max_seqlen_q=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
):
    """Takes those of FlashAttention 3's arguments that are used here."""
    assert max_seqlen_q == cu_seqlens_q.diff().max()
    assert len(cache_seqlens) == len(page_table) == len(cu_seqlens_q) - 1
    return by_the_documentation(
        q, k_cache, v_cache, bounds=cu_seqlens_q, lengths=cache_seqlens, table=page_table,
        scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap,
    )  # fmt: skip


KERNELS = {
    "flash2": flash.flash2(flash_attn_varlen_func),
    "flash3": flash.flash3(flash_attn_with_kvcache),
}


@pytest.mark.parametrize("how", [{}, {"softcap": 2.0}, {"scale": 0.7}], ids=str)
@pytest.mark.parametrize("window", [None, 1, 9, 100])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_over_page_tables(make_story, kernel, layout, window, how):
    story = make_story(SPANS, page_size=4, layout=layout)
    out = story.attend(story.batch(kernel=KERNELS[kernel]), window=window, **how)
    story.assert_right(out, window=window, **how)


def test_kernels_see_the_pages_themselves(make_story):
    """Nothing is gathered: the kernel's K and V share the memory of the pages."""
    story = make_story(SPANS, page_size=4)
    seen = []

    def kernel(query, k, v, tables, *, window, scoring):
        seen.extend([k, v])
        return KERNELS["flash2"](query, k, v, tables, window=window, scoring=scoring)

    story.attend(story.batch(kernel=kernel))
    assert [part.data_ptr() for part in seen] == [
        part(story.LAYER).data_ptr() for part in (story.tensors.k, story.tensors.v)
    ]


def test_there_is_no_kernel_for_a_cpu(make_story):
    assert flash.find(make_story(SPANS, page_size=4).tensors) is None


@pytest.mark.parametrize("device", GPU)
@pytest.mark.parametrize("page_size", [16, 256])
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_a_kernel_of_this_machine(make_story, device, page_size, window, softcap):
    if not any(map(importlib.util.find_spec, ("flash_attn", "flash_attn_interface"))):
        pytest.skip("no flash-attention installed")
    story = make_story(SPANS, page_size=page_size, dim=64, dtype=torch.bfloat16, device=device)
    kernel = flash.find(story.tensors)
    if kernel is None:
        pytest.skip(f"what is installed does not take pages of {page_size} tokens here")
    how = {"window": window, "softcap": softcap}
    story.assert_right(story.attend(story.batch(kernel=kernel), **how), 3e-2, **how)


@pytest.mark.parametrize("device", GPU)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 9])
def test_gathering_on_a_gpu(make_story, device, dtype, window):
    story = make_story(SPANS, page_size=16, dim=64, dtype=dtype, device=device)
    tolerance = 1e-4 if dtype == torch.float32 else 3e-2
    story.assert_right(story.attend(window=window), tolerance, window=window)


@pytest.mark.parametrize("device", ["cpu", *GPU])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("spans", [SPANS, [(30, 31), (9, 10)], [(5, 6), (0, 30), (9, 10)]])
def test_sinks_in_half_precision(make_story, device, softcap, spans):
    """In batches whose rows are in another order than their lengths."""
    story = make_story(spans, page_size=16, dim=64, dtype=torch.bfloat16, device=device)
    how = {"sinks": torch.linspace(-1, 1, story.heads, device=device), "softcap": softcap}
    story.assert_right(story.attend(**how), 3e-2, **how)


def test_what_is_passed_on():
    """The kernels' windows count the keys before a query, ours the query too."""
    given = []

    def function(*args, **more):
        given.append(more)
        return args[0]

    tables = flash.Tables(*[torch.zeros(1, dtype=torch.int32)] * 4, most_keys=5, most_queries=3)
    for kernel in (flash.flash2(function), flash.flash3(function)):
        q = torch.zeros(1)
        kernel(q, q, q, tables, window=7, scoring=Scoring(0.5, 30.0))
        kernel(q, q, q, tables, window=None, scoring=Scoring())
    for windowed, plain in (given[:2], given[2:]):
        assert (windowed["window_size"], plain["window_size"]) == ((6, 0), (-1, -1))
        assert (windowed["softcap"], plain["softcap"]) == (30.0, 0.0)
        assert (windowed["softmax_scale"], plain["softmax_scale"]) == (0.5, None)
        assert windowed["causal"] is plain["causal"] is True
