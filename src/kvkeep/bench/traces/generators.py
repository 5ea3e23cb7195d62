"""Generated traces: workloads with known statistics, from a seed."""

from __future__ import annotations

import hashlib
import heapq
import random
from bisect import bisect_right
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Protocol, TypeVar

from kvkeep.bench.traces.chain import Growing, words_of
from kvkeep.bench.traces.request import MAX_UNIT_TOKENS, TraceRequest
from kvkeep.core.errors import InvalidValue, whole

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvkeep.bench.traces.chain import Words

__all__ = [
    "FIRST_TOKEN_S",
    "KINDS",
    "TOKEN_S",
    "WAITS",
    "Chance",
    "Chat",
    "CodingAgents",
    "GeneratedTrace",
    "PromptSegments",
    "SessionScript",
    "Table",
    "TrafficModel",
    "Turn",
    "generate",
    "mean_of",
    "value_at",
    "zipf",
]

Item = TypeVar("Item")


Table = tuple[tuple[float, float], ...]
"""A distribution by its quantiles: pairs of a share and the value that this share lies below, with
straight lines between. Half of the values of ``((0, 10), (0.5, 100), (1, 1000))`` are below 100."""


@lru_cache(maxsize=512)
def _columns(table: Table) -> tuple[tuple[float, ...], tuple[float, ...]]:
    shares = tuple(share for share, _ in table)
    values = tuple(value for _, value in table)
    whole = len(table) > 1 and shares[0] == 0 and shares[-1] == 1
    if not whole or any(left >= right for left, right in pairwise(shares)):
        raise InvalidValue(
            f"a table is (share, value) pairs with shares that grow from 0 to 1, got {table}"
        )
    return shares, values


def value_at(table: Table, share: float) -> float:
    """Return the value below which ``share`` (0 … 1) of all values lie."""
    shares, values = _columns(table)
    right = min(bisect_right(shares, share), len(shares) - 1)
    low, high = shares[right - 1], shares[right]
    begin, end = values[right - 1], values[right]
    return begin + (end - begin) * ((share - low) / (high - low))


def mean_of(table: Table) -> float:
    """Return the mean of a distribution."""
    shares, values = _columns(table)
    widths = (right - left for left, right in pairwise(shares))
    heights = ((left + right) / 2 for left, right in pairwise(values))
    return sum(width * height for width, height in zip(widths, heights, strict=True))


WAITS: Table = (
    (0, 0), (0.1, 0.1054), (0.25, 0.2877), (0.5, 0.6931), (0.75, 1.3863), (0.9, 2.3026),
    (0.97, 3.5066), (0.99, 4.6052), (0.999, 6.9078), (1, 8),
)  # fmt: skip
"""Times between independent arrivals (exponential), with a mean of 1 within 3 %."""


class Chance:
    """A random stream, seeded by its purpose, so that draws from other streams do not shift it."""

    def __init__(self, *names: object) -> None:
        self._random = random.Random("/".join(map(str, names)))  # noqa: S311 - no secret

    def share(self) -> float:
        """Return a number in 0 … 1, excluding 1."""
        return self._random.random()

    def of(self, table: Table) -> float:
        """Return a value of a distribution."""
        return value_at(table, self.share())

    def whole(self, table: Table) -> int:
        """Return a value of a distribution, rounded, and at least 1."""
        return max(1, int(self.of(table) + 0.5))

    def below(self, count: int) -> int:
        """Return a whole number in 0 … ``count`` - 1."""
        return int(self.share() * count)

    def happens(self, probability: float) -> bool:
        """Return True with this probability."""
        return self.share() < probability

    def pick(self, items: Sequence[Item], sums: Sequence[float]) -> Item:
        """Return one of ``items``, with weights whose cumulative sums are ``sums``."""
        at = bisect_right(sums, self.share() * sums[-1])
        return items[min(at, len(items) - 1)]


@lru_cache(maxsize=64)
def zipf(count: int) -> tuple[float, ...]:
    """Return cumulative sums of 1 / rank, for popularities of Zipf's law."""
    return tuple(accumulate(1.0 / rank for rank in range(1, count + 1)))


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """Chats of people: 3.5 turns on average, 40 s between an answer and the next question.

    One session in five begins with a document.
    """

    kind: str = "chat"
    sessions_per_second: float = 0.5
    assistants: int = 3
    instructions: Table = ((0, 100), (0.5, 600), (1, 1500))
    document: Table = ((0, 1000), (0.5, 4000), (0.9, 15_000), (1, 40_000))
    message: Table = ((0, 4), (0.5, 40), (0.9, 300), (1, 2000))
    output: Table = ((0, 10), (0.5, 250), (0.9, 700), (1, 2000))
    turns: Table = ((0, 0.51), (0.45, 1.49), (0.7, 3.5), (0.9, 8), (1, 16))
    gap_s: Table = ((0, 2), (0.5, 40), (0.9, 250), (0.98, 1200), (1, 3600))

    def session(self, name: str, chance: Chance, unit_tokens: int) -> SessionScript:
        """Return the session of this name."""
        return SessionScript(name, self.kind, self._turns(name, chance, unit_tokens))

    def _turns(self, name: str, chance: Chance, unit_tokens: int) -> Iterator[Turn]:
        prompt = PromptSegments(unit_tokens)
        assistant = chance.pick(range(self.assistants), zipf(self.assistants))
        shared = "", "chat", assistant
        prompt.add(Chance(*shared).whole(self.instructions), *shared)
        if chance.happens(0.2):
            prompt.add(chance.whole(self.document), "", name, "document")
        for turn in range(chance.whole(self.turns)):
            prompt.add(chance.whole(self.message), "", name, "message", turn)
            yield Turn(
                chance.of(self.gap_s) if turn else 0.0,
                prompt,
                chance.whole(self.output),
                "end_turn",
            )


_TOOL, _END = "tool_use", "end_turn"
_REMEMBERED = 6  # prompts to which a session can go back


@dataclass(frozen=True, slots=True, kw_only=True)
class CodingAgents:
    """Sessions of coding agents, as long as recorded ones.

    A person sets a task; the agent calls tools until it is done (``tool_use``), and ends its turn
    (``end_turn``); the person reads, types, and sets the next task, or never does. Pauses, answers
    and results have the quantiles of 104 recorded sessions (kv-cache-tester, Apache-2.0).

    All sessions of one of the ``agents`` begin with its tools and its instructions. Shares of the
    answers: ``aborted`` are never followed by their tool's result, ``delegated`` call one to three
    sub-agents, which have the tools of their caller, other instructions and a conversation of their
    own, and are waited for. After a share ``branched`` of the tasks the session goes back to an
    earlier prompt. A prompt of more than ``context`` tokens is replaced by a summary.
    """

    kind: str = "agents"
    sessions_per_second: float = 0.01
    agents: int = 4
    tools: Table = ((0, 8000), (1, 12_000))
    instructions: Table = ((0, 2000), (1, 6000))
    tasks: Table = ((0, 0.51), (0.5, 3.5), (0.9, 11), (1, 24))
    steps: Table = ((0, 0.51), (0.25, 2), (0.5, 6), (0.75, 18), (0.9, 40), (1, 100))
    message: Table = ((0, 10), (0.5, 80), (0.75, 220), (0.9, 1450), (1, 8600))
    result: Table = (
        (0, 10), (0.25, 60), (0.5, 310), (0.75, 950), (0.9, 3000), (0.97, 8500), (1, 30_000),
    )  # fmt: skip
    output: Table = (
        (0, 20), (0.1, 108), (0.25, 141), (0.5, 227), (0.75, 465), (0.9, 990), (0.97, 2400),
        (1, 8000),
    )  # fmt: skip
    tool_s: Table = (
        (0, 0.1), (0.1, 3.8), (0.25, 5.3), (0.5, 8.7), (0.75, 19), (0.9, 65), (0.97, 290),
        (0.99, 620), (1, 3600),
    )  # fmt: skip
    person_s: Table = (
        (0, 0.5),
        (0.1, 6),
        (0.25, 50),
        (0.5, 175),
        (0.75, 790),
        (0.9, 2900),
        (1, 3600),
    )
    delegated_steps: Table = ((0, 0.51), (0.5, 8), (0.9, 25), (1, 50))
    summary: Table = ((0, 3000), (1, 9000))
    aborted: float = 0.006
    delegated: float = 0.01
    branched: float = 0.15
    context: int = 180_000

    def session(self, name: str, chance: Chance, unit_tokens: int) -> SessionScript:
        """Return the session of this name."""
        agent = chance.pick(range(self.agents), zipf(self.agents))
        return SessionScript(name, self.kind, self._turns(name, agent, chance, unit_tokens))

    def _begin(self, agent: int, role: str, unit_tokens: int) -> PromptSegments:
        """Return what all prompts of an agent in a role begin with."""
        prompt = PromptSegments(unit_tokens)
        for part, lengths in ((("tools",), self.tools), ((role,), self.instructions)):
            shared = self.kind, agent, *part
            prompt.add(Chance(*shared).whole(lengths), *shared)
        return prompt

    def _turns(self, name: str, agent: int, chance: Chance, unit_tokens: int) -> Iterator[Turn]:
        prompt = self._begin(agent, "main", unit_tokens)
        earlier = [prompt.fork()]
        gap = 0.0
        for task in range(chance.whole(self.tasks)):
            if task and chance.happens(self.branched):
                prompt = earlier[chance.below(len(earlier))].fork()
            prompt.add(chance.whole(self.message), name, "task", task)
            steps = chance.whole(self.steps)
            for step in range(steps - 1):
                calls = self._called(name, agent, (task, step), chance, unit_tokens)
                yield Turn(gap, prompt, chance.whole(self.output), _TOOL, calls=calls)
                if chance.happens(self.aborted):
                    return
                prompt.add(chance.whole(self.result), name, "result", task, step)
                gap = chance.of(self.tool_s)
                if prompt.tokens > self.context:
                    prompt = self._begin(agent, "main", unit_tokens)
                    prompt.add(chance.whole(self.summary), name, "summary", task, step)
                    earlier.clear()
            yield Turn(gap, prompt, chance.whole(self.output), _END)
            earlier = [*earlier, prompt.fork()][-_REMEMBERED:]
            gap = chance.of(self.person_s)

    def _called(
        self, name: str, agent: int, at: tuple[int, int], chance: Chance, unit_tokens: int
    ) -> list[SessionScript]:
        """Return the sub-agents that an answer calls, mostly none."""
        if not chance.happens(self.delegated):
            return []
        scripts = []
        for number in range(1 + chance.below(3)):
            own = f"{name}/{at[0]}.{at[1]}.{number}"
            turns = self._delegated(own, agent, Chance(chance.share()), unit_tokens)
            scripts.append(SessionScript(own, "subagent", turns, caller=name))
        return scripts

    def _delegated(self, name: str, agent: int, chance: Chance, unit_tokens: int) -> Iterator[Turn]:
        prompt = self._begin(agent, f"role {chance.below(3)}", unit_tokens)
        prompt.add(chance.whole(self.message), name, "task")
        gap = 0.0
        for step in range(chance.whole(self.delegated_steps) - 1):
            yield Turn(gap, prompt, chance.whole(self.output), _TOOL)
            prompt.add(chance.whole(self.result), name, "result", step)
            gap = chance.of(self.tool_s)
        yield Turn(gap, prompt, chance.whole(self.output), _END)


_WORKLOADS: dict[str, Callable[[], TrafficModel]] = {"agents": CodingAgents, "chat": Chat}
KINDS = tuple(_WORKLOADS)
"""Names of the workloads for `generate`."""


def generate(
    kind: str,
    *,
    seed: int,
    requests: int,
    unit_tokens: int = 16,
    sessions_per_second: float | None = None,
) -> GeneratedTrace:
    """Return a trace of one of `KINDS`; `GeneratedTrace` takes any workload.

    Raises `InvalidValue` for a kind that does not exist.
    """
    if kind not in _WORKLOADS:
        raise InvalidValue(f"a kind of traffic is one of {', '.join(KINDS)}; got {kind!r}")
    return GeneratedTrace(
        _WORKLOADS[kind](),
        seed=seed,
        requests=requests,
        unit_tokens=unit_tokens,
        sessions_per_second=sessions_per_second,
    )
