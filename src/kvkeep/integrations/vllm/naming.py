"""The namespace of an engine's KV.

A page is opaque bytes, so only an engine that writes the same bytes may read it. The namespace
names everything they depend on: the loaded weights, the configuration,
and here the minor version of vLLM and the version of torch, dtypes, the layout of pages, the
attention backend and the hardware it packs for, block size, groups of layers, and ranks.

An upgrade to another minor version of vLLM therefore finds nothing: its kernels may round otherwise
or pack pages in another order.

The settings of vLLM that decide the numbers of KV are all except those listed as neutral: a setting
that a later vLLM adds is part of the namespace until it is known to be neutral. Values are those
that vLLM resolved, so ``--hf-overrides`` and a default given by hand count by their effect.

Neutral settings are about serving, logs, sampling, sizes and scheduling. The composition of a batch
is neutral too: it changes the last bits of sums, and vLLM's own prefix cache ignores it as well.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
import logging
import os
import platform
import secrets
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
import vllm
from vllm import envs

from kvkeep.core.errors import InvalidValue
from kvkeep.core.keys import Namespace
from kvkeep.integrations.loaded import SAFETENSORS_FORMATS, loaded_identity
from kvkeep.store.identity.values import NEUTRAL_CONFIG

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm.config import ModelConfig, VllmConfig

    from kvkeep.integrations.options import EngineOptions
    from kvkeep.integrations.vllm.groups import Groups
    from kvkeep.integrations.vllm.options import ConnectorOptions

__all__ = [
    "computed_by",
    "engine_namespace",
    "machine_of",
    "namespace_of",
    "numbers_of",
    "plain",
    "ranks_of",
    "revision_of",
    "warn_of_seeds",
]


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
            `kvkeep.integrations.vllm.naming.plain` converts.
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


_MODEL: Final = {
    # described in another way: by the loaded files, and by the model's configuration
    "model", "model_weights", "revision", "hf_config", "hf_text_config", "hf_config_path",
    "hf_overrides", "config_format", "max_model_len", "spec_target_max_model_len", "dtype",
    "multimodal_config",
    # tokens and requests
    "tokenizer", "tokenizer_mode", "tokenizer_revision", "skip_tokenizer_init", "max_logprobs",
    "logprobs_mode", "return_sampling_mask", "generation_config", "override_generation_config",
    "logits_processors", "pooler_config", "seed", "use_fp64_gumbel", "enable_prompt_embeds",
    "io_processor_plugin", "renderer_num_workers", "served_model_name", "enable_trace_replay",
    # access
    "allowed_local_media_path", "allowed_media_domains", "hf_token", "trust_remote_code",
    "allow_deprecated_quantization",
    # memory; compilation is described by its mode
    "enforce_eager", "enable_sleep_mode", "sleep_preserve_parameter_names", "sleep_mode_backend",
    "sleep_mode_offload_cudagraph", "enable_nccl_comm_suspend", "enable_cumem_allocator",
}  # fmt: skip
_IMAGES: Final = {
    "language_model_only", "limit_per_prompt", "enable_mm_embeds", "mm_processor_cache_gb",
    "mm_processor_cache_type", "mm_hasher_algorithm", "mm_shm_cache_max_object_size_mb",
    "mm_encoder_only", "interleave_mm_strings", "skip_mm_profiling", "mm_tensor_ipc",
    "allow_missing_mm_embeddings", "mm_ipc_gpu_memory_gb",
}  # fmt: skip
_CACHE: Final = {
    # described in another way
    "block_size", "user_specified_block_size", "kv_cache_layout", "hash_block_size", "cache_dtype",
    "prefix_caching_hash_algo", "_block_size_resolved", "effective_attention_block_size",
    # sizes, and choice of cached tokens
    "gpu_memory_utilization", "num_gpu_blocks", "num_cpu_blocks", "num_gpu_blocks_override",
    "kv_cache_memory_bytes", "kv_cache_size_tokens", "kv_cache_max_concurrency",
    "kv_offloading_size", "kv_offloading_backend", "enable_prefix_caching", "prefix_match_unit",
    "prefix_cache_retention_interval", "cache_hit_alignment_tokens",
}  # fmt: skip
_ATTENTION: Final = {"backend", "backend_per_kind"}  # the chosen ones are in the namespace
_KERNELS: Final = {"enable_flashinfer_autotune", "enable_rocm_segmented_attn_autotune",
                   "enable_cutedsl_warmup", "enable_jit_warmup"}  # fmt: skip
_LORA: Final = {"max_lora_rank", "max_loras", "max_cpu_loras", "max_lora_cls_labels",
                "default_mm_loras"}  # fmt: skip
_LOADING: Final = {
    "download_dir", "use_tqdm_on_load", "device", "pt_load_map_location",
    "safetensors_prefetch_num_threads", "safetensors_prefetch_block_size",
}  # fmt: skip
# Compiler passes about the sums of ranks, which vLLM runs by default only where there are several.
_SUMS: Final = {"fuse_allreduce_rms", "fi_allreduce_fusion_max_size_mb", "enable_sp",
                "fuse_gemm_comms", "sp_min_token_num"}  # fmt: skip
# Environment variables that are neutral, although vLLM's own list of neutral ones lacks them.
_ENVIRONMENT: Final = {
    "CUDA_HOME", "VLLM_NCCL_SO_PATH", "VLLM_CONFIGURE_LOGGING", "VLLM_PLUGINS",
    "VLLM_TARGET_DEVICE",  # the device is in the namespace
    "VLLM_ENGINE_READY_TIMEOUT_S", "VLLM_CPU_OMP_THREADS_BIND", "VLLM_CPU_NUM_OF_RESERVED_CPU",
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN", "VLLM_ALLOW_RUNTIME_LORA_UPDATING", "VLLM_KV_CACHE_LAYOUT",
    "VLLM_LORA_RESOLVER_CACHE_DIR", "VLLM_DISABLE_COMPILE_CACHE", "VLLM_DP_RANK", "VLLM_DP_SIZE",
    "VLLM_DP_RANK_LOCAL", "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "VLLM_MSGPACK_ZERO_COPY_THRESHOLD",
    "VLLM_PROCESS_NAME_PREFIX", "VLLM_LOG_BATCHSIZE_INTERVAL", "VLLM_LOG_MODEL_INSPECTION",
    # where a replica is reached, and how it waits for others
    "VLLM_NIXL_SIDE_CHANNEL_PORT", "VLLM_P2P_SIDE_CHANNEL_HOST", "VLLM_P2P_SIDE_CHANNEL_PORT",
    "VLLM_EC_SIDE_CHANNEL_HOST", "VLLM_EC_SIDE_CHANNEL_PORT", "VLLM_MOONCAKE_BOOTSTRAP_PORT",
    "VLLM_LOOPBACK_IP", "VLLM_RAY_BUNDLE_INDICES", "VLLM_RAY_DP_PLACEMENT_NODE_IPS",
    "VLLM_RAY_PER_WORKER_GPUS", "VLLM_P2P_HANDSHAKE_TIMEOUT_S", "VLLM_P2P_IDLE_TIMEOUT_S",
    "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT", "VLLM_GPU_NIC_PCIE_MAPPING", "VLLM_NIC_SELECTION_VARS",
    # what an image of vLLM says of itself
    "VLLM_BUILD_COMMIT", "VLLM_BUILD_PIPELINE", "VLLM_BUILD_URL", "VLLM_IMAGE_TAG",
    "VLLM_USAGE_SOURCE", "VLLM_DISABLE_LOG_LOGO", "VLLM_GC_DEBUG",
    # requests, and bounds of them
    "VLLM_SYSTEM_START_DATE", "VLLM_MAX_N_SEQUENCES", "VLLM_ENABLE_RESPONSES_API_STORE",
    "VLLM_XGRAMMAR_CACHE_MB", "VLLM_USE_FLASHINFER_SAMPLER", "VLLM_ALLOW_INSECURE_SERIALIZATION",
}  # fmt: skip
# With other kinds of rotary embedding, and with Llama 4, the maximum length changes all positions:
# vllm/model_executor/layers/rotary_embedding/phi3_long_rope_scaled_rope.py, llama4.py.
_ANY_LENGTH: Final = {"default", "linear", "llama3", "yarn", "mrope", "proportional"}


def numbers_of(vllm_config: VllmConfig, *, any_ranks: bool = False) -> dict[str, object]:
    """Return every setting that may decide a number, in JSON's types.

    ``any_ranks``: without those that only concern how ranks add their sums. That changes the last
    bits of sums, as the number of ranks itself does.
    """
    model, compilation = vllm_config.model_config, vllm_config.compilation_config
    images, lora = model.multimodal_config, vllm_config.lora_config
    described: dict[str, object] = {
        "matmul": torch.get_float32_matmul_precision(),
        "hf": _configuration(model.hf_config),
        "hf_text": _configuration(model.hf_text_config),
        "model": _fields(model, _MODEL),
        "longest": model.max_model_len if _length_decides(model) else None,
        "images": None if images is None else _fields(images, _IMAGES),
        "cache": _fields(vllm_config.cache_config, _CACHE),
        "attention": _fields(vllm_config.attention_config, _ATTENTION),
        "kernels": _fields(vllm_config.kernel_config, _KERNELS),
        "compilation": [
            compilation.mode, compilation.backend, compilation.custom_ops,
            _fields(compilation.pass_config, _SUMS) if any_ranks else compilation.pass_config,
            compilation.inductor_compile_config, compilation.inductor_passes,
        ],
        "lora": None if lora is None else _fields(lora, _LORA),
        "loading": _fields(vllm_config.load_config, _LOADING),
        "experts": vllm_config.parallel_config.enable_expert_parallel,
        "additional": vllm_config.additional_config,
        "environment": _environment(),
    }  # fmt: skip
    if model.using_transformers_backend():
        described["transformers"] = version("transformers")
    plainly = plain(described)
    assert isinstance(plainly, dict)
    return plainly


def plain(value: object) -> object:
    """Return ``value`` in JSON's types, the same in every process."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, torch.dtype):
        return str(value)
    if isinstance(value, Mapping):
        return {str(name): plain(each) for name, each in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [type(value).__name__, _fields(value, frozenset())]
    if callable(value):
        name = getattr(value, "__qualname__", type(value).__qualname__)
        return f"{getattr(value, '__module__', '')}.{name}"
    if hasattr(value, "to_dict"):
        return plain(value.to_dict())
    text = repr(value)
    return f"{type(value).__module__}.{type(value).__qualname__}" if " at 0x" in text else text


def _fields(config: Any, neutral: set[str] | frozenset[str]) -> dict[str, object]:
    """Return the fields of a dataclass, except those that are ``neutral``."""
    return {
        field.name: plain(getattr(config, field.name, None))
        for field in dataclasses.fields(config)
        if field.name not in neutral
    }


def _configuration(config: Any) -> dict[str, object]:
    """Return a model's configuration with all overrides, and the class that computes it."""
    named: dict[str, object] = config.to_dict()
    kept = {name: value for name, value in named.items() if name not in NEUTRAL_CONFIG}
    return kept | {"architectures": named.get("architectures")}


def _length_decides(model: ModelConfig) -> bool:
    """Return whether the numbers of a short text depend on ``--max-model-len``."""
    text = model.hf_text_config
    if "llama4" in str(getattr(text, "model_type", "")):
        return True
    return not set(_kinds(getattr(text, "rope_parameters", None))) <= _ANY_LENGTH


def _kinds(rope: object) -> list[str]:
    """Return the kinds of rotary embedding in ``rope_parameters``, of all layer types."""
    if not isinstance(rope, Mapping):
        return []
    kinds = [str(rope[name]) for name in ("rope_type", "type") if rope.get(name) is not None]
    return kinds + [kind for value in rope.values() for kind in _kinds(value)]


def _environment() -> dict[str, object]:
    """Return vLLM's environment variables that are set, except those that change no number."""
    return {
        name: value
        for name, value in envs.compile_factors().items()
        if name in os.environ and name not in _ENVIRONMENT
    }
