"""What a cache of another size would do, from what this one is asked for: sampled, online."""

from __future__ import annotations

from kvkeep.core.miss_ratio.curve import MissRatioCurve
from kvkeep.core.miss_ratio.prompts import TIMES, MissRatioPoint, PromptWatch

__all__ = ["TIMES", "MissRatioCurve", "MissRatioPoint", "PromptWatch"]
