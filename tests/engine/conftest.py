"""Tiny random models of several families, and a bench to run them over pages and alone."""

from __future__ import annotations

import copy
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
import transformers

from kvkeep.core.geometry import KVGeometry
from kvkeep.core.pages.tensors import PagedTensors
from kvkeep.serve.engine import Piece, Runner
from kvkeep.serve.engine.attention.batch import PagedBatch
from kvkeep.serve.engine.attention.dense import Scoring
from kvkeep.serve.engine.attention.memory import KVMemory, Reach

if TYPE_CHECKING:
    from kvkeep.core.cache import Sequence

WINDOW = 9  # smaller than the prompts, and no multiple of a page
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
    """Return a random model of the family, in float32, the same at every call."""
    name, more = FAMILIES[family]
    config = getattr(transformers, name)(**{**_SHAPE, **more, **changes})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model.eval()


@cache
def alone(family: str):
    """The family's model by itself, the same object at every call: nothing may change it."""
    return build(family)


@cache
def following(family: str) -> dict[tuple[int, ...], int]:
    """The token that the family's model puts behind each text that was asked for."""
    return {}


class Bench:
    """A model by itself, and the same model over pages with a cache."""

    def __init__(
        self, family: str, *, page_size: int, num_pages: int, device: str = "cpu", **cache
    ) -> None:
        self.plain = alone(family)
        self._following = following(family)
        paged = copy.deepcopy(self.plain).to(device)
        geometry = KVGeometry.from_config(paged.config, dtype="float32")
        self.runner = Runner(paged, geometry, num_pages=num_pages, page_size=page_size)
        self.spoil()
        self.cache = self.runner.cache(**cache)

    def spoil(self) -> None:
        """Fill all pages: reads of unwritten memory change the result."""
        groups = self.runner.groups
        parts = [self.runner.tensors] if groups is None else [one.tensors for one in groups.parts]
        for tensors in parts:
            for layer in range(tensors.geometry.layers):
                tensors.k(layer).fill_(1e3)
                tensors.v(layer).fill_(1e3)

    def expected(self, tokens) -> torch.Tensor:
        """Logits of all ``tokens`` by the model's own attention, without a cache."""
        ids = torch.from_numpy(np.asarray(tokens, np.int64))[None]
        with torch.inference_mode():
            return self.plain(input_ids=ids, use_cache=False).logits[0]

    def greedy(self, tokens, count: int) -> list[int]:
        """The next ``count`` tokens, each from a forward pass over all tokens before it."""
        text = tuple(map(int, tokens))
        for _ in range(count):
            if text not in self._following:
                self._following[text] = int(self.expected(text)[-1].argmax())
            text += (self._following[text],)
        return [*text[-count:]]

    def assert_greedy(self, tokens, answer, count: int) -> None:
        """``answer`` is what `greedy` gives, by one forward pass over ``tokens`` and ``answer``.

        Each of its tokens is the most likely one behind those before it.
        """
        assert len(answer) == count
        logits = self.expected([*tokens, *answer[:-1]])[-count:]
        assert [*answer] == logits.argmax(-1).tolist()

    def piece(self, sequence: Sequence, start: int) -> Piece:
        """The tokens of ``sequence`` from ``start`` on, all with logits; makes its page copies."""
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
        """The logits and the greedy choices are those of the last tokens of ``sequence``."""
        expected = self.expected(sequence.tokens)[-len(logits) :]
        logits = logits.cpu()
        assert (logits - expected).abs().max() <= 1e-4
        assert torch.equal(logits.argmax(-1), expected.argmax(-1))


class Story:
    """Pieces of sequences with random K and V, whose first tokens are in pages already.

    A span is (start, stop) of a piece, or (start, stop, shared): the sequence's first ``shared``
    tokens are the same in all sequences that share, and lie in the same pages.
    """

    LAYER = 1
    LAYERS = 2

    def __init__(
        self,
        spans,
        *,
        page_size,
        layout="NHD",
        heads=6,
        kv_heads=2,
        dim=8,
        dtype=torch.float32,
        device="cpu",
        seed=7,
    ) -> None:
        self._rng = np.random.default_rng(seed)
        self._random = torch.Generator().manual_seed(seed)
        self.heads, self.kv_heads, self.dim = heads, kv_heads, dim
        spans = [(*span, 0)[:3] for span in spans]
        need = [-(-stop // page_size) for _, stop, _ in spans]
        common = max(shared for *_, shared in spans)
        geometry = KVGeometry(self.LAYERS, kv_heads, dim, str(dtype).removeprefix("torch."))
        self.tensors = PagedTensors(
            geometry, sum(need) + common + 3, page_size, device=device, layout=layout
        )
        self.tensors.k(self.LAYER).fill_(1e4)  # unwritten memory must not change the result
        self.tensors.v(self.LAYER).fill_(1e4)
        self._free = iter(self._rng.permutation(self.tensors.num_pages).astype(np.int32))
        self._shared = (self._take(common // page_size), *self._kv(common))
        self.pieces, self.keys, self.values, self.queries = [], [], [], []
        for start, stop, shared in spans:
            self._add(start, stop, shared // page_size)

    def _take(self, pages: int) -> np.ndarray:
        return np.array([next(self._free) for _ in range(pages)], np.int32)

    def _kv(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._normal(tokens, self.kv_heads), self._normal(tokens, self.kv_heads)

    def _normal(self, tokens: int, heads: int) -> torch.Tensor:
        values = torch.randn(tokens, heads, self.dim, generator=self._random)
        return values.to(self.tensors.device, self.tensors.dtype)

    def _add(self, start: int, stop: int, shared: int) -> None:
        size = self.tensors.page_size
        assert shared * size <= start
        first, keys, values = (part[: shared * size] for part in self._shared)
        pages = np.concatenate((first[:shared], self._take(-(-stop // size) - shared)))
        parts = self._kv(stop - shared * size)
        keys, values = torch.cat((keys, parts[0])), torch.cat((values, parts[1]))
        self.pieces.append(Piece(np.zeros(stop - start, np.int32), start, pages))
        self.keys.append(keys)
        self.values.append(values)
        self.queries.append(self._normal(stop - start, self.heads))
        if start:
            slots = self.tensors.slots(pages, 0, start)
            self.tensors.store(self.LAYER, slots, keys[:start], values[:start])

    def batch(self, **how) -> PagedBatch:
        memory = KVMemory.plain(self.tensors)
        memory.kernels = [how.pop("kernel", None)]
        return PagedBatch(self.pieces, memory, **how)

    def attend(
        self, batch=None, *, window=None, chunked=False, sinks=None, **scoring
    ) -> torch.Tensor:
        starts = [piece.start for piece in self.pieces]
        keys, values = (
            torch.cat([each[at:] for each, at in zip(every, starts, strict=True)])
            for every in (self.keys, self.values)
        )
        part = (self.batch() if batch is None else batch).parts[0]
        part.store(self.LAYER, keys, values)
        return part.attend(
            self.LAYER,
            torch.cat(self.queries),
            keys,
            values,
            reach=Reach(window, chunked),
            scoring=Scoring(sinks=sinks, **scoring),
        )

    def expected(
        self, *, window=None, chunked=False, sinks=None, scale=None, softcap=None
    ) -> torch.Tensor:
        """Plain attention in float64, query by query."""
        group = self.heads // self.kv_heads
        rows = []
        for piece, keys, values, queries in zip(
            self.pieces, self.keys, self.values, self.queries, strict=True
        ):
            whole = [part.double().repeat_interleave(group, 1) for part in (keys, values)]
            for query, position in zip(queries, range(piece.start, piece.stop), strict=True):
                first = 0 if window is None else max(0, position - window + 1)
                if chunked:
                    first = position // window * window
                k, v = (part[first : position + 1] for part in whole)
                scores = torch.einsum("khd,hd->hk", k, query.double())
                scores = scores * (self.dim**-0.5 if scale is None else scale)
                if softcap is not None:
                    scores = torch.tanh(scores / softcap) * softcap
                if sinks is not None:  # a key without a value
                    scores = torch.cat((scores, sinks[:, None].to(scores)), -1)
                weights = scores.softmax(-1)[:, : len(v)]
                rows.append(torch.einsum("hk,khd->hd", weights, v))
        return torch.stack(rows)

    def assert_right(self, out: torch.Tensor, tolerance: float = 1e-5, **how) -> None:
        """``out`` equals the plain attention, to rounding."""
        assert out.shape == (sum(map(len, self.queries)), self.heads, self.dim)
        assert (out.double() - self.expected(**how)).abs().max() <= tolerance


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
    """``make_bench(family, page_size=…, num_pages=…, device="cpu", **of the cache)``.

    The model by itself is on the CPU, whatever the device of the one over pages.
    """
    return Bench


@pytest.fixture(scope="session")
def make_story():
    """``make_story([(start, stop), …], page_size=…)``: random pieces, and attention written out."""
    return Story
