"""`SlotLease`: the steps of one request on its slot."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvkeep.core.errors import IllegalStep, InvalidValue, whole
from kvkeep.core.tokens import as_tokens

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from kvkeep.core.keys import Namespace
    from kvkeep.core.slots.guards import SlotCopy
    from kvkeep.core.slots.rows import TokenRows
    from kvkeep.core.slots.table import SlotTable
    from kvkeep.core.tokens import TokenArray, TokensLike

__all__ = ["SlotLease"]


class SlotLease:
    """One request's hold on a slot, from `SlotCache.acquire` to `release`.

    ``slot`` and ``version`` name the hold: the version grows each time the slot is given out.
    ``num_cached`` is the number of prompt tokens that need no computing, once ``copy`` is made, if
    there is one; it is always less than the prompt. ``copy`` turns to None when the copy was made.

    As a context manager it releases the slot at the end, keeping what was published. Every step
    after that, or after the cache was cleared, raises `IllegalStep` and changes nothing.
    """

    __slots__ = ("_kept", "_table", "copy", "namespace", "num_cached", "slot", "version")

    def __init__(
        self,
        table: SlotTable,
        namespace: Namespace,
        *,
        slot: int,
        version: int,
        kept: int,
        num_cached: int,
        copy: SlotCopy | None,
    ) -> None:
        self._table = table
        self._kept = kept  # what the slot held already; not this request's to forget
        self.namespace = namespace
        self.slot = slot
        self.version = version
        self.num_cached = num_cached
        self.copy = copy

    @property
    def running(self) -> bool:
        """Whether the lease still holds its slot."""
        table = self._table
        return table.versions[self.slot] == self.version and table.is_running(self.slot)

    @property
    def tokens(self) -> TokenArray:
        """The prompt and what was added to it; a copy."""
        rows = self._rows()
        return rows.row(self.slot, rows.lengths[self.slot]).copy()

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and of what was added to it."""
        return self._rows().lengths[self.slot]

    @property
    def published(self) -> int:
        """Tokens, from the front, that others may use."""
        return int(self._rows().published[self.slot])

    def copied(self) -> None:
        """Say that ``copy`` was made: what it brought is published, its source is free to go."""
        rows = self._rows()
        if self.copy is None:
            raise IllegalStep(f"no copy into slot {self.slot} is pending")
        rows.published[self.slot] = self.copy.tokens
        self._settle()

    def extend(self, tokens: TokensLike) -> None:
        """Append generated tokens (or more of the prompt). O(tokens added).

        `InvalidValue` when the slot cannot hold that many.
        """
        rows, added = self._rows(), as_tokens(tokens)
        length = rows.lengths[self.slot] + len(added)
        if length > self._table.max_tokens:
            raise InvalidValue(
                f"a slot holds at most {self._table.max_tokens} tokens; "
                f"slot {self.slot} would have {length}"
            )
        rows.extend(self.slot, added)

    def publish(self, n: int) -> None:
        """Say that the KV of the first ``n`` tokens is computed: others may copy it. O(1).

        Less than what is published already changes nothing. While a copy is pending, ``n`` must
        reach to its end, and says that it was made; `IllegalStep` otherwise.
        """
        rows = self._rows()
        n = whole("n, the number of tokens computed,", n, 0, rows.lengths[self.slot])
        if self.copy is not None:
            if n < self.copy.tokens:
                raise IllegalStep(f"{self.copy} is pending; make it and call copied() first")
            self._settle()
        rows.published[self.slot] = max(int(rows.published[self.slot]), n)

    def truncate(self, n: int) -> None:
        """Drop what was added beyond the first ``n`` tokens: drafts that were rejected. O(pins).

        Published tokens may go as well; soft pins on them end. `IllegalStep` when a hard pin or
        a pending copy, from this slot or into it, needs them.
        """
        rows, guards = self._rows(), self._table.guards
        n = whole("n, the number of tokens left,", n, 0, rows.lengths[self.slot])
        if self.copy is not None and n < self.copy.tokens:
            raise IllegalStep(f"{self.copy} is pending; make it and call copied() first")
        if n < guards.locked(self.slot):
            raise IllegalStep(
                f"slot {self.slot} cannot be cut to {n} tokens: "
                f"{guards.locked(self.slot)} are hard-pinned or being copied from"
            )
        guards.give_way(self.slot, n)
        rows.cut(self.slot, n)
        self._kept = min(self._kept, n)

    def release(self, *, keep: bool = True) -> None:
        """Give the slot back. What is published stays there for others; the rest is forgotten.

        ``keep=False`` forgets what this request put there as well, soft pins on it included. What
        the slot held before the request took it, and what hard pins guard, stays.
        """
        published = self.published
        if not keep:
            published = max(min(published, self._kept), self._table.guards.hard(self.slot))
        if self.copy is not None:
            self._settle()
        self._table.give_back(self.slot, published)

    def __enter__(self) -> Self:
        self._rows()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.running:
            self.release()

    def _settle(self) -> None:
        """The pending copy was made, or never will be."""
        assert self.copy is not None
        self._table.settle(self.copy)
        self.copy = None

    def _rows(self) -> TokenRows:
        """The rows, if this lease may still touch its own."""
        if not self.running:
            raise IllegalStep(
                f"the lease on slot {self.slot} (version {self.version}) is over: it was released, "
                f"or the cache was cleared"
            )
        return self._table.rows

    def __repr__(self) -> str:
        hold = f"SlotLease slot {self.slot} version {self.version}"
        if not self.running:
            return f"<{hold}, over>"
        pending = f", {self.copy} pending" if self.copy else ""
        return f"<{hold}, {self.published} of {self.num_tokens} tokens published{pending}>"
