"""Prove which pages this version of vLLM writes: add its digests to ``formats.json``.

    .venv-vllm-0.31/bin/python tests_vllm/page_fixtures.py [--rows]

Run it in the environment of a version, with the operators of that version. It computes small models
with given weights, prompts and answers, and packs given keys and values. It is not run for a
version whose Python runs on the operators of another one. With ``--rows`` it adds the rows below
vLLM's offloading to a proof of the same pages.
"""

from __future__ import annotations

import conftest  # noqa: F401, isort: skip  (vLLM's environment, before vLLM)

import hashlib
import json
import os
import sys
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import vllm
from engines import engine, prompt
from models import _save, _sizes
from tiered import TieredEngine, tiered
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
from versions import NO_TIERS
from vllm import _custom_ops as operators
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

from kvkeep.integrations.vllm import formats, worker
from kvkeep.integrations.vllm.naming import dtype_of, machine_of
from kvkeep.integrations.vllm.numbers import numbers_of
from kvkeep.store.blocks.store import BlockStore

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from engines import Engine

FILE = Path(formats.__file__).with_name("formats.json")
PROOFS: list[dict[str, Any]] = json.loads(FILE.read_text())["proofs"]
MINE = [
    proof
    for proof in PROOFS
    if (proof["vllm"], proof["torch"]) == (vllm.__version__, str(torch.__version__))
]
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 512}  # fmt: skip
WINDOWS = {"num_hidden_layers": 6, "sliding_window": 48, "sliding_window_pattern": 6}
EXPERTS = {"sliding_window": 48, "num_local_experts": 4, "num_experts_per_tok": 2,
           "layer_types": ["sliding_attention", "full_attention"] * 2}  # fmt: skip

DEEP = "llama with twelve layers"  # ten and more: names of layers have two orders
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
    DEEP: lambda: LlamaForCausalLM(LlamaConfig(**_sizes({"num_hidden_layers": 12}))),
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


def weighted(name: str) -> Any:
    """A model with given weights."""
    model = MODELS[name]()
    with torch.no_grad():
        for weight, values in model.named_parameters():
            scale = 1.0 if values.dim() == 1 else 0.2
            values.copy_(torch.from_numpy(numbers(weight, values.shape)) * scale)
    return model


def written(name: str, dtype: str, *, compiled: bool, directory: Path) -> dict[str, Any]:
    """The digest of all pages of a model, and what the engine was set to."""
    model, seen = weighted(name), {}
    path = _save(model, directory / name.replace(" ", "-"))
    named = worker.namespace_of

    def looked(config: Any, options: Any, groups: Any, where: str) -> Any:
        namespace = named(config, options, groups, where)
        seen.update(config=config, dtype=namespace.dtype,
                    machine=machine_of(config, groups.layers, torch.device("cpu")))  # fmt: skip
        return namespace

    worker.namespace_of = looked
    try:
        with engine(path, ["memory://64MiB"], dtype=dtype, enforce_eager=not compiled) as one:
            pages = records(one)
    finally:
        worker.namespace_of = named
    described = numbers_of(seen["config"])
    return {
        "name": name,
        "dtype": seen["dtype"],
        "mode": described["compilation"][0],
        "kind": formats.kind_of(described),
        "settings": formats.settings_of(described),
        "pages": pages,
        "machine": seen["machine"],
    }


def written_rows(name: str, dtype: str, *, compiled: bool, directory: Path) -> dict[str, Any]:
    """The digest of all rows of a model below vLLM's offloading, and what decides them."""
    path = _save(weighted(name), directory / f"rows of {name}".replace(" ", "-"))
    disk = f"file://{path}-kv-{dtype}-{compiled}?size=64MiB"
    with tiered(path, disk, dtype=dtype, enforce_eager=not compiled) as one:
        assert one.tier._engine is not None
        (note,) = one.tier._offloading_spec.notes or ()
        assert note.portable, "rows are the same for all ranks"
        rows = records(one, lambda: offloaded(one))
        config = one.tier._engine.config
        described = numbers_of(config, any_ranks=True)
    return {
        "dtype": dtype_of(config),
        "mode": described["compilation"][0],
        "settings": formats.settings_of(described),
        "rows": rows,
        "machine": note.machine,
    }


def offloaded(one: TieredEngine) -> None:
    """Wait until all is given to the tier: vLLM does that in later steps."""
    one.ask([prompt(5)], max_tokens=60)
    one.forget_all()


def records(one: Engine, end: Callable[[], object] = lambda: None) -> str:
    """The digest of all records that an engine writes for given prompts, with their keys."""
    found, write = {}, BlockStore.write

    def kept(self: BlockStore, keys: Any, sizes: Any, fill: Any, **more: Any) -> int:
        for at, key in enumerate(keys):
            record = bytearray(sizes[at])
            fill(at, memoryview(record))
            found[key.hex()] = digest(record)
        return write(self, keys, sizes, fill, **more)

    BlockStore.write = kept  # type: ignore[method-assign]
    try:
        for at, length in enumerate((300, 45, 128)):
            one.ask([prompt(length, seed=at)], max_tokens=60)
        end()
    finally:
        BlockStore.write = write  # type: ignore[method-assign]
    assert len(found) >= 7, f"{len(found)} records"  # of each window, the last blocks
    return digest(json.dumps(found, sort_keys=True).encode())


def digest(data: bytes | bytearray) -> str:
    return hashlib.sha256(data).hexdigest()[:32]


def proof() -> dict[str, Any]:
    """What this version writes on this machine."""
    models, settings = [], []
    with TemporaryDirectory() as directory:
        for name, dtype, compiled in fixtures():
            found = written(name, dtype, compiled=compiled, directory=Path(directory))
            machine, mine = found.pop("machine"), found.pop("settings")
            models.append(found | {"settings": numbered(settings, mine)})
            print(vllm.__version__, name, dtype, compiled, found["pages"], flush=True)
    return {"vllm": vllm.__version__, "torch": str(torch.__version__), "machine": machine,
            "packings": packings(), "settings": settings, "models": models}  # fmt: skip


def with_rows(old: dict[str, Any]) -> dict[str, Any]:
    """A proof of this version, with the rows below vLLM's offloading."""
    new: dict[str, Any] = deepcopy(old)
    models = {(each["name"], each["dtype"], each["mode"]): each for each in new["models"]}
    with TemporaryDirectory() as directory:
        deep = written_rows(DEEP, "bfloat16", compiled=False, directory=Path(directory))
        new["order"] = deep["rows"]
        for name, dtype, compiled in fixtures():
            found = written_rows(name, dtype, compiled=compiled, directory=Path(directory))
            assert found["machine"] == new["machine"], "pages were proven on another machine"
            model = models[name, found["dtype"], found["mode"]]
            model["rows"] = found["rows"]
            model["row settings"] = numbered(new["settings"], found["settings"])
            print(vllm.__version__, name, dtype, compiled, found["rows"], flush=True)
    return new


def numbered(settings: list[dict[str, Any]], mine: dict[str, Any]) -> int:
    """The place of ``mine`` in ``settings``, where it is added if need be."""
    if mine not in settings:
        settings.append(mine)
    return settings.index(mine)


def fixtures() -> list[tuple[str, str, bool]]:
    """Models, dtypes, and whether they are compiled."""
    eager = [(name, dtype, False) for name in MODELS if name != DEEP for dtype in DTYPES]
    eager.remove(("gpt_oss", "float32", False))  # vLLM 0.30 has its sinks in bfloat16 alone
    return eager + [(name, "bfloat16", True) for name in COMPILED]


def added(proofs: list[dict[str, Any]], new: dict[str, Any]) -> list[dict[str, Any]]:
    """``proofs`` with a new one; equal pages keep the name of the version that had them first."""
    mine = _place(new)
    others = [each for each in proofs if _place(each) != mine]
    for digest, first in (("pages", "as"), ("rows", "rows as")):
        names = {
            _named(model, digest): model[first]
            for each in others for model in each["models"] if digest in model
        }  # fmt: skip
        for model in new["models"]:
            if digest in model:
                model[first] = names.get(_named(model, digest), new["vllm"])
    return sorted([*others, new], key=lambda each: [int(part) for part in each["vllm"].split(".")])


def _named(model: dict[str, Any], digest: str) -> str:
    return json.dumps([model[part] for part in ("kind", "dtype", "mode", digest)], sort_keys=True)


def _place(proof: dict[str, Any]) -> list[str]:
    return [proof[part] for part in ("vllm", "torch", "machine")]


def main() -> None:
    own = Path(os.path.realpath(vllm.__file__)).parent
    others = [file.name for file in own.glob("*.so") if file.is_symlink()]
    if others:
        sys.exit(f"{others} are the operators of another version: this proves nothing of pages")
    proofs = json.loads(FILE.read_text())["proofs"] if FILE.exists() else []
    if sys.argv[1:] == ["--rows"]:
        here = (vllm.__version__, str(torch.__version__))
        (old,) = [each for each in proofs if (each["vllm"], each["torch"]) == here]
        new = with_rows(old)
    else:
        new = proof() if NO_TIERS else with_rows(proof())
    FILE.write_text(json.dumps({"proofs": added(proofs, new)}, indent=1) + "\n")


if __name__ == "__main__":
    main()
