"""Which part of a model's KV needs how many bits: sensitivities, and the bits that fit them.

Divergences of small errors add up, and each bit less makes the error of a part four times as
large. So parts are measured one at a time, and bits go where they lower the sum most.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvkeep.store.codecs import make_codec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvkeep.bench.codecs.probe import ReuseProbe

__all__ = ["BITS", "allocate", "sensitivities"]

BITS = (2, 3, 4, 5, 6, 8)
"""Bits that `int4` can give to a part."""


def sensitivities(
    probe: ReuseProbe, depth: int | None = None, bits: Sequence[int] = BITS
) -> list[dict[int, float]]:
    """Return the nats of each part's error alone, by the bits it is quantised to.

    Cost: a forward pass of the probe for each part and number of bits.
    """
    depth = depth or probe.deepest
    found: list[dict[int, float]] = [{} for _ in probe.shape.parts]
    exact = [part[:, :, :depth] for pair in probe.kv for part in pair]
    for each in bits:
        lossy = probe.through(make_codec(f"int4:{each}", probe.shape), depth)
        parts = [part for pair in lossy for part in pair]
        for number, part in enumerate(parts):
            mixed = [*exact[:number], part, *exact[number + 1 :]]
            kv = list(zip(mixed[::2], mixed[1::2], strict=True))
            found[number][each] = max(0.0, probe.nats_of(kv, depth))
    return found


def allocate(
    nats: Sequence[Mapping[int, float]], sizes: Sequence[int], bits_a_number: float
) -> str:
    """Return the setting of `int4` with the least sum of ``nats`` within ``bits_a_number``.

    ``nats`` has the divergence of each part by its bits, ``sizes`` the numbers of each part in a
    token; ``bits_a_number`` is the mean over all numbers. Greedy: the bit that gains most for its
    size comes next. Pure.
    """
    steps = [sorted(each) for each in nats]
    chosen = [0] * len(nats)
    left = bits_a_number * sum(sizes) - sum(
        size * step[0] for size, step in zip(sizes, steps, strict=True)
    )
    while True:
        best, to, gain = -1, 0, 0.0
        for part, (step, at, size) in enumerate(zip(steps, chosen, sizes, strict=True)):
            for more in range(at + 1, len(step)):
                cost = (step[more] - step[at]) * size
                worth = (nats[part][step[at]] - nats[part][step[more]]) / cost
                if cost <= left and worth > gain:
                    best, to, gain = part, more, worth
        if best < 0:
            return "".join(str(step[at]) for step, at in zip(steps, chosen, strict=True))
        left -= (steps[best][to] - steps[best][chosen[best]]) * sizes[best]
        chosen[best] = to
