"""A small engine: Transformers causal models whose attention reads and writes kvkeep's pages."""

from __future__ import annotations

from kvkeep.core.errors import require

require("torch", "transformers")  # all of this room needs it: say which extra brings it

from kvkeep.serve.engine.attention.batch import Piece  # noqa: E402 - torch was asked for politely first
from kvkeep.serve.engine.engine import Engine  # noqa: E402
from kvkeep.serve.engine.logprobs import TokenLogprob  # noqa: E402
from kvkeep.serve.engine.params import SamplingParams  # noqa: E402
from kvkeep.serve.engine.request import Choice, Completion, Delta, Request  # noqa: E402
from kvkeep.serve.engine.runner import Runner  # noqa: E402
from kvkeep.serve.engine.scheduler import Limits  # noqa: E402
from kvkeep.serve.engine.stats import EngineStats  # noqa: E402
from kvkeep.serve.engine.text import Tokenizer  # noqa: E402

__all__ = [
    "Choice", "Completion", "Delta", "Engine", "EngineStats", "Limits",
    "Piece", "Request", "Runner", "SamplingParams", "TokenLogprob", "Tokenizer",
]  # fmt: skip
