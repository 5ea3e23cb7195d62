"""Snapshots that are a function of their tokens, and geometries to test them with.

The KV of a token depends on all tokens up to it, and a state on all tokens in front of its
position. So whatever a store returns can be compared with what belongs there, bit for bit.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kvkeep.core.geometry import AttentionShape, KVGeometry, LayerGroup, StateTensor
from kvkeep.store import KVStore, Snapshot

if TYPE_CHECKING:
    from collections.abc import Sequence

SIZE = 4
HEADS = AttentionShape(2, 4)
WIDE = AttentionShape(1, 8, value_dim=4)
LATENT = AttentionShape(1, 6, latent_dim=4)
STATE = (StateTensor("conv", (3, 2), "bfloat16"), StateTensor("recurrent", (2, 3), "float32"))


def _of(*groups: LayerGroup) -> KVGeometry:
    return KVGeometry.of(groups, dtype="float32")


GEOMETRIES = {
    "state": _of(LayerGroup("full", (1,), HEADS), LayerGroup("state", (0, 2), state=STATE)),
    "windows": _of(
        LayerGroup("full", (0,), HEADS),
        LayerGroup("window", (1, 3), HEADS, 6),
        LayerGroup("chunk", (2,), WIDE, 5),
    ),
    "all": _of(
        LayerGroup("latent", (0,), LATENT),
        LayerGroup("full", (2,), WIDE),
        LayerGroup("window", (1,), HEADS, 10),
        LayerGroup("chunk", (3,), HEADS, 8),
        LayerGroup("state", (2, 4), state=STATE),
    ),
    "states alone": _of(LayerGroup("state", (0, 1), state=STATE)),
    "window alone": _of(LayerGroup("window", (0, 1), HEADS, 3)),
}
"""Every kind of group; spans below, at and above a block of `SIZE` tokens, and off its grid."""


def prefixes(tokens: Sequence[int], tenant: str = "") -> np.ndarray:
    """A number of 64 bits for every prefix, from the empty one on."""
    state = zlib.crc32(tenant.encode()) + 1
    found = [state]
    for token in tokens:
        state = (state * 6364136223846793005 + int(token) * 2 + 1) % 2**64
        found.append(state)
    return np.array(found, np.uint64)


def _mixed(seeds: np.ndarray, salt: str, width: int) -> np.ndarray:
    """``width`` whole numbers below 256 for each seed: exact in every element type."""
    salted = seeds[:, None] + np.uint64(zlib.crc32(salt.encode()))
    mixed = salted + np.arange(width, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return (mixed >> np.uint64(56)).astype(np.float32)


def first_of(group: LayerGroup, tokens: int) -> int:
    """The first token that going on behind ``tokens`` needs, by the definition of attention."""
    if group.span is None:
        return 0
    if group.kind == "chunk":
        return tokens // group.span * group.span
    return max(0, tokens + 1 - group.span)


def snapshot(
    store: KVStore, tokens: Sequence[int], start: int = 0, more: int = 0, tenant: str = ""
) -> Snapshot:
    """The snapshot behind ``tokens``; of windows ``more`` tokens than needed, where there are."""
    count, seeds = len(tokens), prefixes(tokens, tenant)
    dtype = getattr(torch, store.geometry.dtype)
    layers: dict[int, tuple[torch.Tensor, ...]] = {}
    state: dict[tuple[int, str], torch.Tensor] = {}
    for group in store.geometry.groups:
        first = start if group.span is None else max(0, first_of(group, count) - more)
        for layer in group.layers:
            if group.shape is not None:
                heads, key = group.shape.kv_heads, group.shape.head_dim
                latent = group.shape.latent_dim is not None
                widths = [key] if latent else [key, group.shape.width - key]
                parts = []
                for part, width in enumerate(widths):
                    flat = _mixed(seeds[first + 1 :], f"{layer}/{part}", heads * width)
                    tensor = torch.from_numpy(flat).to(dtype)
                    if not latent:
                        tensor = tensor.view(count - first, heads, width)
                        tensor = tensor if store.layout == "NHD" else tensor.transpose(0, 1)
                    parts.append(tensor)
                layers[layer] = tuple(parts)
            for one in group.state:
                numbers = _mixed(seeds[-1:], f"{layer}/{one.name}", int(np.prod(one.shape)))
                tensor = torch.from_numpy(numbers).view(one.shape)
                state[layer, one.name] = tensor.to(getattr(torch, one.dtype))
    return Snapshot(count, start, layers, state)


def same(one: Snapshot, other: Snapshot) -> bool:
    """Whether two snapshots are equal to the bit."""
    return (
        (one.tokens, one.start) == (other.tokens, other.start)
        and one.layers.keys() == other.layers.keys()
        and one.state.keys() == other.state.keys()
        and all(
            len(one.layers[key]) == len(other.layers[key])
            and all(map(torch.equal, one.layers[key], other.layers[key]))
            for key in one.layers
        )
        and all(torch.equal(one.state[key], other.state[key]) for key in one.state)
    )


def open_snapshots(name: str, *tiers: str, **more: Any) -> KVStore:
    """A store of small blocks for one of `GEOMETRIES`; memory of 4 MiB unless tiers are named."""
    options = {"model": "tiny@1", "tiers": tiers or ("memory://4MiB",), "block_tokens": SIZE}
    return KVStore(GEOMETRIES[name], **({"snapshots": True} | options | more))


def get(store: KVStore, tokens: Sequence[int], start: int = 0, **more: Any) -> int:
    """Get a snapshot, and compare it with what belongs there; its position, or 0."""
    found = store.get_snapshot(tokens, start, **more)
    if found is None:
        return 0
    want = snapshot(store, list(tokens)[: found.tokens], start, tenant=more.get("tenant", ""))
    assert same(found, want), f"not what belongs at {found.tokens}"
    assert start < found.tokens <= more.get("limit", len(tokens))
    return found.tokens
