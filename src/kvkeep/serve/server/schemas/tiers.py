"""``/kv/tiers``: requests and responses."""

from typing import Annotated

from pydantic import ConfigDict, Field

from kvkeep.serve.server.schemas.base import RequestModel, ResponseModel

__all__ = ["AttachRequest", "DetachResponse", "TierRow", "TiersResponse"]

_LONGEST_URL = 4096


class TierRow(ResponseModel):
    """One level of the store, at this moment."""

    name: str
    place: str = Field(description="Its URL, without secrets.")
    codec: str
    capacity: int | None = Field(description="Bytes; null for a place without a budget.")
    used_bytes: int | None = Field(description="Null where they are not counted.")
    blocks: int | None
    queued_bytes: int = Field(description="That wait to be written.")
    breaker: str = Field(description="The worst circuit breaker: closed, trying or open.")


class TiersResponse(ResponseModel):
    """The levels of the store, fastest first; the first one is memory."""

    tiers: list[TierRow]


class AttachRequest(RequestModel):
    """A tier to attach."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"url": "file:///mnt/nvme/kv?size=2TiB"},
                {"url": "file:///mnt/nvme/kv?size=2TiB", "below": "memory"},
            ]
        }
    )

    url: Annotated[str, Field(min_length=1, max_length=_LONGEST_URL)] = Field(
        description="As --tier takes it."
    )
    below: Annotated[str, Field(min_length=1, max_length=256)] | None = Field(
        default=None, description="The tier above it; by default it is the lowest."
    )


class DetachResponse(ResponseModel):
    """A tier that was detached; what it stores stays in its place."""

    name: str
    moved: int = Field(description="Blocks that it alone had, copied to other tiers.")
    moved_bytes: int
    left: int = Field(description="Blocks that no other tier has: these are missing from now on.")
    tiers: list[TierRow] = Field(description="Those that remain.")
