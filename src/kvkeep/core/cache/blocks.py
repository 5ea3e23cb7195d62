"""Blocks of tokens, as a store names them, by the runs of a tree in which they end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvkeep.core.keys import KEY_BYTES, chain_keys
from kvkeep.core.tokens import TOKEN_BYTES, TOKEN_DTYPE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvkeep.core.keys import Namespace
    from kvkeep.core.prefix.marks import Marks

__all__ = ["BlockNames", "Blocks", "RunOfTokens", "ends_of_blocks"]


@dataclass(frozen=True, slots=True)
class BlockNames:
    """How a store names its blocks, so that `PagedCache.map` can say which those of a run are.

    ``tokens`` make a block. ``root`` gives, for a namespace of the cache, the name that stands
    before its first block: what all names there begin with, and then the 32 bytes of a key that
    the first block's is chained to (`kvkeep.core.keys.chain_keys`).
    """

    tokens: int
    root: Callable[[Namespace], bytes]


class Blocks(NamedTuple):
    """The blocks that end in one run."""

    before: int
    """So many tokens before the run belong to the block in which it begins."""
    names: tuple[bytes, ...]


class RunOfTokens(NamedTuple):
    """A run, of which `ends_of_blocks` is to say what ends in it."""

    parent: int
    """The position of the run that it hangs from; below 0 if from none of them."""
    above: tuple[Namespace, bytes] | None
    """If from none: its namespace, and all tokens before it. None where they are not known."""
    tokens: bytes | None
    """Its own. None where they are not known. Tokens with extras are marks, here and above."""


class _Place(NamedTuple):
    """Where the chain of blocks stands at the end of a run."""

    space: bytes
    key: bytes
    rest: bytes
    """The tokens behind the last block."""


def ends_of_blocks(
    names: BlockNames, runs: Iterable[RunOfTokens], marks: Marks
) -> list[Blocks | None]:
    """The blocks that end in each of ``runs``, parents first; None where it is not known.

    Cost: a SHA-256 a block, about 1 µs for 256 tokens.
    """
    size = names.tokens * TOKEN_BYTES
    places: list[_Place | None] = []
    found: list[Blocks | None] = []
    for run in runs:
        before = _begin(names, run.above) if run.parent < 0 else places[run.parent]
        if before is None or run.tokens is None:
            places.append(None)
            found.append(None)
            continue
        passed, begun = divmod(len(before.rest), size)  # before the top, there may be many
        tokens = before.rest + run.tokens
        row, extras = marks.plain(np.frombuffer(tokens, TOKEN_DTYPE))
        if row.nbytes < len(tokens):  # evicted meanwhile, and its marks with it
            places.append(None)
            found.append(None)
            continue
        keys = chain_keys(before.key, row.tobytes(), size, extras)
        key, rest = keys[-1] if keys else before.key, tokens[len(keys) * size :]
        places.append(_Place(before.space, key, rest))
        found.append(
            Blocks(begun // TOKEN_BYTES, tuple(before.space + key for key in keys[passed:]))
        )
    return found


def _begin(names: BlockNames, above: tuple[Namespace, bytes] | None) -> _Place | None:
    if above is None:
        return None
    space, tokens = above
    root = names.root(space)
    return _Place(root[:-KEY_BYTES], root[-KEY_BYTES:], tokens)
