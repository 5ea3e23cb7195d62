"""vLLM's offloading below its scheduler: the manager of its memory, and its filesystem tier.

Its copies between the device and memory need a GPU, so puts and gets of memory are not measured.
The tier of files moves chunks of 256 tokens between vLLM's memory and the disk; what follows, the
copy to the device, is not part of its times.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import time
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING, Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import numpy as np
from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from peers.prompts import emptied, evict_from_cache, into_cache, prompt, sync
from peers.vllm_blocks import Blocks, version
from peers.work import by_tiers

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from peers.worker import Setting, Steps

__all__ = ["CASES", "version"]


def manager_of(keys: Sequence[Any]) -> tuple[CPUOffloadingManager, ReqContext]:
    """Return a manager that has these chunks."""
    made = CPUOffloadingManager(2 * len(keys))
    context = ReqContext("stored")
    made.on_new_request(context)
    assert made.prepare_store(keys, context) is not None
    made.complete_store(keys, context)
    return made, context


def lookup(setting: Setting) -> Steps:
    """Hash a prompt by pages, as vLLM does once for its own cache, and look up its chunks."""
    sizes = setting.sizes
    tokens = prompt(1, sizes.tokens).tolist()
    blocks = Blocks(1, sizes.page, sizes.tokens)
    request = blocks.make(tokens, hashed=False)
    step = sizes.block // sizes.page

    def keys() -> list[Any]:
        return [make_offload_key(one, 0) for one in blocks.hasher(request)[step - 1 :: step]]

    manager, context = manager_of(keys())

    def find() -> int:
        found = 0
        for key in keys():
            if manager.lookup(key, context) is not LookupResult.HIT:
                break
            found += sizes.block
        return found

    while True:
        found = yield find
        assert found == sizes.tokens


def known(setting: Setting) -> Steps:
    keys = [
        make_offload_key(hashlib.sha256(b"%d" % at).digest(), 0)
        for at in range(setting.sizes.pages)
    ]
    manager, context = manager_of(keys)

    def find() -> int:
        found = 0
        for key in keys:
            if manager.lookup(key, context) is not LookupResult.HIT:
                break
            found += 1
        return found

    while True:
        found = yield find
        assert found == len(keys)


class Files:
    """The filesystem tier below memory with room for one prompt."""

    def __init__(self, setting: Setting, length: int) -> None:
        sizes = setting.sizes
        chunk = sizes.block * sizes.token_bytes
        self.chunks = length // sizes.block
        config = OffloadingConfig(
            groups=(OffloadingGroupConfig(sizes.block, ("layer",), 0),),
            worker_kv_bytes_per_block=chunk,
            enable_kv_cache_events=False,
            extra_config={"cpu_bytes_to_use": self.chunks * chunk},
            engine_id="peers",
            model=OffloadingModelConfig("none", "bfloat16"),
            cache=OffloadingCacheConfig(sizes.block, 1),
            parallel=OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, True),
        )
        self.memory = np.frombuffer(mmap.mmap(-1, self.chunks * chunk), np.uint8)
        self.memory = self.memory.reshape(self.chunks, chunk)
        self.tier = FileSystemTierManager(
            TieringOffloadingSpec(config), memoryview(self.memory), "fs",  # type: ignore[arg-type]
            root_dir=str(setting.directory / "kv"),
        )  # fmt: skip
        self._jobs = count()

    def fill(self) -> bytes:
        """Fill memory with random bytes; return their digest."""
        noise = np.random.default_rng(1).integers(0, 256, 1 << 20, np.uint8)
        flat = self.memory.reshape(-1)
        for at in range(0, len(flat), len(noise)):
            part = flat[at : at + len(noise)]
            part[:] = noise[: len(part)]
            part[0] = at >> 20 & 255
        return self.digest()

    def digest(self) -> bytes:
        """Return the digest of memory."""
        return hashlib.blake2b(self.memory.data).digest()

    def keys(self, of: int) -> list[Any]:
        """Return keys that no other ``of`` has."""
        return [
            make_offload_key(hashlib.sha256(b"%d %d" % (of, at)).digest(), 0)
            for at in range(self.chunks)
        ]

    def run(self, keys: list[Any], *, load: bool) -> None:
        """Move all chunks in one job, and wait for it."""
        job = TransferJob(next(self._jobs), keys, np.arange(len(keys)), load, ReqContext("one"))
        (self.tier.submit_load if load else self.tier.submit_store)(job)
        until = time.monotonic() + 120
        while not (done := list(self.tier.get_finished_jobs())):
            assert time.monotonic() < until, "vLLM's tier still works after 120 s"
            time.sleep(0.0005)
        assert all(one.success for one in done)


@contextmanager
def files(setting: Setting, length: int) -> Iterator[Files]:
    """Return an empty tier."""
    emptied(setting.directory)
    made = Files(setting, length)
    try:
        yield made
    finally:
        made.tier.shutdown()


def disk_put(which: int) -> Any:
    def steps(setting: Setting) -> Steps:
        with files(setting, setting.sizes.stored[which]) as made:
            made.fill()
            for at in count():
                emptied(setting.directory)
                keys = made.keys(at)

                def put(keys: list[Any] = keys) -> None:
                    made.run(keys, load=False)
                    sync(setting.directory)

                yield put

    return steps


def disk_get(which: int, *, cached: bool) -> Any:
    """It reads past the page cache, where the filesystem can."""

    def steps(setting: Setting) -> Steps:
        with files(setting, setting.sizes.stored[which]) as made:
            digest = made.fill()
            keys = made.keys(0)
            made.run(keys, load=False)
            sync(setting.directory)
            while True:
                (into_cache if cached else evict_from_cache)(setting.directory)
                made.memory[:] = 0
                yield lambda: made.run(keys, load=True)
                assert made.digest() == digest

    return steps


CASES = by_tiers(
    lookup=lookup, known=known, disk_put=disk_put, disk_get=disk_get,
)  # fmt: skip
