"""The contenders of `engine.py`: kvkeep's engine, and those of Transformers on the same model.

Each contender takes prompts and how many tokens each is to get, and returns the greedy tokens. All
compute in float32 with attention from the same library, and none has seen a prompt before.
"""

from __future__ import annotations

import logging
import os
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from kvkeep.core.cache import PagedCache
from kvkeep.serve.engine import Engine, Limits, Runner, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kvkeep.serve.engine import Piece

__all__ = [
    "Contender", "Generate", "GenerateBatch", "GenerateOnPrefix", "Ours", "TimedRunner", "Tokens",
    "Work", "load_plain", "save_model",
]  # fmt: skip

Tokens = npt.NDArray[np.int32]
Answers = list[tuple[int, ...]]

POOL_TOKENS = 32_768
PAGE = 16
VOCABULARY = 32_000

_GROUPED = "TRANSFORMERS_SDPA_FORCE_GQA"


class Work:
    """Prompts, and the number of tokens to generate; ``prefix`` tokens are common to all."""

    def __init__(self, prompts: Sequence[Tokens], outputs: Sequence[int], prefix: int = 0) -> None:
        self.prompts = list(prompts)
        self.outputs = list(outputs)
        self.prefix = prefix

    @property
    def tokens(self) -> int:
        """The number of tokens to generate."""
        return sum(self.outputs)


class Contender(Protocol):
    """A generator under test."""

    name: str

    def run(self, work: Work) -> Answers:
        """Return the greedy tokens for each prompt, as many as requested."""
        ...

    def rest(self) -> None:
        """End background threads, so that the next contender has the machine."""


def save_model(path: Path, seed: int) -> int:
    """Save a Llama of random weights to ``path``; returns its number of parameters."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=768,
            num_hidden_layers=12,
            num_attention_heads=12,
            num_key_value_heads=4,
            intermediate_size=2048,
            vocab_size=VOCABULARY,
            tie_word_embeddings=True,
            max_position_embeddings=4096,
            bos_token_id=None,
            eos_token_id=None,
        )
    )
    model.save_pretrained(path)
    return int(model.num_parameters())


def load_plain(path: Path) -> Any:
    """Load the model for Transformers."""
    model: Any = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="sdpa"
    )
    return model.eval()


class TimedRunner(Runner):
    """A runner that sums the seconds of its forward passes."""

    seconds = 0.0

    def forward(self, pieces: Sequence[Piece]) -> torch.Tensor:
        """See `Runner.forward`."""
        start = perf_counter()
        logits = super().forward(pieces)
        self.seconds += perf_counter() - start
        return logits


class Ours:
    """kvkeep's engine; its cache is empty at the start of each run."""

    name = "kvkeep"

    def __init__(self, path: Path, **limits: int) -> None:
        runner = TimedRunner.load(path, num_pages=POOL_TOKENS // PAGE, page_size=PAGE)
        assert isinstance(runner, TimedRunner)
        self.runner = runner
        self.cache = PagedCache(self.runner.num_pages, PAGE)
        self.engine = Engine(self.runner, self.cache, limits=Limits(**limits))

    def run(self, work: Work) -> Answers:
        """See `Contender`."""
        self.cache.clear()
        return self.answers(work)

    def rest(self) -> None:
        """No background threads."""

    def answers(self, work: Work) -> Answers:
        """Like `run`, without emptying the cache."""
        params = [SamplingParams(max_tokens=count, ignore_eos=True) for count in work.outputs]
        return [done.tokens for done in self.engine.generate(work.prompts, params)]


class Generate:
    """Plain ``generate``: prompts padded on the left, each batch as long as its longest answer.

    It cannot let one request end before the others, so requests of like lengths go together, in
    ``batches`` of them; what is generated beyond what was asked for does not count. With a static
    cache, which was 1.02 to 1.15 times as fast here as a dynamic one.
    """

    def __init__(self, model: Any, batches: int) -> None:
        self.name = "generate" if batches == 1 else f"generate, in {batches} sorted batches"
        self._model = model
        self._batches = batches

    def run(self, work: Work) -> Answers:
        """See `Contender`."""
        order = sorted(range(len(work.prompts)), key=work.outputs.__getitem__)
        done: dict[int, tuple[int, ...]] = {}
        for batch in np.array_split(np.array(order), self._batches):
            ids, mask = padded([work.prompts[i] for i in batch])
            longest = max(work.outputs[i] for i in batch)
            rows = greedy(self._model, ids, mask, longest, cache="static")
            done.update(
                {i: tuple(row[: work.outputs[i]]) for i, row in zip(batch, rows, strict=True)}
            )
        return [done[i] for i in range(len(work.prompts))]

    def rest(self) -> None:
        """No background threads."""


class GenerateOnPrefix:
    """``generate`` by someone who knows the shared prefix and takes care of it by hand.

    It is computed once, its cache repeated for every prompt, and handed to ``generate``.
    """

    name = "generate, prefix handed over by hand"

    def __init__(self, model: Any) -> None:
        self._model = model

    def run(self, work: Work) -> Answers:
        """See `Contender`."""
        count, prefix = len(work.prompts), work.prefix
        shared = torch.from_numpy(work.prompts[0][:prefix].astype(np.int64))[None]
        cache = DynamicCache(config=self._model.config)
        with torch.inference_mode():
            self._model(shared, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache.batch_repeat_interleave(count)
        ids, mask = padded([prompt[prefix:] for prompt in work.prompts])
        ids = torch.cat((shared.expand(count, -1), ids), 1)
        mask = torch.cat((torch.ones(count, prefix, dtype=torch.long), mask), 1)
        rows = greedy(self._model, ids, mask, max(work.outputs), past_key_values=cache)
        return [tuple(row[:n]) for row, n in zip(rows, work.outputs, strict=True)]

    def rest(self) -> None:
        """No background threads."""


class GenerateBatch:
    """Transformers' continuous batching, with block sharing on, as `generate_batch` runs it.

    Driven through its manager, since `generate_batch` gives all requests one length. It is set up
    at the first run after a rest, which should be one to warm up. Without flash attention there
    are ``sdpa`` and ``paged|eager``; the first was about twice as fast when it was tried here.

    All queries of a step attend to all keys of the step under one mask, so that its cost grows
    with the square of the requests ``at_once``. Pages of 256 tokens and steps of 256
    or 1,024 were no faster here than those of 32 and 512.
    """

    def __init__(self, model: Any, *, at_once: int, step_tokens: int = 512, page: int = 32) -> None:
        # It would report psutil as missing, which it needs only to size what is sized here.
        logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)
        self.name = f"generate_batch, {at_once} at once"
        self._model = model
        self._config = ContinuousBatchingConfig(
            page_size=page,
            num_blocks=POOL_TOKENS // page,
            max_batch_tokens=step_tokens,
            max_requests_per_batch=at_once,
            allow_block_sharing=True,
        )
        self._manager: Any = None

    def run(self, work: Work) -> Answers:
        """See `Contender`."""
        # Under a mask, heads would be repeated for each query head; this way it is up to 1.6 times
        # as fast here, and Transformers asks for it at each call.
        os.environ[_GROUPED] = "1"
        if self._manager is None:
            self._manager = self._model.init_continuous_batching(
                generation_config=_greedy_config(eos_token_id=-1),
                continuous_batching_config=self._config,
            )
            self._manager.start()
        try:
            return self._run(work)
        finally:
            del os.environ[_GROUPED]

    def _run(self, work: Work) -> Answers:
        ids = [
            self._manager.add_request(prompt.tolist(), max_new_tokens=count)
            for prompt, count in zip(work.prompts, work.outputs, strict=True)
        ]
        done: dict[str, tuple[int, ...]] = {}
        while len(done) < len(ids):
            result = self._manager.get_result(timeout=1)
            if result is not None:
                assert result.error is None, result.error
                done[result.request_id] = tuple(result.generated_tokens)
            assert self._manager.is_running(), "the thread of generate_batch has ended"
        return [done[one] for one in ids]

    def rest(self) -> None:
        """End the background thread."""
        self._manager.stop(block=True)
        self._manager = None


def padded(prompts: Sequence[Tokens]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return prompts as one batch, padded on the left, and its mask."""
    width = max(map(len, prompts))
    ids = torch.zeros(len(prompts), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.from_numpy(prompt.astype(np.int64))
        mask[row, width - len(prompt) :] = 1
    return ids, mask


def greedy(
    model: Any,
    ids: torch.Tensor,
    mask: torch.Tensor,
    count: int,
    *,
    cache: str | None = None,
    **more: object,
) -> list[list[int]]:
    """``generate`` with a ``cache`` of that kind; the new tokens alone. ``more`` is passed on."""
    config = _greedy_config(
        eos_token_id=None, pad_token_id=0, max_new_tokens=count, cache_implementation=cache
    )
    with torch.inference_mode():
        out = model.generate(input_ids=ids, attention_mask=mask, generation_config=config, **more)
    rows: list[list[int]] = out[:, ids.shape[1] :].tolist()
    return rows


def _greedy_config(**settings: object) -> Any:
    return GenerationConfig(do_sample=False, **settings)  # type: ignore[no-untyped-call]
