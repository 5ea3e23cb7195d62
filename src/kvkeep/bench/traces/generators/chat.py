"""`Chat`: conversations of people.

Each distribution is a table of quantiles (`Table`). Segments of the same name are the same text in
all prompts: a system prompt has one name, each user's question has another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvkeep.bench.traces.generators.base import PromptSegments, SessionScript, Turn
from kvkeep.bench.traces.generators.chance import Chance, zipf

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvkeep.bench.traces.generators.chance import Table

__all__ = ["Chat"]


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
        assistant = chance.pick(range(self.assistants), zipf(self.assistants, 1.0))
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
