"""Tiny random models of several families, and a bench to run them on pages against themselves."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
import transformers

from kvkeep.cache import PagedCache
from kvkeep.engine import Piece, Runner
from kvkeep.geometry import KVGeometry

if TYPE_CHECKING:
    from kvkeep.cache import Sequence

WINDOW = 9  # smaller than the prompts, no multiple of a page
VOCABULARY = 160

_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,  # large, so that one wrong byte of KV shows in the logits
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}

FAMILIES = {
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {}),
    "mistral": ("MistralConfig", {"sliding_window": WINDOW}),
    "gemma2": ("Gemma2Config", {"sliding_window": WINDOW, "query_pre_attn_scalar": 16}),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 16,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}


def build(family: str, **changes):
    """A random model of the family, in float32, the same at every call."""
    name, more = FAMILIES[family]
    config = getattr(transformers, name)(**{**_SHAPE, **more, **changes})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model.eval()


class Bench:
    """A model by itself, and the same model over pages with a cache."""

    def __init__(self, family: str, *, page_size: int, num_pages: int, **cache) -> None:
        self.plain = build(family)
        paged = copy.deepcopy(self.plain)
        geometry = KVGeometry.from_config(paged.config, dtype="float32")
        self.runner = Runner(paged, geometry, num_pages=num_pages, page_size=page_size)
        # Whatever is read without having been written shows.
        for layer in range(geometry.layers):
            self.runner.tensors.k(layer).fill_(1e3)
            self.runner.tensors.v(layer).fill_(1e3)
        self.cache = PagedCache(num_pages, page_size, **cache)

    def expected(self, tokens) -> torch.Tensor:
        """Logits of all ``tokens`` by the model's own attention, with no cache at all."""
        ids = torch.from_numpy(np.asarray(tokens, np.int64))[None]
        with torch.inference_mode():
            return self.plain(input_ids=ids, use_cache=False).logits[0]

    def greedy(self, tokens, count: int) -> list[int]:
        """The next ``count`` tokens, each from a forward pass over everything before it."""
        tokens = list(tokens)
        for _ in range(count):
            tokens.append(int(self.expected(tokens)[-1].argmax()))
        return tokens[-count:]

    def piece(self, sequence: Sequence, start: int) -> Piece:
        """The tokens of ``sequence`` from ``start`` on, all logits wanted, its copies made."""
        self.runner.copy(sequence.copies())
        tokens = sequence.tokens[start:].copy()
        return Piece(tokens, start, sequence.pages.copy(), len(tokens))

    def compute(self, sequence: Sequence, start: int | None = None) -> torch.Tensor:
        """Compute ``sequence`` from ``start`` (default: what is not cached) and publish it.

        Returns the logits of all computed tokens.
        """
        start = sequence.num_cached if start is None else start
        logits = self.runner.forward([self.piece(sequence, start)])
        sequence.publish()
        return logits

    def keep(self, tokens) -> None:
        """Compute ``tokens`` and leave them in the cache."""
        with self.cache.open(tokens) as sequence:
            self.compute(sequence)

    def assert_right(self, sequence: Sequence, logits: torch.Tensor) -> None:
        """The logits are those of the last tokens of ``sequence``, and the greedy choice too."""
        expected = self.expected(sequence.tokens)[-len(logits) :]
        assert (logits - expected).abs().max() <= 1e-4
        assert torch.equal(logits.argmax(-1), expected.argmax(-1))


def random_tokens(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCABULARY, count, dtype=np.int32)


@pytest.fixture(scope="session")
def prompt():
    """``prompt(count, seed)``: random tokens."""
    return random_tokens


@pytest.fixture(scope="session")
def make_model():
    """``make_model(family, **changes of its configuration)``."""
    return build


@pytest.fixture(scope="session")
def make_bench():
    """``make_bench(family, page_size=…, num_pages=…, **of the cache)``."""
    return Bench
