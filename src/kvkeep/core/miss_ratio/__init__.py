"""What a cache of another size would do, from what this one is asked for: sampled, online."""

from __future__ import annotations

from kvkeep.core.miss_ratio.curve import MissRatioCurve
from kvkeep.core.miss_ratio.prompts import TIMES, MemoryPoint, PromptWatch

__all__ = ["TIMES", "MemoryPoint", "MissRatioCurve", "PromptWatch"]
