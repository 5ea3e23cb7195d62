"""A small engine: Transformers causal models whose attention reads and writes kvkeep's pages.

A request's way from `Engine.add` to its tokens:

    engine.py       `add` checks the request (checks.py) and queues it; `step` runs one step
    request.py      a prompt with its parameters · answer.py: one sequence it generates
    scheduler.py    admits waiting answers by opening sequences of the `PagedCache`; preempts the
                    youngest when pages run out; cuts prompts into chunks (limits.py: how many)
    offload/        while an answer waits: prefetches from a store; while it runs: loads and writes
    step.py         copies pages, computes the chunks, publishes full pages, chooses tokens
    runner.py       the model and its pages: one forward pass over all chunks as one row of tokens
    attention/      stores K and V of new tokens in pages, and attends over page tables
    sampling.py     a token for each row of logits · logprobs.py
    drafts.py       guessed tokens, verified in the same pass
    text.py         tokens to text, up to a stop text
    results.py      `Delta` for each step of an answer; `Completion` at the end

Also: params.py, stats.py; observe.py: events for observers; loading.py: models from files;
probe.py: checks that a model computes the same over pages; linear.py: faster layers on CPUs.
"""

from __future__ import annotations

from kvkeep.core.errors import require

require("torch", "transformers")  # before the imports below: its error names the missing extra

from kvkeep.serve.engine.attention.batch import Piece  # noqa: E402
from kvkeep.serve.engine.engine import Engine  # noqa: E402
from kvkeep.serve.engine.limits import Limits  # noqa: E402
from kvkeep.serve.engine.logprobs import TokenLogprob  # noqa: E402
from kvkeep.serve.engine.params import SamplingParams  # noqa: E402
from kvkeep.serve.engine.request import Request  # noqa: E402
from kvkeep.serve.engine.results import Choice, Completion, Delta  # noqa: E402
from kvkeep.serve.engine.runner import Runner  # noqa: E402
from kvkeep.serve.engine.stats import EngineStats  # noqa: E402
from kvkeep.serve.engine.text import Tokenizer  # noqa: E402

__all__ = [
    "Choice", "Completion", "Delta", "Engine", "EngineStats", "Limits",
    "Piece", "Request", "Runner", "SamplingParams", "TokenLogprob", "Tokenizer",
]  # fmt: skip
