"""Time to the first token with a tier of any bandwidth: computed, loaded, and chosen.

    python benchmarks/cost.py [--quick] [--json] [--picture FILE] [--points N] [--repeats N]
        [--at-once N ...] [--from BYTES] [--to BYTES] [--latency SECONDS] [--device cpu|cuda]
        [--paced SECONDS]

A random Llama of 100 million parameters answers prompts of 4,096 tokens, one and eight at once. The
KV of all of them is in a tier below memory whose reads share a token bucket. Three engines take
turns at each bandwidth: one without a store computes all; one loads all that is stored; one chooses
by what it has learned. Medians of the repeats; ratios are of the same repeat.

``--quick`` takes a small model and short prompts, and bandwidths around its balance.
``--paced SECONDS`` computes nothing: a pass sleeps as long as it would take if a prompt took so
many seconds, so that a busy machine disturbs the result less; reads and copies are real.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from kvkeep.core.cost import CostModel, PrefillCost
from kvkeep.core.geometry import KVGeometry, parse_bytes
from kvkeep.serve.engine import Engine, Limits, Runner, SamplingParams
from kvkeep.store import KVStore, LoadChoice, LoadPiece
from kvkeep.store.backends.memory import MemoryBackend

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvkeep.serve.engine import Piece
    from kvkeep.store.backends.base import Room

VOCABULARY = 4096
BLOCK = 64
MODES = ("computed", "loaded", "chosen")


class Link:
    """A token bucket: what passes takes its share of ``bytes_per_s``, and ``latency_s``."""

    def __init__(self) -> None:
        self.bytes_per_s = math.inf
        self.latency_s = 0.0
        self._free = 0.0
        self._lock = threading.Lock()

    def clear(self) -> None:
        """Forget reads that were dropped and not waited for."""
        with self._lock:
            self._free = 0.0

    def take(self, nbytes: int) -> None:
        """Wait until ``nbytes`` have passed."""
        with self._lock:
            self._free = max(self._free, time.monotonic()) + nbytes / self.bytes_per_s
            until = self._free + self.latency_s
        time.sleep(max(0.0, until - time.monotonic()))


class Throttled(MemoryBackend):
    """Memory whose reads pass a `Link`."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.link = Link()
        self.timeout = 1e4  # the throttle is no fault

    def get(self, block: bytes, room: Room) -> memoryview | None:
        """As memory does, later."""
        record = super().get(block, room)
        if record is not None:
            self.link.take(len(record))
        return record

    def close(self) -> None:
        """Nothing: the next store finds all records."""


def load_all(
    cost: CostModel, start: int, tokens: int, pieces: Sequence[LoadPiece], **_how: Any
) -> LoadChoice:
    """As an engine's choice: all that is stored is loaded."""
    return LoadChoice(start, pieces[-1].stop, pieces[-1].stop, 0.0, 0.0, 0.0, None, ())


@dataclass(frozen=True)
class Point:
    """One bandwidth and number of prompts: seconds to the first token, a mean for each repeat."""

    bytes_per_s: float
    at_once: int
    seconds: dict[str, list[float]]
    loaded: float
    """Share of the prompts that was loaded by choice."""

    def median(self, mode: str) -> float:
        """The median of a mode, in seconds."""
        return statistics.median(self.seconds[mode])

    def ratio(self, over: str) -> float:
        """The median over the repeats of ``chosen`` / ``over``: a mode, or the "better" of two."""
        chosen = self.seconds["chosen"]
        if over == "better":
            over = min(("computed", "loaded"), key=self.median)
        return statistics.median(
            one / other for one, other in zip(chosen, self.seconds[over], strict=True)
        )

    def as_dict(self) -> dict[str, object]:
        """The point for JSON."""
        return {
            "bytes_per_s": self.bytes_per_s,
            "at_once": self.at_once,
            "seconds": self.seconds,
            "median": {mode: self.median(mode) for mode in MODES},
            "chosen_to_better": self.ratio("better"),
            "chosen_to_computed": self.ratio("computed"),
            "chosen_to_loaded": self.ratio("loaded"),
            "loaded": self.loaded,
        }


class PacedRunner:
    """A runner whose passes take as long as ``cost`` says, and compute nothing."""

    def __init__(self, runner: Runner, cost: PrefillCost) -> None:
        self._runner = runner
        self._cost = cost

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def forward(self, pieces: Sequence[Piece]) -> torch.Tensor:
        """Sleep, and return logits that are all alike."""
        cost, seconds = self._cost, self._cost.seconds_fixed
        for one in pieces:
            seconds += cost.prefill_s(one.start, one.stop) - cost.seconds_fixed
        time.sleep(seconds)
        return torch.zeros(sum(one.outputs for one in pieces), self._runner.vocabulary)


class Bench:
    """A model, and a tier that has the KV of all prompts."""

    def __init__(self, *, quick: bool, prompts: int, device: str, paced: float | None) -> None:
        self.tokens = 1024 if quick else 4096
        width, layers = (384, 6) if quick else (768, 12)
        config = LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=width, intermediate_size=width * 11 // 3,
            num_hidden_layers=layers, num_attention_heads=width // 64,
            num_key_value_heads=width // 64, max_position_embeddings=8192, bos_token_id=None,
            eos_token_id=None, pad_token_id=None,
        )  # fmt: skip
        torch.manual_seed(0)
        real = device == "cpu" and paced is None
        dtype = torch.float32 if real else torch.bfloat16
        made = AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
        model = made.to(device).eval()
        self.parameters = sum(one.numel() for one in model.parameters())
        geometry = KVGeometry.from_config(config, dtype=str(dtype).removeprefix("torch."))
        pages = (prompts + 1) * (self.tokens // 16 + 2)
        self.runner = Runner(model, geometry, num_pages=pages, page_size=16)
        if paced is not None:  # of the seconds a tenth is attention; a pass takes 1 %
            each, pair = 0.9 * paced / self.tokens, 0.1 * paced * 2 / self.tokens**2
            cost = PrefillCost(
                seconds_fixed=0.01 * paced, seconds_per_token=each, seconds_per_token_pair=pair
            )
            self.runner = PacedRunner(self.runner, cost)  # type: ignore[assignment]
        self.prompt_bytes = geometry.bytes_per_token * self.tokens
        self.limits = Limits(step_tokens=256 if quick else 1024)
        self.tier = Throttled(int(self.prompt_bytes * (prompts + 1) * 1.1) + (64 << 20))
        rng = np.random.default_rng(1)
        self.prompts = [
            rng.integers(0, VOCABULARY, self.tokens, dtype=np.int32) for _ in range(prompts)
        ]
        self.computing = CostModel()
        self.costs: dict[float, CostModel] = {}
        for prompt in self.prompts:  # writes its KV
            with self.store(CostModel()) as store:
                engine = self.engine(store)
                self.ask(engine, [prompt])
                engine.close(60)
                store.flush(60)

    def store(self, cost: CostModel) -> KVStore:
        """A store whose memory is empty, above the tier."""
        return KVStore(
            self.runner.geometry, model="bench@1", tiers=["memory://256MiB", self.tier],
            block_tokens=BLOCK, cost=cost,
        )  # fmt: skip

    def engine(self, store: KVStore | None) -> Engine:
        """An engine with an empty pool."""
        return Engine(
            self.runner, self.runner.cache(), limits=self.limits, store=store, load_timeout=1e4
        )

    @staticmethod
    def ask(engine: Engine, prompts: Sequence[np.ndarray]) -> tuple[float, float]:
        """Return the mean time to the first token, and the share of the tokens loaded."""
        began = time.perf_counter()
        requests = [engine.add(one, SamplingParams(max_tokens=1)) for one in prompts]
        first: dict[int, float] = {}
        while engine.has_work:
            for delta in engine.step():
                if delta.error is not None:
                    raise delta.error
                first.setdefault(delta.request.id, time.perf_counter() - began)
        assert len(first) == len(requests)
        tokens = sum(map(len, prompts))
        return statistics.mean(first.values()), engine.stats().loaded_tokens / tokens

    def once(self, mode: str, at_once: int, cost: CostModel) -> tuple[float, float]:
        """Ask once in one mode."""
        prompts = self.prompts[:at_once]
        self.tier.link.clear()
        if mode == "computed":
            engine = self.engine(None)
            try:
                return self.ask(engine, prompts)
            finally:
                engine.close()
        with self.store(cost) as store:
            engine = self.engine(store)
            if mode == "loaded":
                assert engine._offload is not None
                engine._offload._planner.choose_load = load_all
            try:
                return self.ask(engine, prompts)
            finally:
                engine.close()

    def measure(self, bytes_per_s: float, latency_s: float, at_once: int, repeats: int) -> Point:
        """Measure all modes by turns at one bandwidth."""
        self.tier.link.bytes_per_s, self.tier.link.latency_s = bytes_per_s, latency_s
        cost = self.costs.get(bytes_per_s)
        if cost is None:  # one that has learned of this tier, in one unmeasured request
            cost = self.costs[bytes_per_s] = CostModel(
                self.computing.prefill.cost if self.computing.prefill.known else None
            )
            self.once("chosen", 1, cost)
        seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
        shares: list[float] = []
        for number in range(repeats):
            order = MODES[number % 3 :] + MODES[: number % 3]
            for mode in order:
                took, share = self.once(mode, at_once, cost if mode == "chosen" else CostModel())
                seconds[mode].append(took)
                if mode == "chosen":
                    shares.append(share)
        self.computing = cost
        return Point(bytes_per_s, at_once, seconds, statistics.median(shares))


def line(point: Point) -> str:
    """A point as a line of text."""
    times = "  ".join(f"{mode} {point.median(mode) * 1e3:8.0f} ms" for mode in MODES)
    return (
        f"{point.bytes_per_s / 1e6:9.1f} MB/s {point.at_once:2} at once: {times}"
        f"  {point.loaded:4.0%} loaded"
        f"  chosen/better {point.ratio('better'):5.3f}"
        f"  chosen/computed {point.ratio('computed'):5.3f}"
    )


def summary(points: Sequence[Point]) -> list[str]:
    """What the goals are about, for each number of prompts at once."""
    lines = []
    for at_once in sorted({one.at_once for one in points}):
        mine = [one for one in points if one.at_once == at_once]
        worst = max(mine, key=lambda one: one.ratio("better"))
        slow = max(mine, key=lambda one: one.ratio("computed"))
        lines += [
            f"{at_once} at once: at worst {worst.ratio('better'):.3f} of the better one "
            f"({worst.bytes_per_s / 1e6:.0f} MB/s; goal 1.03)",
            f"{at_once} at once: at worst {slow.ratio('computed'):.3f} of no store "
            f"({slow.bytes_per_s / 1e6:.0f} MB/s; goal 1.03)",
        ]
    return lines


def draw(points: Sequence[Point], path: str, title: str) -> None:
    """Draw the sweep."""
    import matplotlib as mpl  # noqa: PLC0415 - only for pictures

    mpl.use("svg" if path.endswith(".svg") else "agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415 - behind the choice of the backend

    counts = sorted({one.at_once for one in points})
    figure, axes = plt.subplots(1, len(counts), figsize=(5.2 * len(counts), 3.6), squeeze=False)
    for axis, at_once in zip(axes[0], counts, strict=True):
        mine = sorted(
            (one for one in points if one.at_once == at_once), key=lambda one: one.bytes_per_s
        )
        x = [one.bytes_per_s / 1e6 for one in mine]
        names = {"computed": "computed alone", "loaded": "loaded alone", "chosen": "chosen"}
        for mode, style in zip(MODES, ("--", ":", "-"), strict=True):
            y = [one.median(mode) for one in mine]
            axis.plot(x, y, style, marker="o", ms=3, label=names[mode])
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_xlabel("bandwidth of the tier, MB/s")
        axis.set_ylabel("seconds to the first token")
        axis.set_title(f"{at_once} prompt{'s' * (at_once > 1)} at once", fontsize=10)
        axis.grid(alpha=0.3, which="both")
    axes[0][0].legend(fontsize=9)
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> int:
    """Run the sweep."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--quick", action="store_true", help="small model, 1,024 tokens")
    parser.add_argument("--picture", help="file to draw into (needs matplotlib)")
    parser.add_argument("--points", type=int, help="bandwidths (12; with --quick 6)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--from", dest="least", help="lowest bandwidth a second (10MB)")
    parser.add_argument("--to", dest="most", help="highest bandwidth a second (10GB)")
    parser.add_argument("--latency", type=float, default=0.0, help="seconds of each read")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--paced", type=float, help="seconds a prompt, slept instead of computed")
    options = parser.parse_args()
    bench = Bench(
        quick=options.quick, prompts=max(options.at_once), device=options.device,
        paced=options.paced,
    )  # fmt: skip
    for _ in range(2):
        alone, _ = bench.once("computed", 1, CostModel())
    balance = bench.prompt_bytes / alone
    least, most = (balance / 30, balance * 100) if options.quick else (1e7, 1e10)
    if options.least:
        least = parse_bytes(options.least)
    if options.most:
        most = parse_bytes(options.most)
    count = options.points or (6 if options.quick else 12)
    load = os.getloadavg()[0]
    title = (
        f"{bench.parameters / 1e6:.0f} million parameters, {bench.tokens:,} tokens, "
        f"{bench.prompt_bytes / 1e6:.0f} MB of KV; balance near {balance / 1e6:.0f} MB/s"
    )
    if not options.json:
        print(f"{title}; load of the machine {load:.1f}", flush=True)
    points = []
    for at_once in options.at_once:
        for rate in np.geomspace(least, most, count):
            points.append(bench.measure(float(rate), options.latency, at_once, options.repeats))
            if not options.json:
                print(line(points[-1]), flush=True)
    if options.json:
        found = {"title": title, "load": load, "points": [one.as_dict() for one in points]}
        print(json.dumps(found, indent=1))
    else:
        print("\n".join(summary(points)))
    if options.picture:
        draw(points, options.picture, title)
    return 0


if __name__ == "__main__":
    sys.exit(main())
