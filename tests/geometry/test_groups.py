"""Layer groups, and geometries made of them."""

from __future__ import annotations

import copy
import pickle
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.core.errors import InvalidValue, UnsupportedModel
from kvkeep.core.geometry import AttentionShape, KVGeometry, LayerGroup, StateTensor

SHAPE = AttentionShape(8, 128)
LATENT = AttentionShape(1, 576, latent_dim=512)
CONV = StateTensor("conv", (6144, 4), "bfloat16", ((32, 128), (1, 1024), (1, 1024)), follows=True)
RECURRENT = StateTensor("recurrent", (32, 128, 64), "float32", ((32, 1),))
FULL = LayerGroup("full", (0, 2), SHAPE)
STATE = LayerGroup("state", (1, 3), state=(CONV, RECURRENT), grid=64)
HYBRID = KVGeometry.of([FULL, STATE])
CONV_BYTES, RECURRENT_BYTES = 6144 * 4 * 2, 32 * 128 * 64 * 4


# --- groups ----------------------------------------------------------------------------------


def test_bytes_of_attention() -> None:
    assert AttentionShape(8, 128, 128) == SHAPE
    assert FULL.bytes_per_token("bfloat16") == 2 * 8 * 256 * 2
    assert FULL.bytes_per_token("bfloat16", 4) == 2 * 2 * 256 * 2
    assert FULL.bytes_per_token("int8", 16) == 2 * 256
    assert FULL.bytes_per_state() == 0
    latent = LayerGroup("latent", (0,), LATENT)
    assert latent.bytes_per_token("bfloat16", 8) == 576 * 2


def test_bytes_of_a_state() -> None:
    assert STATE.bytes_per_state() == 2 * (CONV_BYTES + RECURRENT_BYTES)
    assert STATE.bytes_per_token("bfloat16") == 0
    assert STATE.bytes_for(7, "bfloat16") == STATE.bytes_for(7_000_000, "int8")


def test_ranks_divide_the_parts_of_a_state() -> None:
    assert CONV.rank_shape(1) == (6144, 4)
    assert CONV.rank_shape(4) == (1024 + 2 * 1024, 4)  # one group of B and C: each rank holds it
    assert RECURRENT.rank_shape(4) == (8, 128, 64)
    assert RECURRENT.rank_shape(64) == (1, 128, 64)
    whole = StateTensor("conv", (6144, 4), "bfloat16")
    assert whole.rank_shape(4) == (6144, 4)
    with pytest.raises(InvalidValue, match="tp is 5 and the conv state has 32 heads"):
        CONV.rank_shape(5)


@pytest.mark.parametrize(
    ("kind", "span", "tokens", "page_size", "kept"),
    [
        ("full", None, 1000, 1, 1000),
        ("full", None, 1000, 16, 1008),
        ("window", 128, 1000, 1, 128),
        ("window", 128, 100, 1, 100),
        ("window", 128, 1000, 16, 144),  # begins and ends inside of pages
        ("window", 128, 100, 16, 112),
        ("window", 1, 1000, 16, 16),
        ("window", 8, 1000, 256, 512),
        ("chunk", 128, 1000, 1, 128),
        ("chunk", 128, 1000, 16, 128),  # begins on a page boundary
        ("chunk", 100, 1000, 16, 128),
        ("chunk", 128, 0, 16, 0),
    ],
)
def test_tokens_that_take_room(
    kind: Any, span: int | None, tokens: int, page_size: int, kept: int
) -> None:
    group = LayerGroup(kind, (0,), SHAPE, span)
    assert group.kept(tokens, page_size) == kept
    wanted = kept * group.bytes_per_token("bfloat16")
    assert group.bytes_for(tokens, "bfloat16", page_size=page_size) == wanted


@given(st.integers(1, 300), st.integers(1, 40), st.integers(1, 600))
def test_a_window_touches_at_most_what_is_counted(span: int, page_size: int, tokens: int) -> None:
    """While a sequence grows to ``tokens``, by pages of each position."""
    touched = max(
        (end - 1) // page_size - max(0, end - span) // page_size + 1 for end in range(1, tokens + 1)
    )
    kept = LayerGroup("window", (0,), SHAPE, span).kept(tokens, page_size)
    assert touched * page_size <= kept <= (touched + 1) * page_size
    if tokens >= 2 * (span + page_size) and span > 1:
        assert kept <= -(-(span - 1) // page_size) * page_size + page_size


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "half"}, "kind is 'half'; known are full, latent"),
        ({"layers": ()}, r"layers are \(\)"),
        ({"layers": (1, 0)}, r"layers are \(1, 0\)"),
        ({"layers": (1, 1)}, r"layers are \(1, 1\)"),
        ({"layers": (-1,)}, "a layer is -1"),
        ({"shape": None}, "attention needs a shape"),
        ({"shape": LATENT}, "a group of kind 'full' has"),
        ({"kind": "latent"}, "a group of kind 'latent' has"),
        ({"span": 8}, "a group of kind 'full' has"),
        ({"kind": "window"}, "a window or chunk a span"),
        ({"kind": "chunk", "span": 0}, "span is 0"),
        ({"state": (CONV,)}, "a group of kind 'full' has"),
        ({"kind": "state"}, "a state its tensors"),
        ({"grid": 0}, "grid is 0"),
    ],
)
def test_what_does_not_fit_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidValue, match=message):
        LayerGroup(**{"kind": "full", "layers": (0,), "shape": SHAPE, **arguments})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"shape": (8, 0)}, "a dimension of conv is 0"),
        ({"dtype": "float64"}, "dtype is 'float64'"),
        ({"parts": ((4, 1), (3, 1))}, "they must add up to its first dimension"),
        ({"parts": ((0, 8),)}, "heads is 0"),
        ({"parts": ((8, 0),)}, "size is 0"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidValue, match=message):
        StateTensor(**{"name": "conv", "shape": (8, 4), "dtype": "bf16", **arguments})


def test_names() -> None:
    assert FULL.name == "full attention"
    assert LayerGroup("window", (0,), SHAPE, 128).name == "a window of 128 tokens"
    assert LayerGroup("chunk", (0,), SHAPE, 128).name == "chunks of 128 tokens"
    assert LayerGroup("latent", (0,), LATENT).name == "latent attention"
    assert STATE.name == "a recurrent state"
    assert replace(STATE, state=(CONV,)).name == "a convolution's state"


# --- geometries ------------------------------------------------------------------------------


def test_a_plain_model_has_one_group() -> None:
    assert KVGeometry(4, 8, 128).groups == (LayerGroup("full", (0, 1, 2, 3), SHAPE),)
    assert KVGeometry(2, 1, 576, latent_dim=512).groups == (LayerGroup("latent", (0, 1), LATENT),)


def test_windows_are_groups_of_a_plain_model() -> None:
    geometry = KVGeometry(4, 8, 128, windows=[128, None, 128, 64])
    assert geometry.groups == (
        LayerGroup("window", (0, 2), SHAPE, 128),
        LayerGroup("full", (1,), SHAPE),
        LayerGroup("window", (3,), SHAPE, 64),
    )
    assert geometry.plain
    layer = 8 * 256 * 2
    assert geometry.bytes_per_token == 4 * layer
    assert geometry.bytes_for(1000) == layer * (2 * 128 + 1000 + 64)
    assert geometry.bytes_for(0) == 0


@pytest.mark.parametrize(
    "geometry",
    [
        KVGeometry(4, 8, 128),
        KVGeometry(4, 8, 128, "fp8", value_dim=64, windows=[16, None, 16, None], tp=2),
        KVGeometry(3, 1, 576, latent_dim=512, windows=[None, 8, None]),
    ],
)
def test_the_groups_of_a_plain_model_make_it_again(geometry: KVGeometry) -> None:
    again = KVGeometry.of(geometry.groups, dtype=geometry.dtype, tp=geometry.tp)
    assert again == geometry
    assert hash(again) == hash(geometry)
    assert repr(again) == repr(geometry)
    assert replace(geometry) == geometry
    assert geometry.with_dtype("float32") == replace(geometry, dtype="float32")


def test_the_text_of_a_plain_model_is_its_arguments() -> None:
    assert repr(KVGeometry(2, 8, 128)) == (
        "KVGeometry(layers=2, kv_heads=8, head_dim=128, dtype='bfloat16', value_dim=128, "
        "latent_dim=None, windows=(None, None), tp=1)"
    )
    assert repr(HYBRID).startswith("KVGeometry.of((LayerGroup(kind='full', layers=(0, 2), ")
    assert eval(repr(HYBRID)) == HYBRID


def test_groups_that_keep_the_same_are_one() -> None:
    apart = [replace(STATE, layers=(3,)), FULL, replace(STATE, layers=(1,))]
    geometry = KVGeometry.of(apart)
    assert [group.layers for group in geometry.groups] == [(1, 3), (0, 2)]
    finer = KVGeometry.of([FULL, STATE, replace(STATE, layers=(4,), grid=32)])
    assert len(finer.groups) == 3


def test_a_hybrid() -> None:
    assert not HYBRID.plain
    assert (HYBRID.layers, HYBRID.kv_heads, HYBRID.head_dim, HYBRID.windows) == (4, 0, 0, ())
    assert HYBRID.rank_heads == 0
    assert HYBRID.bytes_per_token == 2 * 8 * 256 * 2
    assert HYBRID.bytes_per_page(16) == 16 * HYBRID.bytes_per_token
    assert HYBRID.bytes_per_state == 2 * (CONV_BYTES + RECURRENT_BYTES)
    assert HYBRID.bytes_for(100) == 100 * HYBRID.bytes_per_token + HYBRID.bytes_per_state
    assert HYBRID.bytes_for(1, page_size=16) == HYBRID.bytes_for(16)
    assert HYBRID.sequences_in(3 * HYBRID.bytes_for(100), 100) == 3
    assert HYBRID.sequences_in(3 * HYBRID.bytes_for(100) - 1, 100) == 2
    assert HYBRID.sequences_in("1KiB", 100) == 0


def test_attention_and_a_state_in_the_same_layers() -> None:
    both = KVGeometry.of([FULL, replace(STATE, layers=(0, 2))])
    assert both.layers == 2
    assert not both.plain


def test_layers_with_gaps_are_not_plain() -> None:
    assert not KVGeometry.of([FULL]).plain
    assert KVGeometry.of([replace(FULL, layers=(0, 1))]).plain


def test_groups_that_make_no_model_are_refused() -> None:
    with pytest.raises(InvalidValue, match=r"groups are \(\)"):
        KVGeometry.of([])
    with pytest.raises(InvalidValue, match="each layer needs one attention"):
        KVGeometry.of([FULL, LayerGroup("window", (2,), SHAPE, 16)])
    with pytest.raises(InvalidValue, match="tp is 3 and the model has 8 KV heads"):
        KVGeometry.of([FULL, STATE], tp=3)
    with pytest.raises(InvalidValue, match="dtype is 'fp4'"):
        KVGeometry.of([FULL], dtype="fp4")


@pytest.mark.parametrize("tokens", [0, -1, 1.5, True])
def test_a_sequence_has_a_whole_number_of_tokens(tokens: Any) -> None:
    with pytest.raises(InvalidValue, match="tokens is"):
        HYBRID.sequences_in("1GiB", tokens)
    with pytest.raises(InvalidValue, match="page_size is"):
        HYBRID.bytes_for(5, page_size=tokens)


def test_a_hybrid_is_a_value() -> None:
    for twin in (copy.deepcopy(HYBRID), pickle.loads(pickle.dumps(HYBRID))):
        assert twin == HYBRID
        assert hash(twin) == hash(HYBRID)
    assert KVGeometry.of(HYBRID.groups, tp=2) != HYBRID
    assert KVGeometry(4, 8, 128) != HYBRID
    with pytest.raises(FrozenInstanceError):
        HYBRID.groups = ()  # type: ignore[misc]


def test_a_hybrid_is_not_replaced_by_fields() -> None:
    """That would lose its groups."""
    with pytest.raises(InvalidValue, match="kv_heads is 0"):
        replace(HYBRID, dtype="float32")


def test_what_needs_one_shape_refuses_a_hybrid() -> None:
    with pytest.raises(UnsupportedModel, match="full attention in 2 and a recurrent state in 2"):
        HYBRID.pages_in("1GiB", 16)
