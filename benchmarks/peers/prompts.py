"""What all systems get: prompts, their KV, files that are on the disk or in the page cache."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import numpy.typing as npt

    from peers.work import Sizes

__all__ = [
    "SHORT", "branches", "by_turns", "conversations", "emptied", "evict_from_cache", "into_cache",
    "kv_of", "prompt", "short_prompts", "sync",
]  # fmt: skip

SHORT = 64
"""Tokens of a short prompt."""
VOCABULARY = 128_000


def prompt(seed: int, length: int) -> npt.NDArray[np.int32]:
    """Return random tokens: the same for all systems."""
    return np.random.default_rng(seed).integers(0, VOCABULARY, length, dtype=np.int32)


def conversations(sizes: Sizes) -> list[npt.NDArray[np.int32]]:
    """Return the long prompts that are cached."""
    return [prompt(1 + at, sizes.tokens) for at in range(sizes.conversations)]


def by_turns(prompts: list[Any], times: int, form: Callable[[Any], Any]) -> Iterator[Any]:
    """Return prompts by turns, each an object that no call has seen, made before the first."""
    return iter([form(prompts[at % len(prompts)]) for at in range(times)])


def branches(
    tokens: npt.NDArray[np.int32], runs: int, page: int
) -> Iterator[npt.NDArray[np.int32]]:
    """Return the prompts that split the path of ``tokens`` into so many runs of whole pages."""
    pages = len(tokens) // page
    for at in range(1, runs):
        shared = tokens[: at * pages // runs * page]
        yield np.concatenate((shared, prompt(10**6 + at, page)))


def short_prompts(first: int, count: int) -> Iterator[npt.NDArray[np.int32]]:
    """Return short prompts that differ from their first token on."""
    rng = np.random.default_rng(first)
    for at in range(first, first + count):
        tokens = rng.integers(0, VOCABULARY, SHORT, dtype=np.int32)
        tokens[0] = at
        yield tokens


def kv_of(length: int, token_bytes: int) -> Any:
    """Return random KV of a prompt, ``[layers, 2, tokens, 8, 128]`` in bfloat16."""
    import torch  # noqa: PLC0415 - not every worker needs it

    kv = torch.empty(token_bytes // 4096, 2, length, 8, 128, dtype=torch.bfloat16)
    raw = kv.view(torch.int16).view(-1).numpy()
    raw[:] = np.resize(np.random.default_rng(1).integers(0, 9999, 1 << 20, np.int16), len(raw))
    return kv


def emptied(directory: Path) -> None:
    """Delete all files of a directory."""
    for path in directory.rglob("*"):
        if path.is_file():
            path.unlink()


def _files(directory: Path) -> Iterator[int]:
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            try:
                yield fd
            finally:
                os.close(fd)


def sync(directory: Path) -> None:
    """Sync all files of a directory; files that are synced already cost almost nothing."""
    for fd in _files(directory):
        os.fsync(fd)


def into_cache(directory: Path) -> None:
    """Read all files, so that the page cache has them.

    In small parts: from large ones, Linux fills it with single pages, which are slow to read.
    """
    for fd in _files(directory):
        while os.read(fd, 1 << 17):
            pass


def evict_from_cache(directory: Path) -> None:
    """Drop all files from the page cache; they must be synced."""
    for fd in _files(directory):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
