"""What codecs do to a model: bytes, speed, and the change of what it says next.

probe.py      reuses a model's KV as a codec returns it, and compares what the model says next
speed.py      ratio and speed of one codec on blocks
bits.py       which part of a model's KV needs how many bits
"""

from __future__ import annotations

from kvkeep.bench.codecs.bits import allocate, sensitivities
from kvkeep.bench.codecs.probe import Changed, ReuseProbe
from kvkeep.bench.codecs.speed import Speed, measure

__all__ = ["Changed", "ReuseProbe", "Speed", "allocate", "measure", "sensitivities"]
