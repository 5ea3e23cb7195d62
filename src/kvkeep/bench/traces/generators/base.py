"""`GeneratedTrace`: concurrent sessions of a workload, merged by time."""

from __future__ import annotations

import hashlib
import heapq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from kvkeep.bench.traces.chain import Growing, words_of
from kvkeep.bench.traces.generators.chance import WAITS, Chance, mean_of
from kvkeep.bench.traces.request import MAX_UNIT_TOKENS, TraceRequest
from kvkeep.core.errors import InvalidValue, whole

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvkeep.bench.traces.chain import Words

__all__ = [
    "FIRST_TOKEN_S",
    "TOKEN_S",
    "GeneratedTrace",
    "PromptSegments",
    "SessionScript",
    "TrafficModel",
    "Turn",
]

FIRST_TOKEN_S = 0.3
TOKEN_S = 0.02
"""Assumed seconds of an answer: to its first token, and per token."""


class PromptSegments:
    """A prompt of named segments; a name stands for the same text wherever it occurs."""

    def __init__(self, unit_tokens: int) -> None:
        self._growing = Growing(unit_tokens)

    def add(self, tokens: int, *name: object) -> PromptSegments:
        """Append a segment; return the prompt."""
        self._growing.append(_segment(tokens, *name))
        return self

    def fork(self) -> PromptSegments:
        """Return another prompt that begins like this one."""
        other = PromptSegments(self._growing.unit_tokens)
        other._growing = self._growing.fork()
        return other

    @property
    def tokens(self) -> int:
        """Its length."""
        return self._growing.length

    def request(self, session: SessionScript, number: int, time: float, turn: Turn) -> TraceRequest:
        """Return the prompt as a request, and append the answer to it."""
        units, tokens = self._growing.units(), self._growing.length
        answer = "answer", session.name, number
        computed = self._growing.fork()
        # Without the answer's last token, whose KV is never computed.
        computed.append(_segment(turn.output_tokens - 1, *answer))
        self.add(turn.output_tokens, *answer)
        return TraceRequest(
            time,
            units,
            tokens,
            turn.output_tokens,
            session.namespace,
            session.name,
            None,
            number,
            session.kind,
            computed.full(tokens // computed.unit_tokens),
            stop=turn.stop,
            took_s=round(turn.took_s, 6),
            caller=session.caller,
        )


def _segment(tokens: int, *name: object) -> Words:
    digest = hashlib.blake2b("/".join(map(str, name)).encode(), digest_size=8).digest()
    return words_of(int.from_bytes(digest, "little"), tokens)


@dataclass(frozen=True, slots=True)
class Turn:
    """The next request of a session, ``gap_s`` seconds after the end of the last answer.

    ``prompt`` becomes a request at its time; the answer is then appended to it. ``stop`` says how
    the answer ends. ``calls`` are sub-agents that begin when it ends;
    the next turn then comes ``gap_s`` after the end of the last of them.
    """

    gap_s: float
    prompt: PromptSegments
    output_tokens: int
    stop: str = ""
    calls: Sequence[SessionScript] = ()

    @property
    def took_s(self) -> float:
        """Assumed seconds from the request to the end of the answer."""
        return FIRST_TOKEN_S + TOKEN_S * self.output_tokens


@dataclass(frozen=True, slots=True)
class SessionScript:
    """A session: its turns, each after the answer to the one before.

    ``caller`` names the session that calls it, if it is a sub-agent's.
    """

    name: str
    kind: str
    turns: Iterator[Turn]
    namespace: str = ""
    caller: str | None = None


class TrafficModel(Protocol):
    """A workload: a kind of traffic."""

    @property
    def kind(self) -> str:
        """Its name."""

    @property
    def sessions_per_second(self) -> float:
        """Average number of sessions that begin per second."""

    def session(self, name: str, chance: Chance, unit_tokens: int) -> SessionScript:
        """Return the session ``name``; all its random choices are from ``chance``."""


@dataclass(order=True, slots=True)
class _Running:
    time: float
    number: int
    session: SessionScript = field(compare=False)
    turn: Turn = field(compare=False)
    turns: int = field(compare=False, default=1)
    caller: _Running | None = field(compare=False, default=None)
    calls: int = field(compare=False, default=0)  # sub-agents that have not ended
    ended: float = field(compare=False, default=0.0)


class GeneratedTrace:
    """``requests`` requests of a workload; a `Trace`. A seed gives the same trace everywhere.

    Sessions begin at random, ``sessions_per_second`` on average (None: the workload's own rate).
    More requests only add to the end: the first thousand of two thousand are those of one thousand.
    Memory: the concurrent sessions. Cost: about 20 ns per prompt token that is new in its session.
    """

    def __init__(
        self,
        workload: TrafficModel,
        *,
        seed: int,
        requests: int,
        unit_tokens: int = 16,
        sessions_per_second: float | None = None,
    ) -> None:
        self.workload = workload
        self.seed = whole("seed", seed)
        self.length = whole("requests", requests, 0)
        self.unit_tokens = whole("unit_tokens", unit_tokens, 1, MAX_UNIT_TOKENS)
        rate = workload.sessions_per_second if sessions_per_second is None else sessions_per_second
        if not 0 < rate < 1e9:
            raise InvalidValue(f"sessions_per_second is {rate}; a number above 0 is needed")
        self.sessions_per_second = rate

    @property
    def name(self) -> str:
        """The kind of traffic, and the seed."""
        return f"{self.workload.kind}, seed {self.seed}"

    def __repr__(self) -> str:
        return f"<GeneratedTrace {self.name}, {self.length} requests>"

    def __iter__(self) -> Iterator[TraceRequest]:
        arrivals = Chance(self.seed, self.workload.kind, "arrivals")
        running: list[_Running] = []
        arrival, number = 0.0, 0
        for _ in range(self.length):
            while not running or arrival <= running[0].time:
                self._begin(running, number, arrival)
                number += 1
                arrival += arrivals.of(WAITS) / mean_of(WAITS) / self.sessions_per_second
            yield self._next(running)

    def _begin(self, running: list[_Running], number: int, time: float) -> None:
        chance = Chance(self.seed, self.workload.kind, number)
        session = self.workload.session(str(number), chance, self.unit_tokens)
        heapq.heappush(running, _Running(time, number, session, next(session.turns)))

    @classmethod
    def _next(cls, running: list[_Running]) -> TraceRequest:
        """Return the earliest turn as a request, and schedule what follows its answer."""
        one = heapq.heappop(running)
        turn = one.turn
        request = turn.prompt.request(one.session, one.turns, round(one.time, 6), turn)
        one.ended = one.time + turn.took_s
        for session in turn.calls:
            first = next(session.turns, None)
            if first is not None:
                begin = one.ended + first.gap_s
                heapq.heappush(running, _Running(begin, one.number, session, first, caller=one))
                one.calls += 1
        if not one.calls:
            cls._follow(running, one)
        return request

    @classmethod
    def _follow(cls, running: list[_Running], one: _Running) -> None:
        """Schedule the next turn of a session, or end it and let its caller go on."""
        following = next(one.session.turns, None)
        if following is not None:
            one.turn, one.turns = following, one.turns + 1
            one.time = one.ended + following.gap_s
            heapq.heappush(running, one)
        elif one.caller is not None:
            one.caller.calls -= 1
            one.caller.ended = max(one.caller.ended, one.ended)
            if not one.caller.calls:
                cls._follow(running, one.caller)
