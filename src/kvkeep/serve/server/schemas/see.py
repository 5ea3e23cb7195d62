"""``/kv/explain``, ``/kv/requests``, ``/kv/summary``, ``/kv/live``: requests and responses."""

from typing import Any, Literal

from pydantic import ConfigDict, Field

from kvkeep.serve.server.schemas.base import ResponseModel
from kvkeep.serve.server.schemas.prompt import PromptRequest

__all__ = [
    "DivergedText", "ExplainRequest", "ExplainResponse", "LiveLoads", "LiveLoss", "LivePages",
    "LivePoint", "LiveResponse", "LiveSession", "LiveSource", "LiveTenant", "LiveTier",
    "LiveTimes", "LiveTotals", "LiveTtft", "PrefillCause", "PromptSpan",
    "RequestSummary", "RequestsResponse", "SummaryResponse",
]  # fmt: skip

_REUSED = "Tokens by source: pool, or the name of a tier."
_COMPUTED = "Tokens by the reason for which they were computed."
_SALT = "The cache_salt; empty for requests without one."


class ExplainRequest(PromptRequest):
    """Either a prompt or a conversation."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"prompt": "Return a copy of"},
                {"messages": [{"role": "user", "content": "Hello"}], "cache_salt": "tenant-1"},
            ]
        }
    )


class PromptSpan(ResponseModel):
    """Tokens start … stop - 1 of a prompt, reused from one source or computed for one reason."""

    start: int
    stop: int
    source: str | None = Field(description="pool, or the name of a tier; null: computed.")
    reason: str | None = Field(description="Why it was computed; docs/explain.md lists all.")
    why: str | None = Field(description="The same as a clause, with its evidence; null: reused.")
    evidence: dict[str, Any] = Field(description="The facts from which the reason follows.")


class DivergedText(ResponseModel):
    """The text around the first token that differs from a cached prompt."""

    given_text: str
    cached_text: str
    at_given: int = Field(description="Where the difference begins in given_text, in characters.")
    at_cached: int


class RequestSummary(ResponseModel):
    """A request, with its prompt's tokens by source and reason."""

    id: str | None = Field(description="The response's; null for a prompt that was not run.")
    at: float = Field(description="Seconds since 1970.")
    endpoint: str
    cache_salt: str = Field(description=_SALT)
    session: str | None
    prompt_tokens: int
    generated_tokens: int | None
    ttft_s: float | None = Field(description="From arrival in the engine to the first token.")
    seconds: float | None
    outcome: str | None = Field(description="done, aborted or failed; null while it runs.")
    reused: dict[str, int] = Field(description=_REUSED)
    computed: dict[str, int] = Field(description=_COMPUTED)
    sentence: str = Field(description="The main reason, as a sentence.")


class ExplainResponse(RequestSummary):
    """A request, span by span."""

    spans: list[PromptSpan] = Field(description="In order, without gaps.")
    text: DivergedText | None = Field(
        description="Of the first diverged span; null without one, and with --no-text."
    )


class RequestsResponse(ResponseModel):
    """The last requests, newest first."""

    requests: list[RequestSummary]


class PrefillCause(ResponseModel):
    """A cause of prefill work."""

    reason: str
    tokens: int
    share: float = Field(description="Of all computed tokens.")
    requests: int
    cache_salt: str | None = Field(description="Of all its requests, if they share one.")
    position: int | None = Field(description="The token at which prompts diverge, if they do.")
    example: str = Field(description="The id of one of the requests.")
    sentence: str
    tenants: int = Field(description="How many cache_salts have it.")
    advice: str | None = Field(description="What to do against it; null: nothing.")


class SummaryResponse(ResponseModel):
    """Tokens that the last requests reused and computed."""

    requests: int
    prompt_tokens: int
    reused: dict[str, int] = Field(description=_REUSED)
    computed: dict[str, int] = Field(description=_COMPUTED)
    causes: list[PrefillCause] = Field(
        description="Those with advice come first, by tokens; then the others, by reason, and "
        "tokens that were never seen before last."
    )


# --- live ----------------------------------------------------------------------------------


class LiveTotals(ResponseModel):
    """Counters since the start; tokens that came from tiers are part of the cached ones."""

    requests: int
    prompt_tokens: int
    cached_tokens: int
    loaded_tokens: int
    generated_tokens: int
    evicted_pages: int


class LiveSource(ResponseModel):
    """Where reused tokens came from, since the start."""

    source: str = Field(description="pool, or the name of a tier.")
    tokens: int
    saved_s: float = Field(
        description="Seconds of computing them, each at the average time of a computed token."
    )


class LiveLoss(ResponseModel):
    """How often something was evicted or failed."""

    kind: Literal["eviction", "error", "refusal"]
    what: str = Field(
        description="Requests: failed, timeout, refused; tiers: errors (failed calls), late "
        "(reads), damaged, dropped and evicted (blocks); evicted: pages of the pool."
    )
    place: str = Field(description="pool, requests, or the name of a tier.")
    minute: int = Field(description="In the last minute.")
    ten_minutes: int
    total: int = Field(description="Since the start.")


class LivePages(ResponseModel):
    """Pages of the pool by state."""

    total: int
    free: int
    cached_evictable: int
    cached_held: int
    private: int
    pinned: int


class LiveTimes(ResponseModel):
    """Times to the first token; null without any."""

    count: int
    p50_s: float | None
    p95_s: float | None


class LiveTtft(ResponseModel):
    """Times to the first token in the last five minutes."""

    cold: LiveTimes
    warm: LiveTimes = Field(description="At least half the prompt was reused.")


class LiveTier(ResponseModel):
    """One tier of the store."""

    name: str
    place: str
    blocks: int | None
    used_bytes: int | None
    capacity: int | None
    queued_bytes: int
    breaker: str = Field(description="The worst state of those for lookups, reads and writes.")
    breakers: dict[str, str] = Field(description="By kind of call; only those not closed.")
    parts: dict[str, str] = Field(description="Nodes of a cluster that are not used at present.")
    hits: int
    misses: int
    drops: int
    errors: int
    damaged: int
    late: int = Field(description="Reads that were not answered in time.")
    evictions: int
    read_bytes: int
    written_bytes: int
    read_bytes_per_s: float | None = Field(
        description="The bandwidth of reads, as learned; null if it is unknown or without a bound."
    )


class LiveLoads(ResponseModel):
    """What computing takes, and what was loaded lately; /kv/cost has more."""

    prefill_tokens_per_s: float | None = Field(
        description="Of a prompt of 1,000 tokens, as learned; null if it is unknown."
    )
    loads: int = Field(description="The last prompts of which the store had more than the pool.")
    loaded_tokens: int = Field(description="Of these: tokens that came from the store.")
    computed_stored_tokens: int = Field(
        description="Of these: stored tokens that were computed, because that is faster."
    )


class LivePoint(ResponseModel):
    """The estimated reuse by a cache of another size."""

    times: float
    pages: int
    hit_rate: float
    kv_only: bool = Field(description="Whether it is of the KV alone: a bound from above.")


class LiveTenant(ResponseModel):
    """One cache_salt."""

    cache_salt: str = Field(description=_SALT)
    requests: int
    prompt_tokens: int
    reused_tokens: int
    pages: int


class LiveSession(ResponseModel):
    """One session."""

    session: str
    cache_salt: str
    turns: int
    requests: int
    prompt_tokens: int
    reused_tokens: int
    last_at: float = Field(description="Seconds since 1970.")


class LiveResponse(ResponseModel):
    """The server's state at this moment, for clients that poll every second."""

    at: float = Field(description="Seconds since 1970.")
    uptime_s: float
    version: str
    model: str
    engine: str = Field(
        default="kvkeep", description="What computes: kvkeep, or the engine that kvkeep is in."
    )
    policy: str = Field(description="The eviction policy of the pool.")
    page_size: int
    text: bool = Field(description="False with --no-text.")
    explain: bool = Field(description="False with --no-explain.")
    map: bool = Field(
        default=True,
        description="Whether there is /kv/map, and prompts that were not sent are explained.",
    )
    running: int
    waiting: int
    totals: LiveTotals
    reused: list[LiveSource] = Field(description="The pool first.")
    losses: list[LiveLoss] = Field(description="Without those that never happened.")
    pages: LivePages
    ttft: LiveTtft
    history: list[tuple[int, int, int]] = Field(
        description="[seconds since 1970, prompt tokens, reused tokens] per 5 s, for 10 minutes."
    )
    tiers: list[LiveTier]
    loads: LiveLoads
    what_if: list[LivePoint] | None
    tenants: list[LiveTenant] = Field(description="The 20 with the most prompt tokens.")
    sessions: list[LiveSession] = Field(description="The 20 seen last.")
