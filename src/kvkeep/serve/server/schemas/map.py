"""``/kv/map`` and ``/kv/search``: the prefix tree as a map, its nodes, and where text stands."""

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, model_validator

from kvkeep.serve.server.schemas.base import RequestModel, ResponseModel, wrong

__all__ = [
    "MapResponse",
    "NodeChangeRequest",
    "NodeChangeResponse",
    "NodeResponse",
    "NodeSummary",
    "SearchMatch",
    "SearchResponse",
]  # fmt: skip

_LONGEST_PIN_S = 366 * 86_400


class NodeSummary(ResponseModel):
    """A run of the prefix tree, a namespace, or several small siblings together."""

    id: int = Field(
        description="Stays with the run's end as long as that is stored, and is never another's. "
        "Namespaces have negative ones."
    )
    parent: int | None = Field(description="Null on top.")
    tokens: int = Field(description="Of its own; of a hidden node, all that it stands for.")
    pages: int
    subtree_tokens: int = Field(description="With all behind it.")
    subtree_nodes: int = Field(description="Runs, itself among them.")
    references: int = Field(description="Requests and hard pins on it, runs behind it with any.")
    pins: int = Field(description="Soft pins that end here.")
    hits: int = Field(description="Requests that reused it.")
    age_s: float = Field(description="Since it was last used, to a second or so.")
    text: str | None = Field(
        description="How it begins; a namespace's cache_salt. Null with --no-text."
    )
    tier: str | None = Field(
        description="With `tiers`: the last tier of the store that has all of it as well, so far "
        "as whole blocks tell; `pool` if none has. Null where no block tells: at a prompt's end."
    )
    tier_tokens: dict[str, int] = Field(
        description="With `tiers`: how many of its tokens each tier of the store has in blocks."
    )
    hidden: bool = Field(description="It stands for several small siblings.")
    count: int = Field(description="How many siblings it stands for; 0 where it is not hidden.")


class MapResponse(ResponseModel):
    """The largest subtrees one by one, and all others summed up in hidden nodes."""

    page_size: int = Field(description="Tokens a page.")
    at: float = Field(description="When it was made, in seconds since 1970.")
    total_nodes: int = Field(description="Runs, those behind hidden nodes as well.")
    total_pages: int = Field(description="What pages of all nodes sum up to.")
    tiers: tuple[str, ...] = Field(
        description="With `tiers`: the pool and those of the store, fastest first."
    )
    nodes: list[NodeSummary]


class NodeResponse(NodeSummary):
    """One node, and what is known of it."""

    namespace: str = Field(description="Its cache_salt.")
    path_tokens: int = Field(description="Tokens before it.")
    page_ids: list[int] = Field(description="The first 100.")
    policy: str = Field(description="What the eviction policy says of it.")
    children: int


class SearchMatch(ResponseModel):
    """A run in which what was sought ends."""

    id: int
    parent_path: list[int] = Field(description="Ids from the namespace to its parent.")
    at_token: int = Field(description="Where it begins, in tokens from the prompt's beginning.")
    text: str | None = Field(description="What stands there. Null with --no-text.")


class SearchResponse(ResponseModel):
    """At most 50 places, one for each run, those near the top of the tree first."""

    matches: list[SearchMatch]


class NodeChangeRequest(RequestModel):
    """What to do with a node. It orders eviction, or frees pages; nothing that runs is harmed."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"action": "pin", "ttl_s": 600}, {"action": "evict"}]}
    )

    action: Literal["pin", "unpin", "evict"] = Field(
        description="pin: keep it and all before it until nothing else is left to evict; unpin: "
        "end the pins that end here; evict: forget it and all behind it, so far as nobody uses it."
    )
    ttl_s: Annotated[float, Field(gt=0, le=_LONGEST_PIN_S)] | None = Field(
        default=None, description="To pin: for so many seconds. Default: until it is unpinned."
    )

    @model_validator(mode="after")
    def _seconds_to_pin(self) -> "NodeChangeRequest":
        if self.ttl_s is not None and self.action != "pin":
            raise wrong("ttl_s", "belongs to pin")
        return self


class NodeChangeResponse(ResponseModel):
    """What came of it."""

    pages: int = Field(description="Kept by the pin, no longer kept by one, or freed.")
