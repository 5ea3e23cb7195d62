"""Distances, against a list that is searched."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.core.miss_ratio.curve import COLD, Stack

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


def test_keys_that_are_no_prefixes_do_no_harm() -> None:
    stack = Stack(8)
    chance = np.random.default_rng(3)
    for _ in range(50):
        keys = chance.integers(0, 12, 30).astype(np.uint64)
        found = stack.touch(keys, np.array([10, 0, 20]))
        assert (found >= COLD).all()
        stack.check()
