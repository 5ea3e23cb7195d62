"""Part "copies": the bandwidth of pages between device and host, beside one plain copy.

A plain copy of torch between contiguous tensors is one cudaMemcpyAsync of the same size, from or to
pinned memory: what the hardware gives. Pages are scattered over a pool of twice their number.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from gpu_parts.figures import Clock, Row, Skipped, needs, ratios, short
from gpu_parts.models import shape_of
from kvkeep.core.pages.tensors import PagedTensors
from kvkeep.store import KVStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpu_parts.figures import Report, Setting

__all__ = ["run"]

_SIZE = 16
_BLOCK = 256  # tokens that loads and writes of the engine move at once


def run(report: Report, setting: Setting) -> None:
    """Measure copies of several sizes, then the store's."""
    geometry = shape_of(setting).geometry
    report.note(
        f"Pages of {_SIZE} tokens, {geometry.bytes_per_page(_SIZE) / 1024:,.0f} KiB each; blocks "
        f"of {_BLOCK} tokens, {short(geometry.bytes_for(_BLOCK) / 2**20)} MiB each."
    )
    rounds = setting.pick(15, 7, 2)
    sizes = {"full": (1, 16, 256, 1024), "small": (1, 16), "smallest": (1,)}[setting.size]
    for mib in sizes:
        _measure(report, setting, mib << 20, rounds)
    try:
        needs(xxhash="the store")
    except Skipped as reason:
        report.skip(f"copies through the store: {reason}")
        return
    _store(report, setting, setting.pick(256, 16, 1) << 20, rounds)


def _measure(report: Report, setting: Setting, nbytes: int, rounds: int) -> None:
    """Compare the ways to move ``nbytes``."""
    geometry, device, pinned = shape_of(setting).geometry, setting.device, setting.on_gpu
    count = max(1, nbytes // geometry.bytes_per_page(_SIZE))
    pool = PagedTensors(geometry, 2 * count, _SIZE, device=device, check_ids=False)
    pages = np.random.default_rng(1).permutation(2 * count)[:count].astype(np.int32)
    shape = (count, pool.page_bytes)
    host = torch.empty(shape, dtype=torch.uint8, pin_memory=pinned)
    first, at = torch.arange(count) * 31 % 256, torch.arange(pool.page_bytes) % 251
    host.copy_(first.to(torch.uint8)[:, None] + at.to(torch.uint8))  # pages differ, and wrap
    pool.write(pages, host)
    equal = torch.equal(pool.read(pages).cpu(), host)
    moved = count * pool.page_bytes
    size = f"{short(moved / 2**20)} MiB"
    report.add(Row(size, "there and back is the same", right=equal))
    pageable = torch.ones(shape, dtype=torch.uint8)
    flat, other = (torch.zeros(shape, dtype=torch.uint8, device=device) for _ in range(2))
    step = max(1, _BLOCK // _SIZE)
    parts = [slice(at, at + step) for at in range(0, count, step)]
    gather = pool.prepare_gather(pages, pool.scratch())

    def in_blocks(move: Callable[[slice], object]) -> None:
        for part in parts:
            move(part)

    def gathered() -> None:
        for layer in range(geometry.layers):
            gather.fill(layer)

    ways: dict[str, dict[str, Callable[[], object]]] = {
        "to the device": {
            "plain copy from pinned memory": lambda: flat.copy_(host, non_blocking=True),
            "plain copy from pageable memory": lambda: flat.copy_(pageable),
            "PagedTensors.write, at once": lambda: pool.write(pages, host),
            "PagedTensors.write, by block": lambda: in_blocks(
                lambda part: pool.write(pages[part], host[part])
            ),
        },
        "to the host": {
            "plain copy to pinned memory": lambda: host.copy_(flat, non_blocking=True),
            "plain copy to pageable memory": lambda: pageable.copy_(flat),
            "PagedTensors.read, at once": lambda: pool.read(pages, out=host),
            "PagedTensors.read, by block": lambda: in_blocks(
                lambda part: pool.read(pages[part], out=host[part])
            ),
        },
        "on the device": {
            "plain copy": lambda: other.copy_(flat),
            "PagedTensors.read into device memory": lambda: pool.read(pages, out=other),
            "gather of K and V, layer by layer": gathered,
        },
    }
    rows = partial(_rows, report, device=device, nbytes=moved, rounds=rounds)
    for where, contenders in ways.items():
        rows(f"{size} {where}", contenders)


def _store(report: Report, setting: Setting, nbytes: int, rounds: int) -> None:
    """Compare `KVStore.put` and `get` of tensors on the device with plain copies."""
    geometry, device = shape_of(setting).geometry, setting.device
    blocks = max(1, nbytes // geometry.bytes_for(_BLOCK))
    shape = (geometry.layers, 2, blocks * _BLOCK, geometry.kv_heads, geometry.head_dim)
    dtype = getattr(torch, geometry.dtype)
    kv, out = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
    kv.normal_()
    host = torch.empty(shape, dtype=dtype, pin_memory=setting.on_gpu).zero_()
    rng = np.random.default_rng(2)
    memory = f"memory://{3 * kv.nbytes + (8 << 20)}"
    with KVStore(geometry, model="proof@1", tiers=[memory]) as store:
        last = rng.integers(0, 1 << 30, blocks * _BLOCK, dtype=np.int32)
        store.put(last, kv)
        _rows(report, f"{short(kv.nbytes / 2**20)} MiB from the store's memory to the device", {
            "plain copy from pinned memory": lambda: out.copy_(host, non_blocking=True),
            "KVStore.get": lambda: store.get(last, out=out),
        }, device=device, nbytes=kv.nbytes, rounds=rounds)  # fmt: skip
        found, count = store.get(last, out=torch.zeros_like(kv))
        right = count == len(last) and isinstance(found, torch.Tensor) and torch.equal(found, kv)
        report.add(Row("the store", "KV put and got is the same", right=right))
        fresh = [rng.integers(0, 1 << 30, len(last), dtype=np.int32) for _ in range(rounds + 2)]
        _rows(report, f"{short(kv.nbytes / 2**20)} MiB from the device to the store's memory", {
            "plain copy to pinned memory": lambda: host.copy_(kv, non_blocking=True),
            "KVStore.put": lambda: store.put(fresh.pop(), kv),
        }, device=device, nbytes=kv.nbytes, rounds=rounds)  # fmt: skip


def _rows(
    report: Report,
    case: str,
    contenders: dict[str, Callable[[], object]],
    *,
    device: torch.device,
    nbytes: int,
    rounds: int,
) -> None:
    """Add a row for each contender, with its ratio to the first."""
    taken = Clock(device).turns(contenders, rounds)
    plain, *_ = taken
    for name, seconds in taken.items():
        beside = () if name == plain else ratios(seconds, taken[plain])
        report.add(Row(case, name, "GB/s", tuple(nbytes / one / 1e9 for one in seconds), beside))
