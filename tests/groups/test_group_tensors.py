"""The memory of rows and states: written by one path, read by another, byte for byte."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvkeep import PagedCache
from kvkeep.core.errors import InvalidValue
from kvkeep.core.geometry import AttentionShape, KVGeometry, LayerGroup, StateTensor
from kvkeep.core.groups import GroupPlan
from kvkeep.core.groups.tensors import GroupedTensors, LayerPages

GEOMETRY = KVGeometry.of(
    [
        LayerGroup("full", (0, 3), AttentionShape(2, 8)),
        LayerGroup("latent", (4,), AttentionShape(1, 12, latent_dim=8)),
        LayerGroup("window", (1, 2, 5), AttentionShape(3, 8, 4), 10),
        LayerGroup(
            "state",
            (6, 7),
            state=(
                StateTensor("conv", (6, 3), "bfloat16", follows=True),
                StateTensor("recurrent", (2, 4, 5), "float32"),
            ),
            grid=4,
        ),
    ],
    dtype="bfloat16",
)
SIZE = 4


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def memory(request: pytest.FixtureRequest) -> GroupedTensors:
    return GroupedTensors(GroupPlan(GEOMETRY, SIZE), 64, request.param)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are equal, wherever they are."""
    return torch.equal(one.cpu(), other.cpu())


def place(memory: GroupedTensors, layer: int) -> tuple[LayerPages, int]:
    """Where the KV of a layer lies, and its number there."""
    (part,) = (part for part in memory.parts if layer in part.layers)
    return part, part.layers.index(layer)


def random_state(seed: int) -> dict[tuple[int, str], torch.Tensor]:
    torch.manual_seed(seed)
    return {
        (layer, name): torch.randn(shape).to(dtype)
        for layer in (6, 7)
        for name, shape, dtype in (
            ("conv", (6, 3), torch.bfloat16),
            ("recurrent", (2, 4, 5), torch.float32),
        )
    }


def test_every_layer_keeps_its_own(memory: GroupedTensors) -> None:
    torch.manual_seed(1)
    written = {}
    rows = {None: [3], 0: [7, 9, 11][: memory.plan.layout.windows[0].pages]}
    for layer in range(6):
        part, at = place(memory, layer)
        page = rows[part.window][part.page]
        slots = list(range(page * SIZE, page * SIZE + SIZE))
        shape = part.tensors.geometry
        k = torch.randn(SIZE, shape.kv_heads, shape.head_dim).bfloat16()
        latent = shape.latent_dim is not None
        v = None if latent else torch.randn(SIZE, shape.kv_heads, shape.value_dim).bfloat16()
        device = memory.device
        part.tensors.store(at, slots, k.to(device), None if v is None else v.to(device))
        written[layer] = page, k, v
    for layer, (page, k, v) in written.items():
        part, at = place(memory, layer)
        got_k, got_v = part.tensors.gather(at, [page], SIZE)
        assert same(got_k, k), layer
        assert v is None or same(got_v, v), layer


def test_a_state_comes_back_as_it_was(memory: GroupedTensors) -> None:
    pages = np.array([5, 60, 2, 33, 8, 9][: memory.plan.layout.state_pages], np.int32)
    state = random_state(2)
    memory.write_state(pages, state)
    found = memory.read_state(pages)
    assert found.keys() == state.keys()
    assert all(same(found[key], state[key]) for key in state)


def test_states_and_rows_are_copied_as_the_cache_asks(memory: GroupedTensors) -> None:
    """A sequence resumes at a checkpoint of another, and a fork goes its own way."""
    layout = memory.plan.layout
    cache = PagedCache(64, layout)
    cache.bind(memory)
    first = cache.open(range(9))
    first.groups.reach(8)
    memory.copy(first.groups.copies())
    state = random_state(3)
    memory.write_state(first.groups.state, state)
    memory.copy([first.groups.checkpoint(8)])
    first.publish(8)
    memory.write_state(first.groups.state, random_state(4))
    second = cache.open([*range(8), 50, 51])
    assert second.num_cached == 8
    memory.copy(second.groups.copies())
    found = memory.read_state(second.groups.state)
    assert all(same(found[key], state[key]) for key in state)
    second.groups.reach(10)
    part, at = place(memory, 1)
    k, v = torch.ones(2, 3, 8).bfloat16(), torch.ones(2, 3, 4).bfloat16()
    row = second.groups.tables[0][2, part.page]
    slots = [row * SIZE, row * SIZE + 1]
    part.tensors.store(at, slots, k.to(memory.device), v.to(memory.device))
    fork = second.fork()
    memory.copy(second.groups.copies())
    fork.append([7])
    (copy,) = fork.groups.reach(11)
    memory.copy([copy])
    table = fork.groups.tables[0][2:3, part.page]
    assert table[0] != row
    assert same(part.tensors.gather(at, table, 2)[0], k)
    found = memory.read_state(fork.groups.state)
    assert all(same(found[key], state[key]) for key in state)
    for sequence in (first, second, fork):
        sequence.close()
    cache.check()


def test_whole_pages_are_read_and_written(memory: GroupedTensors) -> None:
    pages = np.array([1, 4], np.int32)
    content = torch.randint(0, 255, (2, memory.plan.page_bytes), dtype=torch.uint8)
    memory.write(pages, content)
    assert same(memory.read(pages), content)
    assert not memory.read(np.array([2, 3], np.int32)).any()


def test_mistakes_are_named(memory: GroupedTensors) -> None:
    pages = np.arange(memory.plan.layout.state_pages, dtype=np.int32)
    state = random_state(5)
    del state[7, "conv"]
    with pytest.raises(InvalidValue, match="the state 'conv' of layer 7 is missing"):
        memory.write_state(pages, state)
    state[7, "conv"] = torch.zeros(6, 4)
    with pytest.raises(InvalidValue, match=r"is \(6, 4\) of torch.float32; \(6, 3\)"):
        memory.write_state(pages, state)
    assert not memory.read(pages).any(), "nothing was written"
    with pytest.raises(InvalidValue, match="content is"):
        memory.write(pages, torch.zeros(1))
    with pytest.raises(InvalidValue, match="no memory for 64 pages"):
        GroupedTensors(memory.plan, 64, "nonsense")
    part, _ = place(memory, 0)
    with pytest.raises(InvalidValue, match="uint8"):
        type(part.tensors)(
            part.tensors.geometry, 64, SIZE, memory=torch.zeros(64, 3, dtype=torch.uint8)
        )
