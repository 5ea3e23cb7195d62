"""Engines with vLLM's own offloading, and kvkeep below it."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from engines import Engine, engine

import kvkeep.integrations.vllm.tier as tier_module
from kvkeep.core.geometry.units import parse_bytes
from kvkeep.integrations.vllm.stats import Counts

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvkeep.store import BlockStore

MODULE = "kvkeep.integrations.vllm.tier"


def offloading(tiers: Sequence[dict[str, Any]], **extra: Any) -> dict[str, Any]:
    """The configuration of an engine with these secondary tiers."""
    return {
        "kv_connector": "KVKeepOffloadingConnector",
        "kv_connector_module_path": MODULE,
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "KVKeepSpec", "spec_module_path": MODULE,
            "cpu_bytes_to_use": 64 << 20, "secondary_tiers": list(tiers), **extra,
        },
    }  # fmt: skip


def kvkeep_tier(*tiers: str, **options: Any) -> dict[str, Any]:
    """Its loads are tested: so what is stored is loaded, whatever computing would take.

    vLLM's memory is emptied by a reset, after which the tier is to have what it had.
    """
    found = {"compare_costs": False, "resets": False, **options}
    return {"type": "KVKeepTier", "module_path": MODULE, "tiers": list(tiers), **found}


class TieredEngine(Engine):
    """An engine with one `KVKeepTier`, and a look at what it does."""

    @property
    def tier(self) -> tier_module.KVKeepTier:
        (tier,) = self.core.scheduler.connector.connector_scheduler.manager.secondary_tiers
        return tier  # type: ignore[no-any-return]

    @property
    def store(self) -> BlockStore:
        return self.tier._store.store

    def forget_all(self) -> None:
        """Empty vLLM's prefix cache and its primary tier; what the tier has stays."""
        assert self.core.scheduler.reset_prefix_cache(reset_connector=True)


@contextmanager
def buffered(size: str | int | None) -> Iterator[None]:
    """Tiers that are made now have so small a buffer, or the one that they choose."""
    with pytest.MonkeyPatch.context() as patch:
        if size is not None:
            patch.setattr(tier_module, "buffer_bytes", lambda _: parse_bytes(size))
        yield


@contextmanager
def tiered(model: str, *tiers: str, **more: Any) -> Iterator[TieredEngine]:
    """An engine with kvkeep's ``tiers`` below vLLM's 64 MiB of memory.

    ``buffer`` among its options is how large the memory is from which chunks are written.
    """
    options, extra = dict(more.pop("options", {})), more.pop("extra", {})
    buffer = options.pop("buffer", None)
    transfer = offloading([kvkeep_tier(*tiers, **options)], **extra)
    kept: list[dict[str, float]] = []
    take = Counts.take

    def told(counts: Counts) -> Any:
        stats = take(counts)
        for name, amount in (stats.data if stats else {}).items():
            for one in kept:
                one[name] = one.get(name, 0) + amount
        return stats

    Counts.take = told  # type: ignore[method-assign]
    try:
        with buffered(buffer), engine(model, kv_transfer_config=transfer, **more) as plain:
            plain.__class__ = TieredEngine
            assert isinstance(plain, TieredEngine)
            plain._take = plain._kept = told
            kept.append(plain.counted)
            yield plain
    finally:
        Counts.take = take  # type: ignore[method-assign]
