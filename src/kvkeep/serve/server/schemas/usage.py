"""``/kv/usage``: what tenants used."""

from pydantic import Field

from kvkeep.serve.server.schemas.base import ResponseModel

__all__ = ["TenantRow", "UsageResponse"]


class TenantRow(ResponseModel):
    """One tenant, or all others together, since the start of the server."""

    cache_salt: str | None = Field(
        description="The tenant; empty: no cache_salt; null: all tenants without a row."
    )
    requests: int
    prompt_tokens: int = Field(description="Of admitted requests.")
    read_tokens: int = Field(description="Prompt tokens reused from pool and tiers.")
    loaded_tokens: int = Field(description="Those of them that came from tiers.")
    computed_tokens: int = Field(description="Prompt tokens computed, also again.")
    generated_tokens: int
    written_tokens: int = Field(description="Tokens that became reusable in the pool, in pages.")
    stored_tokens: int = Field(description="Tokens handed to the tiers.")
    pool_tokens: int = Field(description="Tokens in the pool now, in pages.")
    tier_tokens: int = Field(description="Tokens in the tiers now, about.")


class UsageResponse(ResponseModel):
    """What tenants used between two times."""

    model: str
    since: float = Field(description="Unix seconds: the start of the server.")
    until: float = Field(description="Unix seconds.")
    count: int = Field(description="Tenants with a row of their own that ``search`` finds.")
    tenants: list[TenantRow] = Field(
        description="Those with the most prompt tokens first; all others together last."
    )
