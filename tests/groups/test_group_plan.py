"""How layers share pool pages: sizes, places, and what is lost to padding."""

from __future__ import annotations

import pytest

from kvkeep.core.errors import InvalidValue
from kvkeep.core.geometry import AttentionShape, KVGeometry, LayerGroup, StateTensor
from kvkeep.core.groups import GroupPlan, StateSpec, WindowSpec

HEADS = AttentionShape(8, 128)
GEMMA = KVGeometry.of(  # 27b: five windows to a full layer
    [
        LayerGroup("full", tuple(range(5, 62, 6)), AttentionShape(16, 128)),
        LayerGroup(
            "window", tuple(one for one in range(62) if one % 6 != 5), AttentionShape(16, 128), 1024
        ),
    ]
)
QWEN = KVGeometry.of(  # Qwen3-Next-80B: three delta rules to an attention
    [
        LayerGroup("full", tuple(range(3, 48, 4)), AttentionShape(2, 256)),
        LayerGroup(
            "state",
            tuple(one for one in range(48) if one % 4 != 3),
            state=(
                StateTensor("conv", (8192, 4), "bfloat16", follows=True),
                StateTensor("recurrent", (32, 128, 128), "float32"),
            ),
            grid=64,
        ),
    ]
)
MAMBA = KVGeometry.of(
    [
        LayerGroup(
            "state",
            tuple(range(4)),
            state=(StateTensor("recurrent", (24, 64, 128), "float32"),),
            grid=256,
        )
    ]
)


def test_a_plain_model_has_no_layout() -> None:
    plan = GroupPlan(KVGeometry(4, 8, 128), 16)
    assert plan.layout is None
    assert plan.page_bytes == KVGeometry(4, 8, 128).bytes_per_page(16)
    assert plan.pages_for(100) == 7


def test_windows_take_as_many_pages_as_their_layers_need() -> None:
    plan = GroupPlan(GEMMA, 16)
    assert plan.page_bytes == 10 * 16 * 2 * 16 * 128 * 2
    assert plan.layout is not None
    assert plan.layout.windows == (WindowSpec(1024, 6),), "52 layers, ten to a page"
    assert plan.layout.state is None


@pytest.mark.parametrize("tokens", [131_072, 32_768])
@pytest.mark.parametrize("geometry", [GEMMA, QWEN], ids=["windows", "states"])
def test_long_prompts_take_hardly_more_than_the_ideal(geometry: KVGeometry, tokens: int) -> None:
    plan = GroupPlan(geometry, 16)
    taken = plan.pages_for(tokens) * plan.page_bytes
    assert 1.0 <= taken / geometry.bytes_for(tokens) <= 1.1
    if tokens > 100_000:
        assert taken / geometry.bytes_for(tokens) <= 1.02


def test_a_state_is_cut_into_pages() -> None:
    plan = GroupPlan(QWEN, 64)
    assert plan.layout is not None
    state = 36 * (8192 * 4 * 2 + 32 * 128 * 128 * 4)
    assert plan.layout.state == StateSpec(-(-state // plan.page_bytes), 64)
    assert plan.state_offset(0, "conv") == 0
    assert plan.state_offset(0, "recurrent") == 8192 * 4 * 2
    assert plan.state_offset(1, "conv") == state // 36
    with pytest.raises(InvalidValue, match="layer 3 has no state 'conv'"):
        plan.state_offset(3, "conv")


def test_a_model_of_states_alone_has_small_pages() -> None:
    plan = GroupPlan(MAMBA, 256)
    assert plan.layout is not None
    assert plan.layout.grid == 1
    assert plan.layout.state == StateSpec(256, 256)
    assert plan.pages_for(4096) * plan.page_bytes <= 1.07 * MAMBA.bytes_for(4096)


def test_no_two_layers_lie_in_one_place() -> None:
    for geometry in (GEMMA, QWEN):
        plan = GroupPlan(geometry, 16)
        found: dict[tuple[int | None, int], list[tuple[int, int]]] = {}
        for group in geometry.groups:
            for layer in group.layers if group.shape else ():
                place = plan.place(layer)
                piece = 16 * group.shape.bytes_per_token(geometry.dtype)  # type: ignore[union-attr]
                found.setdefault((place.window, place.page), []).append((place.offset, piece))
        for (window, page), pieces in found.items():
            pieces.sort()
            ends = [offset + size for offset, size in pieces]
            assert all(end <= start for end, (start, _) in zip(ends, pieces[1:], strict=False))
            assert ends[-1] <= plan.page_bytes
            assert page < (1 if window is None else plan.layout.windows[window].pages)  # type: ignore[union-attr]


def test_a_window_of_wide_layers_makes_the_pages_larger() -> None:
    geometry = KVGeometry.of(
        [
            LayerGroup("full", (0,), AttentionShape(1, 64)),
            LayerGroup("window", (1, 2), AttentionShape(4, 64), 128),
            LayerGroup("chunk", (3,), AttentionShape(1, 64), 256),
        ]
    )
    plan = GroupPlan(geometry, 16)
    assert plan.page_bytes == 16 * 2 * 4 * 64 * 2
    assert plan.layout is not None
    assert plan.layout.windows == (WindowSpec(128, 2), WindowSpec(256, 1, chunked=True))


def test_mistakes_are_named() -> None:
    plan = GroupPlan(QWEN, 16)
    with pytest.raises(InvalidValue, match="layer is 0, which has no attention"):
        plan.place(0)
    with pytest.raises(InvalidValue, match="holds no page"):
        plan.pages_in("1KiB")
    assert plan.pages_in("1GiB") == (1 << 30) // plan.page_bytes
    with pytest.raises(InvalidValue, match="page_size is 0"):
        GroupPlan(QWEN, 0)
