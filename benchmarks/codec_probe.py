"""What codecs do to a model: bytes, speed, and the change of what it says next.

`ReuseProbe`: a model goes on behind KV that a codec has encoded and decoded. `measure`: ratio and
speed of codecs on blocks, side by side.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from kvkeep.core.errors import InvalidValue
from kvkeep.store.codecs import BlockShape, make_codec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from kvkeep.store.codecs import Codec

__all__ = ["Changed", "ReuseProbe", "Speed", "measure"]

KV = list[tuple["Tensor", "Tensor"]]
"""K and V of each layer, [prompts, heads, tokens, dim], in float32."""


class Changed(NamedTuple):
    """How greedy answers differ from those behind exact KV.

    ``share`` of the prompts have another answer; ``first`` is the mean number of equal tokens
    before the first difference, over these prompts (all tokens if there is none).
    """

    share: float
    first: float


class ReuseProbe:
    """Compares what a model says behind exact KV, and behind KV that went through a codec.

    ``model`` is a causal language model of Transformers whose layers all keep K and V of every
    token, in evaluation mode. ``prompts`` [prompts, tokens] are token ids: reuse is measured at
    each depth up to ``tokens`` less ``following``, and compared over the ``following`` tokens
    behind it. KV is rounded to ``dtype`` once, as a cache keeps it, and computed with in float32.

    Memory: the KV of all prompts in float32. Not thread-safe.

    Raises:
        InvalidValue: the prompts are too short, or the model keeps something else.
    """

    def __init__(
        self,
        model: Any,
        prompts: Tensor,
        *,
        following: int = 256,
        dtype: str = "bfloat16",
        block_tokens: int = 256,
    ) -> None:
        self.model = model
        self._ids = prompts
        self.following = following
        self.deepest = prompts.shape[1] - following
        self.block_tokens = block_tokens
        self.dtype: torch.dtype = getattr(torch, dtype)
        if self.deepest < 1:
            raise InvalidValue(
                f"prompts of {prompts.shape[1]} tokens leave none before the last {following}"
            )
        self.kv = self._prefill()
        heads = [(k.shape[1], k.shape[3], v.shape[3]) for k, v in self.kv]
        parts = tuple((h, dim) for h, key, value in heads for dim in (key, value))
        self.shape = BlockShape(dtype, "NHD", parts)
        self._expected: dict[int, Tensor] = {}

    def _prefill(self) -> KV:
        kept: list[KV] = []
        with torch.inference_mode():
            for ids in self._ids[:, : self.deepest]:
                cache = self.model(ids[None], use_cache=True, logits_to_keep=1).past_key_values
                layers = getattr(cache, "layers", ())
                if not layers or any(one.keys.shape[2] != self.deepest for one in layers):
                    raise InvalidValue("the model's layers do not all keep K and V of every token")
                kept.append([(self._kept(one.keys), self._kept(one.values)) for one in layers])
        cat = torch.cat
        return [
            (cat([k for k, _ in each]), cat([v for _, v in each]))
            for each in zip(*kept, strict=True)
        ]

    def _kept(self, numbers: Tensor) -> Tensor:
        return numbers.to(self.dtype).float()

    # --- blocks ----------------------------------------------------------------------------------

    def blocks(self, prompt: int = 0, depth: int | None = None) -> tuple[bytes, ...]:
        """Return the first ``depth`` tokens' KV as raw bytes of blocks, parts [tokens, heads, dim].

        The last block is shorter if ``depth`` ends in it.
        """
        depth = depth or self.deepest
        return tuple(
            b"".join(
                part[prompt, :, at : min(at + self.block_tokens, depth)]
                .transpose(0, 1).to(self.dtype).contiguous().view(torch.uint8).numpy()
                .tobytes()
                for pair in self.kv for part in pair
            )
            for at in range(0, depth, self.block_tokens)
        )  # fmt: skip

    def through(self, codec: Codec, depth: int | None = None) -> KV:
        """Return the KV of all prompts' first ``depth`` tokens, encoded and decoded by block."""
        depth = depth or self.deepest
        return [
            (torch.cat([k for k, _ in each]), torch.cat([v for _, v in each]))
            for each in zip(
                *(self._through(codec, prompt, depth) for prompt in range(len(self._ids))),
                strict=True,
            )
        ]

    def _through(self, codec: Codec, prompt: int, depth: int) -> KV:
        parts: list[list[Tensor]] = [[] for _ in self.shape.parts]
        for raw in self.blocks(prompt, depth):
            back = torch.frombuffer(_there_and_back(codec, raw), dtype=self.dtype)
            tokens = back.numel() // sum(heads * dim for heads, dim in self.shape.parts)
            sizes = [tokens * heads * dim for heads, dim in self.shape.parts]
            split = torch.split(back, sizes)
            for pieces, part, (heads, dim) in zip(parts, split, self.shape.parts, strict=True):
                pieces.append(part.view(tokens, heads, dim).transpose(0, 1).float())
        whole = [torch.cat(pieces, 1)[None] for pieces in parts]
        return list(zip(whole[::2], whole[1::2], strict=True))

    # --- what the model says ---------------------------------------------------------------------

    def nats(self, codec: str | Codec, depth: int | None = None) -> float:
        """Return the divergence behind ``depth`` reused tokens, the mean over the tokens after it.

        It is the Kullback-Leibler divergence of the next token's distribution from that behind
        exact KV, in nats. Cost: a forward pass of each prompt's ``following`` tokens.
        """
        depth = depth or self.deepest
        coder = make_codec(codec, self.shape) if isinstance(codec, str) else codec
        return self.nats_of(self.through(coder, depth), depth)

    def nats_of(self, kv: KV, depth: int | None = None) -> float:
        """Return the same for ``kv``, of ``depth`` tokens."""
        depth = depth or self.deepest
        if depth not in self._expected:
            exact = [(k[:, :, :depth], v[:, :, :depth]) for k, v in self.kv]
            self._expected[depth] = self._log_probabilities(exact, depth)
        expected = self._expected[depth]
        got = self._log_probabilities(kv, depth)
        return float((expected.exp() * (expected - got)).sum(-1).double().mean())

    def _log_probabilities(self, kv: KV, depth: int) -> Tensor:
        """Return [prompts, following, vocabulary]."""
        said = []
        with torch.inference_mode():
            for prompt, ids in enumerate(self._ids):
                cache = self._cache([(k[prompt, None], v[prompt, None]) for k, v in kv])
                next_ids = ids[None, depth : depth + self.following]
                logits = self.model(next_ids, past_key_values=cache).logits
                said.append(logits.double().log_softmax(-1))
        together: Tensor = torch.cat(said)
        return together

    def answers(self, kv: KV, depth: int, *, tail: int = 16, tokens: int = 32) -> Tensor:
        """Return greedy answers [prompts, tokens] behind ``kv`` and ``tail`` exact tokens."""
        answer = []
        with torch.inference_mode():
            cache = self._cache(kv)
            ids = self._ids[:, depth : depth + tail]
            for _ in range(tokens):
                logits = self.model(ids, past_key_values=cache, logits_to_keep=1).logits
                ids = logits[:, -1].argmax(-1, keepdim=True)
                answer.append(ids)
        together: Tensor = torch.cat(answer, 1)
        return together

    def changed(self, exact: Tensor, other: Tensor) -> Changed:
        """Compare answers, as `answers` returns them."""
        differ = exact != other
        which = differ.any(1)
        first = [int(row.int().argmax()) for row in differ[which]]
        return Changed(
            float(which.double().mean()), statistics.mean(first) if first else exact.shape[1]
        )

    def _cache(self, kv: KV) -> Any:
        from transformers import DynamicCache  # noqa: PLC0415 - slow

        cache: Any = DynamicCache()
        for layer, (keys, values) in enumerate(kv):
            cache.update(keys.clone(), values.clone(), layer)
        return cache


def _there_and_back(codec: Codec, raw: bytes) -> bytearray:
    encoded = memoryview(bytearray(codec.bound(len(raw))))
    size = codec.encode(memoryview(raw), encoded, b"")
    back = bytearray(len(raw))
    codec.decode(encoded[:size], memoryview(back), b"")
    return back


# --- speed ---

Span = tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class Speed:
    """One codec on some blocks: raw bytes by encoded bytes, GB/s as (slowest, median, fastest)."""

    codec: str
    ratio: float
    encode: Span
    decode: Span


def measure(
    blocks: Sequence[bytes], codecs: Sequence[tuple[str, Codec | None]], rounds: int
) -> list[Speed]:
    """Time each codec once per round, in turn, after one round of warming up; None is a copy.

    GB/s are raw bytes per second of the calling thread's processor time.
    """
    raws = [memoryview(bytearray(block)) for block in blocks]
    total = sum(map(len, raws))
    most = max(map(len, raws))
    bounds = [codec.bound(most) for _, codec in codecs if codec is not None]
    outs = [memoryview(bytearray(max([most, *bounds]))) for _ in raws]
    backs = [memoryview(bytearray(len(raw))) for raw in raws]
    took: list[tuple[list[float], list[float]]] = [([], []) for _ in codecs]
    stored = [0] * len(codecs)
    for turn in range(rounds + 1):
        for which, (_, codec) in enumerate(codecs):
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
            stored[which] = sum(sizes)
            if codec is None or codec.exact:
                assert all(back == raw for back, raw in zip(backs, raws, strict=True))
    return [
        Speed(name, total / size, _span(total, encoding), _span(total, decoding))
        for (name, _), (encoding, decoding), size in zip(codecs, took, stored, strict=True)
    ]


def _encode(codec: Codec | None, raw: memoryview, out: memoryview) -> int:
    if codec is not None:
        return codec.encode(raw, out, b"")
    out[: len(raw)] = raw
    return len(raw)


def _span(total: int, seconds: Sequence[float]) -> Span:
    slowest, middle, fastest = max(seconds), statistics.median(seconds), min(seconds)
    return total / slowest / 1e9, total / middle / 1e9, total / fastest / 1e9
