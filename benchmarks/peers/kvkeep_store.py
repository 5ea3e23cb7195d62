"""kvkeep's `KVStore` and `BlockStore`; KV is one tensor of a prompt, and gets fill one."""

from __future__ import annotations

import hashlib
from itertools import count
from typing import TYPE_CHECKING, Any

import torch

import kvkeep
from kvkeep import Namespace
from kvkeep.core.geometry import KVGeometry
from kvkeep.store import BlockStore, KVStore
from kvkeep.store.backends.memory import MemoryBackend
from peers.prompts import evict_from_cache, into_cache, kv_of, prompt, sync
from peers.work import by_tiers

if TYPE_CHECKING:
    from peers.worker import Setting, Steps

MODEL = "bench@1"
SMALL = KVGeometry(1, 1, 8, "bfloat16")


def version(variant: str) -> str:
    """Return kvkeep's version."""
    return str(kvkeep.__version__) + variant


def geometry(token_bytes: int) -> KVGeometry:
    """Return 8 KV heads of 128 in bfloat16, in as many layers as make ``token_bytes``."""
    return KVGeometry(token_bytes // 4096, 8, 128, "bfloat16")


def memory(size: int) -> MemoryBackend:
    """Return a memory tier whose memory was touched, as in a process that has run for a while."""
    backend = MemoryBackend(size + (size >> 2) + (64 << 20))
    pages = backend.arena.buffer[::4096]
    pages[:] = bytes(len(pages))
    return backend


def lookup(setting: Setting) -> Steps:
    tokens = prompt(1, setting.sizes.tokens)
    kv = torch.zeros(1, 2, len(tokens), 1, 8, dtype=torch.bfloat16)
    with KVStore(SMALL, model=MODEL, tiers=["memory://64MiB"]) as store:
        store.put(tokens, kv)
        while True:
            found = yield lambda: store.lookup(tokens)
            assert found.tokens == len(tokens)


def known(setting: Setting) -> Steps:
    keys = [hashlib.sha256(b"%d" % at).digest() for at in range(setting.sizes.pages)]
    with BlockStore(Namespace(model=MODEL), tiers=["memory://64MiB"]) as store:
        store.put(keys, [bytes(64)] * len(keys))
        while True:
            found = yield lambda: store.knows(keys)
            assert found == len(keys)


def memory_put(which: int) -> Any:
    def steps(setting: Setting) -> Steps:
        sizes = setting.sizes
        length = sizes.stored[which]
        tokens, kv = prompt(1, length), kv_of(length, sizes.token_bytes)
        tiers = [memory(length * sizes.token_bytes)]
        with KVStore(geometry(sizes.token_bytes), model=MODEL, tiers=tiers) as store:
            while True:
                store.clear()
                done = yield lambda: store.put(tokens, kv)
                assert done.tokens == length

    return steps


def memory_get(which: int) -> Any:
    def steps(setting: Setting) -> Steps:
        sizes = setting.sizes
        length = sizes.stored[which]
        tokens, kv = prompt(1, length), kv_of(length, sizes.token_bytes)
        out = torch.zeros_like(kv)
        tiers = [memory(length * sizes.token_bytes)]
        with KVStore(geometry(sizes.token_bytes), model=MODEL, tiers=tiers) as store:
            store.put(tokens, kv)
            while True:
                _, found = yield lambda: store.get(tokens, out=out)
                assert found == length
                assert torch.equal(out, kv)
                out.zero_()

    return steps


def opened(setting: Setting, length: int, options: str = "") -> KVStore:
    """Open the directory, with empty memory in front of it."""
    sizes = setting.sizes
    tiers: list[Any] = [
        memory(length * sizes.token_bytes),
        f"file://{setting.directory}/kv?size=64GiB{options}",
    ]
    return KVStore(geometry(sizes.token_bytes), model=MODEL, tiers=tiers)


def disk_put(which: int) -> Any:
    def steps(setting: Setting) -> Steps:
        sizes = setting.sizes
        length = sizes.stored[which]
        kv = kv_of(length, sizes.token_bytes)
        with opened(setting, length) as store:
            for at in count(1):
                store.clear()
                tokens = prompt(at, length)

                def put(tokens: Any = tokens) -> int:
                    done = store.put(tokens, kv)
                    assert store.flush()
                    sync(setting.directory)
                    return int(done.tokens)

                done = yield put
                assert done == length

    return steps


def disk_get(which: int, *, cached: bool) -> Any:
    """With ``io=buffered`` where the page cache has the files: by default it goes past it."""
    options = "&io=buffered" if cached else ""

    def steps(setting: Setting) -> Steps:
        sizes = setting.sizes
        length = sizes.stored[which]
        tokens, kv = prompt(1, length), kv_of(length, sizes.token_bytes)
        out = torch.zeros_like(kv)
        with opened(setting, length, options) as store:
            store.put(tokens, kv, wait=True)
            store.flush()
        sync(setting.directory)
        while True:
            with opened(setting, length, options) as store:
                (into_cache if cached else evict_from_cache)(setting.directory)
                _, found = yield lambda: store.get(tokens, out=out)
                assert found == length
                assert torch.equal(out, kv)
                out.zero_()

    return steps


CASES = by_tiers(
    lookup=lookup, known=known, disk_put=disk_put, disk_get=disk_get,
    memory_put=memory_put, memory_get=memory_get,
)  # fmt: skip
