"""States at the ends of blocks: which of them are saved, and where prompts should leave one.

vLLM moves the running state of a request from page to page, and keeps it at few ends of blocks: at
the last one in a prompt, and where prompts branch. In the step that computes such an end it says in
which page the state is (``boundary_state_offloads``); later that page may hold another state. So a
state is saved in that step or not at all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvkeep.integrations.vllm.keys import keys_of
from kvkeep.integrations.vllm.messages import BlockSpan

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import KVConnectorBlockState
    from vllm.v1.request import Request

    from kvkeep.integrations.vllm.groups import BlockReach, Groups
    from kvkeep.integrations.vllm.requests import FollowedRequest

__all__ = ["pinned_states", "states_of_step", "stop_at_branch"]


def states_of_step(
    groups: Groups,
    followed: FollowedRequest,
    end: int,
    offered: KVConnectorBlockState,
    *,
    new: bool,
) -> list[BlockSpan]:
    """Return the states of a request that can be saved in this step, up to block ``end``.

    These are the states that vLLM offers and, if the request is ``new`` in this step, the one that
    it found in its own prefix cache. Notes their positions in ``followed.states``.
    """
    size, request = groups.block_tokens, followed.request
    found: dict[tuple[int, int], int] = {}  # (group, end of a block) → page
    for group, page, tokens in offered.boundary_state_offloads.get(request.request_id, ()):
        if tokens % size == 0:
            found[group, tokens // size] = page
    if new and followed.local and request.num_computed_tokens == followed.local:
        tables = offered.get_block_ids(request.request_id)
        local = followed.local // size
        if tables is not None:
            found |= {(group, local): tables[group][local - 1] for group in groups.states}
    spans = []
    for (group, at), page in found.items():
        if page and at <= end:  # 0 is vLLM's null block
            followed.states.add(at)
            spans.append(BlockSpan(group, keys_of(followed.hashes(at - 1, at), group), [page]))
    return spans


def pinned_states(groups: Groups, followed: FollowedRequest) -> list[list[bytes]]:
    """Return the keys of the request's states, those of one group and position in each list."""
    return [
        keys_of(followed.hashes(at - 1, at), group)
        for at in sorted(followed.states)
        for group in groups.states
    ]


def stop_at_branch(
    request: Request, reach: BlockReach, block_tokens: int, *, first: int, public: int
) -> None:
    """Let vLLM keep a state where the stored KV of other prompts ends: prompts branch there.

    vLLM does so by itself where a prompt branches from one in its own prefix cache. It knows no
    prompts in the store, and without a state at the branch none of them is ever of use.

    All prompts with a public prefix branch at its end. So the first of them leaves a state behind
    its ``public`` blocks, unless one is stored there, or vLLM goes on behind ``first`` later ones.
    """
    branch = reach.covered * block_tokens
    if max(first, reach.end) < public:
        request.shared_prefix_boundary = public * block_tokens
    elif reach.covered > reach.end and branch > request.shared_prefix_boundary:
        request.shared_prefix_boundary = branch
