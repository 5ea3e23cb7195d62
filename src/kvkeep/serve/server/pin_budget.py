"""`PinBudget`: who may keep how much, and whose pins give way when there is no more room."""

from __future__ import annotations

import heapq
from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

from kvkeep.core.tokens import TOKEN_BYTES
from kvkeep.serve.server.pin_units import KeptUnit, LargestGivers, PinGroup, PinTenant

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvkeep.core.keys import Namespace
    from kvkeep.core.tokens import TokenArray

__all__ = ["PinBudget", "Pinner"]

_SHORTEST_S = 0.001
"""Seconds of a pin that is moved when it is just about to end."""


class Pinner(Protocol):
    """Sets and ends the pins of a budget. ``kept.handle`` is for its own use."""

    def pin(self, kept: KeptUnit, tokens: TokenArray, seconds: float) -> int:
        """Pin ``tokens``, in place of the pin that ``kept`` has, if any; return those pinned."""

    def unpin(self, kept: KeptUnit, start: int) -> None:
        """End the pin of ``kept``; tokens before ``start`` are under other pins."""


class PinBudget:
    """Counts units under pins; a unit under several pins counts once.

    A tenant, which is a namespace, has at most ``most_each`` units, all together have ``most``.
    Beyond its own bound a tenant's pin is shortened to the beginning of its prefix. At the common
    bound, the tenant furthest above its fair share gives a unit to one that is below, again and
    again: the ends of the pins that it asked for longest ago. Shares are equal; with ``weights``,
    by tenant, those that are named have shares by weight, and all others together one of weight 1:
    so nobody takes over the shares of named tenants by making up others.

    Thread safety: none. Memory: about 350 bytes a unit and 4 a token. Cost: O(units) for a prompt,
    and O(log tenants) for each unit that gives way.
    """

    def __init__(
        self,
        pinner: Pinner,
        *,
        unit: int,
        most_each: int,
        most: int,
        clock: Callable[[], float],
        weights: Mapping[str, float] | None = None,
        tails: bool = False,
    ) -> None:
        """``unit`` is in tokens; with ``tails``, the rest behind the last one counts as one."""
        self._pinner = pinner
        self._unit = unit * TOKEN_BYTES
        self._tails = tails
        self.most_each = most_each
        self.most = most
        self._clock = clock
        self._tenants: dict[Namespace, PinTenant] = {}
        self._others = PinGroup(1.0)
        self._named = {name: PinGroup(weight) for name, weight in (weights or {}).items() if name}
        self._due: list[tuple[float, int, KeptUnit]] = []
        self._serial = 0
        self.units = 0
        """Units of all tenants, once `expire` was called."""
        self.given_tokens = 0
        """Tokens whose pins ended early since the start, for another tenant."""

    def keep(
        self, tokens: TokenArray, namespace: Namespace, wanted: Sequence[tuple[int, float]]
    ) -> int:
        """Pin prefixes of ``tokens``: (end in tokens, seconds), in order; return tokens pinned."""
        now = self._clock()
        self.expire()
        ends = [(self._count(at), seconds) for at, seconds in wanted]
        last = max((units for units, _ in ends), default=0)
        if not last:
            return 0
        furthest = max(at for at, _ in wanted)
        tenant = self._tenants.get(namespace) or PinTenant(namespace, self._group(namespace))
        path = self._path(tenant, tokens[:furthest].tobytes(), last)
        pinned = 0
        for units, seconds in ends:
            if units and path:
                kept = path[min(units, len(path)) - 1]
                pinned = max(pinned, self._pin(kept, now, seconds))
        self._merge(path)
        if path:
            self._prune(path[-1])
        return pinned

    def _count(self, tokens: int) -> int:
        size = tokens * TOKEN_BYTES
        return -(-size // self._unit) if self._tails else size // self._unit

    def _group(self, namespace: Namespace) -> PinGroup:
        return self._named.get(namespace.tenant, self._others)

    # --- units -------------------------------------------------------------------------------

    def _path(self, tenant: PinTenant, row: bytes, last: int) -> list[KeptUnit]:
        """Return the units of a prompt, as many leading ones of ``last`` as there is room for."""
        path: list[KeptUnit] = []
        at = tenant.root
        pieces = [row[one * self._unit : (one + 1) * self._unit] for one in range(last)]
        for piece in pieces:
            found = at.children.get(piece)
            if found is None:
                break
            path.append(at := found)
        more = min(last - len(path), self.most_each - tenant.units)
        if more <= 0:
            return path
        room = max(0, self.most - self.units)  # less than none after a `resize`
        if more > room:
            more = room + self._make_room(tenant, room, more - room)
        new = pieces[len(path) : len(path) + more]
        return path + [at := self._add(at, piece) for piece in new]

    def _add(self, parent: KeptUnit, piece: bytes) -> KeptUnit:
        tenant = parent.tenant
        if not tenant.units:
            self._tenants[tenant.namespace] = tenant
            tenant.group.tenants += 1
        made = parent.children[piece] = KeptUnit(tenant, parent, piece)
        tenant.leaves.pop(parent, None)
        tenant.leaves[made] = None
        self._changed(tenant, 1)
        return made

    def _changed(self, tenant: PinTenant, more: int) -> None:
        tenant.units += more
        tenant.group.units += more
        self.units += more
        tenant.group.changed(tenant)
        if not tenant.units:
            del self._tenants[tenant.namespace]
            tenant.group.tenants -= 1

    def _prune(self, kept: KeptUnit) -> None:
        """Remove a unit with neither a pin nor units behind it, and those before it likewise."""
        tenant, removed = kept.tenant, 0
        while kept.parent is not None and not kept.end and not kept.children:
            parent = kept.parent
            del parent.children[kept.piece]
            kept.parent = None
            tenant.leaves.pop(kept, None)
            if parent.parent is not None and not parent.children:
                tenant.leaves[parent] = None
                tenant.leaves.move_to_end(parent, last=False)
            removed += 1
            kept = parent
        if removed:
            self._changed(tenant, -removed)

    # --- pins --------------------------------------------------------------------------------

    def _pin(self, kept: KeptUnit, now: float, seconds: float) -> int:
        """Pin up to the end of a unit, at least as long as it was; return the tokens pinned."""
        end = max(kept.end, now + seconds)
        pinned = self._pinner.pin(kept, kept.prefix(), max(end - now, _SHORTEST_S))
        if pinned < kept.tokens:
            self._unpin(kept, pinned)
            above = kept.parent
            while above is not None and above.tokens > pinned:
                above = above.parent
            found = 0 if above is None or above.parent is None else self._pin(above, now, end - now)
            self._prune_at(kept)
            return found
        self._ends(kept, end)
        if kept in kept.tenant.leaves:
            kept.tenant.leaves.move_to_end(kept)
        return pinned

    def _prune_at(self, kept: KeptUnit) -> None:
        if not kept.children:
            self._prune(kept)

    def _ends(self, kept: KeptUnit, end: float) -> None:
        if kept.end == end:
            return
        kept.end = end
        self._serial += 1
        heapq.heappush(self._due, (end, self._serial, kept))
        if len(self._due) > 2 * self.units + 64:  # most entries have another end by now
            self._due = [item for item in self._due if item[2].end == item[0]]
            heapq.heapify(self._due)

    def _unpin(self, kept: KeptUnit, start: int) -> None:
        kept.end = 0.0
        self._pinner.unpin(kept, start)

    def _merge(self, path: Sequence[KeptUnit]) -> None:
        """End the pins before a unit of ``path`` that end no later than a pin behind them."""
        latest = 0.0
        for kept in reversed(path):
            if kept.end and kept.end <= latest:
                self._unpin(kept, kept.tokens)
            latest = max(latest, kept.end)

    def expire(self) -> None:
        """Give back the units of pins whose time is over."""
        now = self._clock()
        while self._due and self._due[0][0] <= now:
            end, _, kept = heapq.heappop(self._due)
            if kept.end == end:
                kept.end = 0.0
                self._pinner.unpin(kept, kept.tokens)
                self._prune_at(kept)

    # --- fairness ----------------------------------------------------------------------------

    def _make_room(self, tenant: PinTenant, room: int, needed: int) -> int:
        """Shorten pins of tenants above their shares by up to ``needed`` units; return how many.

        The tenant gets these beside ``room`` units that are free.
        """
        before = self.units
        for victim, units in self._givers(tenant, room, needed).items():
            left = victim.units - units
            while victim.units > left:
                self._shorten(victim, victim.units - left)
        return min(before - self.units, needed)

    def _givers(self, tenant: PinTenant, room: int, needed: int) -> dict[PinTenant, int]:
        """Return who gives how many units: one after the other, whoever has the most then.

        None is given by a group or tenant that would have less than the one that gets it.
        """
        own = tenant.group
        groups = [self._others, *self._named.values()]
        units = {group: group.units for group in groups}
        units[own] += room
        mine = tenant.units + room
        largest = {group: LargestGivers(group) for group in groups}
        givers: Counter[PinTenant] = Counter()
        while givers.total() < needed:
            top = max(groups, key=lambda group: units[group] / group.weight)
            if (units[top] - 1) * own.weight < (units[own] + 1) * top.weight:
                top = own
            count, giver = largest[top].first()
            if giver is None or giver is tenant or (top is own and count - 1 < mine + 1):
                break
            largest[top].take()
            givers[giver] += 1
            units[top] -= 1
            units[own] += 1
            mine += 1
        for one in largest.values():
            one.restore()
        return givers

    def _shorten(self, tenant: PinTenant, units: int) -> int:
        """Take up to ``units`` from the oldest leaf; return how many, at least one."""
        before = tenant.units
        kept = next(iter(tenant.leaves))
        end = kept.end
        at: KeptUnit = kept
        self.given_tokens += kept.tokens
        while at.parent is not None and units:
            units -= 1
            at = at.parent
            if at.end or len(at.children) > 1:
                break
        self.given_tokens -= at.tokens
        self._unpin(kept, at.tokens)
        now = self._clock()
        if at.parent is not None:
            self._pin(at, now, max(end, at.end) - now)
        self._prune_at(kept)
        return before - tenant.units

    def by_tenant(self) -> dict[str, int]:
        """Return the units of each tenant, once `expire` was called."""
        found: dict[str, int] = {}
        for namespace, tenant in self._tenants.items():
            found[namespace.tenant] = found.get(namespace.tenant, 0) + tenant.units
        return found

    def check(self) -> None:
        """Recount everything; an AssertionError is a bug of kvkeep."""
        total = 0
        for namespace, tenant in self._tenants.items():
            assert tenant.namespace == namespace
            found, leaves, stack = 0, set(), [tenant.root]
            while stack:
                kept = stack.pop()
                stack += kept.children.values()
                if kept.parent is None:
                    continue
                found += 1
                assert kept.end or kept.children, "a unit without a pin"
                if not kept.children:
                    leaves.add(kept)
            assert found == tenant.units > 0
            assert leaves == set(tenant.leaves)
            total += found
        assert total == self.units == sum(g.units for g in (self._others, *self._named.values()))
        assert all(early[0] <= late[0] for early, late in pairwise(sorted(self._due[:2])))
