"""Paged memory against a model that keeps each token's bytes in a dictionary."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from kvkeep.core.errors import InvalidValue, UnsupportedModel  # noqa: E402 - after the skip
from kvkeep.core.geometry import DTYPES, AttentionShape, KVGeometry, LayerGroup  # noqa: E402
from kvkeep.core.pages import PageCopy  # noqa: E402
from kvkeep.core.pages.tensors import PagedTensors  # noqa: E402

if TYPE_CHECKING:
    from torch import Tensor

    from kvkeep.core.pages.tensors import Layout

LAYOUTS: list[Layout] = ["NHD", "HND"]
GEOMETRIES = {
    "mha": KVGeometry(2, 4, 3, "float32"),
    "gqa": KVGeometry(3, 2, 8, "float32"),
    "mqa": KVGeometry(2, 1, 5, "float32"),
    "narrow values": KVGeometry(2, 2, 6, "float32", value_dim=4),
    "mla": KVGeometry(2, 1, 7, latent_dim=5, dtype="float32"),
    "rank of two": KVGeometry(2, 4, 4, "float32", tp=2),
}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> Layout:
    layout: Layout = request.param
    return layout


@pytest.fixture(params=GEOMETRIES)
def geometry(request: pytest.FixtureRequest) -> KVGeometry:
    return GEOMETRIES[request.param]


def bits(tensor: Tensor) -> Tensor:
    """The tensor as bytes: NaN is not equal to itself, its bytes are."""
    return tensor.cpu().contiguous().view(torch.uint8)


def random_tokens(memory: PagedTensors, tokens: int, rng: np.random.Generator) -> Any:
    """K and V (None with a latent) of random bits, NaN and infinities among them."""
    geometry = memory.geometry

    def part(width: int) -> Tensor:
        shape = (tokens, geometry.rank_heads, width)
        raw = rng.bytes(np.prod(shape) * memory.dtype.itemsize)
        flat = torch.tensor(list(raw), dtype=torch.uint8).view(memory.dtype)
        return flat.view(shape).to(memory.device)

    latent = geometry.latent_dim is not None
    return part(geometry.head_dim), None if latent else part(geometry.value_dim)


def fill(memory: PagedTensors, seed: int = 0) -> None:
    """Random bits everywhere."""
    rng = np.random.default_rng(seed)
    slots = np.arange(memory.num_pages * memory.page_size)
    for layer in range(memory.geometry.layers):
        memory.store(layer, slots, *random_tokens(memory, len(slots), rng))


def contents(memory: PagedTensors) -> Tensor:
    return memory.read(range(memory.num_pages)).cpu()


def test_new_memory_is_zero_and_of_the_promised_size(geometry: KVGeometry, layout: Layout) -> None:
    memory = PagedTensors(geometry, 5, 4, layout=layout)
    assert memory.nbytes == 5 * geometry.bytes_per_page(4)
    assert contents(memory).shape == (5, memory.page_bytes)
    assert not contents(memory).any()


def test_a_page_is_laid_out_as_the_docstring_says(layout: Layout) -> None:
    geometry = KVGeometry(2, 3, 4, "int8", value_dim=2)
    memory = PagedTensors(geometry, 2, 5, layout=layout)
    for layer in range(2):
        memory.k(layer)[1] = 2 * layer + 1
        memory.v(layer)[1] = 2 * layer + 2
    wanted = [1] * 60 + [2] * 30 + [3] * 60 + [4] * 30
    assert memory.read([1])[0].tolist() == wanted
    memory.k(0)[0] = torch.arange(60, dtype=torch.int8).view(memory.k(0).shape[1:])
    assert memory.read([0])[0, :60].tolist() == list(range(60))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", DEVICES)
def test_what_is_stored_is_gathered_bit_by_bit(
    geometry: KVGeometry, layout: Layout, dtype: str, device: str
) -> None:
    memory = PagedTensors(replace(geometry, dtype=dtype), 6, 4, layout=layout, device=device)
    assert memory.dtype == getattr(torch, dtype)
    rng = np.random.default_rng(1)
    table = [4, 0, 3]
    k, v = random_tokens(memory, 10, rng)
    memory.store(1, memory.slots(table, 0, 10), k, v)
    for length in range(11):
        got_k, got_v = memory.gather(1, table, length)
        assert got_k.shape == (length, geometry.rank_heads, geometry.head_dim)
        assert got_k.dtype == memory.dtype
        assert torch.equal(bits(got_k), bits(k[:length]))
        wanted_v = k[:, :, : geometry.latent_dim] if v is None else v
        assert torch.equal(bits(got_v), bits(wanted_v[:length]))
        assert got_k.is_contiguous()
        assert got_v.is_contiguous() or v is None
    assert not bits(memory.gather(0, table, 10)[0]).any()


@st.composite
def works(draw: st.DrawFn) -> tuple[PagedTensors, list[tuple[str, Any]]]:
    """Some memory, and what is done to it."""
    geometry = draw(st.sampled_from(sorted(GEOMETRIES.items())))[1]
    geometry = replace(geometry, dtype=draw(st.sampled_from(sorted(DTYPES))))
    num_pages, page_size = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    memory = PagedTensors(geometry, num_pages, page_size, layout=draw(st.sampled_from(LAYOUTS)))
    memory._batched = draw(st.booleans())  # the way of a GPU, which is right on a CPU too
    page = st.integers(0, num_pages - 1)
    table = st.lists(page, min_size=1, max_size=num_pages, unique=True)
    copy = st.tuples(page, page, st.integers(1, page_size))
    steps = st.one_of(
        st.tuples(st.just("store"), st.tuples(table, st.integers(0), st.integers(0))),
        st.tuples(st.just("copy"), st.lists(copy, max_size=8)),
        st.tuples(st.just("move"), st.tuples(table, st.permutations(range(num_pages)))),
    )
    return memory, draw(st.lists(steps, max_size=6))


@settings(max_examples=150, deadline=None)
@given(works(), st.integers(0, 2**31))
def test_memory_does_what_a_dictionary_of_tokens_does(
    work: tuple[PagedTensors, list[tuple[str, Any]]], seed: int
) -> None:
    memory, steps = work
    rng = np.random.default_rng(seed)
    layers, size = memory.geometry.layers, memory.page_size
    fill(memory, seed)

    def seen(layer: int, page: int) -> list[tuple[bytes, bytes]]:
        k, v = memory.gather(layer, [page], size)
        return [(bits(k[i]).numpy().tobytes(), bits(v[i]).numpy().tobytes()) for i in range(size)]

    def remember() -> dict[tuple[int, int, int], tuple[bytes, bytes]]:
        return {
            (layer, page, offset): token
            for layer in range(layers)
            for page in range(memory.num_pages)
            for offset, token in enumerate(seen(layer, page))
        }

    model = remember()  # (layer, page, offset) → bytes of K and V
    for step, what in steps:
        if step == "store":
            table, one, other = what
            start, stop = sorted(number % (len(table) * size + 1) for number in (one, other))
            for layer in range(layers):
                k, v = random_tokens(memory, stop - start, rng)
                memory.store(layer, memory.slots(table, start, stop), k, v)
                value = k[:, :, : memory.geometry.latent_dim] if v is None else v
                for i, token in enumerate(range(start, stop)):
                    model[layer, table[token // size], token % size] = (
                        bits(k[i]).numpy().tobytes(),
                        bits(value[i]).numpy().tobytes(),
                    )
        elif step == "copy":
            memory.copy([PageCopy(*copy) for copy in what])
            for src, dst, tokens in what:
                for layer in range(layers):
                    for offset in range(tokens):
                        model[layer, dst, offset] = model[layer, src, offset]
        else:
            sources, targets = what[0], list(what[1][: len(what[0])])
            memory.write(targets, memory.read(sources))
            before = dict(model)
            for src, dst in zip(sources, targets, strict=True):
                for layer in range(layers):
                    for offset in range(size):
                        model[layer, dst, offset] = before[layer, src, offset]
        assert remember() == model


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_slots_are_page_times_size_plus_offset(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 7))
    table = data.draw(st.lists(st.integers(0, 19), max_size=8))
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, len(table) * size)] * 2)))
    memory = PagedTensors(GEOMETRIES["mqa"], 20, size)
    slots = memory.slots(table, start, stop)
    assert slots.dtype == torch.int64
    assert slots.tolist() == [table[i // size] * size + i % size for i in range(start, stop)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "make",
    [
        list,
        tuple,
        np.int32,
        np.int64,
        lambda ids: np.asarray(ids, np.int32)[::1].view(),
        lambda ids: torch.tensor(ids, dtype=torch.int32),
        torch.tensor,
    ],
)
def test_ids_come_in_many_forms(make: Any, device: str) -> None:
    memory = PagedTensors(GEOMETRIES["gqa"], 6, 4, device=device)
    fill(memory)
    ids = make([5, 0, 2])
    if isinstance(ids, np.ndarray):
        ids.flags.writeable = False  # as page tables are handed out
    wanted = contents(memory)[[5, 0, 2]]
    assert torch.equal(memory.read(ids).cpu(), wanted)
    assert memory.slots(ids, 3, 6).tolist() == [23, 0, 1]
    assert torch.equal(memory.gather(0, ids, 9)[0], memory.gather(0, [5, 0, 2], 9)[0])
    memory.write(ids, wanted.flip(0))
    assert torch.equal(contents(memory)[[2, 0, 5]], wanted)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_block_goes_to_other_pages_and_other_memory(
    geometry: KVGeometry, layout: Layout, dtype: str, device: str
) -> None:
    geometry = replace(geometry, dtype=dtype)
    memory, other = (PagedTensors(geometry, 7, 3, layout=layout, device=device) for _ in range(2))
    fill(memory)
    before = contents(memory)
    block = memory.read([6, 1, 2, 3])
    assert block.shape == (4, memory.page_bytes)
    assert block.is_contiguous()
    memory.write([0, 4, 5, 2], block)
    wanted = before.clone()
    wanted[[0, 4, 5, 2]] = before[[6, 1, 2, 3]]
    assert torch.equal(contents(memory), wanted)
    other.write([1, 2, 3, 6], block.cpu())
    for layer in range(geometry.layers):
        k, v = other.gather(layer, [6, 1, 2, 3], 12)
        held_k, held_v = memory.gather(layer, [2, 0, 4, 5], 12)
        assert torch.equal(bits(k), bits(held_k))
        assert torch.equal(bits(v), bits(held_v))


def test_a_block_from_a_byte_buffer_at_any_offset() -> None:
    memory = PagedTensors(KVGeometry(1, 1, 8, "bf16"), 4, 4)
    fill(memory)
    wanted = contents(memory)
    size = 2 * memory.page_bytes
    for base, offset in ((0, 0), (0, 1), (0, 8), (1, 0), (1, 7), (4, 8)):
        buffer = torch.frombuffer(bytearray(16 + size), dtype=torch.uint8, offset=base)
        block = buffer[offset : offset + size].view(2, -1)
        block.copy_(wanted[:2])
        memory.write([2, 3], block)
        assert torch.equal(contents(memory)[2:], wanted[:2])
        assert memory.read([1, 0], out=block) is block
        assert torch.equal(block, wanted[[1, 0]])


@pytest.mark.parametrize("device", DEVICES)
def test_reading_into_memory_of_the_caller(layout: Layout, device: str) -> None:
    memory = PagedTensors(GEOMETRIES["gqa"], 4, 4, layout=layout, device=device)
    fill(memory)
    for place in {device, "cpu"}:
        out = torch.zeros(2, memory.page_bytes, dtype=torch.uint8, device=place)
        assert memory.read([3, 0], out=out) is out
        assert torch.equal(out.cpu(), contents(memory)[[3, 0]])


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_copies_are_made_in_order(layout: Layout, batched: bool, device: str) -> None:
    memory = PagedTensors(GEOMETRIES["gqa"], 5, 4, layout=layout, device=device)
    memory._batched = batched
    fill(memory)
    before = contents(memory)
    # A chain, a swap by way of a third page, and a page that is read before it is overwritten.
    memory.copy([(0, 1, 4), (1, 2, 4), (3, 4, 4), (2, 3, 4), (4, 0, 4)])
    assert torch.equal(contents(memory), before[[3, 0, 0, 0, 3]])
    memory.copy([])
    memory.copy([(2, 2, 4)])
    assert torch.equal(contents(memory), before[[3, 0, 0, 0, 3]])


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.just(2)), max_size=20))
def test_copies_in_one_kernel_are_those_in_order(copies: list[tuple[int, int, int]]) -> None:
    memory = PagedTensors(GEOMETRIES["mqa"], 6, 2)
    memory._batched = True
    fill(memory)
    pages = list(contents(memory))
    rows: Any = np.array(copies, np.int32).reshape(-1, 3)
    memory.copy(rows)
    for src, dst, _ in copies:
        pages[dst] = pages[src]
    assert torch.equal(contents(memory), torch.stack(pages))


WRONG_COPIES: list[Any] = [
    (0, 4, 1), (4, 0, 1), (-1, 0, 1), (0, -1, 1), (0, 1, 0), (0, 1, 5), (0, 1, -1), (0, 1),
    (0, 1, 2, 3), (0.0, 1, 2), (0, 1, 2.0), ("0", 1, 2), None, 7, (None, 1, 2),
]  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG_COPIES)
def test_nothing_is_written_when_one_of_many_copies_is_wrong(layout: Layout, wrong: Any) -> None:
    memory = PagedTensors(GEOMETRIES["gqa"], 4, 4, layout=layout)
    fill(memory)
    before = contents(memory)
    with pytest.raises(InvalidValue, match=r"is no copy here; .* two pages of 0 … 3 and 1 … 4"):
        memory.copy([(0, 1, 4), wrong])
    assert torch.equal(contents(memory), before)


WRONG_IDS = [[4], [-1], [0, 99], [0.0], [True], [[0]], [[0], [0, 1]], ["0"], [None], [2**70]]
WRONG_IDS += [torch.tensor([4]), torch.tensor([0.0]), torch.tensor(0), torch.tensor([True])]
WRONG_IDS += [np.array([2**64 - 1], np.uint64)]


@pytest.mark.parametrize("wrong", WRONG_IDS)
def test_wrong_ids_are_refused_before_anything_is_written(wrong: Any) -> None:
    memory = PagedTensors(GEOMETRIES["gqa"], 4, 1)
    fill(memory)
    before = contents(memory)
    k, v = memory.gather(0, [0], 1)
    tokens = 1 if isinstance(wrong, torch.Tensor) and not wrong.dim() else len(wrong)
    block = torch.zeros(tokens, memory.page_bytes, dtype=torch.uint8)
    for use in (
        lambda: memory.read(wrong),
        lambda: memory.write(wrong, block),
        lambda: memory.store(0, wrong, k.expand(tokens, -1, -1), v.expand(tokens, -1, -1)),
    ):
        with pytest.raises(InvalidValue, match=r"whole numbers|lie in 0 … 3"):
            use()
    assert torch.equal(contents(memory), before)


def test_lengths_beyond_the_table_are_refused() -> None:
    memory = PagedTensors(GEOMETRIES["gqa"], 4, 4)
    with pytest.raises(InvalidValue, match="length is 9; a table of 2 pages of 4 tokens"):
        memory.gather(0, [0, 1], 9)
    with pytest.raises(InvalidValue, match="length is -1"):
        memory.gather(0, [0, 1], -1)
    with pytest.raises(InvalidValue, match="tokens 3 … 9 are not within a table of 2 pages"):
        memory.slots([0, 1], 3, 9)
    with pytest.raises(InvalidValue, match="stop is 2; a whole number of at least 3"):
        memory.slots([0, 1], 3, 2)
    with pytest.raises(InvalidValue, match="start is -1"):
        memory.slots([0, 1], -1, 2)


@pytest.mark.parametrize("layer", [-1, 3, 1.0, True, None])
def test_a_layer_that_is_not_there(layer: Any) -> None:
    memory = PagedTensors(GEOMETRIES["gqa"], 4, 4)
    k, v = memory.gather(0, [0], 1)
    for use in (
        lambda: memory.k(layer),
        lambda: memory.v(layer),
        lambda: memory.gather(layer, [0], 1),
        lambda: memory.store(layer, [0], k, v),
    ):
        with pytest.raises(InvalidValue, match="layer is"):
            use()


def test_tokens_of_a_wrong_shape_or_dtype_are_refused_before_anything_is_written() -> None:
    memory = PagedTensors(GEOMETRIES["gqa"], 4, 4)
    fill(memory)
    before = contents(memory)
    good = torch.zeros(3, 2, 8)
    for wrong in (
        torch.zeros(2, 2, 8),
        torch.zeros(3, 1, 8),
        torch.zeros(3, 2, 7),
        torch.zeros(3, 16),
        torch.zeros(3, 2, 8, dtype=torch.float16),
        torch.zeros(3, 2, 8, dtype=torch.int32),
        torch.zeros(3, 2, 8, device="meta"),
    ):
        with pytest.raises(InvalidValue, match=r"^k is .* is needed"):
            memory.store(0, [0, 1, 2], wrong, good)
        with pytest.raises(InvalidValue, match=r"^v is .* is needed"):
            memory.store(0, [0, 1, 2], good, wrong)
    with pytest.raises(InvalidValue, match="v is needed beside k"):
        memory.store(0, [0, 1, 2], good)
    assert torch.equal(contents(memory), before)


def test_blocks_of_a_wrong_kind_are_refused_before_anything_is_written() -> None:
    memory = PagedTensors(GEOMETRIES["gqa"], 4, 4)
    fill(memory)
    before = contents(memory)
    wide = torch.zeros(2, 2 * memory.page_bytes, dtype=torch.uint8)
    for wrong in (
        wide[:1, : memory.page_bytes],
        wide[:, : memory.page_bytes + 1].contiguous(),
        wide[:, ::2],
        wide[:, : memory.page_bytes].to(torch.int8),
        wide[:, : memory.page_bytes].to("meta"),
    ):
        with pytest.raises(InvalidValue, match=r"^block is .* is needed"):
            memory.write([0, 1], wrong)
        with pytest.raises(InvalidValue, match=r"^out is .* is needed"):
            memory.read([0, 1], out=wrong)
    with pytest.raises(InvalidValue, match="a page is given twice"):
        memory.write([1, 1], wide[:, : memory.page_bytes].contiguous())
    assert torch.equal(contents(memory), before)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_pages": 0}, "num_pages is 0"),
        ({"num_pages": 2.0}, "num_pages is 2.0"),
        ({"page_size": -1}, "page_size is -1"),
        ({"layout": "DHN"}, "layout is 'DHN'; 'NHD' and 'HND' are known"),
        ({"device": "abacus"}, "no memory for 2 pages .* on abacus"),
    ],
)
def test_what_no_memory_can_be_made_of(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidValue, match=message):
        PagedTensors(GEOMETRIES["gqa"], **{"num_pages": 2, "page_size": 4, **arguments})


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there() -> None:
    with pytest.raises(InvalidValue, match=r"no memory for 2 pages .* on cuda"):
        PagedTensors(GEOMETRIES["gqa"], 2, 4, device="cuda")


def test_memory_made_in_inference_mode_can_be_written_outside_of_it() -> None:
    with torch.inference_mode():
        memory = PagedTensors(GEOMETRIES["gqa"], 2, 4)
        memory.store(0, [0], torch.ones(1, 2, 8), torch.ones(1, 2, 8))
    memory.store(0, [1], torch.ones(1, 2, 8), torch.ones(1, 2, 8))
    memory.copy([(0, 1, 2)])
    assert memory.gather(0, [1], 2)[0].all()


def test_tokens_may_be_views_and_want_gradients(layout: Layout) -> None:
    memory = PagedTensors(GEOMETRIES["gqa"], 2, 4, layout=layout)
    turned = torch.randn(2, 3, 8, requires_grad=True).transpose(0, 1)
    memory.store(0, [1, 6, 4], turned, turned)
    k, _ = memory.gather(0, [0, 1], 8)
    assert torch.equal(k[[1, 6, 4]], turned)
    assert not k.requires_grad


def test_layers_of_several_shapes_are_refused() -> None:
    groups = [LayerGroup("full", (layer,), AttentionShape(1 + layer, 8)) for layer in range(2)]
    with pytest.raises(UnsupportedModel, match="PagedTensors needs a model with K and V of one"):
        PagedTensors(KVGeometry.of(groups), 4, 4)
