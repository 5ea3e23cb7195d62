"""Hypothesis strategies: prompts that share prefixes constantly, and tokens in every form."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from hypothesis import strategies as st

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["prompts", "related_prompts", "tails", "token_forms"]

_FORMS: list[Callable[[list[int]], Any]] = [
    list,
    tuple,
    lambda tokens: np.array(tokens, np.int32),
    lambda tokens: np.array(tokens, np.int64),
    lambda tokens: np.array(tokens, np.uint16),
    lambda tokens: np.array(tokens, ">i4"),
    lambda tokens: np.repeat(np.array(tokens, np.int32), 2)[::2],  # not contiguous
    lambda tokens: [np.int64(token) for token in tokens],
]


def tails(page_size: int, *, alphabet: int = 3, max_pages: int = 3) -> st.SearchStrategy[list[int]]:
    """Token lists with few different tokens, in runs, and lengths around page edges.

    Runs make whole pages equal by chance at any page size; single tokens at the end make them
    differ late.
    """
    token = st.integers(0, alphabet - 1)
    edge = st.integers(0, max_pages).map(lambda pages: pages * page_size)
    length = st.builds(lambda at, by: max(1, at + by), edge, st.integers(-2, 2))
    ends = st.lists(token, max_size=min(3, page_size))

    def build(fill: int, size: int, end: list[int]) -> list[int]:
        return ([fill] * size)[: max(0, size - len(end))] + end

    return st.builds(build, token, length, ends).filter(bool)


def prompts(
    page_size: int, *, alphabet: int = 3, max_pages: int = 4
) -> st.SearchStrategy[list[int]]:
    """Prompts of 1 … about ``max_pages`` pages that often begin alike."""
    tail = tails(page_size, alphabet=alphabet, max_pages=max_pages)
    short = st.lists(st.integers(0, alphabet - 1), min_size=1, max_size=2 * page_size)
    return st.one_of(tail, short)


def related_prompts(
    earlier: Sequence[Sequence[int]], page_size: int, *, alphabet: int = 3, max_pages: int = 4
) -> st.SearchStrategy[list[int]]:
    """A prompt that repeats, shortens, extends or leaves one of the ``earlier`` ones."""
    new = prompts(page_size, alphabet=alphabet, max_pages=max_pages)
    if not earlier:
        return new
    tail = st.lists(st.integers(0, alphabet - 1), max_size=page_size + 1)
    cut = st.integers(0, max_pages * page_size)

    def build(base: Sequence[int], keep: int, end: list[int]) -> list[int]:
        return (list(base[:keep]) + end)[: max_pages * page_size + 1] or [0]

    whole = st.sampled_from(earlier).map(list)
    return st.one_of(whole, st.builds(build, st.sampled_from(earlier), cut, tail), new)


def token_forms(tokens: Sequence[int]) -> st.SearchStrategy[Any]:
    """The same tokens in every form that the cache accepts; ids below 2¹⁶."""
    return st.sampled_from(_FORMS).map(lambda form: form(list(tokens)))
