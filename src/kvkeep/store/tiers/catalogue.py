"""What a tier is known to hold, in which order it may go, and what of it is pinned."""

from __future__ import annotations

import heapq
import threading
import time
from collections import OrderedDict
from itertools import islice
from typing import TYPE_CHECKING, Final

from kvkeep.core.eviction import Entry, EvictionPolicy
from kvkeep.core.keys import SPACE_BYTES
from kvkeep.store.tiers.packed import Packed, PackedRow

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Sequence

__all__ = ["Catalogue"]

_PINS = 1024  # times at which pins end that are remembered before those are looked for that count
_AT_ONCE: Final = 1024  # blocks of a listing that are taken over while others wait
_PACKED_AT_ONCE: Final = 32
_ROUNDS: Final = 1 << 16
_REMEMBERED = 4  # times as many blocks as there is room for are remembered as asked for again


class _Kept(Entry):
    """A block that the tier holds; ``size`` is in bytes of its record."""

    __slots__ = ("block", "held", "noted", "pinned", "round", "serial", "used")

    def __init__(self, block: bytes, size: int, used: float, round_: int) -> None:
        super().__init__()
        self.block = block
        self.size = size
        self.used = used  # Unix seconds: what a time to live counts from
        self.serial = 0  # the same in an order that is exact, over all policies of the catalogue
        self.pinned = 0.0  # until then; 0: not
        self.held = 0  # by writers that still read it
        self.noted = used  # the last use that the place itself was told of
        self.round = round_  # the last listing that it was known to be in

    @property
    def may_go(self) -> bool:
        """Whether a policy has it."""
        return not self.held and not self.pinned


class Catalogue:
    """Block ids with sizes and recency; names victims by the policies of the core.

    Blocks of one prompt are used last to first (see `used`), so the end of a prompt goes before
    its beginning. A namespace with a quota has a policy of its own, all others share one; what goes
    under pressure is the older of their candidates.

    Policies that remember (`EvictionPolicy.remembers`) are told of what is `asked` for, and fit for
    ``budget`` bytes, once the size of a block is seen; without a budget they are not served.

    A block that a policy orders takes about half a kilobyte. ``ordered`` bounds how many those are:
    of more, the ones that the policies would have go first are kept in rows of about a hundred
    bytes (`Packed`) and go before all others, in the order in which they became rows. A block that
    is used again is ordered again. For LRU and FIFO that is the order that it would be without a
    bound, but for what was held, pinned or found by a second listing.

    ``unit``: a record takes whole units of so many bytes in its place; `victims` counts in these.

    Thread safety: all methods, by one lock that is never held while anything else is called but the
    policy, nor for more than 1,024 blocks of a listing at once. Cost: about a microsecond a block.
    """

    def __init__(
        self,
        policy: Callable[[], EvictionPolicy],
        *,
        ttl: float | None = None,
        clock: Callable[[], float] = time.time,
        budget: int | None = None,
        ordered: int | None = None,
        unit: int = 1,
    ) -> None:
        self.ttl = ttl
        self.unit = unit
        self.budget = budget
        self._make = policy
        self._clock = clock
        self._lock = threading.Lock()
        self._kept: dict[bytes, _Kept] = {}
        self._packed = Packed(self._group_of)
        self._ordered = ordered
        self._round = 0  # the number of the last listing
        self._filling = threading.Lock()
        self._gone: set[bytes] | None = None  # forgotten while a listing goes on
        self._shared = policy()
        self._own: dict[bytes, EvictionPolicy] = {}
        self._quotas: dict[bytes, int] = {}
        self._spaces: dict[bytes, int] = {}
        self._bytes = 0
        self._taken = 0  # the same in whole units
        self._pinned_bytes = 0
        self._serial = 0
        self._pins: list[tuple[float, bytes]] = []  # a heap: when a pin may end
        self._many_pins = _PINS
        self.remembers = self._shared.remembers and budget is not None
        self._fitted = 0  # bytes of a block that the policies are fit for; 0: for none yet
        self._again: OrderedDict[bytes, None] = OrderedDict()  # `known` when last asked for

    # --- what is there ---------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._kept) + len(self._packed)

    def __contains__(self, block: object) -> bool:
        known = self._known(block)  # type: ignore[arg-type]
        return known is not None and not self._expired(known)

    @property
    def total_bytes(self) -> int:
        """Bytes of all records known."""
        return self._bytes

    @property
    def policy(self) -> str:
        """The name of the policy that orders what has no quota."""
        return self._shared.name

    @property
    def pinned_bytes(self) -> int:
        """Bytes that are pinned now."""
        with self._lock:
            self._unpin_expired()
            return self._pinned_bytes

    def outlived(self, block: bytes) -> bool:
        """Whether ``block`` is known, and not used for longer than it may be found."""
        known = self._known(block)
        return known is not None and self._expired(known)

    def ended(self, block: bytes) -> float | None:
        """When the time of ``block`` was over (Unix seconds), if it is known and outlived it."""
        known = self._known(block)
        if known is None or not self._expired(known):
            return None
        return max(known.used + (self.ttl or 0.0), known.pinned)

    def leading(self, blocks: Sequence[bytes]) -> int:
        """How many of ``blocks`` are there before the first that is not."""
        kept = self._kept
        if self.ttl is None and not len(self._packed):
            for count, block in enumerate(blocks):
                if block not in kept:
                    return count
            return len(blocks)
        for count, block in enumerate(blocks):
            if block not in self:
                return count
        return len(blocks)

    def spaces(self) -> dict[bytes, int]:
        """Bytes by namespace."""
        with self._lock:
            return dict(self._spaces)

    def blocks(self, space: bytes | None = None) -> list[bytes]:
        """All blocks, or those of one namespace."""
        with self._lock:
            known = [*self._kept, *(row.block for row in self._packed)]
            return [block for block in known if space is None or block.startswith(space)]

    def may_free(self, needed: int) -> bool:
        """Whether ``needed`` bytes could go: else nothing should, as it would not suffice.

        Of what is held for a moment it is assumed that it can go.
        """
        with self._lock:
            self._unpin_expired()
            return self._taken - self._pinned_bytes >= needed

    def fits(self, space: bytes) -> int | None:
        """Blocks of a namespace that there is room for, if they are as large as those here.

        None: no end is known.
        """
        with self._lock:
            count = len(self)
            if not count or not self.budget:
                return None
            fit = self.budget * count // self._taken
            limit = self._quotas.get(space)
            return fit if limit is None else min(fit, limit * count // self._bytes)

    # --- what changes it -------------------------------------------------------------------------

    def add(self, block: bytes, size: int, *, hold: bool = False) -> None:
        """``block`` is there now, ``size`` bytes long; it counts as used. ``hold`` holds it."""
        with self._lock:
            self._add(block, size, self._clock())
            if hold:
                self._hold(block)

    def add_all(self, blocks: Iterable[bytes], size: int) -> None:
        """`add` for each of ``blocks``, ``size`` bytes long."""
        with self._lock:
            now = self._clock()
            for block in blocks:
                self._add(block, size, now)

    def fill(self, found: Iterable[tuple[bytes, int, float]]) -> list[bytes]:
        """Take over what a place holds: (block, bytes, last used). Returns what it holds no more.

        What is known stays where it is in the order, but others may have used it later. What is
        new comes after it, by last use. What was known before and is not in ``found`` is forgotten;
        what is added meanwhile is not. What is forgotten meanwhile stays so, since a listing may
        have seen it before it went. If ``found`` raises, what came before that is taken over.

        Blocks are known, and may be named as victims, while ``found`` goes on. Others who call it
        wait.
        """
        with self._filling:
            with self._lock:
                self._round = (self._round + 1) % _ROUNDS
                self._packed.begin_listing()
                self._gone = set()
            try:
                items = iter(found)
                while some := sorted(islice(items, _AT_ONCE), key=lambda item: item[2]):
                    with self._lock:
                        for block, size, used in some:
                            self._list(block, size, used)
            finally:
                with self._lock:
                    self._gone = None
                self._order_listed()
            return self._not_listed()

    def requested(self, blocks: Sequence[bytes]) -> None:
        """A prompt made of ``blocks`` of one namespace came, found or to be put: once for each.

        Before any of them is added. For policies that remember; nothing is done for others.
        """
        if not self.remembers or not self._fitted or not blocks:
            return
        again = self._again
        with self._lock:
            # The key alone: it is hashed over its namespace as well, and is evenly spread.
            known = self._policy_of(blocks[0]).asked([block[SPACE_BYTES:] for block in blocks])
            for block in blocks[known:]:
                again.pop(block, None)
            for block in blocks[:known]:
                again[block] = None
                again.move_to_end(block)
            most = _REMEMBERED * (self.budget or 0) // self._fitted
            while len(again) > most:
                again.popitem(last=False)

    def used(
        self, blocks: Sequence[bytes], grain: float = 30.0, *, new: Container[bytes] = ()
    ) -> list[bytes]:
        """A prompt used ``blocks``, in its order; those the place should be told of, last to first.

        That are the ones of which it was not told for ``grain`` seconds. To those in ``new``, which
        it just brought, it is no hit.
        """
        now = self._clock()
        tell = []
        with self._lock:
            for block in reversed(blocks):
                kept = self._unpacked(block)
                if kept is None:
                    continue
                kept.used = now
                self._serial += 1
                kept.serial = self._serial
                policy = self._policy_of(block)
                tell_policy = policy.used if block in new else policy.hit
                if kept.may_go:
                    policy.discard(kept)
                    tell_policy(kept)
                    policy.add(kept)
                else:
                    tell_policy(kept)
                if not 0.0 <= now - kept.noted < grain:  # the clock may have been ahead
                    kept.noted = now
                    tell.append(block)
        return tell

    def now(self) -> float:
        """The time by which uses are noted, in seconds since the epoch."""
        return self._clock()

    def unnoted(self) -> list[tuple[bytes, float]]:
        """Blocks used since their place was told of it, and when, oldest first; now it is told."""
        with self._lock:
            late = [kept for kept in self._kept.values() if kept.used > kept.noted]
            late.sort(key=lambda kept: kept.serial)
            for kept in late:
                kept.noted = kept.used
            return [(kept.block, kept.used) for kept in late]

    def hold(self, block: bytes) -> bool:
        """Keep ``block`` from eviction until it is freed as often as it was held.

        False, and nothing to be freed: it is not known.
        """
        with self._lock:
            return self._hold(block)

    def hold_all(self, blocks: Iterable[bytes], held: list[bytes]) -> None:
        """`hold` each of ``blocks``; those that are known, and are to be freed, come to ``held``.

        One by one: whoever is interrupted knows what to free.
        """
        with self._lock:
            held.extend(block for block in blocks if self._hold(block))

    def free(self, block: bytes) -> None:
        """Undo one `hold`; nothing happens to what was forgotten meanwhile."""
        with self._lock:
            self._free(block)

    def free_all(self, blocks: Iterable[bytes]) -> None:
        """`free` each of ``blocks``."""
        with self._lock:
            for block in blocks:
                self._free(block)

    def forget(self, block: bytes) -> bool:
        """``block`` is not there any more; whether it was known."""
        with self._lock:
            if self._gone is not None:
                self._gone.add(block)
            return self._forget(block)

    def victims(
        self, needed: int, space: bytes | None = None, outlived: list[bytes] | None = None
    ) -> list[bytes]:
        """Forget what should go next until ``needed`` bytes are; fewer when no more may go.

        Of one namespace only, if it has a quota and ``space`` names it. What outlived its time is
        added to ``outlived`` instead, if that is given.
        """
        gone: list[bytes] = []
        with self._lock:
            self._unpin_expired()
            while needed > 0:
                victim = self._next(space)
                if victim is None:
                    break
                self._drop(victim)
                if self._gone is not None:
                    self._gone.add(victim.block)
                needed -= self._takes(victim.size)
                into = gone if outlived is None or not self._expired(victim) else outlived
                into.append(victim.block)
        return gone

    def expired(self, limit: int = 1000) -> list[bytes]:
        """Forget blocks that outlived their time, ``limit`` of them at most."""
        if self.ttl is None:
            return []
        with self._lock:
            late = (kept.block for kept in self._kept.values() if self._expired(kept))
            old = list(islice(late, limit))
            for block in old:
                self._forget(block)
        for part in self._packed.parts():
            if len(old) >= limit:
                break
            with self._lock:
                rows = self._packed.sweep(part, self._expired)[: limit - len(old)]
                for row in rows:
                    self._forget(row.block)
            old += (row.block for row in rows)
        return old

    # --- quotas and pins -------------------------------------------------------------------------

    def set_quota(self, space: bytes, limit: int) -> None:
        """The namespace may hold ``limit`` bytes here; see `over_quota`."""
        with self._lock:
            self._quotas[space] = limit
            if space in self._own:
                return
            policy = self._make()
            if self.remembers and self._fitted:
                policy.fit(limit, self._fitted)
            mine = [kept for kept in self._kept.values() if kept.block.startswith(space)]
            for kept in mine:
                if kept.may_go:
                    self._shared.discard(kept)
            # The new policy's clock begins at 0: it has to see what happened, in that order.
            for kept in sorted(mine, key=lambda kept: kept.stored):
                hits = kept.hits
                policy.stored(kept, kept.priority, known=hits > 0)
                kept.hits = hits
            for kept in sorted(mine, key=lambda kept: kept.serial):
                policy.used(kept)
                if kept.may_go:
                    policy.add(kept)
            self._own[space] = policy
            self._packed.regroup()

    def over_quota(self, space: bytes, more: int) -> int:
        """Bytes that must go in this namespace before ``more`` come; negative: will not fit."""
        limit = self._quotas.get(space)
        if limit is None:
            return 0
        if more > limit:
            return -1
        return max(0, self._spaces.get(space, 0) + more - limit)

    def pin(self, blocks: Sequence[bytes], seconds: float, most: int) -> list[bytes]:
        """Keep those of ``blocks`` that are here from eviction for so long; which they are.

        From the first on, while pins hold no more than ``most`` bytes in all.
        """
        until = self._clock() + seconds
        pinned: list[bytes] = []
        with self._lock:
            self._unpin_expired()
            for block in blocks:
                kept = self._unpacked(block)
                if kept is None or self._expired(kept):
                    continue
                if not kept.pinned:
                    if self._pinned_bytes + kept.size > most:
                        break
                    if kept.may_go:
                        self._policy_of(block).discard(kept)
                    self._pinned_bytes += kept.size
                kept.pinned = max(kept.pinned, until)
                heapq.heappush(self._pins, (until, block))
                pinned.append(block)
            if len(self._pins) > self._many_pins:
                self._forget_pins()
        return pinned

    def unpin(self, blocks: Sequence[bytes]) -> list[bytes]:
        """Let ``blocks`` go again; which were pinned."""
        with self._lock:
            self._unpin_expired()
            unpinned: list[bytes] = []
            for block in blocks:
                kept = self._kept.get(block)
                if kept is not None and kept.pinned:
                    self._let_go(kept)
                    unpinned.append(block)
        return unpinned

    # --- below here ------------------------------------------------------------------------------

    def _known(self, block: bytes) -> _Kept | PackedRow | None:
        """What is known of ``block``. Takes the lock, if it must."""
        kept = self._kept.get(block)
        if kept is not None or not len(self._packed):
            return kept
        with self._lock:
            return self._kept.get(block) or self._packed.get(block)

    def _order_listed(self) -> None:
        """Have the policies order what a listing found, as much of it as they may."""
        with self._lock:
            self._packed.end_listing()
            most = len(self._packed) if self._ordered is None else self._ordered
            newest = self._packed.newest(most)
        for start in range(0, len(newest), _AT_ONCE):
            with self._lock:
                for block in newest[start : start + _AT_ONCE]:
                    self._unpacked(block)

    def _not_listed(self) -> list[bytes]:
        """Forget what the last listing did not find."""
        with self._lock:
            gone = [kept.block for kept in self._kept.values() if kept.round != self._round]
            for block in gone:
                self._forget(block)
        for part in self._packed.parts():
            with self._lock:
                rows = self._packed.sweep(part, lambda row: row.round != self._round)
                for row in rows:
                    self._forget(row.block)
            gone += (row.block for row in rows)
        return gone

    # --- below here: under the lock --------------------------------------------------------------

    def _group_of(self, block: bytes) -> bytes | None:
        space = block[:SPACE_BYTES]
        return space if space in self._own else None

    def _list(self, block: bytes, size: int, used: float) -> None:
        """A listing found ``block``."""
        known = self._kept.get(block)
        if known is not None:
            known.round = self._round
            if used > known.used:
                known.used = known.noted = used
        elif not self._packed.seen(block, used, self._round) and block not in (self._gone or ()):
            self._packed.add(block, size, used, 0, self._round)
            self._count(block, 0, size)

    def _unpacked(self, block: bytes) -> _Kept | None:
        """``block`` as a policy orders it, from now on if need be."""
        kept = self._kept.get(block)
        if kept is not None:
            return kept
        row = self._packed.take(block)
        if row is None:
            return None
        return self._order(_Kept(block, row.size, row.used, row.round), row.hits)

    def _order(self, kept: _Kept, hits: int) -> _Kept:
        """Have a policy order ``kept``, which is new to it."""
        if self.remembers and kept.size >= 2 * self._fitted:  # the first may be a short tail
            self._fit(kept.size)
        policy = self._policy_of(kept.block)
        if self._ordered is not None and len(self._kept) >= self._ordered:
            self._pack(policy)
        self._kept[kept.block] = kept
        self._serial += 1
        kept.serial = self._serial
        policy.stored(kept, 0, known=hits > 0 or kept.block in self._again)
        if hits:  # what counts goes on counting
            kept.hits = hits
        if kept.may_go:
            policy.add(kept)
        return kept

    def _pack(self, policy: EvictionPolicy) -> None:
        """Keep what ``policy`` would have go first as rows."""
        for _ in range(min(_PACKED_AT_ONCE, 1 + (self._ordered or 0) // 16)):
            kept = _popped(policy)
            if kept is None:
                return
            self._packed.add(kept.block, kept.size, kept.used, kept.hits, kept.round)
            del self._kept[kept.block]

    def _forget(self, block: bytes) -> bool:
        kept = self._kept.get(block)
        if kept is not None:
            if kept.may_go:
                self._policy_of(block).discard(kept)
            self._drop(kept)
            return True
        row = self._packed.take(block)
        if row is None:
            return False
        self._count(block, row.size, 0)
        return True

    def _policy_of(self, block: bytes) -> EvictionPolicy:
        if not self._own:
            return self._shared
        return self._own.get(block[:SPACE_BYTES], self._shared)

    def _add(self, block: bytes, size: int, used: float) -> None:
        kept = self._unpacked(block)
        if kept is None:
            self._count(block, 0, size)
            self._order(_Kept(block, size, used, self._round), 0)
            return
        # Replaced: the record may have another size.
        if kept.may_go:
            self._policy_of(block).discard(kept)
        self._count(block, kept.size, size)
        if kept.pinned:
            self._pinned_bytes += size - kept.size
        kept.size = size
        kept.used = kept.noted = used
        kept.round = self._round
        self._order(kept, kept.hits)

    def _hold(self, block: bytes) -> bool:
        kept = self._unpacked(block)
        if kept is None:
            return False
        if kept.may_go:
            self._policy_of(block).discard(kept)
        kept.held += 1
        return True

    def _free(self, block: bytes) -> None:
        kept = self._kept.get(block)
        if kept is not None and kept.held:
            kept.held -= 1
            if kept.may_go:
                self._policy_of(block).add(kept)

    def _fit(self, size: int) -> None:
        """Blocks of ``size`` bytes come: the first one, or the first after shorter ones."""
        self._fitted = size
        self._shared.fit(self.budget or 0, size)
        for space, policy in self._own.items():
            policy.fit(self._quotas[space], size)

    def _drop(self, kept: _Kept) -> None:
        if self._kept.pop(kept.block, None) is None:
            self._packed.take(kept.block)
        self._count(kept.block, kept.size, 0)
        if kept.pinned:
            self._pinned_bytes -= kept.size

    def _takes(self, size: int) -> int:
        return -(-size // self.unit) * self.unit

    def _count(self, block: bytes, before: int, after: int) -> None:
        self._bytes += after - before
        self._taken += self._takes(after) - self._takes(before)
        space = block[:SPACE_BYTES]
        held = self._spaces.get(space, 0) + after - before
        if held:
            self._spaces[space] = held
        else:
            self._spaces.pop(space, None)

    def _next(self, space: bytes | None) -> _Kept | None:
        if space is not None and space in self._own:
            return self._candidate(space)
        oldest = self._candidate(None)
        for own in self._own:
            other = self._candidate(own)
            if other is None:
                continue
            if oldest is None:
                oldest = other
            elif self._age(other) < self._age(oldest):
                self._put_back(oldest)
                oldest = other
            else:
                self._put_back(other)
        return oldest

    def _candidate(self, group: bytes | None) -> _Kept | None:
        """What goes next of a namespace with a quota, or of all others: a row, if there is one."""
        row = self._packed.oldest(group)
        if row is not None:
            return _Kept(row.block, row.size, row.used, row.round)
        return _popped(self._shared if group is None else self._own[group])

    def _age(self, kept: _Kept) -> tuple[bool, float]:
        """Smaller for what goes first, whichever policy named it."""
        return (True, kept.serial) if kept.block in self._kept else (False, kept.used)

    def _put_back(self, kept: _Kept) -> None:
        if kept.block in self._kept:  # a row was never taken out
            self._policy_of(kept.block).put_back(kept)

    def _expired(self, known: _Kept | PackedRow) -> bool:
        if self.ttl is None:
            return False
        now = self._clock()
        if known.used > now and isinstance(known, _Kept):
            known.used = now  # the clock was ahead: from here on it counts
        return known.used + self.ttl < now and known.pinned < now

    def _unpin_expired(self) -> None:
        now = self._clock()
        while self._pins and self._pins[0][0] <= now:
            kept = self._kept.get(heapq.heappop(self._pins)[1])
            if kept is not None and kept.pinned and kept.pinned <= now:
                self._let_go(kept)

    def _forget_pins(self) -> None:
        """Forget the ends of pins that were made longer, or taken away: else they pile up."""
        blocks = {block for _, block in self._pins}
        pinned = (kept for block in blocks if (kept := self._kept.get(block)) and kept.pinned)
        self._pins = [(kept.pinned, kept.block) for kept in pinned]
        heapq.heapify(self._pins)
        self._many_pins = max(_PINS, 2 * len(self._pins))

    def _let_go(self, kept: _Kept) -> None:
        kept.pinned = 0.0
        self._pinned_bytes -= kept.size
        if kept.may_go:
            self._policy_of(kept.block).add(kept)

    def check(self) -> None:
        """Recount everything; an AssertionError is a fault of kvkeep."""
        with self._lock:
            self._packed.check()
            rows = list(self._packed)
            assert not self._kept.keys() & {row.block for row in rows}
            known: list[_Kept | PackedRow] = [*self._kept.values(), *rows]
            assert self._bytes == sum(one.size for one in known)
            assert self._taken == sum(self._takes(one.size) for one in known)
            pinned = [kept for kept in self._kept.values() if kept.pinned]
            assert self._pinned_bytes == sum(kept.size for kept in pinned)
            spaces: dict[bytes, int] = {}
            for one in known:
                space = one.block[:SPACE_BYTES]
                spaces[space] = spaces.get(space, 0) + one.size
            assert spaces == self._spaces
            queued = len(self._shared) + sum(map(len, self._own.values()))
            assert queued == sum(kept.may_go for kept in self._kept.values())


def _popped(policy: EvictionPolicy) -> _Kept | None:
    entry = policy.pop()
    assert entry is None or isinstance(entry, _Kept)
    return entry
