"""Distances, against a list that is searched."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.core.miss_ratio.stack import COLD, Stack, _greater_before

# A prompt is a path in a tree where each block has two or three that can follow it.
PATHS = st.lists(st.integers(0, 2), max_size=9)
BATCHES = st.lists(st.lists(PATHS, max_size=10), max_size=6)


def chained(path: list[int]) -> list[int]:
    """A key for each block, that names all before it."""
    keys, key = [], 1
    for step in path:
        key = key * 3 + step
        keys.append((key * 0x9E3779B97F4A7C15) % 2**64)
    return keys


def touch(stack: Stack, prompts: list[list[int]]) -> list[int]:
    keys = np.array([key for one in prompts for key in one], np.uint64)
    found = stack.touch(keys, np.array([len(one) for one in prompts], np.int64)).tolist()
    stack.check()
    return found


class PlainStack:
    def __init__(self) -> None:
        self.keys: list[int] = []

    def touch(self, prompts: list[list[int]]) -> list[int]:
        found = []
        for prompt in prompts:
            found += [self.keys.index(key) if key in self.keys else COLD for key in prompt]
            for key in reversed(prompt):
                if key in self.keys:
                    self.keys.remove(key)
                self.keys.insert(0, key)
        return found


@given(BATCHES)
def test_distances_are_those_of_a_list(batches: list[list[list[int]]]) -> None:
    stack, plain = Stack(10**6), PlainStack()
    for batch in batches:
        prompts = [chained(path) for path in batch]
        assert touch(stack, prompts) == plain.touch(prompts)
    assert len(stack) == len(plain.keys)


@given(BATCHES, st.integers(1, 12))
def test_what_lies_too_deep_is_forgotten_and_nothing_else(
    batches: list[list[list[int]]], depth: int
) -> None:
    stack, plain = Stack(depth), PlainStack()
    for batch in batches:
        prompts = [chained(path) for path in batch]
        for got, true in zip(touch(stack, prompts), plain.touch(prompts), strict=True):
            # Within a batch it may still know what lies deeper.
            assert got == true or (got == COLD and true >= depth)
        assert len(stack) == min(depth, len(plain.keys))


@given(BATCHES)
def test_along_a_prompt_distances_only_grow(batches: list[list[list[int]]]) -> None:
    stack = Stack(10**6)
    for batch in batches:
        found = touch(stack, [chained(path) for path in batch])
        start = 0
        for path in batch:
            mine = found[start : start + len(path)]
            start += len(path)
            far = [10**9 if one == COLD else one for one in mine]
            assert far == sorted(far)


@pytest.mark.parametrize("count", [1, 2, 31, 32, 33, 500])
def test_greater_ones_before(count: int) -> None:
    chance = np.random.default_rng(count)
    values, weights = chance.permutation(count * 3)[:count], chance.integers(1, 9, count)
    plain = [int(weights[:at][values[:at] > values[at]].sum()) for at in range(count)]
    assert _greater_before(values, weights).tolist() == plain


def test_keys_that_are_no_prefixes_do_no_harm() -> None:
    stack = Stack(8)
    chance = np.random.default_rng(3)
    for _ in range(50):
        keys = chance.integers(0, 12, 30).astype(np.uint64)
        found = stack.touch(keys, np.array([10, 0, 20]))
        assert (found >= COLD).all()
        stack.check()


def test_nothing_is_no_prompt() -> None:
    assert touch(Stack(4), []) == touch(Stack(4), [[], []]) == []
