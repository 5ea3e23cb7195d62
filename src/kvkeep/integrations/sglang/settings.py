"""Settings of SGLang that decide the numbers of KV, as its process resolved them.

Whole groups of settings count, except those listed here as neutral: a setting that a later SGLang
adds to a group is part of the namespace until it is known to be neutral. The model's own
configuration is in its files, which are part of the revision.
"""

from __future__ import annotations

import hashlib
import os
import re
from typing import Any, Final

__all__ = ["one_node", "resolved_model", "server_setting", "settings_digest"]

_GROUPS: Final = {
    "model": {
        # in the namespace otherwise
        "model_path", "revision",
        # how weights come into memory
        "trust_remote_code", "download_dir", "startup_weight_load_mode",
        "weight_loader_disable_mmap", "weight_loader_prefetch_checkpoints",
        "weight_loader_prefetch_num_threads",
        "weight_loader_drop_cache_after_load", "is_startup_weight_load_overlap", "model_checksum",
        "delete_ckpt_after_loading", "modelopt_checkpoint_save_path", "modelopt_export_path",
        "engine_info_bootstrap_port", "remote_instance_weight_loader_seed_instance_ip",
        "remote_instance_weight_loader_seed_instance_service_port",
        "remote_instance_weight_loader_send_weights_group_ports",
        "remote_instance_weight_loader_backend", "weight_cache_mode", "weight_cache_socket",
        "remote_instance_weight_loader_start_seed_via_transfer_engine", "weight_cache_timeout",
        "checkpoint_engine_wait_weights_before_ready",
    },
    "exec.features": {
        "enable_memory_saver", "enable_weights_cpu_backup", "enable_draft_weights_cpu_backup",
        "enable_custom_logit_processor", "enable_return_hidden_states", "sampling_mask_max_tokens",
        "return_hidden_states_mode", "enable_return_routed_experts", "enable_return_indexer_topk",
        "disable_outlines_disk_cache", "enable_watermark", "watermark_config", "watermark_key",
        "watermark_key_b", "watermark_context_window", "watermark_mixing_probability",
        "watermark_max_probability", "watermark_default_enabled", "watermark_enforce_all",
        "enable_return_aux_hidden_states", "aux_hidden_state_capture",
        "return_aux_hidden_state_layer_ids", "enable_fp32_lm_head",
    },
    "exec.kernel": {"sampling_backend", "grammar_backend", "disable_flashinfer_autotune",
                    "flashinfer_autotune_skip_ops"},
    "exec.moe": {"expert_distribution_recorder_mode", "expert_distribution_recorder_buffer_size",
                 "expert_balancedness_report_mode", "mooncake_ib_device", "is_ep_joiner",
                 "is_ep_scale_joiner", "ep_join_mode", "elastic_ep_scale_timeout", "kt_cpuinfer",
                 "kt_threadpool_count"},
    "exec.mamba": {"mamba_max_states_per_path", "int8_mamba_ckpt_size"},
    "exec.comm": {"enable_layerwise_nvtx_marker", "pre_warm_nccl"},
    "exec.deterministic": set(),
    "exec.dllm": set(),
}  # fmt: skip
_SINGLE: Final = {
    "exec.graph": ("enable_torch_compile",),
    "lora": ("enable_lora", "lora_backend", "lora_target_modules", "lora_use_virtual_experts"),
    "mm": ("mm_attention_backend", "mm_process_config", "image_processor_backend",
           "disable_fast_image_processor", "mm_enable_dp_encoder"),
}  # fmt: skip
# Environment variables that do not change numbers, or differ between ranks.
_OTHER_SWITCHES: Final = re.compile(
    "RANK|LOG|DEBUG|METRIC|_CI|TEST|HEALTH|TRACE|PROFIL|NVTX|CHECK|DISAGG|CRASH|COREDUMP|MOONCAKE"
)


def settings_digest() -> str:
    """Return 16 hexadecimal digits of every setting that may decide a number."""
    settings: list[str] = []
    for path, neutral in _GROUPS.items():
        group = _group(path)
        settings += [f"{path}.{name}={group[name]}" for name in sorted(set(group) - neutral)]
    for path, names in _SINGLE.items():
        group = _group(path)
        settings += [f"{path}.{name}={group.get(name)}" for name in names]
    settings += _switches()
    return hashlib.blake2b("\n".join(settings).encode(), digest_size=8).hexdigest()


def server_setting(name: str, group: str = "model") -> object:
    """Return a setting of the server in this process; None without a server."""
    return _group(group).get(name)


def resolved_model() -> Any | None:
    """Return SGLang's ``ModelConfig`` of the served model; None without a server."""
    if _server_args() is None:
        return None
    from sglang.srt import runtime_context  # noqa: PLC0415 - as below

    return runtime_context.process_model_config()


def one_node() -> bool:
    """Whether all ranks of the server are on one machine; False without a server."""
    arguments = _server_args()
    return arguments is not None and arguments.nnodes == 1


def _server_args() -> Any | None:
    """Return SGLang's ``ServerArgs``; None without a server in this process."""
    from sglang.srt import runtime_context  # noqa: PLC0415 - as below

    try:
        return runtime_context.get_server_args()
    except ValueError:
        return None


def _group(path: str) -> dict[str, object]:
    """Return the settings of a group; none without a server in this process."""
    from sglang.srt import runtime_context  # noqa: PLC0415 - imports much of SGLang

    first, *rest = path.split(".")
    try:
        bag: Any = getattr(runtime_context, f"get_{first}")()
    except ValueError:
        return {}
    for name in rest:
        bag = getattr(bag, name, None)
    return {} if bag is None else dict(bag._fields)


def _switches() -> list[str]:
    """Return the boolean environment variables of SGLang that are set."""
    from sglang.srt import environ  # noqa: PLC0415 - as above

    switches = vars(type(environ.envs))
    return [
        f"{name}={field.get()}"
        for name, field in sorted(switches.items())
        if isinstance(field, environ.EnvBool)
        and name in os.environ
        and not _OTHER_SWITCHES.search(name)
    ]
