"""`TraceRequest`, one request of a trace, and `Trace`, the protocol of traces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    UnitArray = npt.NDArray[np.int64]

__all__ = [
    "MAX_ID", "MAX_TOKENS", "MAX_UNIT_TOKENS", "NO_UNITS", "Served", "Trace", "TraceRequest",
    "units_of",
]  # fmt: skip

MAX_ID = 2**63 - 1
MAX_TOKENS = 2**31 - 1
"""Most tokens of a prompt, and of an answer."""
MAX_UNIT_TOKENS = 1 << 20
NO_UNITS: UnitArray = np.empty(0, np.int64)
NO_UNITS.setflags(write=False)


@dataclass(frozen=True, slots=True)
class Served:
    """The service that a request got when it was captured: reuse and times.

    ``cached_tokens`` of its prompt were reused, ``loaded_tokens`` of them from a store. ``ttft_s``
    and ``seconds`` are the times from its arrival to its first and to its last token.
    """

    cached_tokens: int
    loaded_tokens: int = 0
    ttft_s: float = 0.0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class TraceRequest:
    """One request of a trace.

    ``time`` is in seconds from the beginning of the trace. ``units`` has one id per ``unit_tokens``
    (of the trace) prompt tokens; the last may stand for fewer. Ids are *prefix-chained*: an id
    stands for its own tokens and all before them, so two prompts with the same id anywhere have the
    same tokens from the first to the end of that unit, at the same position. Ids lie in 0 … 2⁶³-1.
    None: only the length of the prompt is known.
    They do not depend on the namespace: the same prompt in two namespaces has the same ids, but may
    not be reused.

    ``tokens`` is the length of the prompt and ``output_tokens`` that of the (first) answer.
    ``session`` names the session, ``parent`` the request in it that this one follows, ``turn``
    counts from 1; each is None if unknown. ``kind`` is a word of the trace ("agent", "text").

    ``answer`` has the ids of the *full* units that end in the answer, so that a cache can hold
    ``units[: tokens // unit_tokens]`` and then these afterwards; None if the trace lacks them. They
    exclude the last token of the answer, whose KV is never computed. ``store`` is False for a
    request that reused KV but stored none. ``served`` says how it was served when captured.

    ``stop`` says how the answer ended ("tool_use", "end_turn"); "" if unknown. ``took_s`` are the
    seconds from the arrival to the end of the answer when the trace was recorded; None if unknown.
    ``caller`` names the session that called this one, a sub-agent's; None for other sessions.
    ``first_token`` is the first token of the answer or a number that stands for it, 0 … 2³¹-1, so
    that answers that begin alike are known; None if unknown.
    """

    time: float
    units: UnitArray | None
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
    stop: str = ""
    took_s: float | None = None
    caller: str | None = None
    first_token: int | None = None

    @property
    def duration_s(self) -> float | None:
        """``took_s``, or else the seconds of ``served``; None if neither is known."""
        if self.took_s is None and self.served is not None and self.served.seconds > 0:
            return self.served.seconds
        return self.took_s


@runtime_checkable
class Trace(Protocol):
    """Requests in the order of their times; every iteration yields the same ones."""

    @property
    def name(self) -> str:
        """The name of the trace, for people."""

    @property
    def unit_tokens(self) -> int:
        """Prompt tokens per unit."""

    def __iter__(self) -> Iterator[TraceRequest]: ...


def units_of(tokens: int, unit_tokens: int) -> int:
    """Return the number of units in a prompt of ``tokens``."""
    return -(-tokens // unit_tokens)
