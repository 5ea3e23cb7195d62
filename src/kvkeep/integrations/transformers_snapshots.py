"""`SnapshotRuns`: generate with snapshots, for models with windows, latent KV and states.

Each row of a batch is computed alone up to its last tokens. It begins at its longest stored
position, and stops where a snapshot is taken:

- where the stored KV ends, as other prompts leave it there, too;
- where rows of the batch part;
- near its end.

Of models with states these are multiples of the block and of the grid of their kernels, so that a
resumed prompt is computed in the same pieces. Of models without, every end of a block that was
computed is a position, and the end of the prompt.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from kvkeep.core.errors import InvalidValue, UnsupportedModel
from kvkeep.integrations.transformers_caches import CacheLayers
from kvkeep.integrations.transformers_model import one_pass, prove
from kvkeep.integrations.transformers_settings import shared_prefixes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import Cache, PreTrainedModel

    from kvkeep.core.tokens import TokenArray
    from kvkeep.integrations.transformers_model import PassClock
    from kvkeep.integrations.transformers_settings import GenerateSettings, Rows
    from kvkeep.store import KVStore, Snapshot

__all__ = ["PreparedRows", "SnapshotRuns"]


class PreparedRows(NamedTuple):
    """Rows computed up to a column.

    Attributes:
        cache: to go on from; None if there is nothing in it.
        starts: for each row, the token up to which it is stored.
        loaded, shared, stored: as in `ReuseReport`.
        exact: for each row, how many leading tokens are exact; None: all are.
    """

    cache: Cache | None
    starts: list[int]
    loaded: int = 0
    shared: int = 0
    stored: int = 0
    exact: Sequence[int | None] = ()


class SnapshotRuns:
    """Computes prompts with the snapshots of one store.

    Thread safety: as the model.

    Raises:
        UnsupportedModel: the model does not go on exactly from a snapshot.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        store: KVStore,
        tenant: str | None,
        *,
        clock: PassClock,
        paying: bool,
    ) -> None:
        """``paying``: load only snapshots that are faster to load than to compute."""
        self._model = model
        self._paying = paying
        self._clock = clock
        self._store = store
        self._tenant = tenant
        self.caches = CacheLayers(model, store.geometry)
        self._stateful = bool(self.caches.states)
        grids = [group.grid for group in store.geometry.groups]
        self._grid = math.lcm(store.block_tokens, *grids)
        if not self.caches.attending:
            raise UnsupportedModel(
                f"{type(model).__name__} has states alone: Transformers cannot tell how many "
                "tokens such a cache holds, and does not go on from it"
            )
        prove(model, store.geometry, self.caches)

    def prepare(self, rows: Rows, *, copies: int = 1, chunk: int | None = None) -> PreparedRows:
        """Compute rows up to the last column or two, which `generate` then computes for all.

        ``copies`` are the rows of the cache for each prompt; ``chunk`` the most tokens of a pass.
        """
        # A pass over a single token takes another path in many models with states.
        last = 2 if self._stateful else 1
        alone = len(rows.texts) == 1
        if min(map(len, rows.texts)) <= last:
            return PreparedRows(None, [0] * len(rows.texts))
        order, common = shared_prefixes(rows.texts)
        done: list[tuple[Snapshot | None, int]] = [(None, 0)] * len(rows.texts)
        loaded = shared = stored = 0
        fresh: dict[int, int] = {}  # row → the token from which this call computed its KV
        for row in order:
            parts = [one for one in common if row in one.rows]
            stops = [one.tokens for one in parts]
            begin, new, snapshot = self._row(rows.texts[row], last, stops, chunk, alone)
            before = [
                fresh[other]
                for one in parts
                for other in one.rows
                if other in fresh and fresh[other] < min(begin, one.tokens)
            ]
            fresh[row] = min(before, default=begin)
            loaded, shared = loaded + fresh[row], shared + begin - fresh[row]
            stored += new
            done[row] = snapshot, begin
        if alone and done[0][0] is None:
            return PreparedRows(None, [0], loaded, shared, stored, [None])
        columns = rows.columns - last
        batch = []
        for (snapshot, _), pad in zip(done, rows.pads, strict=True):
            assert snapshot is not None
            columns = snapshot.tokens + pad if alone else columns
            batch += [(snapshot, pad)] * copies
        block = self._store.block_tokens
        starts = [self._stored_to(len(text), last) // block * block for text in rows.texts]
        cache = self.caches.batch(batch, columns)
        exact = [None if snapshot is None else snapshot.exact for snapshot, _ in done]
        return PreparedRows(cache, starts, loaded, shared, stored, exact)

    def _stored_to(self, tokens: int, last: int) -> int:
        """Return the token up to which a prompt of ``tokens`` was stored."""
        return (tokens - last) // self._grid * self._grid if self._stateful else tokens - last

    def _row(
        self, text: TokenArray, last: int, common: list[int], chunk: int | None, alone: bool
    ) -> tuple[int, int, Snapshot | None]:
        """Compute a text up to its ``last`` tokens, or, ``alone``, up to its last stop.

        Returns the tokens loaded, the tokens newly stored, and the snapshot there.
        """
        store, end = self._store, len(text) - last
        found = store.get_snapshot(text, limit=end, tenant=self._tenant, pays=self._paying)
        begin = at = 0 if found is None else found.tokens
        exact = None if found is None else found.exact
        reach = store.lookup(text, tenant=self._tenant).stored_tokens if self._stateful else 0
        stops = {self._stored_to(n + last, last) for n in (end, min(reach, end), *common)}
        stops = {stop for stop in stops if begin < stop <= end}
        if not alone and end > begin:
            stops.add(end)
        if not stops:
            return begin, 0, found
        cache = self.caches.empty(recording=True) if found is None else self.caches.resumed(found)
        stored = 0
        for stop in sorted(stops):
            self._compute(cache, text, at, stop, chunk)
            found = self.caches.snapshot(cache, stop)
            assert found is not None
            found = replace(found, exact=exact)
            if stop <= self._stored_to(len(text), last):
                put = store.put_snapshot(text, found, tenant=self._tenant)
                stored += put.tokens
            at = stop
        return begin, stored, found

    def _compute(
        self, cache: Cache, text: TokenArray, start: int, stop: int, chunk: int | None
    ) -> None:
        ids = torch.from_numpy(text[:stop]).long()[None]
        size = chunk or stop - start
        if chunk and self._stateful:  # pieces end on the grid of the kernels
            grid = math.lcm(*(group.grid for group in self._store.geometry.groups))
            size = max(grid, chunk // grid * grid)
        for begin in range(start, stop, size):
            end = min(begin + size, stop)
            mask, positions = torch.ones((1, end), dtype=torch.long), torch.arange(begin, end)[None]
            with self._clock.timing(1, begin, end):
                one_pass(self._model, cache, ids[:, begin:end], mask, positions)

    def keep_answers(
        self, settings: GenerateSettings, prepared: PreparedRows, answered: torch.Tensor,
        cache: Cache,
    ) -> int:  # fmt: skip
        """Store prompts with their answers; return the tokens newly stored.

        Of models with states, the answers that go up to the last column: behind the others the
        model went on, over padding. The store learns of all ends, and answers that later prompts
        lack are not stored.
        """
        stored, columns = 0, answered.shape[1] - 1
        for row, pad, text, prompt, ended in settings.answers(answered):
            tokens = min(len(text), columns - pad)
            worth = self._store.keep_until(
                text[:tokens], min(prompt, tokens), ended=ended, tenant=self._tenant
            )
            if worth and not (self._stateful and worth + pad < columns):
                start = prepared.starts[row]
                snapshot = self.caches.snapshot(cache, columns, start, row=row, pad=pad, stop=worth)
                if snapshot is not None:
                    exact = prepared.exact[row] if prepared.exact else None
                    snapshot = replace(snapshot, exact=exact)
                    put = self._store.put_snapshot(text[:worth], snapshot, tenant=self._tenant)
                    stored += put.tokens
            self._store.ended(text, prompt=prompt, ended=ended, tenant=self._tenant)
        return stored

    def fill(self, given: Cache, prepared: PreparedRows) -> None:
        """Copy the prepared rows into a cache of the user, of fixed size or with windows.

        Raises:
            InvalidValue: the model keeps states, which such a cache cannot take.
        """
        if self._stateful:
            raise InvalidValue(
                f"{type(self._model).__name__} keeps states, so it needs a cache made for them; "
                "leave past_key_values and cache_implementation out"
            )
        if prepared.cache is None:
            return
        for number in self.caches.attending:
            layer: Any = prepared.cache.layers[number]
            before = int(layer.get_seq_length()) - layer.keys.shape[-2]
            # Zeros stand for tokens that left the window: `update` counts them, and drops them.
            room = 0, 0, before, 0
            keys, values = (
                torch.nn.functional.pad(one, room) for one in (layer.keys, layer.values)
            )
            given.update(keys, values, number)

    def load(self, rows: Rows) -> tuple[Cache, int, int | None]:
        """Return a cache with the stored KV of all rows up to one column, and that column.

        Then the leading columns that are exact in all rows; None: all are.
        """
        most = rows.columns - 1
        for _ in range(2 * len(rows.texts) + 6):
            found = [
                self._store.get_snapshot(text, limit=max(0, most - pad), tenant=self._tenant)
                for text, pad in zip(rows.texts, rows.pads, strict=True)
            ]
            ends = [
                0 if one is None else one.tokens + pad
                for one, pad in zip(found, rows.pads, strict=True)
            ]
            if not all(ends):
                break
            if min(ends) == max(ends):
                batch = [(one, pad) for one, pad in zip(found, rows.pads, strict=True) if one]
                exact = min(
                    (s.exact + pad for s, pad in batch if s.exact is not None), default=None
                )
                return self.caches.batch(batch, ends[0]), ends[0], exact
            most = min(ends)
        return self.caches.empty(), 0, None

    def save(self, rows: Rows, cache: Cache, columns: int, exact: int | None) -> int:
        """Store each row up to the last of ``columns``, which ``cache`` holds.

        Only ``exact`` leading columns are exact; None: all are.

        Raises:
            InvalidValue: a layer of the cache has dropped tokens that are needed.
        """
        stored = 0
        for row, (text, pad) in enumerate(zip(rows.texts, rows.pads, strict=True)):
            tokens = columns - pad
            if tokens <= 0:
                continue
            snapshot = self.caches.snapshot(cache, columns, row=row, pad=pad)
            if snapshot is None:
                raise InvalidValue(
                    f"the cache does not hold what is needed to go on behind {tokens} tokens; "
                    "compute with the cache that load() returns"
                )
            if exact is not None:
                snapshot = replace(snapshot, exact=max(0, exact - pad))
            stored += self._store.put_snapshot(text[:tokens], snapshot, tenant=self._tenant).tokens
        return stored
