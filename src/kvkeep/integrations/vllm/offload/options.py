"""Options of the tier, given when vLLM starts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvkeep.core.errors import InvalidValue, told
from kvkeep.core.geometry.units import parse_bytes
from kvkeep.integrations.options import EngineOptions, option, text_of, tiers_of, truth_of

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["OffloadOptions"]

_LEAST_BUFFER = 1 << 20


def _tiers_below(name: str, value: object) -> tuple[str, ...]:
    tiers = tiers_of(name, value)
    if any(tier.startswith("memory:") for tier in tiers):
        raise InvalidValue(
            f"{name} have memory://, which would keep what vLLM keeps in memory (cpu_bytes_to_use) "
            "a second time; leave it out, and give vLLM that memory"
        )
    return tiers


def _bytes_of(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise InvalidValue(f'{name} is {told(value)}; a size is needed, as "256MiB"')
    size = parse_bytes(value)
    if size < _LEAST_BUFFER:
        raise InvalidValue(f"{name} is {told(value)}; at least 1MiB is needed")
    return size


@dataclass(frozen=True, slots=True)
class OffloadOptions(EngineOptions):
    """Options of a `KVKeepTier`, in its entry in ``secondary_tiers``.

    ``tiers`` must be given, and have no ``memory://``. ``load_timeout`` is for the load of one
    request; chunks that have not arrived are computed.

    Attributes:
        buffer: bytes of memory for chunks until they are written, given as such or as text. By
            default by the size of the rows, as the buffer of a `BlockStore`.
        public_prefixes: as in `kvkeep.integrations.vllm.options.ConnectorOptions`.
        resets: as there.
    """

    tiers: tuple[str, ...] = option((), _tiers_below)
    buffer: int | None = option(None, _bytes_of)
    public_prefixes: str = option("", text_of)
    resets: bool = option(True, truth_of)

    @classmethod
    def parse(cls, given: Mapping[str, object]) -> OffloadOptions:
        """See `EngineOptions.from_json`.

        Raises:
            InvalidValue: also if there are no tiers.
        """
        options = cls.from_json(given, "KVKeepTier in secondary_tiers")
        if not options.tiers:
            raise InvalidValue(
                "KVKeepTier in secondary_tiers has no tiers; give the places to keep KV in, "
                'fastest first, as "tiers": ["file:///var/lib/kvkeep?size=500GiB"]'
            )
        return options
