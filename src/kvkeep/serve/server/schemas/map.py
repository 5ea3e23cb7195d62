"""``/kv/map``: requests and responses."""

from pydantic import Field

from kvkeep.serve.server.schemas.base import ResponseModel

__all__ = [
    "MapResponse", "NodeResponse", "NodeSummary",
]  # fmt: skip


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
    tier: str | None = Field(
        description="With `tiers`: the last tier of the store that has all its whole blocks; "
        "`pool` if none has. Null without a whole block, such as at a prompt's end."
    )
    tier_tokens: dict[str, int] = Field(
        description="With `tiers`: how many of its tokens each tier of the store has, in blocks."
    )
    hidden: bool = Field(description="Whether it stands for several small siblings.")
    count: int = Field(description="How many siblings it stands for; 0 if not hidden.")


class MapResponse(ResponseModel):
    """The largest subtrees node by node, all others summed up in hidden nodes."""

    page_size: int = Field(description="Tokens per page.")
    at: float = Field(description="When the map was made, in seconds since 1970.")
    total_nodes: int = Field(description="Runs, including those behind hidden nodes.")
    total_pages: int = Field(description="The sum of all nodes' pages.")
    tiers: tuple[str, ...] = Field(
        description="With `tiers`: the pool, then the store's tiers, fastest first."
    )
    nodes: list[NodeSummary]


class NodeResponse(NodeSummary):
    """One node in detail."""

    namespace: str = Field(description="Its cache_salt.")
    path_tokens: int = Field(description="Tokens before it.")
    page_ids: list[int] = Field(description="The first 100.")
    policy: str = Field(description="The eviction policy's state of it.")
    children: int
