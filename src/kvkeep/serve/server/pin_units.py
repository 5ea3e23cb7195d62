"""`KeptUnit` and `PinTenant`: what a budget of pins counts, as a tree of prefixes by tenant."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import numpy as np

from kvkeep.core.tokens import TOKEN_BYTES, TOKEN_DTYPE

if TYPE_CHECKING:
    from kvkeep.core.keys import Namespace
    from kvkeep.core.tokens import TokenArray

__all__ = ["KeptUnit", "LargestGivers", "PinGroup", "PinTenant"]


class KeptUnit:
    """A unit of tokens that counts: a page, a block, or the rest at the end of a prompt.

    It is a node of a tree of prefixes, and is there while it has a pin, or units behind it.
    """

    __slots__ = ("children", "end", "handle", "parent", "piece", "tenant", "tokens")

    def __init__(self, tenant: PinTenant, parent: KeptUnit | None, piece: bytes) -> None:
        self.tenant = tenant
        self.parent = parent
        self.piece = piece
        self.children: dict[bytes, KeptUnit] = {}
        self.end = 0.0  # of its pin; 0 without one
        self.handle: Any = None
        self.tokens: int = len(piece) // TOKEN_BYTES + (0 if parent is None else parent.tokens)

    @property
    def namespace(self) -> Namespace:
        """The namespace of the prefix."""
        return self.tenant.namespace

    def prefix(self) -> TokenArray:
        """Return the tokens from the start of the prompt. Cost: their number."""
        pieces = []
        at: KeptUnit | None = self
        while at is not None:
            pieces.append(at.piece)
            at = at.parent
        return np.frombuffer(b"".join(reversed(pieces)), TOKEN_DTYPE)


class PinTenant:
    """The units of one namespace. ``leaves`` are units with none behind, oldest request first."""

    __slots__ = ("group", "leaves", "namespace", "root", "units")

    def __init__(self, namespace: Namespace, group: PinGroup) -> None:
        self.namespace = namespace
        self.group = group
        self.units = 0
        self.root = KeptUnit(self, None, b"")
        self.leaves: OrderedDict[KeptUnit, None] = OrderedDict()


class PinGroup:
    """Tenants with one weight together: a named one alone, or all that are not named."""

    __slots__ = ("largest", "serial", "tenants", "units", "weight")

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.units = 0
        self.tenants = 0
        self.largest: list[tuple[int, int, PinTenant]] = []  # a heap; an item may be out of date
        self.serial = 0

    def changed(self, tenant: PinTenant) -> None:
        """Note that ``tenant`` has another number of units."""
        self.serial += 1
        heapq.heappush(self.largest, (-tenant.units, self.serial, tenant))
        if len(self.largest) > 4 * self.tenants + 64:
            known = {item[2]: None for item in self.largest if item[2].units}
            self.largest = [(-one.units, at, one) for at, one in enumerate(known)]
            heapq.heapify(self.largest)

    def pop(self) -> PinTenant | None:
        """Take the tenant with the most units out of the heap; `changed` puts it back."""
        while self.largest:
            units, _, tenant = heapq.heappop(self.largest)
            if units and -units == tenant.units:
                return tenant
        return None


class LargestGivers:
    """The tenants of a group as if some had given units: the largest first.

    Cost: O(log tenants) for each unit, and for each tenant that was looked at.
    """

    def __init__(self, group: PinGroup) -> None:
        self._group = group
        self._found: list[tuple[int, int, PinTenant]] = []  # a heap of (-units, number, tenant)
        self._looked: set[PinTenant] = set()
        self._next = self._pop()

    def _pop(self) -> PinTenant | None:
        while (tenant := self._group.pop()) in self._looked:
            pass  # it was in the heap twice
        if tenant is not None:
            self._looked.add(tenant)
        return tenant

    def first(self) -> tuple[int, PinTenant | None]:
        """Return the tenant with the most units, and how many."""
        while self._next is not None and (not self._found or self._next.units > -self._found[0][0]):
            item = (-self._next.units, len(self._found), self._next)
            heapq.heappush(self._found, item)
            self._next = self._pop()
        return (-self._found[0][0], self._found[0][2]) if self._found else (0, None)

    def take(self) -> None:
        """Take a unit from the first one."""
        units, number, tenant = self._found[0]
        heapq.heapreplace(self._found, (units + 1, number, tenant))

    def restore(self) -> None:
        """Put the tenants back that were looked at."""
        for tenant in self._looked:
            self._group.changed(tenant)
