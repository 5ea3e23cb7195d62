"""What codecs gain and cost: bytes, GB/s on one core, and the effect on the next token.

Side by side in one run: every codec takes its turn in each round, on the same bytes; the figure is
the median of the rounds, with the slowest and the fastest. A copy of the same bytes is the floor.
GB/s are raw bytes per second of the thread's own CPU time, so that other load on the machine counts
less. Seeded; one thread.

Nats a token are the Kullback-Leibler divergence between what the shipped model expects of the
text after a prompt, with the prompt's KV in bfloat16 as it was, and after a codec.

    python benchmarks/block_codecs.py            # the table
    python benchmarks/block_codecs.py --json     # for machines
    python benchmarks/block_codecs.py --quick    # fewer rounds, one prompt
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from dataclasses import asdict, dataclass
from pydoc_data.topics import topics
from typing import TYPE_CHECKING

import torch

from kvkeep.serve.models import bundled_model
from kvkeep.store.codecs import BlockShape, make_codec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from kvkeep.store.codecs import Codec

BLOCK = 256  # tokens
CODECS = ("raw", "lossless", "int8", "fp8", "int4")  # transform has transform.py
KEY = bytes(range(32))
GOALS = {
    ("the shipped model's", "lossless", "ratio"): 1.3,
    ("the shipped model's", "int8", "ratio"): 1.9,
    ("the shipped model's", "lossless", "decode"): 1.0,
}
KL_GOAL = {"int8": 1e-3}

KV = list[tuple["Tensor", "Tensor"]]
"""K and V of each layer, [1, heads, tokens, dim], in float32 values that bfloat16 can represent."""


@dataclass(frozen=True, slots=True)
class Case:
    """Blocks of one kind of content."""

    name: str
    shape: BlockShape
    blocks: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Figure:
    """The result of one codec on one case: GB/s of raw bytes as (slowest, median, fastest)."""

    case: str
    codec: str
    ratio: float
    encode: tuple[float, float, float]
    decode: tuple[float, float, float]


class Model:
    """The bundled model after prompts of ``tokens`` tokens of the Python language reference."""

    def __init__(self, tokens: int = 2048, following: int = 256, prompts: int = 1) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415
        from transformers.utils import logging  # noqa: PLC0415

        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        logging.set_verbosity_error()  # type: ignore[no-untyped-call]
        self.model = AutoModelForCausalLM.from_pretrained(bundled_model(), dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(bundled_model())
        text = "\n\n".join(topics[name] for name in sorted(topics)[::7])
        ids = torch.tensor(tokenizer(text).input_ids)[None]
        step = tokens + following
        self.prompts = [ids[:, i * step : i * step + tokens] for i in range(prompts)]
        self.following = [
            ids[:, (i + 1) * step - following : (i + 1) * step] for i in range(prompts)
        ]
        self.kv = [self._prefill(prompt) for prompt in self.prompts]
        heads, _, dim = self.kv[0][0][0][0].shape
        self.shape = BlockShape("bfloat16", "NHD", ((heads, dim),) * (2 * len(self.kv[0])))
        self.expected = [self._expect(i, kv) for i, kv in enumerate(self.kv)]

    @torch.inference_mode()
    def _prefill(self, prompt: Tensor) -> KV:
        cache = self.model(prompt, use_cache=True, logits_to_keep=1).past_key_values
        return [
            (one.keys.bfloat16().float(), one.values.bfloat16().float()) for one in cache.layers
        ]

    @torch.inference_mode()
    def _expect(self, prompt: int, kv: KV) -> Tensor:
        """Return the log probabilities of each of the following tokens."""
        from transformers import DynamicCache  # noqa: PLC0415

        cache = DynamicCache()
        for layer, (keys, values) in enumerate(kv):
            cache.update(keys.clone(), values.clone(), layer)
        logits: Tensor = self.model(self.following[prompt], past_key_values=cache).logits
        return logits.double().log_softmax(-1)

    def blocks(self, prompt: int = 0) -> tuple[bytes, ...]:
        """Return the prompt's KV as raw bytes of blocks; each part is [tokens, heads, dim]."""
        parts = torch.stack([part[0].transpose(0, 1) for pair in self.kv[prompt] for part in pair])
        tokens = parts.shape[1]
        return tuple(
            parts[:, start : start + BLOCK].bfloat16().contiguous().view(torch.uint8)
            .numpy().tobytes()
            for start in range(0, tokens, BLOCK)
        )  # fmt: skip

    def divergence(self, codec: str) -> float:
        """Return nats per token, the mean over all tokens behind the prompts."""
        coder = make_codec(codec, self.shape)
        heads, dim = self.shape.parts[0]
        means = []
        for prompt, expected in enumerate(self.expected):
            back = [_there_and_back(coder, block) for block in self.blocks(prompt)]
            each = [
                torch.frombuffer(raw, dtype=torch.bfloat16).view(-1, len(raw) // 2 // heads // dim
                    // len(self.shape.parts), heads, dim)
                for raw in back
            ]  # fmt: skip
            parts = torch.cat(each, 1).transpose(1, 2).float()
            kv = [(parts[i][None], parts[i + 1][None]) for i in range(0, len(parts), 2)]
            got = self._expect(prompt, kv)
            means.append(float((expected.exp() * (expected - got)).sum(-1).mean()))
        return statistics.mean(means)


def _there_and_back(codec: Codec, raw: bytes) -> bytearray:
    encoded = memoryview(bytearray(codec.bound(len(raw))))
    size = codec.encode(memoryview(raw), encoded, b"")
    back = bytearray(len(raw))
    codec.decode(encoded[:size], memoryview(back), b"")
    return back


def cases(model: Model) -> list[Case]:
    """KV of the bundled model; blocks of Llama 3.1 8B's size of random normals; noise."""
    llama = BlockShape("bfloat16", "NHD", ((8, 128),) * 64)
    count = BLOCK * 64 * 8 * 128
    normals = torch.randn(count, generator=torch.Generator().manual_seed(0)).bfloat16()
    return [
        Case("the shipped model's", model.shape, model.blocks()),
        Case("random normals", llama, (normals.view(torch.uint8).numpy().tobytes(),)),
        Case("random bytes", llama, (os.urandom(2 * count),)),
    ]


def measure(case: Case, codecs: Sequence[Codec | None], rounds: int) -> list[Figure]:
    """Time each codec once per round, in turn; None is a copy, the floor. One warm-up round."""
    raws = [memoryview(bytearray(block)) for block in case.blocks]
    total = sum(map(len, raws))
    outs = [memoryview(bytearray(len(raw) + len(raw) // 8 + 4096)) for raw in raws]
    backs = [memoryview(bytearray(len(raw))) for raw in raws]
    took: list[tuple[list[float], list[float], int]] = [([], [], 0) for _ in codecs]
    for turn in range(rounds + 1):
        for which, codec in enumerate(codecs):
            started = time.thread_time()
            sizes = [_encode(codec, raw, out) for raw, out in zip(raws, outs, strict=True)]
            between = time.thread_time()
            for out, size, back in zip(outs, sizes, backs, strict=True):
                if codec is None:
                    back[:] = out[:size]
                else:
                    codec.decode(out[:size], back, b"")
            ended = time.thread_time()
            if turn:
                took[which][0].append(between - started)
                took[which][1].append(ended - between)
            took[which] = (*took[which][:2], sum(sizes))
            if codec is None or codec.exact:
                assert all(back == raw for back, raw in zip(backs, raws, strict=True))
    return [
        Figure(
            case.name,
            codec.name if codec else "(a copy)",
            total / size,
            _speeds(total, encoding),
            _speeds(total, decoding),
        )
        for codec, (encoding, decoding, size) in zip(codecs, took, strict=True)
    ]


def _encode(codec: Codec | None, raw: memoryview, out: memoryview) -> int:
    if codec is not None:
        return codec.encode(raw, out, b"")
    out[: len(raw)] = raw
    return len(raw)


def _speeds(total: int, seconds: Sequence[float]) -> tuple[float, float, float]:
    slowest, middle, fastest = max(seconds), statistics.median(seconds), min(seconds)
    return total / slowest / 1e9, total / middle / 1e9, total / fastest / 1e9


def all_figures(model: Model, rounds: int) -> list[Figure]:
    """Measure every codec on every case, and two of them encrypted."""
    figures = []
    for case in cases(model):
        codecs: list[Codec | None] = [None, *(make_codec(name, case.shape) for name in CODECS)]
        codecs += [make_codec(name, case.shape, KEY) for name in ("raw", "lossless")]
        figures += measure(case, codecs, rounds)
    return figures


def table(figures: Sequence[Figure], nats: dict[str, float]) -> str:
    """Return the figures as text, with ✓ or ✗ if there is a goal."""
    lines = [f"{'':22}{'ratio':>9}{'encode GB/s':>22}{'decode GB/s':>24}"]
    case = ""
    for one in figures:
        if one.case != case:
            case = one.case
            lines.append(f"KV: {case}")
        spans = [f"{m:6.2f} ({a:.2f}–{b:.2f})" for a, m, b in (one.encode, one.decode)]
        ratio = f"{one.ratio:.2f}×{_mark(one, 'ratio', one.ratio)}"
        decode = spans[1] + _mark(one, "decode", one.decode[1])
        lines.append(f"  {one.codec:20}{ratio:>9}{spans[0]:>22}{decode:>24}")
    lines.append("nats a token")
    for codec, value in nats.items():
        goal = KL_GOAL.get(codec)
        mark = "" if goal is None else f" {'✓' if value < goal else '✗'} (goal < {goal:g})"
        lines.append(f"  {codec:20}{value:9.2g}{mark}")
    return "\n".join(lines)


def _mark(figure: Figure, what: str, value: float) -> str:
    goal = GOALS.get((figure.case, figure.codec, what))
    return "" if goal is None else f" {'✓' if value >= goal else '✗'}"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="figures for machines")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, one prompt")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = Model(prompts=1 if options.quick else 3)
    figures = all_figures(model, 2 if options.quick else 7)
    nats = {name: model.divergence(name) for name in CODECS}
    if options.json:
        print(json.dumps({"figures": [asdict(one) for one in figures], "nats": nats}, indent=1))
    else:
        print(table(figures, nats))


if __name__ == "__main__":
    main()
