"""Ratio and speed of codecs on blocks, side by side."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvkeep.store.codecs import Codec

__all__ = ["Speed", "measure"]

Span = tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class Speed:
    """One codec on some blocks: raw bytes by encoded bytes, GB/s as (slowest, median, fastest)."""

    codec: str
    ratio: float
    encode: Span
    decode: Span


def measure(
    blocks: Sequence[bytes], codecs: Sequence[tuple[str, Codec | None]], rounds: int
) -> list[Speed]:
    """Time each codec once per round, in turn, after one round of warming up; None is a copy.

    GB/s are raw bytes per second of the calling thread's processor time.
    """
    raws = [memoryview(bytearray(block)) for block in blocks]
    total = sum(map(len, raws))
    most = max(map(len, raws))
    bounds = [codec.bound(most) for _, codec in codecs if codec is not None]
    outs = [memoryview(bytearray(max([most, *bounds]))) for _ in raws]
    backs = [memoryview(bytearray(len(raw))) for raw in raws]
    took: list[tuple[list[float], list[float]]] = [([], []) for _ in codecs]
    stored = [0] * len(codecs)
    for turn in range(rounds + 1):
        for which, (_, codec) in enumerate(codecs):
            started = time.thread_time()
            sizes = [_encode(codec, raw, out) for raw, out in zip(raws, outs, strict=True)]
            between = time.thread_time()
            for out, size, back in zip(outs, sizes, backs, strict=True):
                if codec is None:
                    back[:] = out[:size]
                else:
                    codec.decode(out[:size], back, b"")
            ended = time.thread_time()
            if turn:
                took[which][0].append(between - started)
                took[which][1].append(ended - between)
            stored[which] = sum(sizes)
            if codec is None or codec.exact:
                assert all(back == raw for back, raw in zip(backs, raws, strict=True))
    return [
        Speed(name, total / size, _span(total, encoding), _span(total, decoding))
        for (name, _), (encoding, decoding), size in zip(codecs, took, stored, strict=True)
    ]


def _encode(codec: Codec | None, raw: memoryview, out: memoryview) -> int:
    if codec is not None:
        return codec.encode(raw, out, b"")
    out[: len(raw)] = raw
    return len(raw)


def _span(total: int, seconds: Sequence[float]) -> Span:
    slowest, middle, fastest = max(seconds), statistics.median(seconds), min(seconds)
    return total / slowest / 1e9, total / middle / 1e9, total / fastest / 1e9
