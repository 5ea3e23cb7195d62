"""Part "agreement": the device computes what the CPU computes. Needs torch and NumPy alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gpu_parts.figures import Row
from kvkeep.core.geometry import KVGeometry
from kvkeep.core.pages.tensors import PagedTensors
from kvkeep.serve.engine import SamplingParams
from kvkeep.serve.engine.sampling import LogitsRow, chance_of, choose

if TYPE_CHECKING:
    from gpu_parts.figures import Report, Setting
    from kvkeep.core.pages.tensors import Layout

__all__ = ["run"]

_GEOMETRIES = {
    "grouped heads": KVGeometry(3, 2, 64, "bfloat16"),
    "float32": KVGeometry(2, 4, 32, "float32"),
    "latent": KVGeometry(2, 1, 96, latent_dim=64),
    "8 bits": KVGeometry(2, 2, 64, "float8_e4m3fn"),
}
_LAYOUTS: tuple[Layout, ...] = ("NHD", "HND")
_PAGES, _SIZE = 24, 16


def run(report: Report, setting: Setting) -> None:
    """Compare pages byte by byte, and drawn tokens."""
    for name, geometry in _GEOMETRIES.items():
        for layout in _LAYOUTS:
            _pages(report, setting.device, name, geometry, layout)
    _tokens(report, setting)


def _pages(
    report: Report, device: torch.device, name: str, geometry: KVGeometry, layout: Layout
) -> None:
    """Do the same to pages on both devices, and compare all bytes after each step."""
    here, there = (
        PagedTensors(geometry, _PAGES, _SIZE, device=where, layout=layout)
        for where in (torch.device("cpu"), device)
    )
    rng = np.random.default_rng(1)
    wrong: list[str] = []

    def compare(step: str, one: torch.Tensor, other: torch.Tensor) -> None:
        seen = [part.cpu().contiguous().view(torch.uint8) for part in (one, other)]
        if not torch.equal(*seen):
            wrong.append(step)

    every = list(range(_PAGES))
    block = torch.from_numpy(rng.integers(0, 256, (_PAGES, here.page_bytes), dtype=np.uint8))
    order = rng.permutation(_PAGES)
    for memory in (here, there):
        memory.write(order, block)
    compare("write", here.read(every), there.read(every))
    table = rng.permutation(_PAGES)[:5]
    tokens = 4 * _SIZE + 3
    slots = here.slots(table, 0, tokens).tolist()
    shape = (tokens, geometry.rank_heads, here.k(0).shape[-1])
    exact = torch.from_numpy(rng.standard_normal(shape, np.float32))
    key = exact.to(here.dtype)
    value = None if geometry.latent_dim is not None else exact.flip(0).to(here.dtype)
    for memory in (here, there):
        moved = [None if part is None else part.to(memory.device) for part in (key, value)]
        assert moved[0] is not None
        memory.store(1, slots, moved[0], moved[1])
    compare("store", here.read(every), there.read(every))
    for one, other in zip(
        here.gather(1, table, tokens), there.gather(1, table, tokens), strict=True
    ):
        compare("gather", one, other)
    for memory in (here, there):
        memory.copy([(0, 1, _SIZE), (1, 2, 5), (3, 4, _SIZE), (2, 3, 7)])
    compare("copy", here.read(every), there.read(every))
    compare("read of some", here.read(table), there.read(table))
    report.add(Row(
        "pages", f"{name}, {layout}", right=not wrong,
        note=f"differ after: {', '.join(wrong)}" if wrong else "equal byte by byte",
    ))  # fmt: skip


def _tokens(report: Report, setting: Setting) -> None:
    """Draw from the same logits."""
    count, vocabulary = 40, setting.pick(128_256, 32_000, 1000)
    torch.manual_seed(2)
    logits = torch.randn(count, vocabulary).bfloat16()
    ways: tuple[dict[str, Any], ...] = (
        {}, {"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 1.0, "top_k": 50}, {"temperature": 1.0, "min_p": 0.02},
    )  # fmt: skip
    rows = [
        LogitsRow(SamplingParams(**ways[i % len(ways)]), chance_of(1, 0, i), (i, i + 1))
        for i in range(count)
    ]
    here, there = choose(logits, rows), choose(logits.to(setting.device), rows)
    same = sum(one == other for one, other in zip(here, there, strict=True))
    text = f"{same} of {count} equal"
    name = f"vocabulary of {vocabulary:,}"
    report.add(Row("tokens drawn", name, right=same == count, note=text))
