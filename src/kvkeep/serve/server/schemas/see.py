"""``/kv/explain``, ``/kv/requests``, ``/kv/summary``, ``/kv/live``: what is asked and answered."""

from typing import Any

from pydantic import ConfigDict, Field

from kvkeep.serve.server.schemas.base import ResponseModel
from kvkeep.serve.server.schemas.prompt import PromptRequest

__all__ = [
    "DivergedText",
    "ExplainRequest",
    "ExplainResponse",
    "LivePages",
    "LivePoint",
    "LiveResponse",
    "LiveSession",
    "LiveTenant",
    "LiveTier",
    "LiveTimes",
    "LiveTotals",
    "LiveTtft",
    "PrefillCause",
    "PromptSpan",
    "RequestSummary",
    "RequestsResponse",
    "SummaryResponse",
]  # fmt: skip

_REUSED = "Tokens by where they came from: pool, or the name of a tier."
_COMPUTED = "Tokens by the reason why they were computed."
_SALT = "The cache_salt; empty for requests without one."


class ExplainRequest(PromptRequest):
    """A prompt or a conversation; one of the two."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"prompt": "Return a copy of"},
                {"messages": [{"role": "user", "content": "Hello"}], "cache_salt": "tenant-1"},
            ]
        }
    )


class PromptSpan(ResponseModel):
    """Tokens start … stop - 1 of a prompt: reused from somewhere, or computed for a reason."""

    start: int
    stop: int
    source: str | None = Field(description="pool, or the name of a tier; null: computed.")
    reason: str | None = Field(description="Why it was computed; docs/explain.md has them all.")
    evidence: dict[str, Any] = Field(description="What the reason is known by.")


class DivergedText(ResponseModel):
    """The text around the first token that differs from a prompt that was cached."""

    given_text: str
    cached_text: str
    at_given: int = Field(description="Where in given_text the difference begins, in characters.")
    at_cached: int


class RequestSummary(ResponseModel):
    """A request, and what became of its prompt's tokens."""

    id: str | None = Field(description="That of the answer; null for a prompt that was not run.")
    at: float = Field(description="Seconds since 1970.")
    endpoint: str
    cache_salt: str = Field(description=_SALT)
    session: str | None
    prompt_tokens: int
    generated_tokens: int | None
    ttft_s: float | None = Field(description="From its arrival in the engine to its first token.")
    seconds: float | None
    outcome: str | None = Field(description="done, aborted or failed; null while it runs.")
    reused: dict[str, int] = Field(description=_REUSED)
    computed: dict[str, int] = Field(description=_COMPUTED)
    sentence: str = Field(description="The main reason, for people.")


class ExplainResponse(RequestSummary):
    """The same, span by span."""

    spans: list[PromptSpan] = Field(description="In order, without gaps.")
    text: DivergedText | None = Field(
        description="Of the first span that diverged; null without one, and with --no-text."
    )


class RequestsResponse(ResponseModel):
    """The last requests, newest first."""

    requests: list[RequestSummary]


class PrefillCause(ResponseModel):
    """One of the things that cost prefill."""

    reason: str
    tokens: int
    share: float = Field(description="Of all tokens that were computed.")
    requests: int
    cache_salt: str | None = Field(description="Of all its requests, if it is the same one.")
    position: int | None = Field(description="The token at which they differ, if they do.")
    example: str = Field(description="The id of a request.")
    sentence: str


class SummaryResponse(ResponseModel):
    """What the last requests had computed, and why; what costs most comes first."""

    requests: int
    prompt_tokens: int
    reused: dict[str, int] = Field(description=_REUSED)
    computed: dict[str, int] = Field(description=_COMPUTED)
    causes: list[PrefillCause]


# --- live ----------------------------------------------------------------------------------


class LiveTotals(ResponseModel):
    """Since the start; never less than before."""

    requests: int
    prompt_tokens: int
    cached_tokens: int
    loaded_tokens: int
    generated_tokens: int
    evicted_pages: int


class LivePages(ResponseModel):
    """Pages of the pool by state."""

    total: int
    free: int
    cached_evictable: int
    cached_held: int
    private: int
    pinned: int


class LiveTimes(ResponseModel):
    """Times to the first token; null where there were none."""

    count: int
    p50_s: float | None
    p95_s: float | None


class LiveTtft(ResponseModel):
    """Of the last five minutes."""

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
    breaker: str = Field(description="The worst of looking up, reading and writing.")
    breakers: dict[str, str] = Field(description="By kind of call; those that are not closed.")
    parts: dict[str, str] = Field(description="Nodes of a cluster that are left alone.")
    hits: int
    misses: int
    drops: int
    errors: int
    damaged: int
    read_bytes: int
    written_bytes: int


class LivePoint(ResponseModel):
    """What a cache of another size would do."""

    times: float
    pages: int
    hit_rate: float


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
    """The server at this moment, for those who ask every second."""

    at: float = Field(description="Seconds since 1970.")
    uptime_s: float
    version: str
    model: str
    policy: str = Field(description="What is evicted first.")
    page_size: int
    text: bool = Field(description="False with --no-text.")
    explain: bool = Field(description="False with --no-explain.")
    changes: bool = Field(description="Whether pins and evictions may be asked for here.")
    running: int
    waiting: int
    totals: LiveTotals
    pages: LivePages
    ttft: LiveTtft
    history: list[tuple[int, int, int]] = Field(
        description="[seconds since 1970, prompt tokens, reused ones] of each 5 s, for 10 minutes."
    )
    tiers: list[LiveTier]
    what_if: list[LivePoint] | None
    tenants: list[LiveTenant] = Field(description="The 20 with the most prompt tokens.")
    sessions: list[LiveSession] = Field(description="The 20 heard of last.")
