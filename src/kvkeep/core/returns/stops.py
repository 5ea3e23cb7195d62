"""`stop_after`: the way in which an answer ended by itself, from its tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

__all__ = ["stop_after"]

_SEARCHED: Final = 8192  # last tokens of an answer


def stop_after(answer: Sequence[int], named: Container[int]) -> str:
    """Return `Ended.stop` of an answer that ended with an end token, its last one.

    Many models end a tool call with another token than a final answer: "stop 128008". Others end
    both alike, but mark the call inside of the answer, so the last of the ``named`` tokens, which
    were added to the vocabulary by name, is part of it: "stop 151645 after 151658". No parser of
    tool calls is needed. Cost: 30 ns a token behind that mark, of at most 8,192.
    """
    end = len(answer) - 1
    for at in range(end - 1, max(-1, end - 1 - _SEARCHED), -1):
        if answer[at] in named:
            return f"stop {answer[end]} after {answer[at]}"
    return f"stop {answer[end]}"
