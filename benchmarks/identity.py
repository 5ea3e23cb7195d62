"""What the identity of a loaded model costs: reading it by its size, watching it by its tensors.

`model_identity` reads every byte of the weights once, so its seconds per GiB are nearly the same at
every size. `ModelWatch.changed` compares the model with a snapshot, so its milliseconds grow with
the number of tensors and modules, not with bytes. The models are Llamas with constant weights,
because the speed of reading does not depend on the values. Each figure is the median of several
runs, with the fastest and the slowest; garbage collection is off.

    python benchmarks/identity.py            # up to 2 GiB, and up to 80 layers
    python benchmarks/identity.py --quick    # an eighth of that, fewer runs
    python benchmarks/identity.py --json     # for machines
"""

from __future__ import annotations

import os
import statistics
import sys
from dataclasses import asdict, dataclass
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from figures import no_collection, print_lines
from kvkeep.store import model_identity
from kvkeep.store.identity import ModelWatch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

GIB = 1 << 30
SIZED = (1, 5, 10, 20)  # layers of 98 MiB each
WATCHED = (4, 16, 32, 80)  # layers, as of models between 0.1 and 70 billion parameters
READS = 7
LOOKS = 200


@dataclass(frozen=True, slots=True)
class Line:
    """A figure of one model: the median of its runs, the fastest and the slowest."""

    name: str
    unit: str
    tensors: int
    modules: int
    gib: float
    median: float
    fastest: float
    slowest: float


def model_of(layers: int, hidden: int) -> torch.nn.Module:
    """A Llama in bfloat16 whose memory is allocated and written."""
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
    )
    with torch.device("meta"):
        model: torch.nn.Module = LlamaForCausalLM(config)
    model = model.to(torch.bfloat16).to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(0.5)
    return model.eval()


def timed(work: Callable[[], object], runs: int) -> list[float]:
    """Return the seconds of each of ``runs`` calls, after a warm-up call."""
    work()
    took: list[float] = []
    with no_collection():
        for _ in range(runs):
            start = perf_counter()
            work()
            took.append(perf_counter() - start)
    return took


def line(name: str, unit: str, model: torch.nn.Module, took: list[float], per: float) -> Line:
    """Return the figure for the durations ``took`` in seconds, each divided by ``per``."""
    tensors = [*model.parameters(), *model.buffers()]
    return Line(
        name,
        unit,
        len(list(model.parameters())),
        len(list(model.modules())),
        sum(tensor.nbytes for tensor in tensors) / GIB,
        statistics.median(took) / per,
        min(took) / per,
        max(took) / per,
    )


def lines(scale: float) -> Iterator[Line]:
    """Measure all models, with ``scale`` times the layers."""
    for layers in SIZED:
        model = model_of(max(1, int(layers * scale)), 2048)
        size = sum(tensor.nbytes for tensor in model.parameters()) / GIB
        took = timed(partial(model_identity, model), max(3, int(READS * scale)))
        yield line("model_identity", "s/GiB", model, took, size)
    for layers in WATCHED:
        model = model_of(max(1, int(layers * scale)), 64)
        watch = ModelWatch(model)
        assert watch.changed() is None
        took = timed(watch.changed, max(20, int(LOOKS * scale)))
        yield line("ModelWatch.changed", "ms", model, took, 1e-3)
        took = timed(partial(watch.changed, samples=False), max(20, int(LOOKS * scale)))
        yield line("  without samples", "ms", model, took, 1e-3)


def text(one: Line) -> str:
    """One printed line."""
    return (
        f"{one.name:19} {one.tensors:4} tensors {one.modules:5} modules {one.gib:7.3f} GiB"
        f"  {one.median:7.3f} {one.unit:5}  {one.fastest:.3f} … {one.slowest:.3f}"
    )


def record(done: list[Line]) -> dict[str, object]:
    """All lines for ``--json``."""
    return {"cpus": os.cpu_count(), "lines": [asdict(one) for one in done]}


if __name__ == "__main__":
    quick = (0.125, "an eighth of the layers, fewer runs")
    sys.exit(print_lines(lines, text, record, doc=__doc__, quick=quick))
