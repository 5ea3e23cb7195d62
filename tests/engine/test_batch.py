"""Attention over pages against plain attention, written out."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep.core.geometry import KVGeometry
from kvkeep.core.pages.tensors import PagedTensors
from kvkeep.serve.engine.attention.batch import PagedBatch, Piece
from kvkeep.serve.engine.attention.memory import KVMemory
from kvkeep.serve.engine.attention.plan import CPU, GPU, SHORT, Grain

pytestmark = pytest.mark.model

# Every shared prefix becomes a cascade; pieces of one length attend together.
SHARING = Grain(query_rows=7, call_bytes=1, group_bytes=1 << 20)
# Cascades only if they save a few pages; pieces of similar length are padded to attend together.
PADDING = Grain(query_rows=16, call_bytes=2048, group_bytes=1 << 20)
# Each piece attends by itself.
FINE = Grain(query_rows=1, call_bytes=1 << 40, group_bytes=0)
GRAINS = {"cpu": CPU, "gpu": GPU, "sharing": SHARING, "padding": PADDING, "fine": FINE}

SPANS = {
    "cold": [(0, 11)],
    "cold and long": [(0, 39)],
    "hit": [(9, 14)],
    "long hit": [(9, 14 + SHORT)],
    "one token": [(13, 14)],
    "first token": [(0, 1)],
    "decode": [(5, 6), (30, 31), (0, 1), (16, 17)],
    "drafts": [(5, 9), (30, 31), (11, 17), (0, 1), (16, 18)],
    "mixed": [(4, 5), (0, 7), (20, 29), (33, 34), (16, 18), (8, 40), (0, 33)],
    "shared": [(33, 34, 32), (35, 36, 32), (40, 45, 32), (17, 18, 16), (20, 60, 16), (3, 4)],
}


@pytest.fixture(params=GRAINS)
def grain(request):
    return GRAINS[request.param]


SINKS = torch.tensor([-1.0, 0.0, 3.0, 0.5, 6.0, -9.0])  # a head each


@pytest.mark.parametrize(
    "how", [{}, {"softcap": 2.0}, {"scale": 0.7}, {"sinks": SINKS}], ids="-".join
)
@pytest.mark.parametrize("window", [None, 1, 3, 8, 100])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("spans", SPANS.values(), ids=SPANS)
def test_each_token_sees_its_own_sequence_up_to_itself(make_story, spans, page_size, window, how):
    story = make_story(spans, page_size=page_size)
    for grain in (GPU, SHARING):
        out = story.attend(story.batch(grain=grain), window=window, **how)
        story.assert_right(out, window=window, **how)


@st.composite
def spans(draw):
    """A piece: how many tokens it shares, how many more are in pages, and how many are new."""
    shared = draw(st.sampled_from([0, 0, 16, 48]))
    start = shared + draw(st.integers(0, 40))
    return start, start + draw(st.sampled_from([1, 1, 1, 2, 5, SHORT, SHORT + 1, 40])), shared


@settings(max_examples=200, deadline=None)
@given(
    spans=st.lists(spans(), min_size=1, max_size=7),
    page_size=st.sampled_from([1, 4, 16]),
    layout=st.sampled_from(["NHD", "HND"]),
    heads=st.sampled_from([(6, 2), (4, 4), (4, 1)]),
    grain=st.sampled_from(sorted(GRAINS)),
    window=st.sampled_from([None, None, 1, 9, 50, 500]),
    chunked=st.booleans(),
    softcap=st.sampled_from([None, None, 3.0]),
    sinks=st.booleans(),
    seed=st.integers(0, 9),
)
def test_any_mix_of_pieces(
    make_story, *, spans, page_size, layout, heads, grain, window, chunked, softcap, sinks, seed
):
    story = make_story(
        spans, page_size=page_size, layout=layout, heads=heads[0], kv_heads=heads[1], seed=seed
    )
    how = {
        "window": window,
        "chunked": chunked and window is not None,
        "softcap": softcap,
        "sinks": SINKS[: heads[0]] if sinks else None,
    }
    story.assert_right(story.attend(story.batch(grain=GRAINS[grain]), **how), **how)


@pytest.mark.parametrize("window", [None, 60, CPU.query_rows + 5])
@pytest.mark.parametrize("start", [0, 37])
def test_pieces_longer_than_a_row_of_queries(make_story, start, window):
    spans = [(start, start + CPU.query_rows + 70), (3, 4), (11, 41)]
    story = make_story(spans, page_size=16)
    story.assert_right(story.attend(window=window), window=window)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 2e-3), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("how", [{}, {"softcap": 2.0}, {"scale": 10.0}], ids=str)
def test_half_precision(make_story, grain, dtype, tolerance, how):
    """The result is rounded as the inputs are; scores, which can be large, are not."""
    story = make_story(SPANS["shared"] + SPANS["mixed"], page_size=4, dtype=dtype)
    out = story.attend(story.batch(grain=grain), **how)
    assert out.dtype == dtype
    story.assert_right(out, tolerance, **how)


@pytest.mark.parametrize("window", [33, 34, 35])
@pytest.mark.parametrize("span", [(33, 34), (3, 34)])
def test_a_window_of_about_the_whole_sequence(make_story, span, window):
    story = make_story([span, (7, 8)], page_size=4)
    story.assert_right(story.attend(window=window), window=window)


def test_layers_of_other_windows_in_one_batch(make_story):
    story = make_story(SPANS["mixed"], page_size=4)
    batch = story.batch()
    for window in (None, 5, None, 12, 5):
        story.assert_right(story.attend(batch, window=window), window=window)


def test_new_keys_and_values_are_in_their_pages_afterwards(make_story, grain):
    story = make_story(SPANS["shared"] + SPANS["mixed"], page_size=4)
    story.attend(story.batch(grain=grain))
    for piece, keys, values in zip(story.pieces, story.keys, story.values, strict=True):
        k, v = story.tensors.gather(story.LAYER, piece.pages, piece.stop)
        assert torch.equal(k, keys)
        assert torch.equal(v, values)


@pytest.mark.parametrize("spans", SPANS.values(), ids=SPANS)
def test_nan_of_others_stays_theirs(make_story, spans, grain):
    """Padding is weighted with 0, and 0 times NaN would be NaN."""
    story = make_story(spans, page_size=4)
    mine = torch.zeros(story.tensors.num_pages, dtype=torch.bool)
    for piece in story.pieces:
        mine[piece.pages.astype(np.int64)] = True
    for part in (story.tensors.k(story.LAYER), story.tensors.v(story.LAYER)):
        part[~mine] = torch.nan
    story.assert_right(story.attend(story.batch(grain=grain)))


def test_the_row_of_tokens():
    pages = np.array([5, 2], np.int32)
    pieces = [
        Piece(np.array([7, 8, 9], np.int32), 3, pages, outputs=2),
        Piece(np.array([5], np.int32), 0, np.array([3], np.int32), outputs=0),
        Piece(np.array([4], np.int32), 0, np.array([1], np.int32)),
    ]
    tensors = PagedTensors(KVGeometry(1, 1, 2, "float32"), 6, 4, device="cpu")
    batch = PagedBatch(pieces, KVMemory.plain(tensors))
    assert batch.input_ids.tolist() == [[7, 8, 9, 5, 4]]
    assert batch.positions.tolist() == [[3, 4, 5, 0, 0]]
    assert batch.parts[0].slots.tolist() == [5 * 4 + 3, 2 * 4, 2 * 4 + 1, 3 * 4, 1 * 4]
    assert batch.outputs.tolist() == [1, 2, 4]


@pytest.mark.parametrize("outputs", [-1, 3])
def test_a_piece_has_no_more_outputs_than_tokens(outputs):
    with pytest.raises(AssertionError):
        Piece(np.zeros(2, np.int32), 0, np.zeros(1, np.int32), outputs)
