"""Masks of long pieces: right, and where fused kernels of a GPU can read them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.profiler import profile

from kvkeep.core.geometry import KVGeometry
from kvkeep.core.pages.tensors import PagedTensors
from kvkeep.serve.engine.attention import plan
from kvkeep.serve.engine.attention.dense import Scoring
from kvkeep.serve.engine.attention.plan import ALIGNED, Grain, PlacedPiece, PlanContext

pytestmark = pytest.mark.model

SIZE = 4
PIECES = st.lists(
    st.tuples(st.integers(0, 70), st.integers(17, 60), st.integers(0, 70)), min_size=1, max_size=3
)


@settings(max_examples=150)
@given(
    PIECES, st.none() | st.integers(1, 40), st.integers(1, 40),
    st.sampled_from([torch.float32, torch.bfloat16]),
)  # fmt: skip
def test_masks_are_aligned_and_say_who_sees_whom(spans, window, rows, dtype):
    geometry = KVGeometry(1, 1, 8, str(dtype).removeprefix("torch."))
    tensors = PagedTensors(geometry, 64, SIZE)
    context = PlanContext(tensors, tensors.scratch(), Grain(rows, 0, 1 << 20), window, group=1)
    placed, begin = [], 0
    for start, tokens, first in spans:
        stop = start + tokens
        pages = torch.arange(-(-stop // SIZE)).numpy()
        seen_from = min(first, start) if window is None else max(0, start + 1 - window)
        placed.append(PlacedPiece(begin, start, stop, pages, seen_from))
        begin += tokens
    made = plan.long_pieces(placed, context)
    for one, piece in zip(placed, made, strict=True):
        cold = piece.gather is None
        base = one.first if cold else one.first // SIZE * SIZE
        covered = []
        for step in piece.steps:
            mask = piece.band.mask(step)
            assert mask.dtype == dtype
            assert mask.data_ptr() % (ALIGNED * mask.element_size()) == 0
            assert mask.stride(0) % ALIGNED == 0
            covered += range(step.rows.start, step.rows.stop)
            query = torch.arange(step.rows.start, step.rows.stop) - one.begin + one.start
            key = torch.arange(step.keys.start, step.keys.stop) + base
            seen = query[:, None] >= key
            if window is not None:
                seen &= query[:, None] - key < window
            assert torch.equal(mask == 0, seen)
            assert (mask[~seen] == float("-inf")).all()
            # Keys outside of the step are seen by none of its queries.
            assert key[0] == (
                one.first if window is None else max(one.first, query[0] + 1 - window)
            )
            assert key[-1] == query[-1]
        assert covered == list(range(one.begin, one.begin + one.tokens))


@pytest.mark.parametrize(("window", "most"), [(None, 32 << 20), (300, 4 << 20)])
def test_a_mask_far_behind_in_a_prompt_takes_its_own_memory_alone(window, most):
    tensors = PagedTensors(KVGeometry(1, 1, 8, "bfloat16"), 1, 1 << 16)
    context = PlanContext(tensors, tensors.scratch(), Grain(256, 0, 1 << 20), window, group=1)
    first = 0 if window is None else 50_001 - window
    placed = PlacedPiece(0, 50_000, 51_000, np.zeros(1, np.int32), first)
    (piece,) = plan.long_pieces([placed], context)
    with profile(profile_memory=True) as seen:
        piece.band.mask(piece.steps[0])
    taken = [max(0, one.self_cpu_memory_usage) for one in seen.events() if one.name != "[memory]"]
    assert 0 < sum(taken) <= most


def test_no_mask_is_made_where_all_is_causal():
    tensors = PagedTensors(KVGeometry(1, 2, 8, "float32"), 32, SIZE)
    context = PlanContext(tensors, tensors.scratch(), Grain(16, 0, 1 << 20), None, group=2)
    (piece,) = plan.long_pieces([PlacedPiece(0, 0, 40, torch.arange(10).numpy())], context)
    query, key = torch.randn(40, 4, 8), torch.randn(40, 2, 8)
    piece.attend(0, query, key, key, scoring=Scoring(), out=torch.empty_like(query))
    assert piece.band._made is None
