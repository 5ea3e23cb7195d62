"""Prove which pages this version of vLLM writes: add its digests to ``formats.json``.

    .venv-vllm-0.31/bin/python tests_vllm/page_fixtures.py

Run it in the environment of a version, with the operators of that version. It computes small models
with given weights, prompts and answers, and packs given keys and values. It is not run for a
version whose Python runs on the operators of another one.
"""

from __future__ import annotations

import conftest  # noqa: F401, isort: skip  (vLLM's environment, before vLLM)

import hashlib
import json
import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import vllm
from engines import engine, prompt
from models import _save, _sizes
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from vllm import _custom_ops as operators
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

from kvkeep.integrations.vllm import formats, worker
from kvkeep.integrations.vllm.naming import machine_of
from kvkeep.integrations.vllm.numbers import numbers_of
from kvkeep.store.blocks.store import BlockStore

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

FILE = Path(formats.__file__).with_name("formats.json")
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 512}  # fmt: skip
WINDOWS = {"num_hidden_layers": 6, "sliding_window": 48, "sliding_window_pattern": 6}
EXPERTS = {"sliding_window": 48, "num_local_experts": 4, "num_experts_per_tok": 2,
           "layer_types": ["sliding_attention", "full_attention"] * 2}  # fmt: skip

MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**_sizes({}))),
    "llama3": lambda: LlamaForCausalLM(LlamaConfig(**_sizes({"rope_parameters": LLAMA3}))),
    "llama3 tied": lambda: LlamaForCausalLM(
        LlamaConfig(**_sizes({"rope_parameters": LLAMA3, "tie_word_embeddings": True}))
    ),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**_sizes({"sliding_window": None}))),
    "mistral window": lambda: MistralForCausalLM(MistralConfig(**_sizes({"sliding_window": 80}))),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**_sizes({}))),
    "qwen2 tied": lambda: Qwen2ForCausalLM(Qwen2Config(**_sizes({"tie_word_embeddings": True}))),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**_sizes({}))),
    "qwen3 tied": lambda: Qwen3ForCausalLM(Qwen3Config(**_sizes({"tie_word_embeddings": True}))),
    "gemma3": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**_sizes(WINDOWS))),
    "gpt_oss": lambda: GptOssForCausalLM(GptOssConfig(**_sizes(EXPERTS))),
}
COMPILED = ("llama3", "qwen3")  # as vLLM does by default; each takes a minute
DTYPES = ("bfloat16", "float32")
HEADS = (32, 64, 80, 96, 112, 128, 256)
TOKENS = (16, 32, 64, 128)


def packings() -> dict[str, str]:
    """The bytes that the kernel of pages writes, by dtype, size of heads and tokens of a block."""
    found = {}
    for dtype in (*DTYPES, "float16"):
        for head in HEADS:
            for tokens in TOKENS:
                found[f"{dtype} {head} {tokens}"] = packed(getattr(torch, dtype), head, tokens)
    return found


def packed(dtype: torch.dtype, head: int, tokens: int, blocks: int = 3, heads: int = 2) -> str:
    cache = torch.zeros(blocks, heads, tokens, 2 * head, dtype=dtype)
    keys, values = (
        torch.from_numpy(numbers(f"{name} {head} {tokens}", (blocks * tokens, heads, head)))
        for name in ("keys", "values")
    )
    order = np.random.PCG64(7).random_raw(blocks * tokens).argsort(kind="stable")
    halves = cache.view(blocks, heads, 2 * tokens, head).chunk(2, dim=2)
    operators.cpu_attn_reshape_and_cache(
        keys.to(dtype), values.to(dtype), *halves, torch.from_numpy(order.astype(np.int64)),
        _get_attn_isa(dtype, tokens, head),
    )  # fmt: skip
    return digest(cache.view(torch.uint8).numpy().tobytes())


def numbers(name: str, shape: Sequence[int]) -> np.ndarray:
    """Numbers between -1 and 1 that no release of a library changes: bits of PCG64."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    count = int(np.prod(shape))
    bits = np.random.PCG64(seed).random_raw(count) >> np.uint64(40)
    return (bits.astype(np.float32) / np.float32(2**23) - 1).reshape(shape)


def written(name: str, dtype: str, *, compiled: bool, directory: Path) -> dict[str, Any]:
    """The digest of all pages of a model, and what the engine was set to."""
    model, pages, seen = MODELS[name](), {}, {}
    with torch.no_grad():
        for weight, values in model.named_parameters():
            scale = 1.0 if values.dim() == 1 else 0.2
            values.copy_(torch.from_numpy(numbers(weight, values.shape)) * scale)
    path = _save(model, directory / name.replace(" ", "-"))
    write, named = BlockStore.write, worker.namespace_of

    def kept(self: BlockStore, keys: Any, sizes: Any, fill: Any, **more: Any) -> int:
        for at, key in enumerate(keys):
            record = bytearray(sizes[at])
            fill(at, memoryview(record))
            pages[key.hex()] = digest(record)
        return write(self, keys, sizes, fill, **more)

    def looked(config: Any, options: Any, groups: Any, where: str) -> Any:
        namespace = named(config, options, groups, where)
        seen.update(config=config, dtype=namespace.dtype,
                    machine=machine_of(config, groups.layers, torch.device("cpu")))  # fmt: skip
        return namespace

    BlockStore.write, worker.namespace_of = kept, looked  # type: ignore[method-assign]
    try:
        with engine(path, ["memory://64MiB"], dtype=dtype, enforce_eager=not compiled) as one:
            for at, length in enumerate((300, 45, 128)):
                one.ask([prompt(length, seed=at)], max_tokens=60)
    finally:
        BlockStore.write, worker.namespace_of = write, named  # type: ignore[method-assign]
    described = numbers_of(seen["config"])
    return {
        "name": name,
        "dtype": seen["dtype"],
        "mode": described["compilation"][0],
        "kind": formats.kind_of(described),
        "settings": formats.settings_of(described),
        "pages": digest(json.dumps(pages, sort_keys=True).encode()),
        "machine": seen["machine"],
    }


def digest(data: bytes | bytearray) -> str:
    return hashlib.sha256(data).hexdigest()[:32]


def proof() -> dict[str, Any]:
    """What this version writes on this machine."""
    models, settings = [], []
    with TemporaryDirectory() as directory:
        for name, dtype, compiled in fixtures():
            found = written(name, dtype, compiled=compiled, directory=Path(directory))
            machine, mine = found.pop("machine"), found.pop("settings")
            if mine not in settings:
                settings.append(mine)
            models.append(found | {"settings": settings.index(mine)})
            print(vllm.__version__, name, dtype, compiled, found["pages"], flush=True)
    return {"vllm": vllm.__version__, "torch": str(torch.__version__), "machine": machine,
            "packings": packings(), "settings": settings, "models": models}  # fmt: skip


def fixtures() -> list[tuple[str, str, bool]]:
    """Models, dtypes, and whether they are compiled."""
    eager = [(name, dtype, False) for name in MODELS for dtype in DTYPES]
    eager.remove(("gpt_oss", "float32", False))  # vLLM 0.30 has its sinks in bfloat16 alone
    return eager + [(name, "bfloat16", True) for name in COMPILED]


def added(proofs: list[dict[str, Any]], new: dict[str, Any]) -> list[dict[str, Any]]:
    """``proofs`` with a new one; equal pages keep the name of the version that had them first."""
    first = {_named(model): model["as"] for each in proofs for model in each["models"]}
    for model in new["models"]:
        model["as"] = first.get(_named(model), new["vllm"])
    mine = _place(new)
    kept = [each for each in proofs if _place(each) != mine] + [new]
    return sorted(kept, key=lambda each: [int(part) for part in each["vllm"].split(".")])


def _named(model: dict[str, Any]) -> str:
    return json.dumps([model[part] for part in ("kind", "dtype", "mode", "pages")], sort_keys=True)


def _place(proof: dict[str, Any]) -> list[str]:
    return [proof[part] for part in ("vllm", "torch", "machine")]


def main() -> None:
    own = Path(os.path.realpath(vllm.__file__)).parent
    others = [file.name for file in own.glob("*.so") if file.is_symlink()]
    if others:
        sys.exit(f"{others} are the operators of another version: this proves nothing of pages")
    proofs = json.loads(FILE.read_text())["proofs"] if FILE.exists() else []
    FILE.write_text(json.dumps({"proofs": added(proofs, proof())}, indent=1) + "\n")


if __name__ == "__main__":
    main()
