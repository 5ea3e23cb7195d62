"""What a server says of itself, as it would be said: for drawings."""

from __future__ import annotations

import math
from typing import Any

AT = 1_790_000_000.0


def live(**changed: Any) -> dict[str, Any]:
    """What /kv/live says."""
    return {
        "at": AT,
        "uptime_s": 7980.0,
        "version": "0.1.0",
        "model": "kvkeep-tiny",
        "policy": "lru",
        "page_size": 16,
        "text": True,
        "running": 3,
        "waiting": 1,
        "totals": {
            "requests": 1204, "prompt_tokens": 1_204_113, "cached_tokens": 770_632,
            "loaded_tokens": 51_200, "generated_tokens": 84_020, "evicted_pages": 2031,
        },
        "pages": {
            "total": 1024, "free": 304, "cached_evictable": 400, "cached_held": 20,
            "private": 300, "pinned": 2,
        },
        "ttft": {
            "cold": {"count": 31, "p50_s": 0.412, "p95_s": 1.21},
            "warm": {"count": 140, "p50_s": 0.038, "p95_s": 0.08},
        },
        "history": [
            [AT - 600 + 5 * at, 1000, round(500 + 400 * math.sin(at / 9))] for at in range(120)
        ],
        "tiers": [
            {
                "name": "memory", "place": "memory://1GiB", "blocks": 300,
                "used_bytes": 432_013_312, "capacity": 1 << 30, "queued_bytes": 0,
                "breaker": "closed", "hits": 1203, "misses": 44, "drops": 0, "errors": 0,
                "damaged": 0, "read_bytes": 90_000_000, "written_bytes": 432_013_312,
            },
            {
                "name": "disk", "place": "file:///var/lib/kvkeep?size=20GiB", "blocks": 3000,
                "used_bytes": 4_320_133_120, "capacity": 20 << 30, "queued_bytes": 1 << 20,
                "breaker": "open", "hits": 120, "misses": 400, "drops": 7, "errors": 3,
                "damaged": 1, "read_bytes": 9_000_000, "written_bytes": 4_320_133_120,
            },
        ],
        "loads": {
            "loads": 0, "loaded_tokens": 0,
            "computed_stored_tokens": 0,
        },
        "what_if": [
            {"times": times, "pages": int(1024 * times), "hit_rate": rate}
            for times, rate in ((0.5, 0.41), (1, 0.64), (2, 0.71), (4, 0.8))
        ],
        "tenants": [
            {"cache_salt": "acme", "requests": 800, "prompt_tokens": 900_000,
             "reused_tokens": 500_000, "pages": 300},
            {"cache_salt": "", "requests": 404, "prompt_tokens": 304_113,
             "reused_tokens": 270_632, "pages": 120},
        ],
        **changed,
    }  # fmt: skip


def request(back: int = 0, **changed: Any) -> dict[str, Any]:
    """One of /kv/requests, ``back`` from the newest."""
    return {
        "id": f"chatcmpl-{back:024x}",
        "at": AT - 3 * back,
        "endpoint": "chat",
        "cache_salt": "acme",
        "session": None,
        "prompt_tokens": 812,
        "generated_tokens": 40,
        "ttft_s": 0.41,
        "seconds": 1.3,
        "outcome": "stop",
        "reused": {"pool": 400, "disk": 100},
        "computed": {"diverged": 300, "last_token": 1, "new": 11},
        "sentence": "300 tokens were computed because the prompt differs at token 500 from one "
        "that was cached.",
        **changed,
    }


def summary(**changed: Any) -> dict[str, Any]:
    """What /kv/summary says."""
    return {
        "requests": 212,
        "prompt_tokens": 84_021,
        "reused": {"pool": 48_000, "disk": 3_211},
        "computed": {"diverged": 12_468, "new": 14_342, "evicted": 6000},
        "causes": [
            {"reason": "new", "tokens": 14_342, "share": 0.4371, "requests": 80,
             "cache_salt": None, "position": None, "example": "cmpl-1",
             "sentence": "44 % of all recomputed tokens: never seen before"},
            {"reason": "diverged", "tokens": 12_468, "share": 0.38, "requests": 41,
             "cache_salt": "acme", "position": 41, "example": "cmpl-2",
             "sentence": "38 % of all recomputed tokens: prompts of tenant acme differ at token "
             "41"},
            {"reason": "evicted", "tokens": 6000, "share": 0.1829, "requests": 12,
             "cache_salt": None, "position": None, "example": "cmpl-3",
             "sentence": "18 % of all recomputed tokens: evicted under pressure by lru"},
        ],
        **changed,
    }  # fmt: skip
