"""`TraceRequest` and `Trace`: what a trace is made of, and what it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    UnitArray = npt.NDArray[np.int64]

__all__ = ["MAX_ID", "MAX_TOKENS", "NO_UNITS", "Served", "Trace", "TraceRequest", "units_of"]

MAX_ID = 2**63 - 1
MAX_TOKENS = 2**31 - 1
"""Of one prompt, and of one answer."""
NO_UNITS: UnitArray = np.empty(0, np.int64)
NO_UNITS.setflags(write=False)


@dataclass(frozen=True, slots=True)
class Served:
    """How a request was served where it was captured.

    Of its prompt ``cached_tokens`` were reused, ``loaded_tokens`` of them from a store. ``ttft_s``
    and ``seconds`` run from its arrival to its first and to its last token.
    """

    cached_tokens: int
    loaded_tokens: int = 0
    ttft_s: float = 0.0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class TraceRequest:
    """One request of a trace.

    ``time`` is in seconds from the trace's beginning. ``units`` has one id for each ``unit_tokens``
    of its trace's prompt tokens; the last may stand for fewer. Ids are *prefix-chained*: an id
    stands for its own tokens and all before them, so two prompts with the same id anywhere have
    the same tokens from the first to the end of that unit, and have it at the same position. Ids
    lie in 0 … 2⁶³-1. They do not depend on the namespace: the same prompt under two of them has
    the same ids, and may not be reused.

    ``tokens`` is the prompt's length and ``output_tokens`` the (first) answer's. ``session`` names
    what belongs together, ``parent`` the request in it that this one follows, ``turn`` counts from
    1; each is None where nothing is known. ``kind`` is the trace's own word ("agent", "text").

    ``answer`` are the ids of the *full* units that end in the answer, so that what a cache can hold
    afterwards is ``units[: tokens // unit_tokens]`` and then these; None where the trace does not
    tell. The last token of an answer is in none: its KV is never computed. ``store`` False: it
    reused what was cached and left nothing. ``served`` is what came of it where it was captured.
    """

    time: float
    units: UnitArray
    tokens: int
    output_tokens: int
    namespace: str = ""
    session: str | None = None
    parent: str | None = None
    turn: int | None = None
    kind: str = ""
    answer: UnitArray | None = None
    store: bool = True
    served: Served | None = None


@runtime_checkable
class Trace(Protocol):
    """Requests in the order of their times; can be gone through again, the same each time.

    ``unit_tokens`` is how many prompt tokens a unit stands for, ``name`` is for people.
    ``length`` is the number of requests where it is known without reading them, else None.
    """

    @property
    def name(self) -> str:
        """For people."""

    @property
    def unit_tokens(self) -> int:
        """Prompt tokens of a unit."""

    @property
    def length(self) -> int | None:
        """Requests, where that is known without reading them."""

    def __iter__(self) -> Iterator[TraceRequest]: ...


def units_of(tokens: int, unit_tokens: int) -> int:
    """How many units a prompt of ``tokens`` has."""
    return -(-tokens // unit_tokens)
