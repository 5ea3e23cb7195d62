"""Pages by heads: KV that engines with other numbers of tensor-parallel ranks read.

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

import logging
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

from kvkeep.integrations.sglang.settings import resolved_model, server_setting

if TYPE_CHECKING:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

__all__ = ["HeadParts", "head_parts"]

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
