"""Gathers and stores prepared once do at every layer what the plain ones do."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from kvkeep.core.errors import InvalidValue  # noqa: E402 - after the skip
from kvkeep.core.geometry import KVGeometry  # noqa: E402
from kvkeep.core.pages.tensors import PagedTensors  # noqa: E402

GEOMETRIES = {
    "gqa": KVGeometry(3, 2, 8, "float32"),
    "half": KVGeometry(2, 3, 4, "bfloat16"),
    "narrow values": KVGeometry(2, 2, 6, "float32", value_dim=4),
    "mla": KVGeometry(2, 1, 7, latent_dim=5, dtype="float32"),
}
PAGE_SIZE = 4


@pytest.fixture(params=GEOMETRIES)
def memory(request, layout, device):
    torch.manual_seed(3)
    memory = PagedTensors(GEOMETRIES[request.param], 9, PAGE_SIZE, layout=layout, device=device)
    for layer in range(memory.geometry.layers):
        memory.k(layer).normal_()
        if memory.geometry.latent_dim is None:
            memory.v(layer).normal_()
    return memory


@pytest.fixture(params=["NHD", "HND"])
def layout(request):
    return request.param


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request):
    return request.param


def assert_gathers(memory, gather, pages):
    for layer in range(memory.geometry.layers):
        gather.fill(layer)
        k, v = memory.gather(layer, pages, len(pages) * PAGE_SIZE)
        assert torch.equal(gather.keys, k)
        assert torch.equal(gather.values, v)


def test_a_prepared_gather_is_the_plain_one(memory):
    scratch = memory.scratch()
    for pages in ([5, 0, 8, 3], [2], [], [7, 7, 1], list(range(9))):
        assert_gathers(memory, memory.prepare_gather(pages, scratch), pages)


def test_gathers_that_were_prepared_before_the_scratch_grew(memory):
    scratch = memory.scratch()
    small = memory.prepare_gather([4, 2], scratch)
    large = memory.prepare_gather([0, 1, 2, 3, 4], scratch)
    again = memory.prepare_gather([8], scratch)
    for gather, pages in ((small, [4, 2]), (large, [0, 1, 2, 3, 4]), (again, [8])):
        assert_gathers(memory, gather, pages)


def test_memory_is_used_again_and_never_more_than_a_bound(memory):
    scratch = memory.scratch()
    first = memory.prepare_gather([1, 2, 3], scratch)
    second = memory.prepare_gather([6, 5], scratch)
    assert first.keys.data_ptr() == second.keys.data_ptr()
    layer_bytes = memory.page_bytes // memory.geometry.layers
    assert scratch.nbytes == 3 * layer_bytes
    many = [1, 2, 3, 4] * ((64 << 20) // layer_bytes // 4 + 1)
    large = memory.prepare_gather(many, scratch)
    assert scratch.nbytes == 3 * layer_bytes
    assert_gathers(memory, large, many)


def test_scratch_made_in_inference_mode_can_be_used_outside_of_it(memory):
    with torch.inference_mode():
        scratch = memory.scratch()
        memory.prepare_gather([1, 2], scratch).fill(0)
    assert_gathers(memory, memory.prepare_gather([4, 2], scratch), [4, 2])


def test_a_prepared_store_is_the_plain_one(memory):
    slots = [5, 30, 11, 0]
    heads, dim = memory.geometry.rank_heads, memory.geometry.head_dim
    latent = memory.geometry.latent_dim is not None
    places = memory.prepare_store(np.array(slots, np.int32))
    assert len(places.pages) == 4
    device = memory.device
    other = PagedTensors(memory.geometry, 9, PAGE_SIZE, layout=memory.layout, device=device)
    other.write(range(9), memory.read(range(9)))
    for layer in range(memory.geometry.layers):
        k = torch.randn(4, heads, dim, dtype=memory.dtype, device=device)
        v = None
        if not latent:
            v = torch.randn(4, heads, memory.geometry.value_dim, dtype=memory.dtype, device=device)
        memory.store(layer, places, k, v)
        other.store(layer, slots, k, v)
    assert torch.equal(memory.read(range(9)), other.read(range(9)))


def test_what_is_prepared_is_checked(memory):
    with pytest.raises(InvalidValue, match="page ids"):
        memory.prepare_gather([9], memory.scratch())
    with pytest.raises(InvalidValue, match="slots"):
        memory.prepare_store([9 * PAGE_SIZE])
    shape = (3, memory.geometry.rank_heads, memory.geometry.head_dim)
    k = torch.zeros(shape, dtype=memory.dtype, device=memory.device)
    v = None if memory.geometry.latent_dim else k[..., : memory.geometry.value_dim]
    with pytest.raises(InvalidValue, match="is needed"):
        memory.store(0, memory.prepare_store([1, 2]), k, v)
