"""Kinds of traffic that public traces lack: agents, retrieval, APIs, chats, and many tenants.

Each distribution is a table of quantiles (`Table`). Segments of the same name are the same text in
all prompts: a system prompt has one name, each user's question has another.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from kvkeep.bench.traces.generators.base import PromptSegments, SessionScript, Turn
from kvkeep.bench.traces.generators.chance import Chance, zipf

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvkeep.bench.traces.generators.chance import Table

__all__ = ["API", "RAG", "Agents", "Chat", "SingleKind", "Tenants"]


class SingleKind:
    """A workload whose sessions are all made by `_turns`."""

    __slots__ = ()
    kind: str

    def session(self, name: str, chance: Chance, unit_tokens: int) -> SessionScript:
        """Return the session of this name."""
        return SessionScript(name, self.kind, self._turns(name, chance, unit_tokens))

    def _turns(self, name: str, chance: Chance, unit_tokens: int) -> Iterator[Turn]:
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class Agents(SingleKind):
    """Agents that call tools: each turn appends an answer and a tool's result to the prompt.

    11 turns on average. 86 % of the tools return within a second, 1 % take more than a minute.
    All sessions of one of the ``agents`` begin with its instructions and tools.
    """

    kind: str = "agent"
    sessions_per_second: float = 0.1
    space: str = ""
    agents: int = 8
    instructions: Table = ((0, 1500), (0.5, 4000), (1, 9000))
    task: Table = ((0, 40), (0.5, 250), (0.9, 2000), (1, 8000))
    turns: Table = ((0, 1), (0.1, 3), (0.5, 8.5), (0.8, 15), (0.95, 28), (1, 42))
    result: Table = ((0, 15), (0.5, 350), (0.9, 2500), (1, 8000))
    output: Table = ((0, 20), (0.5, 120), (0.9, 600), (1, 2000))
    gap_s: Table = ((0, 0.01), (0.5, 0.15), (0.86, 1), (0.95, 8), (0.99, 60), (1, 900))

    def _turns(self, name: str, chance: Chance, unit_tokens: int) -> Iterator[Turn]:
        prompt = PromptSegments(unit_tokens)
        agent = chance.pick(range(self.agents), zipf(self.agents, 1.0))
        shared = self.space, "agent", agent
        prompt.add(Chance(*shared).whole(self.instructions), *shared)
        prompt.add(chance.whole(self.task), self.space, name, "task")
        gap = 0.0
        turns = chance.whole(self.turns)
        for turn in range(turns):
            stop = "tool_use" if turn < turns - 1 else "end_turn"
            yield Turn(gap, prompt, chance.whole(self.output), stop)
            prompt.add(chance.whole(self.result), self.space, name, "result", turn)
            gap = chance.of(self.gap_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class RAG(SingleKind):
    """Questions about passages that a search found, in the order of the search results.

    Popular ``passages`` recur often, but rarely after the same others: a prefix cache reuses the
    instructions and sometimes a first passage. One session in five asks a second question, with
    other passages before it.
    """

    kind: str = "rag"
    sessions_per_second: float = 2.0
    space: str = ""
    passages: int = 2000
    instructions: Table = ((0, 250), (1, 250))
    passage: Table = ((0, 120), (0.5, 350), (1, 700))
    found: Table = ((0, 3), (0.5, 5), (1, 8))
    question: Table = ((0, 8), (0.5, 25), (0.9, 80), (1, 300))
    output: Table = ((0, 20), (0.5, 180), (0.9, 500), (1, 1200))
    gap_s: Table = ((0, 3), (0.5, 30), (0.9, 180), (1, 1200))

    def _turns(self, name: str, chance: Chance, unit_tokens: int) -> Iterator[Turn]:
        popular = zipf(self.passages, 0.8)
        shared = self.space, "rag"
        for turn in range(2 if chance.happens(0.2) else 1):
            prompt = PromptSegments(unit_tokens)
            prompt.add(Chance(*shared).whole(self.instructions), *shared)
            found = chance.some(range(self.passages), chance.whole(self.found), popular)
            for passage in found:
                own = *shared, "passage", passage
                prompt.add(Chance(*own).whole(self.passage), *own)
            prompt.add(chance.whole(self.question), self.space, name, "question", turn)
            yield Turn(
                chance.of(self.gap_s) if turn else 0.0,
                prompt,
                chance.whole(self.output),
                "end_turn",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class API(SingleKind):
    """Programs that each fill in a template. 97 % of requests are alone in their session."""

    kind: str = "api"
    sessions_per_second: float = 5.0
    space: str = ""
    templates: int = 40
    template: Table = ((0, 80), (0.5, 500), (0.9, 2000), (1, 5000))
    payload: Table = ((0, 10), (0.5, 300), (0.9, 1500), (1, 6000))
    output: Table = ((0, 1), (0.5, 60), (0.9, 400), (1, 1500))
    turns: Table = ((0, 1.51), (0.5, 3), (1, 4.49))
    gap_s: Table = ((0, 0.05), (0.5, 1), (0.9, 10), (1, 60))
    alone: float = 0.99
    """Share of sessions with one turn; the others have three on average."""

    def _turns(self, name: str, chance: Chance, unit_tokens: int) -> Iterator[Turn]:
        prompt = PromptSegments(unit_tokens)
        template = chance.pick(range(self.templates), zipf(self.templates, 1.1))
        shared = self.space, "api", template
        prompt.add(Chance(*shared).whole(self.template), *shared)
        turns = 1 if chance.happens(self.alone) else chance.whole(self.turns)
        for turn in range(turns):
            prompt.add(chance.whole(self.payload), self.space, name, "payload", turn)
            yield Turn(
                chance.of(self.gap_s) if turn else 0.0,
                prompt,
                chance.whole(self.output),
                "end_turn",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat(SingleKind):
    """Chats of people: 3.5 turns on average, 40 s between an answer and the next question.

    One session in five begins with a document.
    """

    kind: str = "chat"
    sessions_per_second: float = 0.5
    space: str = ""
    assistants: int = 3
    instructions: Table = ((0, 100), (0.5, 600), (1, 1500))
    document: Table = ((0, 1000), (0.5, 4000), (0.9, 15_000), (1, 40_000))
    message: Table = ((0, 4), (0.5, 40), (0.9, 300), (1, 2000))
    output: Table = ((0, 10), (0.5, 250), (0.9, 700), (1, 2000))
    turns: Table = ((0, 0.51), (0.45, 1.49), (0.7, 3.5), (0.9, 8), (1, 16))
    gap_s: Table = ((0, 2), (0.5, 40), (0.9, 250), (0.98, 1200), (1, 3600))

    def _turns(self, name: str, chance: Chance, unit_tokens: int) -> Iterator[Turn]:
        prompt = PromptSegments(unit_tokens)
        assistant = chance.pick(range(self.assistants), zipf(self.assistants, 1.0))
        shared = self.space, "chat", assistant
        prompt.add(Chance(*shared).whole(self.instructions), *shared)
        if chance.happens(0.2):
            prompt.add(chance.whole(self.document), self.space, name, "document")
        for turn in range(chance.whole(self.turns)):
            prompt.add(chance.whole(self.message), self.space, name, "message", turn)
            yield Turn(
                chance.of(self.gap_s) if turn else 0.0,
                prompt,
                chance.whole(self.output),
                "end_turn",
            )


Kind = Agents | RAG | API | Chat
"""Workloads that a tenant's sessions can have."""


def _mix() -> tuple[tuple[float, Kind], ...]:
    return (0.45, Chat()), (0.3, API()), (0.15, RAG()), (0.1, Agents())


def _flooding() -> Kind:
    return API(
        templates=1,
        template=((0, 200), (1, 200)),
        payload=((0, 2000), (0.5, 6000), (1, 16_000)),
        alone=1.0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenants:
    """Many tenants of different sizes, each with its own namespace and all kinds of sessions.

    The n-th tenant begins 1 / n as many sessions as the first. A share ``common`` of the sessions
    uses the provider's instructions, the same text for all tenants, which a cache must not share
    between tenants.

    With ``flood`` one more tenant, ``flooder``, begins ``flood`` times as many sessions as all
    others together, each with a long prompt that is never seen again (``flooding``).
    """

    kind: str = "tenants"
    sessions_per_second: float = 2.0
    tenants: int = 40
    exponent: float = 1.0
    common: float = 0.3
    mix: tuple[tuple[float, Kind], ...] = field(default_factory=_mix)
    """Workloads, each with its share of the sessions."""
    flood: float = 0.0
    flooding: Kind = field(default_factory=_flooding)

    def session(self, name: str, chance: Chance, unit_tokens: int) -> SessionScript:
        """Return a session of a random tenant and kind."""
        if self.flood and chance.happens(self.flood / (1 + self.flood)):
            made = replace(self.flooding, space="flooder").session(name, chance, unit_tokens)
            return SessionScript(name, "flood", made.turns, "flooder")
        tenant = chance.pick(range(self.tenants), zipf(self.tenants, self.exponent))
        sums, total = [], 0.0
        for share, _ in self.mix:
            total += share
            sums.append(total)
        workload = chance.pick([one for _, one in self.mix], sums)
        space = "" if chance.happens(self.common) else f"tenant-{tenant}"
        made = replace(workload, space=space).session(name, chance, unit_tokens)
        return SessionScript(name, made.kind, made.turns, f"tenant-{tenant}")
