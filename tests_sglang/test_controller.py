"""SGLang's controller with its threads: attached, backing up, prefetching, detached, anew."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang_pools import controller, page_bytes, pools, scribble

if TYPE_CHECKING:
    from pathlib import Path

    from sglang.srt.managers.cache_controller import HiCacheController

PATIENCE_S = 300


def prefetched(made: HiCacheController, request: str, tokens: list[int]) -> tuple[int, Any]:
    """Tokens that SGLang's threads bring from storage, and where they are on the host."""
    made.prefetch(request, tokens)
    operation = made.prefetch_hit_queue.get(timeout=PATIENCE_S)
    if not operation.storage_hit_count:
        return 0, None
    operation.host_indices = made.mem_pool_host.alloc(operation.storage_hit_count)
    made.prefetch_buffer.put(operation)
    tokens_done = 0
    while True:
        ack = made.ack_prefetch_queue.get(timeout=PATIENCE_S)
        if ack.completed_req:
            return tokens_done, operation.host_indices
        tokens_done = max(tokens_done, ack.completed_tokens or 0)


@pytest.mark.parametrize(("kind", "layout", "v1"), [
    ("mha", "page_first", 1), ("mha", "layer_first", 0), ("mla", "page_first_direct", 1),
])  # fmt: skip
def test_a_prompt_outlives_the_server(tmp_path: Path, kind: str, layout: str, v1: int) -> None:
    tiers = ["memory://16MiB", f"file://{tmp_path}/kv?size=64MiB"]
    prompt = list(range(1000, 1000 + 160))
    made = pools(kind, layout)
    scribble(made.host)
    with controller(made, tiers, interface_v1=v1) as first:
        assert prefetched(first, "cold", prompt) == (0, None)
        indices = made.host.alloc(160)
        first.write_storage(indices, prompt, get_storage_hash_str(prompt, page_size=16))
        done = first.ack_backup_queue.get(timeout=PATIENCE_S)
        assert done.completed_tokens == 160
        want = [page_bytes(made.host, int(at) // 16) for at in indices[::16]]
    again = pools(kind, layout)
    scribble(again.host, seed=9)
    with controller(again, tiers, interface_v1=v1) as second:
        tokens, indices = prefetched(second, "warm", [*prompt, *range(64)])
        assert tokens == 160
        assert [page_bytes(again.host, int(at) // 16) for at in indices[::16]] == want
        other = [*prompt[:64], 7, *prompt[65:]]
        assert prefetched(second, "parts after 64 tokens", other)[0] == 64
        second.storage_backend.clear()
        assert prefetched(second, "cleared", prompt) == (0, None)


def test_more_pages_than_go_in_one_call(tmp_path: Path) -> None:
    tiers = ["memory://16MiB", f"file://{tmp_path}/kv?size=64MiB"]
    made = pools("mha", "page_first", page=1, tokens=512)
    prompt = list(range(300))  # SGLang moves at most 128 pages a call
    with controller(made, tiers, interface_v1=1) as one:
        indices = made.host.alloc(300)
        one.write_storage(indices, prompt, get_storage_hash_str(prompt, page_size=1))
        assert one.ack_backup_queue.get(timeout=PATIENCE_S).completed_tokens == 300
        assert prefetched(one, "warm", prompt)[0] == 300


def test_an_option_that_there_is_not_is_said_at_the_start() -> None:
    made = pools("mha", "page_first")
    said = pytest.raises(ValueError, match=r"has 'teirs'; kvkeep's options are tiers, revision")
    with said, controller(made, ["memory://1MiB"], teirs=[]):
        pass
