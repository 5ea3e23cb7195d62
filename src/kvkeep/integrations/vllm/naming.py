"""The namespace of an engine's KV.

A page is opaque bytes, so only an engine that writes the same bytes may read it. The namespace
names everything they depend on: the loaded weights, the configuration (numbers.py),
and here the minor version of vLLM and the version of torch, dtypes, the layout of pages, the
attention backend and the hardware it packs for, block size, groups of layers, and ranks.

An upgrade to another minor version of vLLM therefore finds nothing: its kernels may round otherwise
or pack pages in another order.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch
import vllm
from vllm import envs

from kvkeep.core.errors import InvalidValue
from kvkeep.core.keys import Namespace
from kvkeep.integrations.loaded import SAFETENSORS_FORMATS, loaded_identity
from kvkeep.integrations.vllm.numbers import numbers_of, plain

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from vllm.config import VllmConfig

    from kvkeep.integrations.options import EngineOptions
    from kvkeep.integrations.vllm.groups import Groups
    from kvkeep.integrations.vllm.options import ConnectorOptions

__all__ = [
    "computed_by", "dtype_of", "engine_namespace", "machine_of", "namespace_of", "ranks_of",
    "revision_of", "warn_of_seeds",
]  # fmt: skip

_LOG = logging.getLogger("kvkeep.vllm")
_CONFIGURATION = ("hf", "hf_text", "longest")  # of the model, in `numbers_of`
_FORMAT = 1  # version of our records: the pages of a group's layers, one after another
_SAFETENSORS: Final = SAFETENSORS_FORMATS | {"hf", "instanttensor"}
_ADVICE: Final = 'kv_connector_extra_config: {"revision": "…"}'


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
    """Return the namespace of a worker's pages; ``pages`` describes their layout in memory."""
    parts = {
        "format": _FORMAT,
        "block_tokens": groups.block_tokens,
        "groups": [
            ["state" if group.state else group.window, *group.layers] for group in groups.groups
        ],
        "pages": pages,
    }
    rank = ranks_of(vllm_config, vllm_config.parallel_config.rank)
    computed = computed_by(numbers_of(vllm_config))
    return engine_namespace(vllm_config, options, parts, computed=computed, rank=rank)


def engine_namespace(
    vllm_config: VllmConfig,
    options: EngineOptions,
    layout: Mapping[str, object],
    *,
    computed: str,
    rank: str,
) -> Namespace:
    """Return a namespace in an engine.

    Arguments:
        vllm_config: the engine's configuration.
        options: of the adapter.
        layout: describes the records, in JSON's types or what
            `kvkeep.integrations.vllm.numbers.plain` converts.
        computed: names what computes the pages, see `computed_by`.
        rank: whose records they are, see `ranks_of`.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    parts = {
        **layout,
        "hash": cache.prefix_caching_hash_algo,
        "speculative": _speculative(vllm_config),
    }
    return Namespace(
        tenant=options.tenant,
        model=Path(str(model.model)).name,
        revision=revision_of(vllm_config, options.revision),
        dtype=dtype_of(vllm_config),
        layout=_digest(parts),
        geometry=computed,
        rank=rank,
    )


def machine_of(vllm_config: VllmConfig, names: Iterable[str], device: torch.device) -> str:
    """Return what computes and packs the pages: attention backends and instruction sets.

    ``names`` are those of the layers. Only a worker knows their backends.
    """
    layers = vllm_config.compilation_config.static_forward_context
    backend_of = {name: layers[name].get_attn_backend().get_name() for name in names}
    backends = sorted(set(backend_of.values()))
    if len(backends) > 1:  # two engines may have the same ones, each for the other's layers
        backends.append(_digest(backend_of))
    machine = platform.machine()
    if device.type == "cpu":
        machine += f"/{torch.backends.cpu.get_cpu_capability()}"
        if torch.cpu.get_capabilities().get(
            "amx_tile"
        ):  # it packs bfloat16 in another order than AVX-512
            machine += "/AMX"
    return f"{device.type} {machine} {','.join(backends)}"


def dtype_of(vllm_config: VllmConfig) -> str:
    """Return the dtypes of the model and of its KV, and the quantisation of its weights."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    return f"{model.dtype}/{cache.cache_dtype}/{model.quantization}"


def computed_by(numbers: Mapping[str, object]) -> str:
    """Return what names the computation of pages; ``numbers`` are those of `numbers_of`."""
    minor = ".".join(vllm.__version__.split(".")[:2])
    configuration = _digest([numbers[name] for name in _CONFIGURATION])
    settings = {name: value for name, value in numbers.items() if name not in _CONFIGURATION}
    return (
        f"vLLM {minor}, torch {torch.__version__}; settings {_digest(settings)}; "
        f"configuration {configuration}"
    )


def ranks_of(vllm_config: VllmConfig, rank: int | str) -> str:
    """Return ``rank``, the share of the KV, among how many; empty with one worker."""
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
    return f"{rank} of {sharing} interleave{interleave}"


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


def revision_of(vllm_config: VllmConfig, given: str) -> str:
    """Return the revision of the weights; the option ``revision``, ``given``, is trusted.

    vLLM loads and packs the weights before it makes a connector, so they are named by their files:
    a directory by its identity, if nothing in it changed since the process began; a name on the hub
    in the same way, or by the commit, if the branch did not move; anything else by a name that no
    other process has, and a warning with the reason.
    """
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        return _own("the scales of its KV are computed anew by every process", "")
    if vllm_config.weight_transfer_config is not None:
        return _own("its weights are replaced while it runs (weight_transfer_config)", "")
    if given:
        return given
    model, load = vllm_config.model_config, vllm_config.load_config
    load_format = str(load.load_format)
    if load_format == "dummy":
        return _own("its weights are dummies")
    if load_format not in _SAFETENSORS or (model.model_weights or model.model) != model.model:
        return _own(f"--load-format {load_format} may read files that kvkeep does not check")
    if envs.VLLM_USE_MODELSCOPE and not Path(model.model).is_dir():
        return _own("ModelScope gives no commit")
    try:
        return loaded_identity(str(model.model), model.revision, load.download_dir)
    except InvalidValue as error:
        return _own(str(error))


def _own(reason: str, advice: str = _ADVICE) -> str:
    """Return a name that no other process has, and warn."""
    _LOG.warning(
        "kvkeep cannot identify the weights of the model: %s. Only this process will find what it "
        "stores%s",
        reason,
        f"; to reuse it later, name the weights: {advice}" if advice else "",
    )
    return f"process {secrets.token_hex(16)}"
