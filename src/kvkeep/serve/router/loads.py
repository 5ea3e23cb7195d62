"""`PlaceLoads`: the load of each place, in arrays, so that all are compared at once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvkeep.serve.router.affinity import name_hash

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy.typing as npt

    from kvkeep.serve.router.index import Place

    Seconds = npt.NDArray[np.float64]
    Flags = npt.NDArray[np.bool_]

__all__ = ["PlaceLoad", "PlaceLoads"]

_FIRST = 64


@dataclass(slots=True, eq=False)
class PlaceLoad:
    """The place whose load it is, and its slot in the arrays; ``gone``: it was removed."""

    place: Place
    slot: int
    gone: bool = False


class PlaceLoads:
    """Requests, waiting prefill and recent work of each place, by its slot.

    Recent work decays exponentially: to a third in ``memory_s``. Waiting prefill is in whole
    nanoseconds: additions and subtractions then return to exactly 0. What ends at a place that was
    removed meanwhile changes nothing.

    Thread safety: none. Memory: 50 bytes a place.
    """

    def __init__(self, memory_s: float) -> None:
        self._memory_s = memory_s
        self._all: list[PlaceLoad | None] = []
        self._waiting_ns = np.zeros(0, np.int64)
        self._requests = np.zeros(0, np.int64)
        self._recent_s = np.zeros(0)
        self._noted = np.zeros(0)
        self.known: Flags = np.zeros(0, np.bool_)
        """Slots that have a place."""
        self.instance_hashes = np.zeros(0, np.uint64)
        self.place_hashes = np.zeros(0, np.uint64)

    def add(self, place: Place, slot: int) -> PlaceLoad:
        """Add a place without load at a free slot."""
        while slot >= len(self._all):
            self._all.append(None)
        if slot >= len(self.known):
            self._grow(slot + 1)
        load = self._all[slot] = PlaceLoad(place, slot)
        for values in (self._waiting_ns, self._requests, self._recent_s, self._noted):
            values[slot] = 0
        self.known[slot] = True
        self.instance_hashes[slot] = name_hash(place.instance)
        self.place_hashes[slot] = name_hash(place.instance, str(place.rank))
        return load

    def remove(self, load: PlaceLoad) -> None:
        """Remove a place, whose slot is free then."""
        load.gone = True
        self._all[load.slot] = None
        self.known[load.slot] = False

    def at(self, slot: int) -> PlaceLoad:
        """Return the load of the place at a slot."""
        load = self._all[slot]
        assert load is not None, "a slot without a place"
        return load

    # --- requests ----------------------------------------------------------------------------

    def begin(self, load: PlaceLoad, seconds: float) -> None:
        """Count a request whose prefill takes so many seconds."""
        self._waiting_ns[load.slot] += _ns(seconds)
        self._requests[load.slot] += 1

    def computed(self, load: PlaceLoad, seconds: float, now: float) -> None:
        """Count a prefill as recent work."""
        slot = load.slot
        faded = self._recent_s[slot] * math.exp((self._noted[slot] - now) / self._memory_s)
        self._recent_s[slot] = faded + seconds
        self._noted[slot] = now

    def arrived(self, load: PlaceLoad, seconds: float) -> None:
        """Count its prefill as waiting no longer."""
        if not load.gone:
            self._waiting_ns[load.slot] -= _ns(seconds)

    def end(self, load: PlaceLoad) -> None:
        """Count a request as ended."""
        if not load.gone:
            self._requests[load.slot] -= 1

    # --- sums --------------------------------------------------------------------------------

    def waits(self, running_s: float) -> Seconds:
        """Return the seconds that a prompt waits at each slot; a running request counts too."""
        return self._waiting_ns * 1e-9 + self._requests * running_s

    def recent(self, now: float) -> Seconds:
        """Return the recent work at each slot, in seconds."""
        return self._recent_s * np.exp((self._noted - now) / self._memory_s)

    def total(self, loads: Iterable[PlaceLoad]) -> tuple[int, float]:
        """Return the running requests at some places, and the prefill seconds that wait there."""
        slots = [load.slot for load in loads]
        return int(self._requests[slots].sum()), float(self._waiting_ns[slots].sum() * 1e-9)

    def _grow(self, least: int) -> None:
        size = max(_FIRST, least, 2 * len(self.known))

        def longer(values: Any) -> Any:
            return np.concatenate((values, np.zeros(size - len(values), values.dtype)))

        self._waiting_ns, self._requests = longer(self._waiting_ns), longer(self._requests)
        self._recent_s, self._noted = longer(self._recent_s), longer(self._noted)
        self.known = longer(self.known)
        self.instance_hashes = longer(self.instance_hashes)
        self.place_hashes = longer(self.place_hashes)


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
