"""Hypothesis strategies: prompts that often share prefixes, and tokens in every accepted form."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from hypothesis import strategies as st

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["FORMS", "Recipe", "recipes"]

FORMS: dict[str, Callable[[list[int]], Any]] = {
    "list": list,
    "tuple": tuple,
    "int32": lambda tokens: np.array(tokens, np.int32),
    "int64": lambda tokens: np.array(tokens, np.int64),
    "uint16": lambda tokens: np.array(tokens, np.uint16),
    "big-endian": lambda tokens: np.array(tokens, ">i4"),
    "every other": lambda tokens: np.repeat(np.array(tokens, np.int32), 2)[::2],
    "list of int64": lambda tokens: [np.int64(token) for token in tokens],
    "memoryview": lambda tokens: memoryview(array("i", tokens)),
}
"""Functions that convert a list of tokens (ids below 2¹⁶) into each form a cache accepts."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to make a prompt from earlier ones.

    A state machine draws recipes, which are cheap and shrink well, and builds the prompts later.
    Runs of one token make whole pages equal by chance at any page size, lengths lie around page
    boundaries, and single tokens at the end make prompts differ late.
    """

    kind: str
    base: int
    keep: int
    fill: int
    pages: int
    more: int
    end: tuple[int, ...]

    def build(
        self, earlier: Sequence[Sequence[int]], page_size: int, max_pages: int = 4
    ) -> list[int]:
        """Return an ``earlier`` prompt, a prefix or an extension of one, or a new prompt.

        It has at most ``max_pages`` pages and one token.
        """
        base: list[int] = []
        if earlier and self.kind != "new":
            base = list(earlier[self.base % len(earlier)])
        if self.kind == "part":
            base = base[: self.keep % (len(base) + 1)]
        if self.kind != "again":
            run = 0 if self.kind == "part" else self.pages * page_size + self.more
            base += [self.fill] * run + list(self.end)
        return base[: max_pages * page_size + 1] or [self.fill]


def recipes(*, alphabet: int = 3, new: bool = False) -> st.SearchStrategy[Recipe]:
    """Draw recipes for prompts of ``alphabet`` different tokens; ``new`` ignores earlier ones."""
    token = st.integers(0, alphabet - 1)
    kinds = ["new"] if new else ["again", "part", "part", "extend", "new"]
    return st.builds(
        Recipe,
        kind=st.sampled_from(kinds),
        base=st.integers(0, 15),
        keep=st.integers(0, 63),
        fill=token,
        pages=st.integers(0, 3),
        more=st.integers(-2, 2),
        end=st.lists(token, max_size=4).map(tuple),
    )
