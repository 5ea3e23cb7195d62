"""A small engine: Transformers causal models whose attention reads and writes kvkeep's pages."""

from __future__ import annotations

from kvkeep.errors import require

require("torch", "transformers")  # all of this room needs it: say which extra brings it

from kvkeep.engine.batch import Piece  # noqa: E402 - torch was asked for politely first
from kvkeep.engine.generate import Engine  # noqa: E402
from kvkeep.engine.request import Completion, Delta  # noqa: E402
from kvkeep.engine.runner import Runner  # noqa: E402
from kvkeep.engine.sampling import SamplingParams  # noqa: E402
from kvkeep.engine.text import Tokenizer  # noqa: E402

__all__ = ["Completion", "Delta", "Engine", "Piece", "Runner", "SamplingParams", "Tokenizer"]
