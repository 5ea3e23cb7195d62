"""What "first_token" and "decode" share: an engine over the model, with stores that come and go."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch

import waiting_loads
from gpu_parts.figures import needs, short
from gpu_parts.models import make_model, shape_of
from kvkeep.core.cost import CostModel
from kvkeep.serve.engine import Engine, Limits, Runner, SamplingParams
from kvkeep.store import KVStore

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from gpu_parts.figures import Report, Setting
    from kvkeep.serve.engine.request import Completion

    Tokens = npt.NDArray[np.int32]

__all__ = ["PAGE", "Bench"]

PAGE = 16
_ONE = SamplingParams(max_tokens=1)


class Bench:
    """The model over pages; ``tokens`` is what its pool holds."""

    def __init__(self, report: Report, setting: Setting, tokens: int) -> None:
        needs(transformers="the engine", xxhash="the store")
        self._setting = setting
        self.shape = shape_of(setting)
        model = make_model(setting)
        parameters = sum(one.numel() for one in model.parameters())
        geometry = self.shape.geometry
        self.token_bytes = geometry.bytes_per_token
        self.runner = Runner(model, geometry, num_pages=tokens // PAGE + 64, page_size=PAGE)
        self.cost = CostModel()
        self._limits = Limits(step_tokens=setting.pick(8192, 1024, 1024))
        self._rng = np.random.default_rng(5)
        report.note(
            f"A Llama of {short(parameters / 1e6)} million random weights in {self.shape.dtype}: "
            f"{geometry.layers} layers, {geometry.kv_heads} KV heads of {geometry.head_dim}, "
            f"{short(geometry.bytes_per_token / 1024)} KiB of KV a token, pages of {PAGE} tokens. "
            f"Passes of up to {self._limits.step_tokens:,} tokens."
        )

    def prompt(self, tokens: int) -> Tokens:
        """Return a prompt that was never asked."""
        return self._rng.integers(0, self.shape.vocab_size, tokens, dtype=np.int32)

    def store(self, tokens: int) -> KVStore:
        """Return a store with empty memory for ``tokens``, above the disk of all such stores."""
        memory = int(tokens * self.token_bytes * 1.25) + (64 << 20)
        disk = f"file://{self._setting.folder}/kv?size=64GiB"
        return KVStore(
            self.runner.geometry, model="proof@1", tiers=[f"memory://{memory}", disk],
            cost=self.cost,
        )  # fmt: skip

    @contextmanager
    def engine(self, store: KVStore | None = None, *, load_all: bool = False) -> Iterator[Engine]:
        """An engine with an empty pool; at the end all of its KV is handed to the store.

        With ``load_all`` it waits for loads, whatever computing would take.
        """
        engine = Engine(
            self.runner, self.runner.cache(), store=store, load_timeout=60.0, limits=self._limits
        )
        if load_all:
            assert engine._offload is not None
            engine._offload._planner.choose_load = waiting_loads.load_all
        try:
            yield engine
        finally:
            engine.close(60)

    def first_token(self, engine: Engine, prompt: Tokens) -> Completion:
        """Answer with one token."""
        (done,) = engine.generate([prompt], _ONE)
        if self._setting.on_gpu:
            torch.cuda.synchronize()
        return done

    def keep(self, store: KVStore, prompt: Tokens) -> torch.Tensor:
        """Compute and store a prompt; return the bytes of its pages, on the device.

        A prompt that is computed faster than it is stored is asked again from the pool.
        """
        with self.engine(store) as engine:
            for _ in range(5):
                self.first_token(engine, prompt)
                assert engine._offload is not None
                engine._offload._mover.flush(30)
                if store.lookup(prompt).tokens == len(prompt):
                    break
            pages = self.pages(engine, prompt)
        store.flush(60)
        return pages

    def pages(self, engine: Engine, prompt: Tokens) -> torch.Tensor:
        """Return the bytes of a prompt's full pages in the pool, on the device."""
        with engine.cache.open(prompt) as sequence:
            return self.runner.tensors.read(sequence.pages[: sequence.num_cached // PAGE])
