"""`SlotLease`: the steps of one request on its slot."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvkeep.core.errors import IllegalStep, InvalidValue, switch, whole
from kvkeep.core.tokens import as_tokens

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from kvkeep.core.keys import Namespace
    from kvkeep.core.slots.table import SlotCopy, SlotTable, TokenRows
    from kvkeep.core.tokens import TokenArray, TokensLike

__all__ = ["SlotLease"]


class SlotLease:
    """One request's hold on a slot, from `SlotCache.acquire` to `release`.

    ``slot`` and ``version`` identify the hold: the version grows with each lease of the slot.
    ``num_cached`` prompt tokens, fewer than the prompt, need no computing once ``copy`` is made.
    ``copy`` is None when there is none, and after it was made.

    As a context manager it releases the slot at the end and keeps what was published. Every step
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
        self._kept = kept  # tokens that the slot held before; not forgotten by this request
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
        """A copy of the prompt and the tokens added to it."""
        rows = self._rows()
        return rows.row(self.slot, rows.lengths[self.slot]).copy()

    @property
    def num_tokens(self) -> int:
        """Length of the prompt and the tokens added to it."""
        return self._rows().lengths[self.slot]

    @property
    def published(self) -> int:
        """Leading tokens that other requests may use."""
        return int(self._rows().published[self.slot])

    def copied(self) -> None:
        """Report that ``copy`` was made: publish its tokens, end the guard on its source."""
        rows = self._rows()
        if self.copy is None:
            raise IllegalStep(f"no copy into slot {self.slot} is pending")
        rows.published[self.slot] = self.copy.tokens
        self._settle()

    def extend(self, tokens: TokensLike) -> None:
        """Append generated tokens (or more of the prompt). O(tokens added).

        Raises `InvalidValue` when the slot cannot hold that many.
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
        """Report that the KV of the first ``n`` tokens is computed, for others to copy. O(1).

        A smaller ``n`` than before changes nothing. While a copy is pending, ``n`` must cover it,
        which reports the copy as made; `IllegalStep` otherwise.
        """
        rows = self._rows()
        n = whole("n, the number of tokens computed,", n, 0, rows.lengths[self.slot])
        if self.copy is not None:
            if n < self.copy.tokens:
                raise IllegalStep(f"{self.copy} is pending; make it and call copied() first")
            self._settle()
        rows.published[self.slot] = max(int(rows.published[self.slot]), n)

    def truncate(self, n: int) -> None:
        """Drop all but the first ``n`` tokens, such as rejected drafts. O(pins).

        Published tokens may be dropped too, which ends soft pins on them. Raises `IllegalStep` when
        a hard pin or a pending copy, from this slot or into it, needs them.
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
        """Return the slot. Published tokens stay for other requests; the rest is forgotten.

        ``keep=False`` also forgets what this request published, with the soft pins on it. Tokens
        that the slot held before, and hard-pinned ones, stay.
        """
        published = self.published
        if not switch("keep", keep):
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
        """End the pending copy, made or abandoned."""
        assert self.copy is not None
        self._table.settle(self.copy)
        self.copy = None

    def _rows(self) -> TokenRows:
        """Return the rows, or raise if the lease is over."""
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
