"""A small engine: Transformers causal models whose attention reads and writes kvkeep's pages.

A request's way from `Engine.add` to its tokens:

    engine.py       `add` checks the request and queues it; `step` runs one step
    request.py      a prompt with its parameters, the answers it generates, what comes back
    scheduler.py    admits waiting answers by opening sequences of the `PagedCache`; preempts the
                    youngest when pages run out; cuts prompts into chunks (params.py: how many)
    offload/        while an answer waits: prefetches from a store; while it runs: loads and writes
    step.py         copies pages, computes the chunks, publishes full pages, chooses tokens
    runner.py       the model and its pages: one forward pass over all chunks as one row of tokens
    attention/      stores K and V of new tokens in pages, and attends over page tables
    sampling.py     a token for each row of logits, and its log-probabilities
    text.py         tokens to text, up to a stop text

Also: params.py, stats.py; loading.py: models from files, and
faster layers on CPUs; probe.py: checks that a model computes the same over pages.
"""

from __future__ import annotations

from kvkeep.core.errors import require

require("torch", "transformers")  # before the imports below: its error names the missing extra

from kvkeep.serve.engine.attention.batch import Piece  # noqa: E402
from kvkeep.serve.engine.engine import Engine  # noqa: E402
from kvkeep.serve.engine.params import Limits, SamplingParams  # noqa: E402
from kvkeep.serve.engine.request import (  # noqa: E402
    Choice,
    Completion,
    Delta,
    Request,
)
from kvkeep.serve.engine.runner import Runner  # noqa: E402
from kvkeep.serve.engine.sampling import TokenLogprob  # noqa: E402
from kvkeep.serve.engine.stats import EngineStats  # noqa: E402
from kvkeep.serve.engine.text import Tokenizer  # noqa: E402

__all__ = [
    "Choice", "Completion", "Delta", "Engine", "EngineStats", "Limits", "Piece", "Request",
    "Runner", "SamplingParams", "TokenLogprob", "Tokenizer",
]  # fmt: skip
