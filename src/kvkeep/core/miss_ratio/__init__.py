"""Sampled miss-ratio curves: what a cache of another size would reuse, estimated online."""

from __future__ import annotations

from kvkeep.core.miss_ratio.curve import MissRatioCurve
from kvkeep.core.miss_ratio.prompts import TIMES, MissRatioPoint, PromptWatch

__all__ = ["TIMES", "MissRatioCurve", "MissRatioPoint", "PromptWatch"]
