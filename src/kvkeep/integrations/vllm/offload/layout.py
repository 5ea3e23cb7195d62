"""The layout of rows: one for all numbers of ranks, wherever vLLM proves it.

In vLLM's *direct* layout a row is the pages of rank 0, then those of rank 1, and so on. In its
*canonical* layout it is, for each layer, the page that one rank alone would have: each rank copies
its heads to their places, and ranks with the same heads take turns. So engines with different
numbers of ranks read each other's rows. vLLM derives the places from the strides of the pages, and
marks the layers for which they are right for every number of ranks (*portable* here).
"""

from __future__ import annotations

import copy
import logging
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import CanonicalKVCaches
    from vllm.v1.kv_offload.config import OffloadingConfig

    from kvkeep.integrations.vllm.offload.engine import OffloadEngine

__all__ = ["canonical_of", "is_portable"]

_LOG = logging.getLogger("kvkeep.vllm")
_OPTION = "canonical_layout"
# Pages that would be copied in more pieces are copied whole. Where a page has all heads of a token
# side by side (NHD), each of several ranks has a piece for each token of a block.
_MOST_PIECES = 8


def canonical_of(engine: OffloadEngine, config: OffloadingConfig) -> OffloadingConfig | None:
    """Return ``config`` in the canonical layout; None: it is to stay as it is.

    It stays if ``canonical_layout`` is given, if vLLM expects layers that are not portable, and if
    weights or activations are quantised: ranks may choose the scales of their shares, so another
    number of ranks computes other numbers, by more than rounding.
    The size of a row is the same in both, because it is decided before there are pages.
    """
    if _OPTION in config.extra_config:
        return None
    if engine.config.model_config.quantization is not None:
        return None
    asked, transfer = copy.copy(engine.config), copy.copy(engine.config.kv_transfer_config)
    assert transfer is not None, "a connector made the spec"
    transfer.kv_connector_extra_config = {**config.extra_config, _OPTION: True}
    asked.kv_transfer_config = transfer
    canonical = build_offloading_config(asked, engine.caches)
    one_size = canonical.replicated_layout == config.replicated_layout
    if not canonical.parallel.is_parallelism_agnostic:
        return None
    return canonical if one_size or config.parallel.world_size == 1 else None


def is_portable(caches: CanonicalKVCaches) -> bool:
    """Return whether all pages are portable, and are copied in few pieces; log why not."""
    refs = [ref for group in caches.group_data_refs for ref in group]
    if any(ref.mapping is None or not ref.mapping.parallelism_agnostic for ref in refs):
        _LOG.info("vLLM cannot place pages of this layout: stored KV names the number of ranks")
        return False
    pieces: int = max(sum(run.num_fragments for run in ref.mapping.runs) for ref in refs)
    if pieces > _MOST_PIECES:
        _LOG.info(
            "A page would be copied in %d pieces to be of use to engines with another number of "
            'ranks: stored KV names the number of ranks; "%s": true in kv_connector_extra_config '
            "copies the pieces",
            pieces,
            _OPTION,
        )
    return pieces <= _MOST_PIECES
