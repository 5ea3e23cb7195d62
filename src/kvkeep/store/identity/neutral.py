"""Attributes of modules and configurations that are no part of a model's identity."""

from __future__ import annotations

from typing import Final

import torch

__all__ = ["NEUTRAL", "NEUTRAL_CONFIG"]

NEUTRAL: Final = frozenset(torch.nn.Module().__dict__) | {
    # names and notes
    "config", "name_or_path", "generation_config", "model_tags", "warnings_issued",
    # how the model is loaded, saved and divided among devices
    "_is_hf_initialized", "_is_buffer", "persistent", "_use_kernels",
    "_weight_conversions", "all_tied_weights_keys", "hf_device_map",
    "_hf_hook", "_old_forward", "_keys_to_ignore_on_load_missing",
    "_keys_to_ignore_on_load_unexpected", "_keys_to_ignore_on_save", "_no_split_modules",
    "_skip_keys_device_placement", "_tp_plan", "_ep_plan", "_pp_plan", "_fsdp_plan",
    # training, and additional outputs
    "gradient_checkpointing", "_gradient_checkpointing_func", "_require_grads_hook",
    "_require_grads_hooks",
    "loss_type", "_loss_function", "_output_capturing_hooks_installed",
    # the same operations, compiled; state of `generate` between its calls
    "_compiled_call", "_compiled_call_impl", "_last_compile_config", "_previous_max_cache_length",
}  # fmt: skip
"""Attributes of modules that do not change KV, or that are described elsewhere."""

NEUTRAL_CONFIG: Final = frozenset({
    # names and notes
    "_name_or_path", "name_or_path", "_commit_hash", "transformers_version", "architectures",
    "_post_init_done", "model_type",
    # use of logits, and additional outputs
    "bos_token_id", "eos_token_id", "id2label", "label2id", "output_hidden_states",
    "pad_token_id", "problem_type", "return_dict", "use_cache",
})  # fmt: skip
"""Attributes of configurations that do not change KV; a test changes each of them."""
