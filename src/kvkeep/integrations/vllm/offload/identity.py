"""The namespace of the tier's records.

vLLM's key of a chunk is a block's hash and the number of a group: the same for other weights, other
settings, another number of ranks. A row is opaque bytes besides, in the order in which this
engine's workers put their pages. The namespace names all that; where rows are the same for every
number of ranks (spec.py), it names vLLM's format of such rows instead of the ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.canonical_mapping import (
    canonical_format_id,
)

from kvkeep.integrations.vllm.naming import (
    computed_by,
    engine_namespace,
    ranks_of,
    warn_of_seeds,
)
from kvkeep.integrations.vllm.numbers import numbers_of, plain

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

    from kvkeep.core.keys import Namespace
    from kvkeep.integrations.vllm.offload.engine import OffloadEngine
    from kvkeep.integrations.vllm.offload.notes import WorkerNote
    from kvkeep.integrations.vllm.options import OffloadOptions

__all__ = ["namespace_of_rows"]

_FORMAT = "row 1"  # version of our records: the used bytes of a row, in order
# Fields of specs that tell of one rank. The workers' notes tell the bytes of a page of all ranks,
# and the model's configuration tells all heads.
_SHARES = frozenset({"num_kv_heads", "page_size_padded"})


def namespace_of_rows(
    engine: OffloadEngine,
    options: OffloadOptions,
    spec: TieringOffloadingSpec,
    notes: Sequence[WorkerNote],
) -> Namespace:
    """Return the namespace of an engine's rows; ``notes`` are those of all its workers."""
    warn_of_seeds(engine.config)
    config = spec.config
    any_ranks = all(note.portable for note in notes)
    groups = plain(
        [
            [
                group.group_id,
                group.tokens_per_block,
                engine.caches.kv_cache_groups[group.group_id].kv_cache_spec,
                *group.layer_names,
            ]
            for group in config.groups
        ]
    )
    computed = computed_by(numbers_of(engine.config, any_ranks=any_ranks))
    layout: dict[str, object] = {
        "format": _FORMAT,
        "chunk": [config.cache.tokens_per_hash, config.cache.blocks_per_chunk],
        "shared": _shared(engine.caches),
        "groups": groups,
    }
    if any_ranks:
        assert all(note == notes[0] for note in notes), "rows are the same for all ranks"
        assert config.kv_cache_layout is not None, "vLLM has placed the pages"
        layout |= {
            "groups": _of_all_ranks(groups),
            "layout": canonical_format_id(config.kv_cache_layout),
            "workers": plain(notes[0]),
        }
        return engine_namespace(engine.config, options, layout, computed=computed, rank="")
    layout |= {
        "row": [spec.kv_bytes_per_chunk, spec.cpu_page_size_per_worker],
        "layout": [config.kv_cache_layout, config.canonical_layout, spec.replicated_layout],
        "workers": plain(list(notes)),
    }
    ranks = ranks_of(engine.config, "all")
    return engine_namespace(engine.config, options, layout, computed=computed, rank=ranks)


def _of_all_ranks(groups: object) -> object:
    """Return ``groups`` without what specs say of one rank's share."""
    if isinstance(groups, dict):
        return {name: _of_all_ranks(each) for name, each in groups.items() if name not in _SHARES}
    return [_of_all_ranks(each) for each in groups] if isinstance(groups, list) else groups


def _shared(caches: KVCacheConfig) -> list[list[str]]:
    """Return which layers share their pages with layers of other groups."""
    places: dict[int, list[str]] = {}
    for tensor in caches.kv_cache_tensors:
        for at, name in enumerate(tensor.layers):
            places.setdefault(tensor.offset + at * tensor.layer_stride, []).append(name)
    return list(places.values())
