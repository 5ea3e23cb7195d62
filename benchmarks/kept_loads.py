"""The first token of a Transformers model, with its KV in a tier of some bandwidth.

One text, a random Llama in float32 on one CPU core, and a tier that moves so many bytes a second.
Side by side in each round: the model alone, kvkeep loading all that is stored, and kvkeep loading
what pays while it computes. Ratios are of one round; shown are their medians.

    python benchmarks/kept_loads.py                  # about three minutes
    python benchmarks/kept_loads.py --rounds 3 --tokens 1024 --mbps 5 50
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from kvkeep.integrations.transformers import KeptModel, revision_of
from kvkeep.integrations.transformers_model import geometry_of
from kvkeep.store import KVStore
from kvkeep.store.backends.memory import MemoryBackend
from kvkeep.store.tiers import PassThrough

if TYPE_CHECKING:
    from kvkeep.store.backends.base import Room

VOCABULARY = 4096


class Throttled(MemoryBackend):
    """Memory behind a link that moves ``bytes_per_s``, one read at a time."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.bytes_per_s = float("inf")
        self._link = threading.Lock()

    def get(self, block: bytes, room: Room) -> memoryview | None:
        """As memory does, later."""
        (size,) = self.sizes([block])
        with self._link:
            time.sleep((size or 0) / self.bytes_per_s)
        return super().get(block, room)


def build(layers: int, width: int) -> Any:
    """Build a Llama with seeded random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=width, intermediate_size=3 * width,
        num_hidden_layers=layers, num_attention_heads=8, num_key_value_heads=4,
        max_position_embeddings=8192, bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    return model.eval()


class Bench:
    """One model with a store whose tier is throttled."""

    def __init__(self, layers: int, width: int, tokens: int) -> None:
        self.model = build(layers, width)
        self.link = Throttled(1 << 30)
        geometry = geometry_of(self.model)
        self.store = KVStore(
            geometry, model="random", revision=revision_of(self.model), layout="HND",
            block_tokens=64, tiers=["memory://256MiB?touch=yes", self.link], policy=PassThrough(),
        )  # fmt: skip
        self.bytes = tokens * geometry.bytes_per_token
        random = torch.Generator().manual_seed(1)
        self.text = torch.randint(1, VOCABULARY, (1, tokens), generator=random)
        with KeptModel(self.model, store=self.store, loading="all") as kept:
            kept.generate(self.text, max_new_tokens=1)
        self.store.flush()
        self.ways = {
            "load all": KeptModel(self.model, store=self.store, loading="all"),
            "what pays": KeptModel(self.model, store=self.store),
        }

    def seconds(self, way: str) -> tuple[float, int]:
        """Return the seconds to the first token, and the tokens loaded."""
        memory = self.store._tiered.memory
        memory.remove(list(memory.catalogue.blocks()))  # type: ignore[attr-defined]
        begun = time.perf_counter()
        if way == "alone":
            self.model.generate(self.text, max_new_tokens=1)
            return time.perf_counter() - begun, 0
        kept = self.ways[way]
        kept.generate(self.text, max_new_tokens=1)
        assert kept.last is not None
        return time.perf_counter() - begun, kept.last.loaded


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--mbps", type=float, nargs="*", help="megabytes a second")
    options = parser.parse_args()
    torch.set_num_threads(1)
    bench = Bench(options.layers, options.width, options.tokens)
    print(f"{options.tokens} tokens, {bench.bytes / 1e6:.1f} MB of KV; seconds to the first token")
    ways = ("alone", "load all", "what pays")
    for way in ways * 2:
        bench.seconds(way)
    alone = statistics.median(bench.seconds("alone")[0] for _ in range(3))
    balance = bench.bytes / alone / 1e6
    speeds = options.mbps or [balance * 2**step for step in (-4, -2, -1, 0, 1, 2, 4)]
    print(f"{'MB/s':>8} {'alone':>8} {'all':>8} {'pays':>8} {'loaded':>7}  pays : better  : alone")
    for speed in speeds:
        bench.link.bytes_per_s = speed * 1e6
        for _ in range(2):  # it learns the speed
            bench.seconds("what pays")
        rounds = [{way: bench.seconds(way) for way in ways} for _ in range(options.rounds)]
        took = {way: statistics.median(one[way][0] for one in rounds) for way in ways}
        best = statistics.median(
            one["what pays"][0] / min(one["alone"][0], one["load all"][0]) for one in rounds
        )
        only = statistics.median(one["what pays"][0] / one["alone"][0] for one in rounds)
        loaded = statistics.median(one["what pays"][1] for one in rounds)
        figures = " ".join(f"{took[way]:8.3f}" for way in ways)
        print(f"{speed:8.1f} {figures} {loaded:7.0f} {best:12.2f} {only:9.2f}", flush=True)
    bench.store.close()


if __name__ == "__main__":
    main()
