"""`StoredRows`: puts the KV of a batch's rows, out of the cache that the model filled."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvkeep.core.returns import Ended
from kvkeep.integrations.transformers_caches import held, length_of

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from transformers import Cache

    from kvkeep.core.tokens import TokenArray
    from kvkeep.integrations.transformers_prefill import Prefill
    from kvkeep.integrations.transformers_rows import Rows
    from kvkeep.integrations.transformers_settings import GenerateSettings
    from kvkeep.store import KVStore

__all__ = ["StoredRows"]


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
            self.store(rows.texts[row][:end], cache, row * copies, rows.pads[row])
            for row, end in ends
        )

    def store_answers(
        self, settings: GenerateSettings, sequences: torch.Tensor, cache: Cache
    ) -> int:
        """Store prompts with their answers up to the end token; return tokens newly stored."""
        columns, total = settings.rows.columns, sequences.shape[1]
        if not self._servable(settings.rows.longest + total - columns + 1):
            return 0
        accepted = 0
        for row, pad, text, prompt, ended in settings.answers(sequences):
            accepted += self.store(text, cache, row, pad, stored=prompt - 1, answer=(prompt, ended))
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
    ) -> int:
        """Store the KV of ``text`` in row ``row`` of ``cache``, behind ``pad`` columns of padding.

        ``stored`` of its tokens were stored just now; windows may have dropped them from the cache.
        ``answer`` says where an answer begins, and how it ended.
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
            text[:tokens], kv, start, tail=True, answer=begin, ended=ended, tenant=self._tenant
        )
        return put.tokens
