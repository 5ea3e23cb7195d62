"""`TierChanges`: attaches tiers to a store that is in use, and detaches them."""

from __future__ import annotations

import logging
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvkeep.core.errors import IllegalStep, InvalidValue
from kvkeep.store.tiers.detaching import Detached, Evacuation, close_tier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvkeep.store.tiers.departed import DepartedPlaces
    from kvkeep.store.tiers.levels import Levels
    from kvkeep.store.tiers.tier import Tier, TierSpec
    from kvkeep.store.tiers.tier_returns import TierReturns
    from kvkeep.store.tiers.write_queue import WriteQueue

__all__ = ["TierChanges"]

_LOG = logging.getLogger("kvkeep.tiers")
_PATIENCE = 5.0  # seconds for which a place is attached while blocks are removed
_PAUSE = 0.02  # seconds between two looks at the writes of a tier that is detached


class TierChanges:
    """Attaches and detaches the tiers of one store, one at a time.

    ``make`` returns the tier of a specification, with a name that no tier of the store had before;
    ``tell`` tells it what the store knows of namespaces, under ``lock``, under which the store
    learns of them, and is closed; ``closed`` says whether it is.

    Thread safety: all methods. A second change while one runs raises `IllegalStep`.
    """

    def __init__(
        self,
        levels: Levels,
        queue: WriteQueue,
        returns: TierReturns,
        departed: DepartedPlaces,
        *,
        make: Callable[[TierSpec], Tier],
        tell: Callable[[Tier], None],
        closed: Callable[[], bool],
        lock: threading.Lock,
    ) -> None:
        self._levels = levels
        self._queue = queue
        self._returns = returns
        self._departed = departed
        self._make = make
        self._tell = tell
        self._closed = closed
        self._lock = lock
        self._changing = threading.Lock()
        self._opening: list[threading.Thread] = []
        # Names are used once: holds and writes of a detached tier may still be on their way.
        self._named = {levels.memory.name, *(tier.name for tier in levels.tiers)}

    def attach(self, spec: TierSpec, below: str | None) -> Tier:
        """See `TieredStore.attach`. If it raises, the caller closes the backend."""
        with self._alone():
            levels = self._levels
            place = spec.backend.describe()
            for tier in levels.tiers:
                if spec.backend.shared and tier.backend.describe() == place:
                    raise IllegalStep(f"{place} is attached already, as {tier.name}")
            at = self._place_below(below)
            spec.name = self._unused(spec.name)
            tier = self._make(spec)
            active = list(levels.active)
            active.insert(at, tier)
            until = time.monotonic() + _PATIENCE
            while True:
                self._delete_removed(tier, place)
                if self._arranged(tier, place, active):
                    break
                if time.monotonic() > until:
                    raise IllegalStep(
                        f"{place} cannot be attached while blocks are removed; try again"
                    )
            name = f"kvkeep {tier.name} opening"
            opening = threading.Thread(target=tier.open, name=name, daemon=True)
            self._opening = [*(one for one in self._opening if one.is_alive()), opening]
            opening.start()
        _LOG.info("tier %s attached: %s", tier.name, place)
        return tier

    def _delete_removed(self, tier: Tier, place: str) -> None:
        """Delete in ``place`` what was removed from the store since it was detached there."""
        removed = self._departed.removed_since(place)
        if not removed:
            return
        deleted: list[bool] = []

        def delete() -> None:
            complete = not tier.remove(removed.blocks)[1]
            for prefix in removed.prefixes:
                complete &= tier.clear(prefix or None)[1]
            deleted.append(complete)

        thread = threading.Thread(target=delete, name=f"kvkeep {tier.name} deleter", daemon=True)
        thread.start()
        lists = len(removed.prefixes) * tier.removal_timeout(0)
        thread.join(tier.removal_timeout(len(removed.blocks)) + lists)
        if deleted != [True]:
            raise IllegalStep(
                f"{place} has blocks that were removed while it was detached, and they could not "
                "be deleted there; attach it when it answers, or clear it"
            )
        self._departed.made_good(place, removed)

    def _arranged(self, tier: Tier, place: str, active: list[Tier]) -> bool:
        """Have ``tier`` among the ``active`` ones; False if blocks were removed just now."""
        # In one step: when a store is closed, or told of a quota, it has the tier, or not yet; and
        # a removal that is recorded later finds it.
        with self._lock, self._departed.coming_back(place) as ready:
            if self._closed():
                raise IllegalStep("the store is closed")
            if ready:
                self._tell(tier)
                self._levels.losses.attach(tier.name)
                self._returns.attach(tier.catalogue)
                self._levels.arrange(active)
        return ready

    def detach(self, name: str, *, move: bool, timeout: float) -> Detached:
        """See `TieredStore.detach`."""
        with self._alone():
            tier = self._leaving(name)
            until = time.monotonic() + timeout
            before = self._levels.active
            active = [one for one in before if one is not tier]
            moving = Evacuation(tier, self._levels, self._queue, self._closed)
            self._queue.refuse(name)
            self._levels.arrange(active, [tier])
            try:
                self._drain(name, until)
                if move:
                    moving.run(until)
                left = moving.left(until)
            except BaseException:  # our fault, or Ctrl-C: all is as before
                self._levels.arrange(before)
                self._queue.accept(name)
                raise
            self._departed.left(tier.backend.describe(), tier.undeleted)
            self._levels.arrange(active)  # from here on no read begins there; those that run end
            self._returns.detach(tier.catalogue)
            self._levels.losses.note(left, name, "removed", "detached")
            close_tier(tier, until, self._closed)
        result = moving.result(left)
        _LOG.info(
            "tier %s detached: %d blocks moved, %d that it alone had stay there",
            name,
            result.moved,
            result.left,
        )
        return result

    def _drain(self, name: str, until: float) -> None:
        """Wait for the writes and deletions that were queued for a tier."""
        while self._queue.pending_of(name) and time.monotonic() < until and not self._closed():
            time.sleep(_PAUSE)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if not self._changing.acquire(blocking=False):
            raise IllegalStep("another tier is being attached or detached; try again when it is")
        try:
            yield
        finally:
            self._changing.release()

    def _leaving(self, name: str) -> Tier:
        active = self._levels.active
        tier = next((one for one in active if one.name == name), None)
        if tier is None:
            raise InvalidValue(f"no tier is called {name!r}; {self._names(detachable=True)}")
        if len(active) == 1:
            raise IllegalStep(f"{name} is the last tier below memory; attach another one first")
        return tier

    def _place_below(self, below: str | None) -> int:
        """Return the position for a tier below the one named ``below``; None: the last one."""
        names = [self._levels.memory.name, *(tier.name for tier in self._levels.active)]
        if below is None:
            return len(names) - 1
        if below not in names:
            raise InvalidValue(f"no tier is called {below!r}; {self._names()}")
        return names.index(below)

    def _names(self, *, detachable: bool = False) -> str:
        names = [tier.name for tier in self._levels.active]
        if not detachable:
            names.insert(0, self._levels.memory.name)
        return f"there are {', '.join(names)}" if names else "there is memory alone"

    def _unused(self, name: str) -> str:
        number, given = 1, name
        while name in self._named:
            number += 1
            name = f"{given}{number}"
        self._named.add(name)
        return name
