"""Part "attention": over pages, beside torch's own and FlashAttention over contiguous K and V.

One layer of the model, with tables and masks made before: the layers of a pass share them. What an
attention over pages computes is compared with torch's own in float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from gpu_parts.figures import Clock, Row, ratios
from gpu_parts.models import shape_of
from kvkeep.core.geometry import KVGeometry
from kvkeep.core.pages.tensors import PagedTensors
from kvkeep.serve.engine import Piece
from kvkeep.serve.engine.attention import flash
from kvkeep.serve.engine.attention.batch import PagedBatch
from kvkeep.serve.engine.attention.dense import Scoring
from kvkeep.serve.engine.attention.memory import EVERYTHING, KVMemory

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpu_parts.figures import Report, Setting

__all__ = ["run"]

_PLAIN = "torch's own, contiguous"


@dataclass(frozen=True, slots=True)
class _Case:
    """``sequences`` that each have ``cached`` tokens and compute ``new`` ones."""

    name: str
    sequences: int
    cached: int
    new: int


def run(report: Report, setting: Setting) -> None:
    """Measure decoding, a prompt, and the rest of a prompt whose beginning is cached."""
    pick = setting.pick
    cases = [
        _Case("decode", pick(16, 8, 2), pick(4096, 512, 40), 1),
        _Case("decode", pick(64, 16, 3), pick(1024, 128, 24), 1),
        _Case("a prompt", 1, 0, pick(4096, 512, 40)),
        _Case("the rest of a prompt", 1, pick(8192, 1024, 64), pick(1024, 128, 20)),
    ]
    names = {"flash_attn": "FlashAttention 2", "flash_attn_interface": "FlashAttention 3"}
    for module, name in names.items():
        if find_spec(module) is None:
            report.skip(f"{name}: {module} is not installed")
    for case in cases:
        _measure(report, setting, case)


class _Filled:
    """K, V and queries of a case, contiguous in torch's order [sequences, heads, tokens, dim]."""

    def __init__(self, setting: Setting, case: _Case) -> None:
        self.case = case
        shape = shape_of(setting)
        self.dtype = getattr(torch, shape.dtype)
        self.shape = shape
        self.device = setting.device
        torch.manual_seed(3)
        stop = case.cached + case.new
        self.key, self.value = (self._random(shape.num_key_value_heads, stop) for _ in range(2))
        self.query = self._random(shape.num_attention_heads, case.new)

    def _random(self, heads: int, tokens: int) -> torch.Tensor:
        shape = (self.case.sequences, heads, tokens, self.shape.head_dim)
        return torch.randn(shape, dtype=self.dtype, device=self.device)

    def rows(self, tensor: torch.Tensor, first: int = 0) -> torch.Tensor:
        """Return tokens from ``first`` on as the engine has them: [T, heads, dim]."""
        return tensor[:, :, first:].transpose(1, 2).flatten(0, 1).contiguous()

    def plain(self) -> torch.Tensor:
        """Attend with torch's own; the last query sees the last key."""
        case = self.case
        how: dict[str, Any] = {}
        if case.new > 1 and case.cached:
            how = {"attn_mask": causal_lower_right(case.new, case.cached + case.new)}
        elif case.new > 1:
            how = {"is_causal": True}
        return scaled_dot_product_attention(
            self.query, self.key, self.value, enable_gqa=True, **how
        )

    def wanted(self) -> torch.Tensor:
        """Return what is right, [T, heads, dim], written out in float32."""
        case, group = self.case, self.query.shape[1] // self.key.shape[1]
        key, value = (part.float().repeat_interleave(group, 1) for part in (self.key, self.value))
        scores = self.query.float() @ key.transpose(2, 3) * self.shape.head_dim**-0.5
        seen = torch.ones(scores.shape[2:], dtype=torch.bool, device=self.device)
        weights = scores.masked_fill_(~seen.tril(case.cached), float("-inf")).softmax(-1)
        return self.rows(weights @ value)

    def over_pages(self, page_size: int, *, kernel: bool) -> Callable[[], torch.Tensor] | None:
        """Return attention over scattered pages; None if no kernel takes pages of this size."""
        case, shape = self.case, self.shape
        stop = case.cached + case.new
        pages = -(-stop // page_size)
        geometry = KVGeometry(1, shape.num_key_value_heads, shape.head_dim, shape.dtype)
        tensors = PagedTensors(
            geometry, case.sequences * pages + 1, page_size, device=self.device, check_ids=False
        )
        memory = KVMemory.plain(tensors)
        if not kernel:
            memory.kernels = [None]
        elif flash.find(tensors) is None:
            return None
        order = np.random.default_rng(4).permutation(case.sequences * pages).astype(np.int32) + 1
        tables = order.reshape(case.sequences, pages)
        for number, table in enumerate(tables):
            slots = tensors.slots(table, 0, stop)
            tensors.store(
                0, slots, *(one[number].transpose(0, 1) for one in (self.key, self.value))
            )
        new = np.zeros(case.new, np.int32)
        batch = PagedBatch([Piece(new, case.cached, table) for table in tables], memory)
        query, key, value = (
            self.rows(one, first)
            for one, first in ((self.query, 0), (self.key, case.cached), (self.value, case.cached))
        )

        def attend() -> torch.Tensor:
            with torch.inference_mode():
                return batch.parts[0].attend(
                    0, query, key, value, reach=EVERYTHING, scoring=Scoring()
                )

        return attend


def _measure(report: Report, setting: Setting, case: _Case) -> None:
    """Let all that is installed take turns over one case."""
    filled = _Filled(setting, case)
    label = f"{case.name}: {case.new:,} behind {case.cached:,}"
    if case.sequences > 1:
        label = f"{case.name}: {case.sequences} sequences, 1 behind {case.cached:,}"
    ways: dict[str, Callable[[], torch.Tensor]] = {_PLAIN: filled.plain}
    gathered = filled.over_pages(16, kernel=False)
    assert gathered is not None
    ways["over pages of 16, gathered"] = gathered
    for size in (16, 256):
        found = filled.over_pages(size, kernel=True)
        if found is not None:
            ways[f"over pages of {size}, FlashAttention"] = found
    name, contiguous = _flash(filled)
    if contiguous is not None:
        ways[f"{name}, contiguous"] = contiguous
    wanted = filled.wanted()
    errors: dict[str, float] = {}
    for way, call in list(ways.items()):
        try:
            out = call()
        except (RuntimeError, TypeError) as error:  # of a kernel: the others go on
            report.skip(f"{label}, {way}: {' '.join(str(error).split())[:200]}")
            del ways[way]
            continue
        got = filled.rows(out) if way == _PLAIN else out.reshape(wanted.shape)
        errors[way] = (got.float() - wanted).abs().max().item()
    if not ways:
        return
    first, *_ = ways
    taken = Clock(setting.device).turns(ways, setting.pick(30, 9, 2))
    limit = 1e-4 if filled.dtype == torch.float32 else 3e-2
    for way, seconds in taken.items():
        report.add(Row(
            label, way, "ms", tuple(one * 1e3 for one in seconds),
            () if way == first else ratios(seconds, taken[first]),
            right=errors[way] <= limit, note=f"largest error {errors[way]:.1e}",
        ))  # fmt: skip


def _flash(filled: _Filled) -> tuple[str, Callable[[], torch.Tensor] | None]:
    """Return what FlashAttention is installed, over contiguous K and V."""
    if filled.device.type != "cuda" or filled.dtype == torch.float32:
        return "", None
    major, _ = torch.cuda.get_device_capability(filled.device)
    kinds = (
        ("flash_attn_interface", "FlashAttention 3", 9),
        ("flash_attn", "FlashAttention 2", 8),
    )
    for module, name, least in kinds:
        if major >= least and find_spec(module) is not None:
            return name, partial(_contiguous, import_module(module).flash_attn_func, filled)
    return "", None


def _contiguous(function: Callable[..., Any], filled: _Filled) -> torch.Tensor:
    """Attend over [sequences, tokens, heads, dim], views of K and V."""
    parts = (one.transpose(1, 2) for one in (filled.query, filled.key, filled.value))
    out: Any = function(*parts, causal=True)
    got: torch.Tensor = out[0] if isinstance(out, tuple) else out
    return got
