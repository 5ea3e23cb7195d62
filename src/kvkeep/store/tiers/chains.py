"""`Chain`: a prompt by the ids of its whole blocks, with its tokens where they are at hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvkeep.core.tokens import TokenArray

__all__ = ["Chain"]


class Chain(NamedTuple):
    """A prompt, or a prompt with its answer.

    Attributes:
        root: stands for the place before the first block.
        blocks: ids of the whole blocks, each of which stands for all tokens up to its end.
        size: tokens of a block.
        tokens: length of the prompt.
        row: its tokens, None if blocks are all that is known.
        public: number of leading blocks that other tenants share; ``root`` is this tenant's.
    """

    root: bytes
    blocks: Sequence[bytes]
    size: int
    tokens: int
    row: TokenArray | None = None
    public: int = 0

    def at(self, blocks: int) -> bytes:
        """Return the id of the place behind so many blocks: no other tenant has the same one."""
        if not blocks:
            return self.root
        last = self.blocks[blocks - 1]
        return self.root + last if blocks <= self.public else last

    def beginning(self, tokens: int) -> Chain:
        """Return the first ``tokens`` tokens."""
        row = None if self.row is None else self.row[:tokens]
        return self._replace(blocks=self.blocks[: tokens // self.size], tokens=tokens, row=row)
