"""`Prefill`: the KV of a batch's prompts, from the store, from each other, and from the model.

    load      read the stored KV of each row; common prefixes are read once
    share     compute common prefixes of several rows once
    reach     compute the rest, in few passes over the rows that need them (`passes`)

Until a cache is made nothing is copied: rows refer to slices of KV, which they may share.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from kvkeep.core.returns import Ended
from kvkeep.integrations.transformers_caches import grown, held, length_of
from kvkeep.integrations.transformers_model import one_pass
from kvkeep.integrations.transformers_settings import PASS_TOKENS, passes, shared_prefixes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from transformers import Cache, DynamicCache, PreTrainedModel

    from kvkeep.core.geometry import KVGeometry
    from kvkeep.core.tokens import TokenArray
    from kvkeep.integrations.transformers_model import PassClock
    from kvkeep.integrations.transformers_settings import GenerateSettings, Rows, SharedRows
    from kvkeep.store import Get, KVStore

    Layers = Sequence[tuple[torch.Tensor, ...]]
    Load = Callable[[TokenArray, int], Get]
    """Return the KV of a text's longest stored prefix behind a number of tokens."""

__all__ = ["Prefill", "StoredRows"]


class KVSlice(NamedTuple):
    """KV of tokens ``start`` … ``stop - 1`` of a text: K and V a layer, [heads, tokens, dim].

    From token ``exact`` on it is not exact; None: all of it is.
    """

    start: int
    stop: int
    layers: Layers
    exact: int | None = None

    def cut(self, stop: int) -> KVSlice:
        """Return its beginning, up to token ``stop``."""
        return self if stop >= self.stop else self._replace(stop=stop)


class Prefill:
    """The known KV of a batch's prompts, except the last token of each.

    Attributes:
        loaded: tokens that were not computed because the store had them.
        shared: tokens that were not computed because another row's pass computed them.
        parted: prefixes that were computed for several rows, and end where these differ.

    Thread safety: none; an object belongs to one call.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        geometry: KVGeometry,
        rows: Rows,
        *,
        clock: PassClock,
        chunk: int | None = None,
    ) -> None:
        """``chunk``: the most columns of one pass; ``clock`` times them."""
        self._clock = clock
        self._model = model
        self._geometry = geometry
        self._rows = rows
        self._chunk = chunk
        self._pieces: list[tuple[KVSlice, ...]] = [()] * len(rows.texts)
        self._order, self._common = shared_prefixes(rows.texts)
        self._stored: list[int] = [0] * len(rows.texts)
        self.loaded = 0
        self.shared = 0
        self.parted: list[SharedRows] = []

    @property
    def known(self) -> list[int]:
        """For each row, the number of leading tokens with known KV."""
        return [pieces[-1].stop if pieces else 0 for pieces in self._pieces]

    @property
    def levels(self) -> list[int]:
        """For each row, the column up to which nothing has to be computed."""
        return [pad + known for pad, known in zip(self._rows.pads, self.known, strict=True)]

    def exact(self, row: int) -> int | None:
        """Return how many leading tokens of a row are exact; None: all, as far as it is loaded."""
        ends = [piece.exact for piece in self._pieces[row] if piece.exact is not None]
        return next((end for end in ends if end < self.known[row]), None)

    def load(self, get: Load) -> None:
        """Read the stored KV of all rows; rows that begin alike read their common prefix once."""
        before: dict[int, int] = {}  # row → tokens it shares with the row before it in order
        for shared in self._common:
            before |= dict.fromkeys(shared.rows[1:], shared.tokens)  # longer ones come later
        for at, row in enumerate(self._order):
            if at and row in before:
                self._lend(self._order[at - 1], row, before[row])
            start = self.known[row]
            found = get(self._rows.texts[row][:-1], start)
            layers, count = found
            if layers is not None:
                moved = [tuple(part.to(self._model.device) for part in one) for one in layers]
                self._pieces[row] += (KVSlice(start, start + count, moved, found.exact),)
        for shared in self._common:  # and back: a later row may have loaded more
            best = max(shared.rows, key=self.known.__getitem__)
            for row in shared.rows:
                self._lend(best, row, shared.tokens)
        self._stored = self.known

    def _lend(self, lender: int, row: int, tokens: int) -> None:
        """Give ``row`` the KV that ``lender`` has of their ``tokens`` common first tokens."""
        pieces = tuple(piece.cut(tokens) for piece in self._pieces[lender] if piece.start < tokens)
        if pieces and pieces[-1].stop > self.known[row]:
            self._pieces[row] = pieces

    def share(self) -> None:
        """Compute each common prefix once, if that saves more than a forward pass costs."""
        for shared in self._common:
            row = max(shared.rows, key=self.known.__getitem__)
            start = min(self.known[row], shared.tokens)
            saved = (shared.tokens - start) * (len(shared.rows) - 1)
            if saved > PASS_TOKENS:
                pad = self._rows.pads[row]
                self._compute((row,), pad + start, pad + shared.tokens)
                self.shared += saved
                self.parted.append(shared)
            for other in shared.rows:
                self._lend(row, other, shared.tokens)

    def reach(self, columns: int, *, last: bool) -> DynamicCache:
        """Return a cache of all rows up to ``columns``; without ``last``, up to the last pass.

        The caller then makes that pass, in which all rows take part.
        """
        steps = passes(self.levels, columns)
        for row, stored in enumerate(self._stored):
            first = next((step.start for step in steps if row in step.rows), columns)
            self.loaded += max(0, min(stored, first - self._rows.pads[row]))
        if steps and not last:
            columns = steps.pop().start
        for step in steps:
            self._compute(step.rows, step.start, step.stop)
        return self.cache(columns)

    def cache(self, columns: int) -> DynamicCache:
        """Return a cache of all rows up to a column; all rows have known KV up to there."""
        return self._assemble(range(len(self._pieces)), columns, self._rows.pads)

    def _compute(self, rows: tuple[int, ...], start: int, stop: int) -> None:
        """Compute columns of some rows, in one pass or in chunks, and keep their KV."""
        alone = len(rows) == 1
        skip = self._rows.pads[rows[0]] if alone else 0  # one row needs no pads
        pads = (0,) if alone else tuple(self._rows.pads[row] for row in rows)
        cache = self._assemble(rows, start - skip, pads)
        index = torch.tensor(rows)
        size = self._chunk or stop - start
        for begin in range(start, stop, size):
            end = min(begin + size, stop)
            with self._clock.timing(len(rows), begin - skip, end - skip):
                one_pass(
                    self._model,
                    cache,
                    self._rows.ids[index, begin:end],
                    self._rows.mask[index, skip:end],
                    self._rows.positions[index, begin:end],
                )
        parts = [held(cache, layer) for layer in range(self._geometry.layers)]
        for at, (row, pad) in enumerate(zip(rows, pads, strict=True)):
            known, end = self.known[row], stop - skip - pad
            if end > known:
                columns = slice(pad + known, pad + end)
                layers = [(k[at][:, columns], v[at][:, columns]) for _, k, v in parts]
                self._pieces[row] += (KVSlice(known, end, layers),)

    def _assemble(self, rows: Sequence[int], columns: int, pads: Sequence[int]) -> DynamicCache:
        """Return a cache of ``rows`` up to a column; the KV of their leading pads is zero."""
        if not columns:
            return grown(())
        geometry = self._geometry
        widths = geometry.head_dim, geometry.value_dim
        layers = []
        for layer in range(geometry.layers):
            parts = tuple(
                torch.empty(
                    (len(rows), geometry.rank_heads, columns, width),
                    dtype=self._model.dtype,
                    device=self._model.device,
                )
                for width in widths
            )
            for at, (row, pad) in enumerate(zip(rows, pads, strict=True)):
                assert self.known[row] >= columns - pad
                for whole in parts:
                    whole[at, :, :pad] = 0
                for piece in self._pieces[row]:
                    count = min(piece.stop, columns - pad) - piece.start
                    if count <= 0:
                        break
                    begin = pad + piece.start
                    for whole, part in zip(parts, piece.layers[layer], strict=True):
                        whole[at, :, begin : begin + count] = part[:, :count]
            layers.append((parts[0], parts[1]))
        return grown(layers)


class StoredRows:
    """Stores rows whose layers keep every token.

    ``servable`` says whether the KV of so many tokens is the same in shorter and longer texts.

    Thread safety: as the model.
    """

    def __init__(self, store: KVStore, tenant: str | None, servable: Callable[[int], bool]) -> None:
        self._store = store
        self._tenant = tenant
        self._servable = servable

    def store_prompts(self, prefill: Prefill, rows: Rows, cache: Cache, *, copies: int = 1) -> int:
        """Store prompts without their last tokens, and common prefixes; return tokens stored.

        A prefix that rows share is stored to the token, for other prompts that begin with it.
        ``copies`` are the rows of the cache for each prompt, which share its KV.
        """
        if not self._servable(rows.longest + 1):
            return 0
        ends = [(shared.rows[0], shared.tokens) for shared in prefill.parted]
        ends += [(row, len(text) - 1) for row, text in enumerate(rows.texts)]
        return sum(
            self.store(
                rows.texts[row][:end], cache, row * copies, rows.pads[row], exact=prefill.exact(row)
            )
            for row, end in ends
        )

    def store_answers(
        self, prefill: Prefill, settings: GenerateSettings, sequences: torch.Tensor, cache: Cache
    ) -> int:
        """Store prompts with their answers up to the end token; return tokens newly stored."""
        columns, total = settings.rows.columns, sequences.shape[1]
        if not self._servable(settings.rows.longest + total - columns + 1):
            return 0
        accepted = 0
        for row, pad, text, prompt, ended in settings.answers(sequences):
            accepted += self.store(
                text, cache, row, pad,
                stored=prompt - 1, answer=(prompt, ended), exact=prefill.exact(row),
            )  # fmt: skip
            self._store.ended(text, prompt=prompt, ended=ended, tenant=self._tenant)
        return accepted

    def store(
        self,
        text: TokenArray,
        cache: Cache,
        row: int,
        pad: int,
        *,
        stored: int = 0,
        answer: tuple[int, Ended] | None = None,
        exact: int | None = None,
    ) -> int:
        """Store the KV of ``text`` in row ``row`` of ``cache``, behind ``pad`` columns of padding.

        ``stored`` of its tokens were stored just now; windows may have dropped them from the cache.
        ``answer`` says where an answer begins, and how it ended; ``exact`` as in `KVStore.put`.
        """
        layers = [
            held(cache, layer)
            for layer in range(min(self._store.geometry.layers, len(cache.layers)))
        ]
        if not layers:
            return 0
        tokens = min(length_of(cache) - pad, len(text))
        start = max(0, max(layer.first for layer in layers) - pad)
        block = self._store.block_tokens
        if -(-start // block) * block > stored:
            return 0  # behind a gap, no lookup would find it
        kv = tuple(
            tuple(
                part[row, :, start + pad - first : tokens + pad - first] for part in (keys, values)
            )
            for first, keys, values in layers
        )
        begin, ended = (None, Ended()) if answer is None else (min(answer[0], tokens), answer[1])
        put = self._store.put(
            text[:tokens], kv, start, tail=True, answer=begin, ended=ended, exact=exact,
            tenant=self._tenant,
        )  # fmt: skip
        return put.tokens
