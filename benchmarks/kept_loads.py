"""The first token of a Transformers model, with its KV in a tier of some bandwidth.

One text, a random Llama in float32 on one CPU core, and a tier that moves so many bytes a second.
Side by side in each round: the model alone, kvkeep loading all that is stored, and kvkeep loading
what pays while it computes. Ratios are of one round; shown are their medians.

    python benchmarks/kept_loads.py                  # about three minutes
    python benchmarks/kept_loads.py --rounds 3 --tokens 1024 --mbps 5 50
    python benchmarks/kept_loads.py --paced          # about a minute: the schedule alone

``--paced``: passes take the seconds of a formula, and nothing is computed, so that a neighbour on
the machine changes the result less. Speeds are those at which loading takes so many times as long
as computing; then the tier stops in the middle of a load.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from kvkeep.core.geometry import KVGeometry
from kvkeep.integrations.transformers import KeptModel, revision_of
from kvkeep.integrations.transformers_meeting import RowLoad
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
        self.stops_at = float("inf")  # monotonic seconds, from which on reads take three more
        self._link = threading.Lock()

    def get(self, block: bytes, room: Room) -> memoryview | None:
        """As memory does, later."""
        (size,) = self.sizes([block])
        if time.monotonic() > self.stops_at:
            time.sleep(3)
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


class Paced:
    """A prompt whose passes take 5 ms and a quarter of a millisecond a token, and attention."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        geometry = KVGeometry(4, 2, 32, "bfloat16")
        self.link = Throttled(1 << 30)
        self.store = KVStore(
            geometry, model="paced@1", layout="HND", block_tokens=64,
            tiers=["memory://256MiB", self.link], policy=PassThrough(),
        )  # fmt: skip
        self.text = np.arange(tokens + 1, dtype=np.int32)
        kv = torch.zeros(4, 2, 2, tokens, 32, dtype=torch.bfloat16)
        self.store.put(self.text[:-1], kv, wait=True)
        self.bytes = tokens * geometry.bytes_per_token
        for span in ((0, tokens + 1), (0, tokens // 4), (tokens // 2, tokens)):
            self.store.cost.prefill.observe([span], self.pass_s(*span))

    def pass_s(self, start: int, stop: int) -> float:
        """Return the seconds of a pass."""
        return 0.005 + 2.5e-4 * (stop - start) + 3e-8 * (stop**2 - start**2) / 2

    def compute(self, start: int, stop: int) -> None:
        """Take as long as a pass."""
        begun = time.perf_counter()
        time.sleep(self.pass_s(start, stop))
        self.store.cost.prefill.observe([(start, stop)], time.perf_counter() - begun)

    def both(self) -> float:
        """Return the seconds to the first token with what pays."""
        self._forget()
        begun, known = time.perf_counter(), 0
        load = RowLoad(self.store.load_tail(self.text[:-1]), self.store.cost, self.tokens + 1)
        if load.pays:
            with load:
                while (step := load.next(known)) is not None:
                    if step.layers is None:
                        self.compute(known, step.stop)
                    known = step.stop
        self.compute(known, self.tokens + 1)
        return time.perf_counter() - begun

    def load(self) -> float:
        """Return the seconds to the first token with all that is stored."""
        self._forget()
        begun = time.perf_counter()
        _, known = self.store.get(self.text[:-1])
        time.sleep(self.pass_s(known, self.tokens + 1))
        return time.perf_counter() - begun

    def _forget(self) -> None:
        memory = self.store._tiered.memory
        memory.remove(list(memory.catalogue.blocks()))  # type: ignore[attr-defined]


def paced(tokens: int, rounds: int) -> None:
    """Measure the schedule, and print."""
    bench = Paced(tokens)
    alone = bench.pass_s(0, tokens + 1)
    print(f"{tokens} tokens; computing takes {alone:.2f} s")
    print(f"{'load : compute':>14} {'load':>7} {'both':>7} {'better':>7} {'alone':>7}")
    for ratio in (8.0, 4.0, 2.0, 1.0, 0.5, 0.25, 0.125, 0.03):
        bench.link.bytes_per_s = bench.bytes / alone / ratio
        for _ in range(6):  # it learns the speed
            bench.both()
        load = statistics.median(bench.load() for _ in range(1 if ratio > 1 else rounds))
        both = statistics.median(bench.both() for _ in range(rounds))
        figures = f"{load:7.3f} {both:7.3f} {both / min(load, alone):7.2f} {both / alone:7.2f}"
        print(f"{ratio:14.3f} {figures}", flush=True)
    for ratio, after in ((0.125, 0.0), (0.125, 0.05), (1.0, 0.0), (1.0, 0.3)):
        bench.link.bytes_per_s = bench.bytes / alone / ratio
        for _ in range(8):
            bench.both()
        bench.link.stops_at = time.monotonic() + after
        both = bench.both()
        print(f"stops after {after:4.2f} s, at {ratio:5.3f}: {both / alone:.2f} of computing alone")
        bench.link.stops_at = float("inf")
        time.sleep(4)  # until reads that were on their way are over
    bench.store.close()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--mbps", type=float, nargs="*", help="megabytes a second")
    parser.add_argument("--paced", action="store_true", help="the schedule alone")
    options = parser.parse_args()
    if options.paced:
        paced(2 * options.tokens, options.rounds)
        return
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
