"""Measurements of ``kvkeep calibrate --tier``: reads and writes of records in real tiers."""

from __future__ import annotations

import secrets
import time
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kvkeep.cli.progress import progress
from kvkeep.core.cost import CostModel
from kvkeep.core.errors import InvalidValue

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvkeep.core.cost import TransferCost
    from kvkeep.core.geometry import KVGeometry
    from kvkeep.store import KVStore

__all__ = ["TierReadings", "measure_tiers", "tier_names"]

_MOST_BYTES: Final = 128 << 20  # of the longest prompt that is stored
_MOST_BLOCKS: Final = 64
_LONGEST_S: Final = 20.0  # after which a tier is measured no further
_ROUNDS: Final = 6


@dataclass(frozen=True, slots=True)
class TierReadings:
    """What one tier takes, by the bytes of raw KV: the codec is part of it.

    ``blocks`` of ``block_bytes`` are the longest prompt that was written and read.
    """

    name: str
    place: str
    read: TransferCost
    write: TransferCost | None
    read_error: float
    write_error: float
    block_bytes: int
    blocks: int

    def as_dict(self) -> dict[str, Any]:
        """Return it for the file of costs, as `CostModel.as_dict` does."""
        found: dict[str, Any] = {"read": {**self.read.as_dict(), "error": self.read_error}}
        if self.write is not None:
            found["write"] = {**self.write.as_dict(), "error": self.write_error}
        return {**found, "place": self.place}


def measure_tiers(
    tiers: Mapping[str, str], geometry: KVGeometry, block_tokens: int
) -> list[TierReadings]:
    """Write prompts of several lengths to each of `tier_names`, read them, and delete them.

    Raises `InvalidValue` for a tier that cannot be written and read.
    """
    if not tiers:
        return []
    with progress("measuring tiers", of=2 * len(tiers) * _ROUNDS) as advance:
        return [
            _TierMeasurement(url, geometry, block_tokens).run(name, advance)
            for name, url in tiers.items()
        ]


def tier_names(urls: Sequence[str], geometry: KVGeometry, block_tokens: int) -> dict[str, str]:
    """Return the URLs by the names that a store gives these tiers.

    Raises `InvalidValue` for one that is wrong, and `UnsupportedModel` for a model that is not
    plain.
    """
    if not urls:
        return {}
    geometry.needs_plain("kvkeep calibrate --tier")
    from kvkeep.store import KVStore  # noqa: PLC0415 - torch

    with KVStore(
        geometry, model="calibrate", revision="names", tiers=list(urls), block_tokens=block_tokens
    ) as store:
        names = [tier.name for tier in store.stats().tiers][-len(urls) :]
        return dict(zip(names, urls, strict=True))


class _TierMeasurement:
    """One tier: stores of a namespace of their own, which is deleted at the end."""

    def __init__(self, url: str, geometry: KVGeometry, block_tokens: int) -> None:
        self._url = url
        self._geometry = geometry
        self._block = block_tokens
        self._bytes = block_tokens * geometry.bytes_per_token
        self._blocks = max(2, min(_MOST_BLOCKS, _MOST_BYTES // self._bytes))
        self._own = secrets.token_hex(8)
        self._cost = CostModel()
        self._prompts: list[list[int]] = []

    def run(self, name: str, advance: Callable[[], object]) -> TierReadings:
        """Measure the tier, called ``name`` where other tiers are beside it."""
        try:
            with closing(self._open()) as store:
                tiers = store.stats().tiers
                self._write(store, advance)
                if len(tiers) == 1:  # memory
                    self._read(store, advance)
            if len(tiers) > 1:
                # A new store has none of it in memory, and one that passes through keeps none.
                with closing(self._open()) as store:
                    self._read(store, advance)
        finally:
            with closing(self._open()) as store:
                store.clear()
        tier = tiers[-1]
        read, write = self._cost.reading(tier.name), self._cost.writing(tier.name)
        if not read.known:
            raise InvalidValue(f"{tier.place} was written to, and nothing could be read from it")
        return TierReadings(
            name,
            tier.place,
            read.cost,
            write.cost if write.known else None,
            read.error,
            write.error,
            self._bytes,
            self._blocks,
        )

    def _open(self) -> KVStore:
        from kvkeep.store import KVStore  # noqa: PLC0415 - torch
        from kvkeep.store.tiers import PassThrough  # noqa: PLC0415

        return KVStore(
            self._geometry,
            model=f"calibrate-{self._own}",
            revision=self._own,
            tiers=[self._url],
            block_tokens=self._block,
            policy=PassThrough(),
            cost=self._cost,
        )

    def _write(self, store: KVStore, advance: Callable[[], object]) -> None:
        from kvkeep.serve.engine.samples import sample_kv  # noqa: PLC0415 - seconds, for torch

        until = time.monotonic() + _LONGEST_S
        for number, blocks in enumerate(self._sizes()):
            if number < 2 or time.monotonic() < until:
                prompt = self._prompt(number, blocks)
                put = store.put(prompt, sample_kv(self._geometry, len(prompt)), wait=True)
                if put.tokens < len(prompt):
                    raise InvalidValue(
                        f"{store.stats().tiers[-1].place} takes no record of {self._bytes:,} bytes"
                    )
                self._prompts.append(prompt)
            advance()

    def _read(self, store: KVStore, advance: Callable[[], object]) -> None:
        until = time.monotonic() + _LONGEST_S
        for number in range(_ROUNDS):
            if number < len(self._prompts) and (number < 2 or time.monotonic() < until):
                store.get(self._prompts[number])
            advance()

    def _sizes(self) -> list[int]:
        """Return the blocks of each prompt: one, and several, in turn."""
        return [1, self._blocks, 2, self._blocks // 2, 1, self._blocks][:_ROUNDS]

    def _prompt(self, number: int, blocks: int) -> list[int]:
        return list(range(number << 20, (number << 20) + blocks * self._block))
