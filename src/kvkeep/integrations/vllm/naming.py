"""The namespace of an engine's KV.

A page is opaque: what wrote it must be what reads it. So the namespace names everything that makes
bytes other bytes: the weights that were loaded (weights.py), the configuration and the version of
vLLM (numbers.py); and here dtypes, the layout of pages, the attention backend and what it packs
for, block size, groups of layers, and ranks.
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
_FORMAT = 1  # of our records: the pages of a group's layers, one behind the other


def warn_of_seeds(vllm_config: VllmConfig) -> None:
    """Say it where no later process will name the same blocks the same."""
    algorithm = str(vllm_config.cache_config.prefix_caching_hash_algo)
    if algorithm.startswith("xxhash") and os.getenv("PYTHONHASHSEED") is None:
        _LOG.warning(
            "--prefix-caching-hash-algo %s is seeded anew by every process: what kvkeep stores "
            "will not be found by another one, nor after a restart. Use sha256, the default",
            algorithm,
        )


def namespace_of(
    vllm_config: VllmConfig, options: ConnectorOptions, groups: Groups, pages: str
) -> Namespace:
    """What must never be mixed with this engine's KV; ``pages`` says how they lie in memory."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    parts = {
        "format": _FORMAT,
        "hash": cache.prefix_caching_hash_algo,
        "block_tokens": groups.block_tokens,
        "groups": [[group.window, *group.layers] for group in groups.groups],
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
    """What computes and packs the pages: attention backends, and the instructions they use."""
    layers = vllm_config.compilation_config.static_forward_context
    names = [name for group in groups.groups for name in group.layers]
    backends = sorted({layers[name].get_attn_backend().get_name() for name in names})
    machine = platform.machine()
    if device.type == "cpu":
        machine += f"/{torch.backends.cpu.get_cpu_capability()}"
    return f"{device.type} {machine} {','.join(backends)}"


def _rank(vllm_config: VllmConfig) -> str:
    """This worker's share of the KV; empty where there is one worker."""
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
    """Draft layers are layers of the cache; wrong drafts cost time, never a token."""
    config = vllm_config.speculative_config
    if config is None or not config.use_eagle():
        return None
    draft = config.draft_model_config
    return [config.method, draft.model, draft.revision]


def _digest(parts: object) -> str:
    text = json.dumps(plain(parts), sort_keys=True)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]
