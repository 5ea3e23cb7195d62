"""KV that is a function of tokens and tenant, in every form, and stores to test with."""

from __future__ import annotations

import zlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kvkeep.core.geometry import DTYPES, KVGeometry
from kvkeep.store import KVStore

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

MODEL = "tiny@1"
GQA = KVGeometry(2, 2, 8, "bfloat16")
GEOMETRIES = {
    "mha": KVGeometry(2, 4, 8),
    "gqa": GQA,
    "mqa": KVGeometry(3, 1, 16),
    "uneven": KVGeometry(2, 2, 8, value_dim=4),
    "mla": KVGeometry(2, 1, 16, latent_dim=12),
    "rank": KVGeometry(2, 4, 8, tp=2),
}
FORMS = ("tensor", "tuples", "lists", "batched", "strided")
"""What callers give and take, see `given`."""


def geometry(name: str, dtype: str) -> KVGeometry:
    return replace(GEOMETRIES[name], dtype=dtype)


def numbers(shape: KVGeometry, tokens: Iterable[int], tenant: str = "") -> np.ndarray:
    """Bytes ``[tokens, bytes of a token]``: of each token they depend on all before it."""
    state, states = zlib.crc32(tenant.encode()) + 1, []
    for token in tokens:
        state = (state * 6364136223846793005 + int(token) * 2 + 1) % 2**64
        states.append(state)
    mixed = np.array(states, np.uint64)[:, None] + np.arange(
        shape.bytes_per_token, dtype=np.uint64
    ) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return (mixed >> np.uint64(40)).astype(np.uint8)


def given(shape: KVGeometry, data: np.ndarray, form: str = "tensor", layout: str = "NHD") -> Any:
    """KV of these bytes, as a caller gives it: not by the code that is tested."""
    parts = _parts(shape, data, layout)
    latent = shape.latent_dim is not None
    if form == "tensor":
        per_layer = 1 if latent else 2
        if not latent and shape.value_dim != shape.head_dim:
            return tuple(_pairs(parts))
        whole = torch.stack(parts).contiguous()
        return whole if latent else whole.unflatten(0, (shape.layers, per_layer))
    if form == "strided":
        parts = [_strided(part) for part in parts]
    if form == "batched":
        parts = [part[None] for part in parts]
    if latent:
        return [(part,) for part in parts] if form == "lists" else tuple(parts)
    pairs = _pairs(parts)
    return [list(pair) for pair in pairs] if form == "lists" else tuple(pairs)


def room(shape: KVGeometry, tokens: int, form: str, layout: str = "NHD") -> Any:
    """Memory to read into, of that form, full of something else."""
    return given(shape, np.full((tokens, shape.bytes_per_token), 0xA5, np.uint8), form, layout)


def plain(shape: KVGeometry, kv: Any, layout: str = "NHD") -> np.ndarray:
    """The bytes ``[tokens, bytes of a token]`` of KV in any form."""
    if isinstance(kv, torch.Tensor):
        parts = list(kv) if shape.latent_dim is not None else list(kv.flatten(0, 1))
    else:
        parts = [
            part
            for layer in kv
            for part in ([layer] if isinstance(layer, torch.Tensor) else list(layer))
        ]
    axes = 2 if shape.latent_dim is not None else 3
    columns = []
    for part in parts:
        assert part.dim() == axes or part.shape[0] == 1
        one = part if part.dim() == axes else part[0]
        if axes == 3 and layout == "HND":
            one = one.transpose(0, 1)
        columns.append(one.contiguous().view(torch.uint8).flatten(1).numpy())
    return np.concatenate(columns, axis=1)


def open_store(*tiers: str, shape: KVGeometry = GQA, block_tokens: int = 4, **more: Any) -> KVStore:
    """A store of small blocks; memory of 4 MiB unless tiers are named."""
    options = {"model": MODEL, "tiers": tiers or ("memory://4MiB",), "block_tokens": block_tokens}
    return KVStore(shape, **(options | more))


def put(store: KVStore, tokens: Any, start: int = 0, **more: Any) -> Any:
    """Put what belongs to ``tokens`` of the tenant."""
    data = numbers(store.geometry, tokens, more.get("tenant", store.namespace.tenant))
    kv = given(store.geometry, data[start:], layout=store.layout)
    return store.put(tokens, kv, start, **more)


def get(store: KVStore, tokens: Any, start: int = 0, **more: Any) -> int:
    """Get it, compare each bit with what belongs to these tokens; how many there were."""
    kv, count = store.get(tokens, start, **more)
    if not count:
        assert kv is None
        return 0
    tenant = more.get("tenant", store.namespace.tenant)
    want = numbers(store.geometry, tokens, tenant)[start : start + count]
    assert np.array_equal(plain(store.geometry, kv, store.layout), want), "another's KV"
    return count


def quiet(store: KVStore) -> None:
    """Wait until nothing is on its way."""
    for tier in store._tiered.tiers:
        assert tier.writing.wait(20)
        assert tier.reading.wait(20)


def disk(path: Path, **options: str) -> str:
    """The URL of a directory; what is written there need not outlast a loss of power."""
    options = {"size": "64MiB", "sync": "never"} | options
    return f"file://{path}?" + "&".join(f"{name}={value}" for name, value in options.items())


def records(path: Path) -> list[Path]:
    """The files of all records in a directory of ours."""
    return sorted(
        file for file in path.glob("*/*") if len(file.parent.name) == 32 and len(file.name) == 64
    )


def counter(store: KVStore, name: str, tier: int = 1) -> float:
    """A counter of a tier; 0 is memory."""
    return store.stats().tiers[tier].counters[name]


def _parts(shape: KVGeometry, data: np.ndarray, layout: str) -> list[torch.Tensor]:
    dtype = getattr(torch, shape.dtype)
    widths = [shape.head_dim]
    if shape.latent_dim is None:
        widths.append(shape.value_dim)
    parts, at = [], 0
    for _ in range(shape.layers):
        for width in widths:
            size = shape.rank_heads * width * DTYPES[shape.dtype]
            copied = bytearray(data[:, at : at + size].tobytes())  # at no round address
            flat = torch.frombuffer(copied, dtype=dtype) if copied else torch.empty(0, dtype=dtype)
            flat = flat.view(len(data), shape.rank_heads * width)
            at += size
            if shape.latent_dim is not None:
                parts.append(flat)
                continue
            part = flat.view(len(data), shape.rank_heads, width)
            parts.append(part if layout == "NHD" else part.transpose(0, 1).contiguous())
    assert at == data.shape[1]
    return parts


def _pairs(parts: list[torch.Tensor]) -> list[tuple[torch.Tensor, ...]]:
    return list(zip(parts[::2], parts[1::2], strict=True))


def _strided(part: torch.Tensor) -> torch.Tensor:
    """The same numbers at every other place of a larger tensor that lies the other way round."""
    wide = torch.zeros((*reversed(part.shape), 2), dtype=part.dtype)
    view = wide[..., 0].permute(*reversed(range(part.dim())))
    view.copy_(part)
    return view
