"""`CodingAgents`: agents that call tools and other agents, with people between their tasks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvkeep.bench.traces.generators.base import PromptSegments, SessionScript, Turn
from kvkeep.bench.traces.generators.chance import Chance, zipf

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvkeep.bench.traces.generators.chance import Table

__all__ = ["CodingAgents"]

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
        agent = chance.pick(range(self.agents), zipf(self.agents, 1.0))
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
