"""The namespace of an engine's KV.

A page is opaque bytes, so only an engine that writes the same bytes may read it. The namespace
names everything they depend on: the loaded weights (weights.py), the configuration and the version
of vLLM (numbers.py), and here dtypes, the layout of pages, the attention backend and the hardware
it packs for, block size, groups of layers, and ranks.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from kvkeep.core.keys import Namespace
from kvkeep.integrations.vllm.numbers import numbers_of, plain
from kvkeep.integrations.vllm.weights import revision_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from kvkeep.integrations.vllm.groups import Groups
    from kvkeep.integrations.vllm.options import ConnectorOptions

__all__ = ["machine_of", "namespace_of", "warn_of_seeds"]

_LOG = logging.getLogger("kvkeep.vllm")
_FORMAT = 1  # version of our records: the pages of a group's layers, one after another


def warn_of_seeds(vllm_config: VllmConfig) -> None:
    """Warn if block hashes are seeded, so that no later process computes the same ones."""
    algorithm = str(vllm_config.cache_config.prefix_caching_hash_algo)
    if algorithm.startswith("xxhash") and os.getenv("PYTHONHASHSEED") is None:
        _LOG.warning(
            "--prefix-caching-hash-algo %s is seeded anew by every process: no other process, and "
            "none after a restart, will find what kvkeep stores. Use sha256, the default",
            algorithm,
        )


def namespace_of(
    vllm_config: VllmConfig, options: ConnectorOptions, groups: Groups, pages: str
) -> Namespace:
    """Return the engine's namespace; ``pages`` describes the layout of its pages in memory."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    parts = {
        "format": _FORMAT,
        "hash": cache.prefix_caching_hash_algo,
        "block_tokens": groups.block_tokens,
        "groups": [
            ["state" if group.state else group.window, *group.layers] for group in groups.groups
        ],
        "pages": pages,
        "speculative": _speculative(vllm_config),
    }
    return Namespace(
        tenant=options.tenant,
        model=Path(str(model.model)).name,
        revision=revision_of(vllm_config, options.revision),
        dtype=f"{model.dtype}/{cache.cache_dtype}/{model.quantization}",
        layout=_digest(parts),
        geometry=_digest(numbers_of(vllm_config)),
        rank=_rank(vllm_config),
    )


def machine_of(vllm_config: VllmConfig, groups: Groups, device: torch.device) -> str:
    """Return what computes and packs the pages: attention backends and instruction sets."""
    layers = vllm_config.compilation_config.static_forward_context
    names = [name for group in groups.groups for name in group.layers]
    backends = sorted({layers[name].get_attn_backend().get_name() for name in names})
    machine = platform.machine()
    if device.type == "cpu":
        machine += f"/{torch.backends.cpu.get_cpu_capability()}"
    return f"{device.type} {machine} {','.join(backends)}"


def _rank(vllm_config: VllmConfig) -> str:
    """Return this worker's share of the KV; empty with one worker."""
    parallel = vllm_config.parallel_config
    sizes = {
        "tp": parallel.tensor_parallel_size,
        "pp": parallel.pipeline_parallel_size,
        "pcp": parallel.prefill_context_parallel_size,
        "dcp": parallel.decode_context_parallel_size,
    }
    if parallel.world_size == 1:
        return ""
    sharing = " ".join(f"{name}{size}" for name, size in sizes.items())
    interleave = getattr(parallel, "cp_kv_cache_interleave_size", 1)
    return f"{parallel.rank} of {sharing} interleave{interleave}"


def _speculative(vllm_config: VllmConfig) -> list[object] | None:
    """Return the draft model, whose layers are layers of the cache; None without one."""
    config = vllm_config.speculative_config
    if config is None or not config.use_eagle():
        return None
    draft = config.draft_model_config
    return [config.method, draft.model, draft.revision]


def _digest(parts: object) -> str:
    text = json.dumps(plain(parts), sort_keys=True)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]
