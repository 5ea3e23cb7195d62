"""All that engines of tests import sooner or later, for the process that others are forks of."""

from __future__ import annotations

import importlib
from contextlib import suppress

from engines import freeze
from vllm.platforms import current_platform

for name in (
    "tiered",
    "vllm.entrypoints.openai.api_server",
    "vllm.v1.engine.core",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.kv_offload.tiering.spec",
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector",
    "vllm.model_executor.model_loader.default_loader",
    "vllm.model_executor.layers.quantization.compressed_tensors.utils",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.model_executor.models.llama",
    "vllm.v1.pool.flash_maxsim",
    "kvkeep.integrations.vllm.connector",
    "kvkeep.integrations.vllm.scheduler",
    "kvkeep.integrations.vllm.tier",
    "kvkeep.integrations.vllm.worker",
    "kvkeep.store.backends.disk",
    "kvkeep.store.backends.shm",
):
    with suppress(ImportError):  # another vLLM has other modules
        importlib.import_module(name)

with suppress(AttributeError):
    current_platform.register_triton_kernel_overrides()

freeze()
