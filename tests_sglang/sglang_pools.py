"""Pools, storages and controllers of SGLang's, as its scheduler makes them."""

from __future__ import annotations

import hashlib
import tempfile
import threading
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from sglang.srt import runtime_context
from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.device_pool_info import MambaStateBufferInfo
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from sglang.srt.mem_cache.pool_host.mha import get_mha_host_pool_cls
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.storage import StorageBackendFactory
from sglang.srt.runtime_context import get_parallel
from sglang.srt.server_args import ServerArgs
from transformers import LlamaConfig

from kvkeep.integrations import loaded

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from kvkeep.integrations.sglang import KVKeepStorage

PAGE = 16
TOKENS = 16 * PAGE  # on the device; twice as many on the host
LAYERS = 3
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32,
          "fp8": torch.float8_e4m3fn}  # fmt: skip


@dataclass
class Pools:
    """A pool on the device, and the host's below it."""

    device: Any
    host: Any


def pools(kind: str, layout: str, dtype: str = "bf16", page: int = PAGE, **shape: int) -> Pools:
    """``kind``: mha; mla: latent KV; asym: K and V of different widths."""
    tokens, layers = shape.pop("tokens", TOKENS), shape.pop("layers", LAYERS)
    common: dict[str, Any] = {
        "host_to_device_ratio": 2.0,
        "host_size": 0,
        "page_size": page,
        "layout": layout,
        "pin_memory": False,
        "device_capacity_tokens": tokens,
        "start_layer": 0,
        "end_layer": layers - 1,
    }
    with host_memory_budget_scope(1 << 40):  # SGLang leaves 10 GiB to others
        if kind == "mla":
            latent = MLATokenToKVPool(
                tokens, page, DTYPES[dtype], 32, 16, layers, "cpu", enable_memory_saver=False
            )
            info = latent.get_device_pool_infos()[0].buffer_info
            width = latent.kv_cache_dim
            return Pools(
                latent,
                MLATokenToKVPoolHost(
                    info, target_layer_num=layers, override_kv_cache_dim=width, **common
                ),
            )
        device = MHATokenToKVPool(
            tokens,
            page,
            DTYPES[dtype],
            shape.pop("heads", 2),
            shape.pop("dim", 16),
            layers,
            "cpu",
            enable_memory_saver=False,
            enable_alt_stream=False,
            v_head_dim=32 if kind == "asym" else None,
        )
        info = device.get_device_pool_infos()[0].buffer_info
        return Pools(device, get_mha_host_pool_cls(info)(info, **common))


def states(slots: int = 64) -> Any:
    """A host pool of recurrent states: one a page, of two parts with dtypes of their own."""
    info = MambaStateBufferInfo(
        temporal=torch.zeros(2, slots, 4, 8, dtype=torch.float32),
        conv=(torch.zeros(2, slots, 4, 3, dtype=torch.bfloat16),),
    )
    with host_memory_budget_scope(1 << 40):
        return MambaPoolHost(
            info, 1.5, 0, device_capacity=slots, pin_memory=False, layout="page_first"
        )


def storage_of(
    host: Any,
    tiers: list[str],
    *,
    model: str | None = "m",
    began: float | None = None,
    **more: Any,
) -> KVKeepStorage:
    """A storage as SGLang makes one: by its factory, then told of its pool.

    The process is said to have begun at ``began``, or now: that of a test is older than the files
    that the test makes.
    """
    since = time.time() if began is None else began
    loaded.process_began = lambda: since
    ranks = {name: more.pop(name) for name in [*more] if name.endswith(("_rank", "_size"))}
    config = config_of(model=model, mla=more.pop("mla", False), metrics=more.pop("metrics", False),
                       **ranks)  # fmt: skip
    config.extra_config = extra(tiers, **more)
    made = StorageBackendFactory.create_backend("dynamic", config, host)
    made.register_mem_pool_host(host)
    made.on_host_pools_registered()
    return made


def config_of(
    *, model: str | None = "m", mla: bool = False, metrics: bool = False, **ranks: int
) -> HiCacheStorageConfig:
    sizes = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0,
             "attn_cp_size": 1}  # fmt: skip
    return HiCacheStorageConfig(
        **(sizes | ranks),
        is_mla_model=mla,
        enable_storage_metrics=metrics,
        is_page_first_layout=False,
        model_name=model,
    )


def extra(tiers: list[str], **more: Any) -> dict[str, Any]:
    return {
        "backend_name": "kvkeep",
        "module_path": "kvkeep.integrations.sglang",
        "class_name": "KVKeepStorage",
        "tiers": tiers,
        "revision": "r1",
        **more,
    }


class Pages:
    """SGLang's own page functions over a pool and a storage; ``v1`` as its setting says."""

    def __init__(self, pools: Pools, storage: Any, *, v1: bool) -> None:
        self.host = pools.host
        self.storage = storage
        self.controller = HiCacheController(
            allocator(pools), pools.host, pools.host.page_size, None, threading.Event()
        )
        self.controller.storage_backend = storage
        self._v1 = v1

    def set(self, hashes: list[str], indices: torch.Tensor) -> bool:
        way = self.controller._page_set_zero_copy if self._v1 else self.controller._generic_page_set
        return way(hashes, indices)

    def get(self, hashes: list[str], indices: torch.Tensor) -> int:
        way = self.controller._page_get_zero_copy if self._v1 else self.controller._generic_page_get
        request = SimpleNamespace(request_id="a request", is_terminated=lambda: False)
        return way(request, hashes, indices)


@contextmanager
def controller(
    pools: Pools, tiers: list[str], ranks: tuple[int, int] = (0, 1), **more: Any
) -> Iterator[HiCacheController]:
    """SGLang's controller with its three storage threads, attached to a storage.

    ``ranks``: which rank of how many it says to be; there is no other.
    """
    with ExitStack() as stack:
        if not dist.is_initialized():
            file = stack.enter_context(tempfile.NamedTemporaryFile())
            dist.init_process_group(
                "gloo", store=dist.FileStore(file.name, 1), rank=0, world_size=1
            )
            stack.callback(dist.destroy_process_group)
        stack.enter_context(
            get_parallel().override(
                tp_rank=ranks[0],
                tp_size=ranks[1],
                pp_rank=0,
                pp_size=1,
                attn_dcp_size=1,
                attn_dcp_rank=0,
            )
        )
        made = HiCacheController(
            allocator(pools),
            pools.host,
            pools.host.page_size,
            dist.group.WORLD,
            threading.Event(),
            storage_backend="dynamic",
            prefetch_threshold=pools.host.page_size,
            model_name="m",
            storage_backend_extra_config=extra(tiers, **more),
        )
        stack.callback(made.detach_storage_backend)
        yield made


@contextmanager
def server(
    model: Path, *, config: Mapping[str, Any] | None = None, **settings: Any
) -> Iterator[None]:
    """Settings as a process of SGLang's server has them; its model's weights are elsewhere.

    ``config``: of the model, which has Llama's architecture.
    """
    made = LlamaConfig(architectures=["LlamaForCausalLM"], **(config or {}))
    made.save_pretrained(model)
    arguments = ServerArgs(model_path=str(model), device="cpu", **settings)
    runtime_context.publish(arguments, role="scheduler")
    try:
        yield
    finally:
        runtime_context.reset_context()


def allocator(pools: Pools) -> PagedTokenToKVPoolAllocator:
    return PagedTokenToKVPoolAllocator(
        pools.device.size,
        page_size=pools.host.page_size,
        dtype=pools.device.dtype,
        device="cpu",
        kvcache=pools.device,
        need_sort=False,
    )


def hashes(count: int, of: str = "prompt") -> list[str]:
    """Hashes as SGLang's: hexadecimal SHA-256, each of another page."""
    return [hashlib.sha256(f"{of} {at}".encode()).hexdigest() for at in range(count)]


def spans(host: Any, first: int, pages: int) -> torch.Tensor:
    """Host indices of so many pages from page ``first`` on."""
    size = host.page_size
    return torch.arange(first * size, (first + pages) * size)


def scribble(host: Any, seed: int = 0) -> None:
    """Random bytes all over a pool."""
    generator = torch.Generator().manual_seed(seed)
    for buffer in buffers(host):
        raw = buffer.view(torch.uint8)
        raw.copy_(torch.randint(0, 256, raw.shape, dtype=torch.uint8, generator=generator))


def buffers(host: Any) -> list[torch.Tensor]:
    kept = host.kv_buffer
    return list(kept) if isinstance(kept, list | tuple) else [kept]


def page_bytes(host: Any, page: int) -> bytes:
    """The bytes of one page, by its place in the pool's buffers: not by what is being tested."""
    size, first = host.page_size, page * host.page_size
    parts = []
    for buffer in buffers(host):
        raw = buffer.view(torch.uint8)
        by_token = host.layout in {"layer_first", "page_first"}
        length = host.size if by_token else host.page_num
        axis = next(at for at, found in enumerate(raw.shape) if found == length)
        parts.append(raw.narrow(axis, first, size) if by_token else raw.narrow(axis, page, 1))
    return b"".join(part.contiguous().numpy().tobytes() for part in parts)
