"""`GroupSizes`: groups of layers in numbers, for replays without a model."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Final

from kvkeep.core.errors import InvalidValue, whole
from kvkeep.core.geometry import parse_count
from kvkeep.core.groups import GroupLayout, StateSpec, WindowSpec

__all__ = ["GroupSizes", "WindowSize"]

_LIKE: Final = "such as window=1024x5,state=2400@64"
_WINDOW: Final = re.compile(r"([^x]+?)(?:x(\d+(?:\.\d+)?))?")
_STATE: Final = re.compile(r"([^@]+?)(?:@(.+))?")


@dataclass(frozen=True, slots=True)
class WindowSize:
    """Layers with a window of ``span`` tokens, or with chunks of ``span`` tokens.

    Their KV of a token takes ``times`` as many bytes as that of the layers that keep every token.
    """

    span: int
    times: float = 1.0
    chunked: bool = False


@dataclass(frozen=True, slots=True)
class GroupSizes:
    """What a model keeps beside the layers that keep every token, in units of those.

    A state is as large as their KV of ``state_tokens`` tokens (0: no states), and computing resumes
    at multiples of ``grid`` tokens.
    """

    windows: tuple[WindowSize, ...] = ()
    state_tokens: int = 0
    grid: int = 1

    @classmethod
    def parse(cls, text: str) -> GroupSizes:
        """Parse ``window=SPANxTIMES``, ``chunk=SPANxTIMES`` and ``state=TOKENS@GRID``.

        Separated by commas, in any order; ``xTIMES`` and ``@GRID`` are 1 unless given, and counts
        may end in k or M. Raises `InvalidValue` for anything else.
        """
        windows: list[WindowSize] = []
        state: tuple[int, int] | None = None
        for part in text.split(","):
            kind, _, value = (one.strip() for one in part.partition("="))
            if not value or kind not in {"window", "chunk", "state"}:
                raise InvalidValue(
                    f"groups are window=SPANxTIMES, chunk=SPANxTIMES and state=TOKENS@GRID, "
                    f"separated by commas, {_LIKE}; got {part.strip()!r}"
                )
            if kind != "state":
                windows.append(_window(value, part.strip(), chunked=kind == "chunk"))
            elif state is not None:
                raise InvalidValue(
                    f"groups have one state, the sum of all layers' states; got two in {text!r}"
                )
            else:
                state = _state(value, part.strip())
        return cls(tuple(windows), *(state or (0, 1)))

    def layout(self, page_tokens: int) -> GroupLayout:
        """Return the layout with pages of ``page_tokens``: rows and states in whole pages.

        Raises:
            InvalidValue: there is no group, or a number is below one.
        """
        size = whole("page_tokens", page_tokens, 1)
        rows = tuple(
            WindowSpec(one.span, max(1, math.ceil(one.times)), one.chunked) for one in self.windows
        )
        state = None
        if self.state_tokens:
            state = StateSpec(-(-self.state_tokens // size), self.grid)
        return GroupLayout(size, rows, state)


def _window(value: str, part: str, *, chunked: bool) -> WindowSize:
    found = _WINDOW.fullmatch(value)
    times = 1.0 if found is None or found[2] is None else float(found[2])
    if found is None or not 0 < times <= 1000:
        raise InvalidValue(
            f"a window is its span in tokens, then x and how many times as large the KV of its "
            f"layers is (up to 1000), {_LIKE}; got {part!r}"
        )
    return WindowSize(_tokens(found[1], part), times, chunked)


def _state(value: str, part: str) -> tuple[int, int]:
    found = _STATE.fullmatch(value)
    if found is None:
        raise InvalidValue(
            f"a state is the tokens whose KV is as large, then @ and its grid in tokens, {_LIKE}; "
            f"got {part!r}"
        )
    return _tokens(found[1], part), 1 if found[2] is None else _tokens(found[2], part)


def _tokens(text: str, part: str) -> int:
    try:
        return whole("tokens", parse_count(text), 1)
    except InvalidValue as error:
        raise InvalidValue(f"{text!r} in {part!r} is no count of tokens, {_LIKE}") from error
