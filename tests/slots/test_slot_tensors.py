"""`copy_slot` on real tensors, in both layouts, with the copies that a `SlotCache` names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import pytest

from kvkeep.core.errors import InvalidValue
from kvkeep.core.slots import SlotCache, SlotCopy, copy_slot

torch = pytest.importorskip("torch")

if TYPE_CHECKING:
    from torch import Tensor

    Layout = Literal["HND", "NHD"]

SLOTS, HEADS, TOKENS = 3, 2, 8
both = pytest.mark.parametrize("layout", ["HND", "NHD"])


def shape(layout: Layout, dim: int) -> tuple[int, ...]:
    return (SLOTS, HEADS, TOKENS, dim) if layout == "HND" else (SLOTS, TOKENS, HEADS, dim)


def memory(layout: Layout, dtype: torch.dtype = torch.float32) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [
        (
            torch.rand(shape(layout, 4), generator=generator).to(dtype),
            torch.rand(shape(layout, 5), generator=generator).to(dtype),  # V may be wider than K
        )
        for _ in range(3)
    ]


def by_token(tensor: Tensor, layout: Layout, slot: int) -> Tensor:
    return tensor[slot].transpose(0, 1) if layout == "HND" else tensor[slot]


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize(("start", "tokens"), [(0, 8), (0, 5), (2, 5), (5, 5), (7, 8)])
def test_exactly_the_named_positions_are_copied(
    layout: Layout, dtype: torch.dtype, start: int, tokens: int
) -> None:
    kv = memory(layout, dtype)
    before = [(k.clone(), v.clone()) for k, v in kv]
    copy_slot(kv, SlotCopy(src=2, dst=0, tokens=tokens, start=start), layout=layout)
    for now, then in zip(
        [t for pair in kv for t in pair], [t for pair in before for t in pair], strict=True
    ):
        for slot in (1, 2):
            assert torch.equal(now[slot], then[slot])
        got, old = by_token(now, layout, 0), by_token(then, layout, 0)
        assert torch.equal(got[start:tokens], by_token(then, layout, 2)[start:tokens])
        assert torch.equal(got[:start], old[:start])
        assert torch.equal(got[tokens:], old[tokens:])


@both
def test_views_of_one_big_tensor_are_written_in_place(layout: Layout) -> None:
    whole = torch.rand((2, 2, *shape(layout, 4)))
    expected = by_token(whole[1, 0], layout, 1)[:6].clone()
    copy_slot(
        [(layer[0], layer[1]) for layer in whole],
        SlotCopy(src=1, dst=2, tokens=6),
        layout=layout,
    )
    assert torch.equal(by_token(whole[1, 0], layout, 2)[:6], expected)


@both
@pytest.mark.parametrize(
    "copy",
    [
        SlotCopy(src=0, dst=SLOTS, tokens=2),
        SlotCopy(src=SLOTS, dst=0, tokens=2),
        SlotCopy(src=-1, dst=0, tokens=2),
        SlotCopy(src=0, dst=1, tokens=TOKENS + 1),
        SlotCopy(src=0, dst=1, tokens=2, start=3),
        SlotCopy(src=0, dst=1, tokens=2, start=-1),
    ],
)
def test_what_the_tensors_do_not_have_is_refused(layout: Layout, copy: SlotCopy) -> None:
    kv = memory(layout)
    before = [(k.clone(), v.clone()) for k, v in kv]
    with pytest.raises(InvalidValue):
        copy_slot(kv, copy, layout=layout)
    for pair, old in zip(kv, before, strict=True):
        assert torch.equal(pair[0], old[0])
        assert torch.equal(pair[1], old[1])


def test_a_last_layer_that_does_not_fit_is_refused_before_the_first_is_copied() -> None:
    kv = memory("HND")
    kv[-1] = (kv[-1][0], kv[-1][1][:, :, :4])
    before = kv[0][0].clone()
    with pytest.raises(InvalidValue, match=r"V of layer 2 is shaped \(3, 2, 4, 5\)"):
        copy_slot(kv, SlotCopy(src=0, dst=1, tokens=5))
    assert torch.equal(kv[0][0], before)


def test_a_layout_that_is_none_is_refused() -> None:
    with pytest.raises(InvalidValue, match="'DNH'"):
        copy_slot(memory("HND"), SlotCopy(0, 1, 2), layout="DNH")  # type: ignore[arg-type]


@both
def test_a_request_that_reuses_a_prefix_holds_what_an_uncached_one_computes(
    layout: Layout,
) -> None:
    table = torch.rand((10, HEADS, 4))

    def compute(kv: list[tuple[Tensor, Tensor]], slot: int, tokens: list[int], start: int) -> None:
        """KV that depends on all that came before, as a model's does."""
        for pair in kv:
            for tensor in pair:
                row = by_token(tensor, layout, slot)
                for at in range(start, len(tokens)):
                    row[at] = table[tokens[at]] + (row[at - 1] / 2 if at else 0)

    kv = [(torch.zeros(shape(layout, 4)), torch.zeros(shape(layout, 4))) for _ in range(2)]
    cache = SlotCache(SLOTS, TOKENS)
    reused = 0
    for prompt in ([1, 2, 3, 4, 5], [1, 2, 3, 6], [1, 2, 3, 6, 7], [1, 2, 9], [1, 2, 3, 4, 5, 6]):
        with cache.acquire(prompt) as lease:
            if lease.copy is not None:
                copy_slot(kv, lease.copy, layout=layout)
                lease.copied()
            compute(kv, lease.slot, prompt, lease.num_cached)
            lease.publish(len(prompt))
        reused += lease.num_cached
        fresh = [(torch.zeros(shape(layout, 4)), torch.zeros(shape(layout, 4)))]
        compute(fresh, 0, prompt, 0)
        for pair in kv:
            for tensor in pair:
                got = by_token(tensor, layout, lease.slot)[: len(prompt)]
                assert torch.equal(got, by_token(fresh[0][0], layout, 0)[: len(prompt)])
    assert reused == 0 + 3 + 4 + 2 + 5
    assert cache.stats().copies >= 2
