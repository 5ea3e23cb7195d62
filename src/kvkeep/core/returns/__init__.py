"""When conversations return: learned from the ends of requests, per class, without any settings."""

from __future__ import annotations

from kvkeep.core.returns.answers import AnswerShares, FirstTokens
from kvkeep.core.returns.learner import Ended, Returns, Wait, stop_after
from kvkeep.core.returns.times import AGES, BUCKETS, ReturnTimes, bucket_of

__all__ = [
    "AGES",
    "BUCKETS",
    "AnswerShares",
    "Ended",
    "FirstTokens",
    "ReturnTimes",
    "Returns",
    "Wait",
    "bucket_of",
    "stop_after",
]
