"""The names of a store's blocks that end in the runs of a tree."""

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
    """A store's rule for naming blocks, for `PagedCache.map`.

    A block has ``tokens`` tokens. ``root`` returns, for a namespace of the cache, the prefix of all
    block names there, followed by the 32-byte key that the first block's key is chained to
    (`kvkeep.core.keys.chain_keys`).
    """

    tokens: int
    root: Callable[[Namespace], bytes]


class Blocks(NamedTuple):
    """The blocks that end in one run."""

    before: int
    """Tokens before the run that belong to the block in which the run begins."""
    names: tuple[bytes, ...]


class RunOfTokens(NamedTuple):
    """A run of the tree, as input for `ends_of_blocks`."""

    parent: int
    """Index of the parent run in the list of runs; below 0 if the parent is not in it."""
    above: tuple[Namespace, bytes] | None
    """If ``parent`` is below 0: the namespace and all tokens before the run; None if unknown."""
    tokens: bytes | None
    """Tokens of the run; None if unknown. As in ``above``, marks replace tokens with extras."""


class _Place(NamedTuple):
    """The state of the key chain at the end of a run."""

    space: bytes
    key: bytes
    rest: bytes
    """Tokens behind the last full block."""


def ends_of_blocks(
    names: BlockNames, runs: Iterable[RunOfTokens], marks: Marks
) -> list[Blocks | None]:
    """Return the blocks that end in each of ``runs``; None where that is not known.

    ``runs`` has parents before children. Cost: a SHA-256 a block, about 1 µs for 256 tokens.
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
        passed, begun = divmod(len(before.rest), size)  # after `_begin`, rest may have full blocks
        tokens = before.rest + run.tokens
        row, extras = marks.plain(np.frombuffer(tokens, TOKEN_DTYPE))
        if row.nbytes < len(tokens):  # the run was evicted meanwhile, and its marks with it
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
