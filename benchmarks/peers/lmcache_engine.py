"""LMCache's in-process engine on the CPU, with a connector that copies a prompt's KV by chunks.

LMCache ships no connector for the CPU. This one makes one copy of each chunk of 256 tokens, between
LMCache's memory and one tensor of a prompt, as `KVStore` does. Its hashes are Python's `hash`, its
default.
"""

from __future__ import annotations

import os
import time
from contextlib import contextmanager
from importlib.metadata import version as version_of
from itertools import count
from typing import TYPE_CHECKING, Any

os.environ |= {
    "LMCACHE_TRACK_USAGE": "false", "DO_NOT_TRACK": "1", "LMCACHE_LOG_LEVEL": "ERROR",
    "PYTHONHASHSEED": "0",
}  # fmt: skip

import torch
from lmcache.v1.cache_engine import LMCacheEngineBuilder
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.gpu_connector.gpu_connectors import GPUConnectorInterface
from lmcache.v1.metadata import LMCacheMetadata

from peers.prompts import emptied, evict_from_cache, into_cache, kv_of, prompt, sync
from peers.work import by_tiers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from peers.worker import Setting, Steps

GIB = 1 << 30
MEMORY, DISK = "LocalCPUBackend", "LocalDiskBackend"


def version(variant: str) -> str:
    """Return LMCache's version."""
    return version_of("lmcache") + variant


class Slabs(GPUConnectorInterface):  # type: ignore[misc]
    """Copies between chunks and ``kv``, a tensor ``[2, layers, tokens, width]``."""

    def __init__(self, shape: tuple[int, int, int]) -> None:
        self._layers, _, self._width = shape

    def get_shape(self, num_tokens: int) -> torch.Size:
        return torch.Size([2, self._layers, num_tokens, self._width])

    def from_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
        memory_obj.tensor.copy_(kwargs["kv"][:, :, start:end])

    def to_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
        kwargs["kv"][:, :, start:end].copy_(memory_obj.tensor)

    def batched_from_gpu(self, memory_objs: Any, starts: Any, ends: Any, **kwargs: Any) -> None:
        for one, start, end in zip(memory_objs, starts, ends, strict=True):
            self.from_gpu(one, start, end, **kwargs)

    def batched_to_gpu(
        self, memory_objs: Any = None, starts: Any = None, ends: Any = None, **kwargs: Any
    ) -> None:
        for one, start, end in zip(memory_objs, starts, ends, strict=True):
            self.to_gpu(one, start, end, **kwargs)


_NUMBER = count()


@contextmanager
def engine(
    setting: Setting,
    length: int,
    token_bytes: int,
    *,
    disk: bool = False,
    cached: bool = False,
    block: int = 0,
) -> Iterator[Any]:
    """Return an engine with room for a prompt in memory, or on disk behind as much staging.

    Its disk is opened past the page cache, which is faster, unless that is to have the files.
    """
    layers, width = token_bytes // 4096, 1024
    if token_bytes < 4096:
        layers, width = 1, token_bytes // 4
    chunk = block or setting.sizes.block
    need = length * token_bytes
    options: dict[str, Any] = {
        "chunk_size": chunk, "local_cpu": not disk,
        "max_local_cpu_size": (need + (need >> 2) + (64 << 20)) / GIB,
    }  # fmt: skip
    if disk:
        place = setting.directory / "kv"
        place.mkdir(exist_ok=True)
        options |= {
            "local_disk": f"file://{place}/", "max_local_disk_size": 64.0,
            "extra_config": {"use_odirect": not cached},
        }  # fmt: skip
    name = f"peers {next(_NUMBER)}"
    made = LMCacheEngineBuilder.get_or_create(
        name,
        LMCacheEngineConfig.from_defaults(**options),
        LMCacheMetadata(
            model_name="bench", world_size=1, local_world_size=1, worker_id=0, local_worker_id=0,
            kv_dtype=torch.bfloat16, kv_shape=(layers, 2, chunk, 1, width), chunk_size=chunk,
        ),
        Slabs((layers, 2, width)),
        lambda tensor, source: tensor,
        lambda found, source: found,
    )  # fmt: skip
    made.post_init()
    try:
        yield made
    finally:
        LMCacheEngineBuilder.destroy(name)


def kv_by_parts(length: int, token_bytes: int) -> Any:
    """Return KV as ``[2, layers, tokens, width]``."""
    return kv_of(length, token_bytes).view(2, token_bytes // 4096, length, 1024)


def lookup(setting: Setting) -> Steps:
    sizes = setting.sizes
    tokens = prompt(1, sizes.tokens).tolist()
    with engine(setting, sizes.tokens, 32) as made:
        made.store(tokens=tokens, kv=torch.zeros(2, 1, sizes.tokens, 8, dtype=torch.bfloat16))
        while True:
            found = yield lambda: made.lookup(tokens=tokens)
            assert found == sizes.tokens


def known(setting: Setting) -> Steps:
    sizes = setting.sizes
    tokens = prompt(1, sizes.tokens).tolist()
    with engine(setting, sizes.tokens, 32, block=sizes.page) as made:
        made.store(tokens=tokens, kv=torch.zeros(2, 1, sizes.tokens, 8, dtype=torch.bfloat16))
        keys = [key for _, _, key in made.token_database.process_tokens(tokens=tokens)]
        while True:
            found = yield lambda: made.storage_manager.batched_contains(keys)
            assert found[0] == len(keys)


def memory_put(which: int) -> Any:
    def steps(setting: Setting) -> Steps:
        sizes = setting.sizes
        length = sizes.stored[which]
        tokens, kv = prompt(1, length).tolist(), kv_by_parts(length, sizes.token_bytes)
        with engine(setting, length, sizes.token_bytes) as made:
            while True:
                made.clear(locations=[MEMORY])
                assert made.lookup(tokens=tokens) == 0
                yield lambda: made.store(tokens=tokens, kv=kv)
                assert made.lookup(tokens=tokens) == length

    return steps


def memory_get(which: int) -> Any:
    def steps(setting: Setting) -> Steps:
        sizes = setting.sizes
        length = sizes.stored[which]
        tokens, kv = prompt(1, length).tolist(), kv_by_parts(length, sizes.token_bytes)
        out = torch.zeros_like(kv)
        with engine(setting, length, sizes.token_bytes) as made:
            made.store(tokens=tokens, kv=kv)
            while True:
                found = yield lambda: made.retrieve(tokens=tokens, kv=out)
                assert found.all()
                assert torch.equal(out, kv)
                out.zero_()

    return steps


def written(made: Any) -> None:
    """Wait until the disk tier has written what it took."""
    worker = made.storage_manager.storage_backends[DISK].disk_worker
    until = time.monotonic() + 120
    while worker.put_tasks:
        assert time.monotonic() < until, "LMCache still writes after 120 s"
        time.sleep(0.0005)


def disk_put(which: int) -> Any:
    def steps(setting: Setting) -> Steps:
        sizes = setting.sizes
        length = sizes.stored[which]
        kv = kv_by_parts(length, sizes.token_bytes)
        with engine(setting, length, sizes.token_bytes, disk=True) as made:
            for at in count(1):
                emptied(setting.directory)  # its clear leaves the files: new tokens each time
                tokens = prompt(at, length).tolist()

                def put(tokens: Any = tokens) -> None:
                    made.store(tokens=tokens, kv=kv)
                    written(made)
                    sync(setting.directory)

                yield put
                assert made.lookup(tokens=tokens) == length

    return steps


def disk_get(which: int, *, cached: bool) -> Any:
    def steps(setting: Setting) -> Steps:
        sizes = setting.sizes
        length = sizes.stored[which]
        tokens, kv = prompt(1, length).tolist(), kv_by_parts(length, sizes.token_bytes)
        out = torch.zeros_like(kv)
        with engine(setting, length, sizes.token_bytes, disk=True, cached=cached) as made:
            emptied(setting.directory)
            made.store(tokens=tokens, kv=kv)
            written(made)
            sync(setting.directory)
            while True:
                (into_cache if cached else evict_from_cache)(setting.directory)
                found = yield lambda: made.retrieve(tokens=tokens, kv=out)
                assert found.all()
                assert torch.equal(out, kv)
                out.zero_()

    return steps


CASES = by_tiers(
    lookup=lookup, known=known, disk_put=disk_put, disk_get=disk_get,
    memory_put=memory_put, memory_get=memory_get,
)  # fmt: skip
