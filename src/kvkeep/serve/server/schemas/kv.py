"""``/kv`` and the health checks: requests and responses."""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator

from kvkeep.serve.server.schemas.base import CacheSalt, RequestModel, ResponseModel, field_error
from kvkeep.serve.server.schemas.prompt import PromptRequest

__all__ = [
    "ClearRequest", "ClearResponse", "ExplainRequest", "HealthResponse", "KVStats", "MemoryPoint",
    "RemoveRequest", "RemoveResponse", "SessionRequest", "SessionResponse", "TierFreed",
]  # fmt: skip


class MemoryPoint(ResponseModel):
    """The estimated reuse by a cache of another size, for the requests so far."""

    times: float = Field(description="Its size, relative to this cache's.")
    pages: int
    tokens: int = Field(description="Its capacity.")
    hit_rate: float = Field(
        description="The share of prompt tokens that it would have reused; at 1, the measured one."
    )
    kv_only: bool = Field(
        description="Of models with windows or states: the share whose KV it would have had, which "
        "is the most that it could reuse."
    )


class KVStats(ResponseModel):
    """Counters and gauges; docs/serving.md explains each."""

    reuse: bool = Field(description="False with --no-reuse: every prompt is computed.")
    cache: dict[str, int | float]
    engine: dict[str, int | float]
    store: dict[str, Any] | None = Field(description="Null for a server without tiers.")
    what_if: list[MemoryPoint] | None = Field(description="Null without an estimate.")


class ClearRequest(RequestModel):
    """Clear all cached KV that no running request uses, or only that of one cache_salt."""

    model_config = ConfigDict(json_schema_extra={"examples": [{}, {"cache_salt": "tenant-1"}]})

    cache_salt: CacheSalt | None = None


class TierFreed(ResponseModel):
    """The amount that one tier removed."""

    name: str
    freed_bytes: int
    complete: bool = Field(
        description="False: the tier failed or was late, and may still have some blocks. This "
        "server no longer reads them; repeat the request when the tier is available."
    )


class ClearResponse(ResponseModel):
    """The amount cleared, in the pool and in each tier."""

    pages: int
    stored_bytes: int = Field(description="In all tiers; of salts used since the server's start.")
    tiers: list[TierFreed] = Field(description="Fastest first; empty for a server without tiers.")


class RemoveRequest(PromptRequest):
    """A prompt whose KV to delete: a text, tokens, or a conversation."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"prompt": "My number is 0123"},
                {"prompt": [1, 2, 3], "cache_salt": "tenant-1"},
                {"messages": [{"role": "user", "content": "My number is 0123"}]},
            ]
        }
    )


class RemoveResponse(ResponseModel):
    """The amount deleted, of all prompts that begin with the prompt's first page or block."""

    tokens: int = Field(description="The length of the prompt.")
    pages: int = Field(description="Pages freed in the pool.")
    pages_in_use: int = Field(
        description="Pages left in the pool because running requests or hard pins use them or what "
        "follows them."
    )
    tiers: list[TierFreed] = Field(description="Fastest first; empty for a server without tiers.")
    complete: bool = Field(description="True: no page is in use, and no tier failed.")


class ExplainRequest(PromptRequest):
    """A prompt to explain: a text, tokens, or a conversation."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"prompt": "Return a copy of"},
                {"messages": [{"role": "user", "content": "Hello"}], "cache_salt": "tenant-1"},
            ]
        }
    )


class SessionRequest(RequestModel):
    """A hint about a session. It changes the order of eviction and nothing else."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"action": "suspend", "eta_s": 30}, {"action": "close"}]}
    )

    action: Literal["suspend", "close"] = Field(
        description="suspend: it pauses, and will go on; close: it is over."
    )
    eta_s: Annotated[float, Field(gt=0)] | None = Field(
        default=None,
        description="For suspend: seconds until it goes on at the latest. At most an hour.",
    )
    cache_salt: CacheSalt | None = None

    @model_validator(mode="after")
    def _seconds_to_suspend(self) -> "SessionRequest":
        if (self.eta_s is None) == (self.action == "suspend"):
            raise field_error("eta_s", "is required by suspend, and allowed with it only")
        return self


class SessionResponse(ResponseModel):
    """The effect of a hint."""

    known: bool = Field(description="Whether this server has seen the session recently.")
    pages: int = Field(description="Pages of its own, now kept or first to be evicted.")


class HealthResponse(ResponseModel):
    """The answer to a health check is yes."""

    status: str
