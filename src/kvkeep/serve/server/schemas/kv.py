"""``/kv`` and the health checks: requests and responses."""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator

from kvkeep.serve.server.schemas.base import CacheSalt, RequestModel, ResponseModel, field_error
from kvkeep.serve.server.schemas.chat import Messages
from kvkeep.serve.server.schemas.completions import Token

__all__ = [
    "ClearRequest", "ClearResponse", "ExplainRequest", "HealthResponse", "KVStats", "MapResponse",
    "MemoryPoint", "NodeResponse", "NodeSummary", "PromptRequest", "RemoveRequest",
    "RemoveResponse", "SessionRequest", "SessionResponse", "TierFreed",
]  # fmt: skip

_Text = Annotated[str, Field(min_length=1)]


class PromptRequest(RequestModel):
    """A prompt as text, token ids or a conversation, and its cache_salt."""

    prompt: _Text | Annotated[list[Token], Field(min_length=1, fail_fast=True)] | None = Field(
        default=None, description="Text or token ids, as /v1/completions takes it."
    )
    messages: Messages | None = Field(
        default=None, description="A conversation, as /v1/chat/completions takes it."
    )
    cache_salt: CacheSalt | None = None

    @model_validator(mode="after")
    def _one_of_them(self) -> "PromptRequest":
        if (self.prompt is None) == (self.messages is None):
            raise field_error("prompt", "or messages is needed, but not both")
        return self


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


class NodeSummary(ResponseModel):
    """A run of the prefix tree, a namespace, or several small siblings as one hidden node."""

    id: int = Field(
        description="Belongs to the end of a run as long as it is cached, and is never reused. "
        "Namespaces have negative ids."
    )
    parent: int | None = Field(description="Null for a namespace.")
    tokens: int = Field(description="Its own; those of all siblings, if hidden.")
    pages: int = Field(description="Its own, those of rows and states included.")
    group_pages: int = Field(
        description="Of these, pages of rows and states; 0 if all layers keep every token."
    )
    checkpoints: list[int] = Field(
        description="Where in it requests can resume, in tokens from the prompt's start: the last "
        "100. Empty if all layers keep every token: then anywhere."
    )
    subtree_tokens: int = Field(description="Its own and all behind it.")
    subtree_nodes: int = Field(description="Runs, including itself.")
    references: int = Field(description="Requests and hard pins on it, and held runs behind it.")
    pins: int = Field(description="Soft pins that end here.")
    hits: int = Field(description="Requests that reused it.")
    text: str | None = Field(
        description="Its beginning; for a namespace, the cache_salt. Null with --no-text."
    )
    hidden: bool = Field(description="Whether it stands for several small siblings.")
    count: int = Field(description="How many siblings it stands for; 0 if not hidden.")


class MapResponse(ResponseModel):
    """The largest subtrees node by node, all others summed up in hidden nodes."""

    page_size: int = Field(description="Tokens per page.")
    at: float = Field(description="When the map was made, in seconds since 1970.")
    total_nodes: int = Field(description="Runs, including those behind hidden nodes.")
    total_pages: int = Field(description="The sum of all nodes' pages.")
    nodes: list[NodeSummary]


class NodeResponse(NodeSummary):
    """One node in detail."""

    namespace: str = Field(description="Its cache_salt.")
    path_tokens: int = Field(description="Tokens before it.")
    page_ids: list[int] = Field(description="The first 100.")
    policy: str = Field(description="The eviction policy's state of it.")
    children: int
