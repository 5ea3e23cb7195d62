"""`KeptPrompts`: which records a store keeps of a prompt; `WholeBlocks`: blocks of all layers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import partial
from typing import TYPE_CHECKING

from kvkeep.store.blocks.stats import Lookup, runs_of
from kvkeep.store.kv.lookup import find_stored, pieces_of
from kvkeep.store.kv.prefetch import start_prefetch
from kvkeep.store.kv.removal import delete_from
from kvkeep.store.kv.why import misses_behind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvkeep.store.codecs import BlockShape
    from kvkeep.store.kv.forms import Form
    from kvkeep.store.kv.names import PromptBlocks
    from kvkeep.store.kv.paying import LoadPiece
    from kvkeep.store.kv.prefetch import Prefetch
    from kvkeep.store.kv.removal import Followers
    from kvkeep.store.tiers import Miss, Removed, TieredStore

__all__ = ["KeptPrompts", "WholeBlocks"]


class KeptPrompts(ABC):
    """Finds the records of prompts, and acts on them; for each method see `PromptStore`.

    The tiers are an argument, because users of a shared store have tiers of their own to close.

    Thread safety: all methods.

    Attributes:
        block_shape: the shape of a record's raw bytes, for codecs.
    """

    block_shape: BlockShape

    @abstractmethod
    def lookup(self, tiered: TieredStore, prompt: PromptBlocks, tiers: Sequence[str]) -> Lookup:
        """Return the length of the stored prefix; ``tiers`` are the names of all levels."""

    @abstractmethod
    def pieces(
        self, tiered: TieredStore, prompt: PromptBlocks, tiers: Sequence[str]
    ) -> list[LoadPiece]:
        """Return what is stored of the prompt from its ``start`` on, in pieces to load."""

    @abstractmethod
    def why(
        self, tiered: TieredStore, prompt: PromptBlocks, since: float | None
    ) -> tuple[Miss, ...]:
        """Return why tokens from the prompt's ``start`` on are missing."""

    @abstractmethod
    def touch(self, tiered: TieredStore, prompt: PromptBlocks) -> None:
        """Count a use of the records that are known to be stored."""

    @abstractmethod
    def beside(self, tiered: TieredStore, prompt: PromptBlocks, full: list[bytes]) -> list[bytes]:
        """Return the ids of records that a prompt has beside its blocks, which are ``full``."""

    @abstractmethod
    def prefetch(self, tiered: TieredStore, prompt: PromptBlocks) -> Prefetch:
        """Start to read the records into memory."""

    @abstractmethod
    def pin(self, tiered: TieredStore, prompt: PromptBlocks, seconds: float) -> int:
        """Pin the stored prefix; return its tokens."""

    @abstractmethod
    def unpin(self, tiered: TieredStore, prompt: PromptBlocks) -> int:
        """End the pin of the prompt from its ``start`` on; return the tokens that were pinned."""

    @abstractmethod
    def remove(self, tiered: TieredStore, prompt: PromptBlocks) -> Removed:
        """Delete all records with a token from the prompt's ``start`` on."""


class WholeBlocks(KeptPrompts):
    """Blocks with the KV of all layers."""

    def __init__(self, form: Form, followers: Followers) -> None:
        self.block_shape = form.block_shape
        self._form = form
        self._followers = followers

    def lookup(self, tiered: TieredStore, prompt: PromptBlocks, tiers: Sequence[str]) -> Lookup:
        found = find_stored(tiered, prompt)
        names = map(tiers.__getitem__, found.levels)
        return Lookup(sum(found.lengths), runs_of(zip(names, found.lengths, strict=True)))

    def pieces(
        self, tiered: TieredStore, prompt: PromptBlocks, tiers: Sequence[str]
    ) -> list[LoadPiece]:
        return pieces_of(find_stored(tiered, prompt), prompt, self._form, tiers)

    def why(
        self, tiered: TieredStore, prompt: PromptBlocks, since: float | None
    ) -> tuple[Miss, ...]:
        row, start, names = prompt
        return misses_behind(names, partial(tiered.losses_of, since=since), row, start)

    def touch(self, tiered: TieredStore, prompt: PromptBlocks) -> None:
        tiered.used(prompt.names.full(prompt.row))

    def beside(self, tiered: TieredStore, prompt: PromptBlocks, full: list[bytes]) -> list[bytes]:
        row, _, names = prompt
        rest = row[len(full) * names.block_tokens :]
        return names.tails(full, rest)[-1:]

    def prefetch(self, tiered: TieredStore, prompt: PromptBlocks) -> Prefetch:
        return start_prefetch(tiered, self._form, prompt)

    def pin(self, tiered: TieredStore, prompt: PromptBlocks, seconds: float) -> int:
        found = find_stored(tiered, prompt)
        return sum(found.lengths[: tiered.pins.pin(found.ids, seconds)])

    def unpin(self, tiered: TieredStore, prompt: PromptBlocks) -> int:
        found = find_stored(tiered, prompt._replace(start=0))
        first = -(-prompt.start // prompt.names.block_tokens)
        return sum(found.lengths[first:][: tiered.pins.unpin(found.ids[first:])])

    def remove(self, tiered: TieredStore, prompt: PromptBlocks) -> Removed:
        return delete_from(tiered, prompt, self._followers, tiered.remove)
