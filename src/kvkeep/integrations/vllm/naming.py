"""The namespace of an engine's KV.

A page is opaque: what wrote it must be what reads it. So the namespace names everything that makes
bytes other bytes: the weights and the configuration, dtypes, the layout of pages, the attention
backend and what it packs for, block size, groups of layers, ranks, and the version of vLLM.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import re
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import vllm

from kvkeep.errors import InvalidValue
from kvkeep.keys import Namespace

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

    from kvkeep.integrations.vllm.groups import Groups
    from kvkeep.integrations.vllm.options import Options

__all__ = ["machine_of", "namespace_of", "warn_of_seeds"]

_LOG = logging.getLogger("kvkeep.vllm")
_FORMAT = 1  # of our records: the pages of a group's layers, one behind the other
_COMMIT = re.compile(r"[0-9a-f]{40}")
_NOT_KV = {"_name_or_path", "transformers_version", "torch_dtype", "dtype", "architectures"}


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
    vllm_config: VllmConfig, options: Options, groups: Groups, pages: str
) -> Namespace:
    """What must never be mixed with this engine's KV; ``pages`` says how they lie in memory."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    parts = {
        "format": _FORMAT,
        "vllm": ".".join(vllm.__version__.split(".")[:2]),
        "hash": cache.prefix_caching_hash_algo,
        "block_tokens": groups.block_tokens,
        "groups": [[group.window, *group.layers] for group in groups.groups],
        "pages": pages,
        "speculative": _speculative(vllm_config),
    }
    return Namespace(
        tenant=options.tenant,
        model=Path(str(model.model)).name,
        revision=_revision(vllm_config, options),
        dtype=f"{model.dtype}/{cache.cache_dtype}/{model.quantization}",
        layout=_digest(parts),
        geometry=_digest(_configuration(model)),
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


def _revision(vllm_config: VllmConfig, options: Options) -> str:
    """Which weights these are; one that nobody else has where that cannot be known."""
    model = vllm_config.model_config
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        return _own("the scales of its KV are computed anew by every process", "")
    if options.revision:
        return options.revision
    advice = 'kv_connector_extra_config: {"revision": "…"}'
    if str(vllm_config.load_config.load_format) == "dummy":
        return _own("its weights are dummies", advice)
    found = _directory(model)
    if found is not None:
        from kvkeep.store.weights import weights_digest  # noqa: PLC0415 - reads files: when asked

        try:
            return weights_digest(found)
        except InvalidValue as error:
            return _own(f"its weights cannot be digested ({error})", advice)
    if model.revision and _COMMIT.fullmatch(model.revision):
        return str(model.revision)
    return _own(f"{model.model} at revision {model.revision} may be other weights tomorrow", advice)


def _own(reason: str, advice: str) -> str:
    _LOG.warning(
        "kvkeep cannot tell which weights the model has: %s. What it stores will be found by this "
        "process alone%s",
        reason,
        f"; to keep it, say which weights they are: {advice}" if advice else "",
    )
    return f"process {secrets.token_hex(16)}"


def _directory(model: ModelConfig) -> str | None:
    """Where the weights lie on this machine: a directory, or what the hub downloaded."""
    if Path(model.model).is_dir():
        return str(model.model)
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - vLLM has it
    from huggingface_hub.errors import LocalEntryNotFoundError  # noqa: PLC0415

    try:
        return str(snapshot_download(model.model, revision=model.revision, local_files_only=True))
    except (LocalEntryNotFoundError, ValueError, OSError):
        return None


def _configuration(model: ModelConfig) -> dict[str, object]:
    """The model's configuration, overrides of the command line included."""
    config: dict[str, object] = model.hf_config.to_dict()
    return {name: value for name, value in config.items() if name not in _NOT_KV}


def _speculative(vllm_config: VllmConfig) -> list[object] | None:
    """Draft layers are layers of the cache; wrong drafts cost time, never a token."""
    config = vllm_config.speculative_config
    if config is None or not config.use_eagle():
        return None
    draft = config.draft_model_config
    return [config.method, draft.model, draft.revision]


def _digest(parts: object) -> str:
    text = json.dumps(parts, sort_keys=True, default=_plain)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _plain(value: object) -> str:
    """For what JSON cannot write: the same in every process."""
    if isinstance(value, torch.dtype):
        return str(value)
    if isinstance(value, set | frozenset):
        return repr(sorted(map(str, value)))
    return repr(value)
