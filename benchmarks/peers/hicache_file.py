"""SGLang's `HiCacheFile`, driven by its controller's page functions over its own host pool.

Pages of 64 tokens, in calls of 128 pages, as its controller moves them.
"""

from __future__ import annotations

import sys
from array import array
from importlib.metadata import version as version_of
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests_sglang"))

import torch
import without_gpu  # type: ignore[import-not-found]  # noqa: F401 - before SGLang itself
from sglang.srt.mem_cache.hicache_storage import HiCacheFile
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_hash_str
from sglang_pools import Pages, config_of, hashes, pools, spans  # type: ignore[import-not-found]

from peers.prompts import emptied, evict_from_cache, into_cache, kv_of, prompt, sync
from peers.work import by_tiers

if TYPE_CHECKING:
    from peers.worker import Setting, Steps

PAGE = 64
CALL = 128


def version(variant: str) -> str:
    """Return SGLang's version."""
    return version_of("sglang") + variant


def storage(setting: Setting) -> HiCacheFile:
    """Return the backend over an empty directory."""
    emptied(setting.directory)
    return HiCacheFile(config_of(), str(setting.directory / "kv"))


def lookup(setting: Setting) -> Steps:
    """Hash a prompt by pages, and ask for them."""
    sizes = setting.sizes
    made = storage(setting)
    tokens = RadixKey(array("q", prompt(1, sizes.tokens).tolist()))
    small = torch.zeros(64, dtype=torch.uint8)
    for key in get_hash_str(tokens, page_size=PAGE):
        assert made.set(key, small)
    while True:
        found = yield lambda: made.batch_exists(get_hash_str(tokens, page_size=PAGE))
        assert found == sizes.tokens // PAGE


def known(setting: Setting) -> Steps:
    made = storage(setting)
    keys = hashes(setting.sizes.pages)
    small = torch.zeros(64, dtype=torch.uint8)
    for key in keys:
        assert made.set(key, small)
    while True:
        found = yield lambda: made.batch_exists(keys)
        assert found == len(keys)


class Host:
    """A host pool with room for a prompt twice: its first half is stored, its second is filled."""

    def __init__(self, setting: Setting, length: int) -> None:
        sizes = setting.sizes
        made = pools(
            "mha", "page_first", "bf16", page=PAGE, tokens=length, heads=8, dim=128,
            layers=sizes.token_bytes // 4096,
        )  # fmt: skip
        self.count = length // PAGE
        kept = made.host.kv_buffer
        (self._kept,) = kept if isinstance(kept, list | tuple) else (kept,)
        self._axis = next(at for at, size in enumerate(self._kept.shape) if size == made.host.size)
        source = self._part(0, length)
        source.copy_(kv_of(length, sizes.token_bytes).view(-1)[: source.numel()].view(source.shape))
        self._length = length
        self._host = made.host
        self.pages = Pages(made, storage(setting), v1=False)

    def _part(self, first: int, length: int) -> Any:
        return self._kept.narrow(self._axis, first, length)

    def set(self, keys: list[str]) -> bool:
        """Store the first half."""
        return all(
            self.pages.set(keys[at : at + CALL], spans(self._host, at, len(keys[at : at + CALL])))
            for at in range(0, len(keys), CALL)
        )

    def get(self, keys: list[str]) -> int:
        """Fill the second half; return the pages that were found."""
        return sum(
            self.pages.get(
                keys[at : at + CALL],
                spans(self._host, self.count + at, len(keys[at : at + CALL])),
            )
            for at in range(0, len(keys), CALL)
        )

    def equal(self) -> bool:
        """Compare the halves, and clear the second."""
        second = self._part(self._length, self._length)
        same = torch.equal(self._part(0, self._length), second)
        second.zero_()
        return same


def disk_put(which: int) -> Any:
    def steps(setting: Setting) -> Steps:
        host = Host(setting, setting.sizes.stored[which])
        for at in count():
            emptied(setting.directory)
            keys = hashes(host.count, f"put {at}")

            def put(keys: list[str] = keys) -> bool:
                done = host.set(keys)
                sync(setting.directory)
                return done

            done = yield put
            assert done

    return steps


def disk_get(which: int, *, cached: bool) -> Any:
    def steps(setting: Setting) -> Steps:
        host = Host(setting, setting.sizes.stored[which])
        keys = hashes(host.count)
        assert host.set(keys)
        sync(setting.directory)
        while True:
            (into_cache if cached else evict_from_cache)(setting.directory)
            found = yield lambda: host.get(keys)
            assert found == len(keys)
            assert host.equal()

    return steps


CASES = by_tiers(
    lookup=lookup, known=known, disk_put=disk_put, disk_get=disk_get,
)  # fmt: skip
