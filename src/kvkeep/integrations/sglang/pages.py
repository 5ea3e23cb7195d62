"""Pages of SGLang's host pools as bytes: from a pool into a record, and back.

A record is a page in its pool's own layout: the flattened result of ``get_data_page``; or K, then
V, of some of its heads. SGLang names a page by the index of its first token. Copies
release the interpreter lock.

Pages by heads: KV that engines with other numbers of tensor-parallel ranks read.

A page of all ranks is cut along the KV heads. Each part is a record of its own, named by its heads
and the number of all heads instead of the rank that wrote it:

    one rank                 0 … 7
    rank 1 of 2              4 … 7      of 8 heads: records 4, 5, 6 and 7
    ranks 10 and 11 of 16    5          both have record 5; one of them writes it

SGLang gives rank r of R the heads from r · heads / R on, or head r · heads // R where there are
fewer heads than ranks: its weights are loaded so (`QKVParallelLinear`), and its own transfers
between numbers of ranks rely on it (`compute_head_slice_params`).
"""

from __future__ import annotations

import ctypes
import logging
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

from kvkeep.core.errors import UnsupportedModel
from kvkeep.integrations.records import gather, scatter
from kvkeep.integrations.sglang.settings import resolved_model, server_setting

if TYPE_CHECKING:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

    from kvkeep.integrations.records import Bytes

__all__ = ["HeadParts", "HostPages", "bytes_of", "first_tokens", "head_parts", "pages_of"]


class HostPages(ABC):
    """The pages of one pool.

    Attributes:
        size: bytes of a record.
        records: records of a page; 1 unless pages are stored by heads.
        tokens: entries of ``host_indices`` for each page.

    Thread safety: any, on different pages.
    """

    size: int
    records: int = 1

    def __init__(self, pool: Any) -> None:
        self.pool = pool
        self.tokens = int(pool.page_size)

    @abstractmethod
    def save(self, index: int, raw: memoryview, record: int = 0) -> None:
        """Copy a record of page ``index`` into ``raw``, which has `size` bytes."""

    @abstractmethod
    def load(self, index: int, raw: memoryview, record: int = 0) -> None:
        """Copy ``raw`` into page ``index``, as its record of this number."""

    def part(self, page: Bytes, record: int) -> Bytes:
        """Return the memory of a record in a flattened page; what it is a view of is shared."""
        assert not record
        return page


class _Views(HostPages):
    """Pages that are views of one tensor, strided where layers, or K and V, are apart."""

    def __init__(self, pool: Any) -> None:
        super().__init__(pool)
        self.size = _view(pool, 0).size

    def save(self, index: int, raw: memoryview, record: int = 0) -> None:
        part = self.part(_view(self.pool, index), record)
        np.copyto(np.frombuffer(raw, np.uint8).reshape(part.shape), part)

    def load(self, index: int, raw: memoryview, record: int = 0) -> None:
        part = self.part(_view(self.pool, index), record)
        np.copyto(part, np.frombuffer(raw, np.uint8).reshape(part.shape))


class _Heads(_Views):
    """Pages whose heads are apart, stored by parts of so many heads: K of the part, then V."""

    def __init__(self, pool: Any, records: int) -> None:
        super().__init__(pool)
        self.records = records
        page = _view(pool, 0)
        assert page.shape[:3] == (2, 1, pool.head_num), page.shape
        self.size = page.size // records
        assert np.shares_memory(self.part(page, 0), page), page.strides

    def part(self, page: Bytes, record: int) -> Bytes:
        heads: Bytes = page.reshape(2, self.records, -1)  # of one axis, or of a pool's
        return heads[:, record]


class _Joined(HostPages):
    """Pages of several tensors, which the pool joins into one and splits again."""

    def __init__(self, pool: Any) -> None:
        super().__init__(pool)
        page = pool.get_data_page(0)
        self.size = page.numel() * page.element_size()
        self._dtype = page.dtype

    def save(self, index: int, raw: memoryview, record: int = 0) -> None:
        page = bytes_of(self.pool.get_data_page(index).contiguous())
        np.copyto(np.frombuffer(raw, np.uint8), page)

    def load(self, index: int, raw: memoryview, record: int = 0) -> None:
        page = torch.empty(self.size, dtype=torch.uint8)
        np.copyto(page.numpy(), np.frombuffer(raw, np.uint8))
        self.pool.set_from_flat_data_page(index, page.view(self._dtype))


class _Spans(HostPages):
    """Pages of several spans of memory, for pools that give only addresses."""

    def __init__(self, pool: Any) -> None:
        super().__init__(pool)
        self.size = sum(map(len, self._spans(0)))

    def save(self, index: int, raw: memoryview, record: int = 0) -> None:
        gather(self._spans(index), raw)

    def load(self, index: int, raw: memoryview, record: int = 0) -> None:
        scatter(raw, self._spans(index))

    def _spans(self, index: int) -> list[Bytes]:
        if not 0 <= index <= self.pool.size - self.tokens:
            raise IndexError(f"token {index} begins no page of a pool of {self.pool.size} tokens")
        addresses, sizes = self.pool.get_page_buffer_meta(torch.arange(index, index + self.tokens))
        return [
            np.frombuffer((ctypes.c_uint8 * size).from_address(address), np.uint8)
            for address, size in zip(addresses, sizes, strict=True)
        ]


class _Marks(HostPages):
    """Pages without bytes, which a pool only numbers for other pools; a record marks one."""

    size = 1

    def save(self, index: int, raw: memoryview, record: int = 0) -> None:
        raw[:] = b"\x01"

    def load(self, index: int, raw: memoryview, record: int = 0) -> None:
        pass


def pages_of(pool: Any, heads: HeadParts | None = None) -> HostPages:
    """Return the pages of ``pool``, a host pool of SGLang in any layout; by parts of ``heads``.

    Raises:
        UnsupportedModel: the pool gives no access to its pages.
    """
    if heads is not None:
        return _Heads(pool, heads.count)
    try:
        first, again = _page(pool, 0), _page(pool, 0)
        if not first.numel():
            return _Marks(pool)
        # Both tensors are alive, so equal addresses mean that the page is memory of the pool.
        return (_Views if first.data_ptr() == again.data_ptr() else _Joined)(pool)
    except (NotImplementedError, ValueError):
        pass  # the pool has no such method; it may give addresses
    try:
        return _Spans(pool)
    except (NotImplementedError, ValueError) as error:
        raise UnsupportedModel(
            f"{type(pool).__name__} in layout {pool.layout} does not give its pages to storage: "
            f"{error}; another --hicache-mem-layout may, or serve without a storage backend"
        ) from error


def first_tokens(host_indices: torch.Tensor | None, count: int, pages: HostPages) -> list[int]:
    """Return the first token of each of ``count`` pages, by which pools name them.

    Raises:
        ValueError: ``host_indices`` has not as many entries as these pages have tokens.
    """
    if host_indices is None or host_indices.numel() != count * pages.tokens:
        given = None if host_indices is None else host_indices.numel()
        raise ValueError(f"{given} host indices name {count} pages of {pages.tokens} tokens")
    starts: list[int] = host_indices[:: pages.tokens].tolist()
    return starts


def bytes_of(tensor: torch.Tensor) -> Bytes:
    """Return the memory of ``tensor``, which is contiguous and on the CPU."""
    flat: Bytes = tensor.detach().view(-1).view(torch.uint8).numpy()
    return flat


def _page(pool: Any, index: int) -> torch.Tensor:
    if pool.layout == "page_unified":  # `get_data_page` does not support it
        at = index // pool.page_size
        page: torch.Tensor = pool.kv_buffer[at : at + 1]
    else:
        page = pool.get_data_page(index, flat=False)
    return page


def _view(pool: Any, index: int) -> Bytes:
    view: Bytes = _page(pool, index).view(torch.uint8).numpy()
    return view


_LOG = logging.getLogger("kvkeep.sglang")
_LAYOUT: Final = "page_head"
# Not fp8: its scales may differ by rank.
_DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, slots=True)
class HeadParts:
    """The parts of a page that one rank has."""

    heads: int
    """The KV heads of each layer, of all ranks."""
    width: int
    """Heads of a part."""
    first: int
    """The first head of this rank."""
    count: int
    """Parts of this rank."""
    copy: int = 0
    """Which of the ranks with the same heads this is."""

    @property
    def names(self) -> list[str]:
        """The names of this rank's parts, in the order of heads."""
        starts = range(self.first, self.first + self.count * self.width, self.width)
        return [f"heads {start}-{start + self.width - 1} of {self.heads}" for start in starts]


def head_parts(config: HiCacheStorageConfig, pool: Any) -> HeadParts | None:
    """Return the parts of this rank's pages of KV; None: its pages are named by the rank.

    Parts have one head, or as many as SGLang's ``tp_lcm_size`` allows. If the pool's layout keeps
    heads apart, and yet pages are named by the rank, the reason is logged.
    """
    if type(pool) is not MHATokenToKVPoolHost or pool.layout != _LAYOUT:
        return None
    model = resolved_model()
    if model is None:
        _LOG.info("Stored KV names the rank: the model's configuration is not known here")
        return None
    heads, ranks = int(model.get_total_num_kv_heads()), int(config.tp_size)
    if why := _why_not(config, pool, model, heads):
        _LOG.info("Stored KV names the rank, and other --tp do not find it: %s", why)
        return None
    sharing = max(1, ranks // heads)  # ranks with the same heads
    width = heads // math.gcd(heads, int(config.tp_lcm_size or heads))
    place, copy = divmod(int(config.tp_rank), sharing)
    held = int(pool.head_num)
    return HeadParts(heads, width, place * held, held // width, copy)


def _why_not(config: HiCacheStorageConfig, pool: Any, model: Any, heads: int) -> str:
    """Return why the heads of a rank are not known to be a part of the page of all; or nothing."""
    ranks = int(config.tp_size)
    uneven = heads < 1 or (heads % ranks and ranks % heads)
    if uneven or pool.head_num != max(1, heads // ranks):
        return f"{ranks} ranks with {pool.head_num} KV heads each do not divide {heads} heads"
    if heads % ranks and server_setting("device", "device") == "cpu":
        return "on a CPU, SGLang adds heads until the ranks divide them"
    if pool.dtype not in _DTYPES:
        return f"KV of {pool.dtype} may have scales of each rank"
    if model.quantization or server_setting("quantization"):
        return "ranks of quantised models may have scales of their own"
    if model.is_hybrid_swa:
        return "layers with sliding windows may have other heads"
    if pool.layer_num != pool.target_layer_num:
        return "a draft model's layers are in the same pages"
    if config.attn_cp_size > 1 or config.dcp_size > 1:
        return "ranks of context parallelism have parts of the tokens"
    return ""
