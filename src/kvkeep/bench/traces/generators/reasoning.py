"""`Reasoning`: chats whose answers begin with reasoning that no later prompt contains."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvkeep.bench.traces.generators.base import PromptSegments, Turn
from kvkeep.bench.traces.generators.chance import Chance, zipf
from kvkeep.bench.traces.generators.workloads import SingleKind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvkeep.bench.traces.generators.chance import Table

__all__ = ["Reasoning"]

_REASONS: Final = 1  # the first token of reasoning


@dataclass(frozen=True, slots=True, kw_only=True)
class Reasoning(SingleKind):
    """Chats with a model that reasons before it answers.

    A share ``reasons`` of the answers begins with ``reasoning`` tokens. Chat templates leave them
    out of the next prompt, which therefore goes on right after the question: the KV of such an
    answer, of its reasoning and of all behind it, is never read again. The other answers are, by
    the next question. The tokens of both are in the trace, for a cache to store.
    """

    kind: str = "reasoning"
    sessions_per_second: float = 0.3
    assistants: int = 3
    instructions: Table = ((0, 100), (0.5, 600), (1, 1500))
    message: Table = ((0, 4), (0.5, 60), (0.9, 600), (1, 4000))
    reasoning: Table = ((0, 100), (0.5, 1500), (0.9, 6000), (1, 16_000))
    output: Table = ((0, 10), (0.5, 300), (0.9, 800), (1, 2000))
    turns: Table = ((0, 0.51), (0.4, 1.49), (0.7, 4), (0.9, 9), (1, 20))
    gap_s: Table = ((0, 2), (0.5, 45), (0.9, 300), (0.98, 1200), (1, 3600))
    reasons: float = 0.8

    def _turns(self, name: str, chance: Chance, unit_tokens: int) -> Iterator[Turn]:
        prompt = PromptSegments(unit_tokens)
        assistant = chance.pick(range(self.assistants), zipf(self.assistants, 1.0))
        shared = self.kind, assistant
        prompt.add(Chance(*shared).whole(self.instructions), *shared)
        for turn in range(chance.whole(self.turns)):
            prompt.add(chance.whole(self.message), name, "message", turn)
            gap = chance.of(self.gap_s) if turn else 0.0
            hidden = chance.whole(self.reasoning) if chance.happens(self.reasons) else 0
            output = hidden + chance.whole(self.output)
            # Reasoning begins with one token of its own, other answers with many different ones.
            first = _REASONS if hidden else _word(name, turn)
            yield Turn(gap, prompt, output, "end_turn", reasoning_tokens=hidden, first_token=first)


def _word(name: str, turn: int) -> int:
    """Return the first token of an answer without reasoning: one of a thousand."""
    return 2 + zlib.crc32(f"{name}/{turn}".encode()) % 1000
