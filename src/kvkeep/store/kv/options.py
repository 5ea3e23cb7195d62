"""The arguments of a `KVStore`, and their checks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import InitVar, dataclass, field
from typing import TYPE_CHECKING, Required, TypedDict

from kvkeep.core.cost import CostModel
from kvkeep.core.errors import InvalidValue, check_type, switch, told, whole
from kvkeep.core.geometry import KVGeometry
from kvkeep.store.blocks.shared import places_of
from kvkeep.store.kv.forms import RecordForms
from kvkeep.store.kv.names import store_namespace
from kvkeep.store.tiers import Inclusive, TenantWeights, TieringPolicy

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from kvkeep.core.keys import Namespace
    from kvkeep.store.backends import Backend
    from kvkeep.store.kv.forms import Layout

__all__ = ["StoreConfig", "StoreOptions"]


class StoreOptions(TypedDict, total=False):
    """The keyword arguments of `KVStore`, for `KVStore.shared`."""

    model: Required[str | torch.nn.Module]
    revision: str
    tiers: Sequence[str | Backend]
    layout: Layout
    block_tokens: int
    tenant: str
    lora: str
    rank: str
    policy: TieringPolicy | None
    quotas: Mapping[str, int | str] | None
    shares: Mapping[str, float] | None
    snapshots: bool | None
    cost: CostModel | None


@dataclass(frozen=True, kw_only=True)
class StoreConfig:
    """The arguments of a `KVStore`, checked; a loaded ``model`` is read for its identity.

    Attributes:
        forms: of records, by geometry and layout.
        namespace: model, revision, tenant, LoRA and rank, with the form and the block size.
        cost: learns what loading and computing take. Users of a shared store need not agree on it:
            the first one's is used.

    Raises:
        UnsupportedModel: the layers of the geometry differ, and ``snapshots`` is False.
        InvalidValue: an argument is wrong.
    """

    geometry: KVGeometry
    model: InitVar[str | torch.nn.Module]
    revision: InitVar[str] = ""
    tiers: Sequence[str | Backend] = ("memory://1GiB",)
    layout: Layout = "NHD"
    block_tokens: int = 256
    tenant: InitVar[str] = ""
    lora: InitVar[str] = ""
    rank: InitVar[str] = ""
    policy: TieringPolicy | None = None
    quotas: Mapping[str, int | str] | None = None
    shares: Mapping[str, float] | None = None
    snapshots: bool | None = None
    cost: CostModel | None = None
    forms: RecordForms = field(init=False)
    namespace: Namespace = field(init=False)

    def __post_init__(
        self, model: str | torch.nn.Module, revision: str, tenant: str, lora: str, rank: str
    ) -> None:
        geometry, snapshots, shares = self.geometry, self.snapshots, self.shares
        check_type("geometry", geometry, KVGeometry, "a KVGeometry")
        if snapshots is not None:
            snapshots = switch("snapshots", snapshots)
        if snapshots is False:
            geometry.needs_plain("KVStore(…, snapshots=False)")
        if snapshots is None:
            snapshots = not geometry.plain
        check_type("policy", self.policy, TieringPolicy | None, "a TieringPolicy, as Inclusive(),")
        check_type("cost", self.cost, CostModel | None, "a kvkeep.core.cost.CostModel")
        check_type("quotas", self.quotas, Mapping | None, "a limit by tenant, as {'a': '1GiB'},")
        if shares is not None:
            if not isinstance(shares, Mapping):
                raise InvalidValue(
                    f"shares are weights by tenant, as {{'a': 3}}; got {told(shares)}"
                )
            shares = dict(TenantWeights(shares).weights)
        block_tokens = whole("block_tokens", self.block_tokens, 1, 1 << 20)
        forms = RecordForms(geometry, self.layout, whole=not snapshots)
        namespace = store_namespace(
            geometry, self.layout, block_tokens,
            model=model, revision=revision, tenant=tenant, lora=lora, rank=rank,
            snapshots=snapshots,
        )  # fmt: skip
        checked = {
            "snapshots": snapshots, "shares": shares, "block_tokens": block_tokens,
            "forms": forms, "namespace": namespace,
        }  # fmt: skip
        for name, value in checked.items():
            object.__setattr__(self, name, value)  # the dataclass is frozen

    def compared(self) -> dict[str, object]:
        """Return the values that two users of one shared store must agree on, by name."""
        return {
            "geometry": self.geometry,
            "layout": self.layout,
            "snapshots": self.snapshots,
            "block_tokens": self.block_tokens,
            "namespace": self.namespace,
            "tiers": places_of(self.tiers),
            "policy": repr(self.policy or Inclusive()),
            "quotas": dict(self.quotas or {}),
            "shares": None if self.shares is None else dict(self.shares),
        }
