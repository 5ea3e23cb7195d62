"""``/kv``: a look into the cache."""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator

from kvkeep.serve.server.schemas.base import RequestModel, ResponseModel, wrong
from kvkeep.serve.server.schemas.prompt import PromptRequest

__all__ = [
    "ClearRequest",
    "ClearResponse",
    "HealthResponse",
    "Hidden",
    "KVStats",
    "KVTree",
    "MemoryPoint",
    "RemoveRequest",
    "RemoveResponse",
    "Run",
    "SessionRequest",
    "SessionResponse",
    "Space",
    "TierFreed",
]  # fmt: skip


class MemoryPoint(ResponseModel):
    """What a cache of another size would do, as far as what was asked for tells."""

    times: float = Field(description="Of the memory there is.")
    pages: int
    tokens: int = Field(description="That fit in them.")
    hit_rate: float = Field(description="The share of prompt tokens that would be reused.")


class KVStats(ResponseModel):
    """Counters and measures; docs/serving.md says what each is."""

    reuse: bool = Field(description="False with --no-reuse: every prompt is computed.")
    cache: dict[str, int | float]
    engine: dict[str, int | float]
    store: dict[str, Any] | None = Field(description="Null for a server without tiers.")
    what_if: list[MemoryPoint] | None = Field(description="Null with --no-what-if.")


class Hidden(ResponseModel):
    """What a drawing leaves out below a run."""

    runs: int
    pages: int


class Run(ResponseModel):
    """Consecutive pages on one edge of the prefix tree, and what follows them."""

    num_tokens: int
    num_pages: int
    references: int = Field(description="Requests and pins that hold it.")
    pins: int
    policy: str = Field(description="What the eviction policy says of it.")
    text: str | None = Field(description="How it begins; null with --no-text.")
    runs: list["Run"]
    hidden: Hidden | None = None


class Space(ResponseModel):
    """One namespace: what is stored under one cache_salt."""

    cache_salt: str
    num_pages: int
    runs: list[Run]
    hidden: Hidden | None = None


class KVTree(ResponseModel):
    """The prefix trees."""

    page_size: int = Field(description="Tokens a page.")
    namespaces: list[Space]


class ClearRequest(RequestModel):
    """What to forget: everything that no running request uses, or that of one cache_salt."""

    model_config = ConfigDict(json_schema_extra={"examples": [{}, {"cache_salt": "tenant-1"}]})

    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None


class TierFreed(ResponseModel):
    """What one tier deleted."""

    name: str
    freed_bytes: int
    complete: bool = Field(
        description="False: the tier failed or was late, and may have some of it still. This "
        "server does not read it any more; ask again when the tier is back."
    )


class ClearResponse(ResponseModel):
    """What was forgotten."""

    pages: int
    stored_bytes: int = Field(description="In all tiers; of salts that were used since the start.")
    tiers: list[TierFreed] = Field(description="Fastest first; empty for a server without tiers.")


class RemoveRequest(PromptRequest):
    """The prompt whose KV is to go: a text, tokens, or a conversation."""

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
    """What was deleted: everything that begins with the prompt's first page or block."""

    tokens: int = Field(description="Of the prompt.")
    pages: int = Field(description="Freed in the pool.")
    pages_in_use: int = Field(
        description="Left in the pool, because running requests or pins that never yield use them "
        "or what follows them."
    )
    tiers: list[TierFreed] = Field(description="Fastest first; empty for a server without tiers.")
    complete: bool = Field(description="True: no page is in use, and no tier failed.")


class SessionRequest(RequestModel):
    """What is said of a session. It orders eviction, and changes nothing else."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"action": "suspend", "eta_s": 30}, {"action": "close"}]}
    )

    action: Literal["suspend", "supersede", "close"] = Field(
        description="suspend: it is away, and expected back; supersede: its next request begins "
        "anew; close: it is over."
    )
    eta_s: Annotated[float, Field(gt=0)] | None = Field(
        default=None,
        description="To suspend: the seconds in which it is back at the latest. An hour at most.",
    )
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None

    @model_validator(mode="after")
    def _seconds_to_suspend(self) -> "SessionRequest":
        if (self.eta_s is None) == (self.action == "suspend"):
            raise wrong("eta_s", "belongs to suspend, which needs it")
        return self


class SessionResponse(ResponseModel):
    """What came of it."""

    known: bool = Field(description="Whether this server has heard of the session lately.")
    pages: int = Field(description="Of its own: those that are kept, or those that go first now.")


class HealthResponse(ResponseModel):
    """The service takes requests."""

    status: str
