"""Sampled miss-ratio curves: online estimates of the hit rates of caches of other sizes."""

from __future__ import annotations

from kvkeep.core.miss_ratio.curve import MissRatioCurve
from kvkeep.core.miss_ratio.prompts import TIMES, MissRatioPoint, PromptWatch

__all__ = ["TIMES", "MissRatioCurve", "MissRatioPoint", "PromptWatch"]
