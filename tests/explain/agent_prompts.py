"""Prompts like those of coding agents: a system prompt, tools, a task, and turns of tool calls."""

from __future__ import annotations

import random
import re
from itertools import product
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvkeep.core.tokens import TokenArray

SYLLABLES = (
    ("re", "con", "pa", "un", "tri", "mo"),
    ("ta", "lo", "mi", "ver", "sen", "du", "ki"),
    ("n", "ck", "ble", "st", "ny", "d"),
)
WORDS = ["".join(parts) for parts in product(*SYLLABLES)]
PLANTED = {
    "date": "Today is",
    "header": "call=",
    "reminder": "You have used",
    "tools": '{"name": "',
}
"""What changes from prompt to prompt, and text beside the place where they then differ."""


class Words:
    """A tokenizer: each word, number and sign is a token."""

    def __init__(self) -> None:
        self.ids: dict[str, int] = {}
        self.words: list[str] = []

    def encode(self, text: str) -> TokenArray:
        ids = self.ids
        parts = re.findall(r" ?[a-zA-Z]+|\d{1,3}|\n+|[^\w\n]|_", text)
        for part in parts:
            if part not in ids:
                ids[part] = len(ids)
                self.words.append(part)
        return np.array([ids[part] for part in parts], np.int32)

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(self.words[token] for token in tokens)


class Agent:
    """One agent's prompts; ``planted`` names what changes in them from prompt to prompt."""

    def __init__(self, seed: int, planted: str | None = None) -> None:
        self.chance = random.Random(seed)
        self.planted = planted
        self.name = self.chance.choice(WORDS).title()
        self.rules = self.text(self.chance.randint(300, 600))
        self.more = self.text(self.chance.randint(100, 300))
        self.tools = [self._tool() for _ in range(self.chance.randint(6, 14))]
        self.files = [self.text(self.chance.randint(100, 300)) for _ in range(5)]  # read often
        self.sent = 0

    def text(self, words: int) -> str:
        chosen = self.chance.choices(WORDS, k=words)
        return " ".join(
            word + self.chance.choice(["", "", "", "", "", ",", ".", ".\n"]) for word in chosen
        )

    def _tool(self) -> str:
        name, about = "_".join(self.chance.sample(WORDS, 2)), self.text(self.chance.randint(20, 80))
        fields = ", ".join(
            f'"{word}": {{"type": "string"}}' for word in self.chance.sample(WORDS, 4)
        )
        return f'{{"name": "{name}", "description": "{about}", "properties": {{{fields}}}}}'

    def system(self) -> str:
        """The head of a prompt; some of it changes with each prompt, if that is planted."""
        self.sent += 1
        header = date = ""
        tools = self.tools
        if self.planted == "header":
            number = self.chance.randrange(16**6)
            header = f"x-billing-header: version=2.1; call={number:06x};\n"
        if self.planted == "date":
            date = (
                f"Today is {2000 + self.sent // 300}-{self.sent // 28 % 12 + 1}-{self.sent % 28}.\n"
            )
        if self.planted == "tools":
            tools = self.chance.sample(tools, len(tools))
        listed = ",\n".join(tools)
        return (
            f"{header}You are {self.name}, an agent.\n{self.rules}\n{date}{self.more}\n"
            f"# Tools\n[{listed}]\n"
        )

    def session(self, turns: int) -> Iterator[str]:
        """The prompts of one conversation: each continues the one before, but for what changes."""
        messages = [f"<user>\n{self.text(self.chance.randint(5, 60))}\n</user>\n"]
        for turn in range(turns):
            head = self.system()
            body = "".join(messages)
            if self.planted == "reminder":
                used = f"You have used {turn * 7 + self.sent % 5} of your turns."
                left = f"<reminder>\n{used}\n</reminder>\n</user>\n"
                body = body.replace("</user>\n", left, 1)
            yield f"{head}{body}<assistant>\n"
            seen = self.text(self.chance.randint(30, 200))
            if self.chance.random() < 0.3:
                seen = self.chance.choice(self.files)
            said, path = self.text(self.chance.randint(10, 60)), self.chance.choice(WORDS)
            call = f'<call>{{"name": "read", "path": "src/{path}.py"}}</call>'
            messages.append(
                f"<assistant>\n{said}\n{call}\n</assistant>\n<result>\n{seen}\n</result>\n"
            )
