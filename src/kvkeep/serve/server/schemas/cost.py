"""``/kv/cost``: the response."""

from typing import Any

from pydantic import Field

from kvkeep.serve.server.schemas.base import ResponseModel

__all__ = ["CostResponse", "LoadCounts", "LoadTotals", "TierCost", "TransferNow"]

_LEARNED = "The relative error to expect: 0.1 is 10 %; 1 as long as nothing was observed."


class TransferNow(ResponseModel):
    """What moving bytes of raw KV takes: seconds_fixed + seconds_per_byte · bytes."""

    seconds_fixed: float
    seconds_per_byte: float
    error: float = Field(description=_LEARNED)
    observations: int
    bytes_per_s: float | None = Field(
        None, description="The bandwidth; left out where bytes take no time."
    )
    queued_bytes: int = Field(description="Bytes that wait or are under way.")
    busy_s: float = Field(description="Seconds until a transfer that is queued now begins.")
    running: int = Field(description="Transfers under way.")


class TierCost(ResponseModel):
    """One tier; its codec is part of the cost."""

    read: TransferNow | None = None
    write: TransferNow | None = None


class LoadCounts(ResponseModel):
    """Sums over loads: requests of which the store had more than the pool."""

    loads: int
    loaded_tokens: int = Field(description="Tokens that came from the store.")
    computed_stored_tokens: int = Field(
        description="Stored tokens that were computed, because that is faster."
    )
    overtaken_tokens: int = Field(description="Of these, computed since loading them turned slow.")
    both: int = Field(description="Loads that were loaded in part and computed in part.")
    computed: int = Field(description="Loads of which all was computed.")
    late: int = Field(description="Loads in which computing did not wait for a tier.")
    computing_s: float = Field(description="Expected seconds of computing what was loaded.")
    avoided_s: float = Field(description="Expected seconds by which loading would be slower.")


class LoadTotals(ResponseModel):
    """What was decided."""

    recent: LoadCounts = Field(description="Of the last 1,000 loads.")
    total: LoadCounts = Field(description="Since the start.")


class CostResponse(ResponseModel):
    """What the engine has learned; as a file it is one for --cost. docs/cost.md explains it.

    Tokens a … b - 1 of a prompt take seconds_fixed + seconds_per_token · (b - a) +
    seconds_per_token_pair · (b² - a²) / 2. Fields of prefill are left out while nothing is known.
    """

    kvkeep_cost: int = Field(description="Version of the format.")
    seconds_fixed: float | None = None
    seconds_per_token: float | None = None
    seconds_per_token_pair: float | None = None
    decode_seconds_per_token: float | None = None
    kv_bytes_per_token: float | None = None
    name: str | None = None
    error: float | None = Field(None, description=_LEARNED)
    observations: int | None = Field(None, description="Forward passes observed.")
    model: str = Field(description="The model and the device; empty if unknown.")
    tiers: dict[str, TierCost] = Field(description="By the names of the store's tiers.")
    loads: LoadTotals

    @classmethod
    def of(cls, found: dict[str, Any]) -> "CostResponse":
        """Return the response of a `EngineCosts.as_dict`."""
        return cls.model_validate(found)
