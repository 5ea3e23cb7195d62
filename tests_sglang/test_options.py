"""What can be chosen, and what is said of what cannot."""

from __future__ import annotations

import pytest
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController

from kvkeep.core.errors import InvalidValue
from kvkeep.integrations.sglang.options import StorageOptions


def test_what_sglang_reads_itself_is_not_ours() -> None:
    text = """{"backend_name": "kvkeep", "module_path": "kvkeep.integrations.sglang",
      "class_name": "KVKeepStorage", "interface_v1": 1, "allocator": "shm",
      "prefetch_threshold": 64, "prefetch_timeout_base": 2, "prefetch_timeout_per_ki_token": 0.5,
      "tp_lcm_size": 4, "hicache_storage_pass_prefix_keys": true,
      "tiers": ["memory://8GiB"], "load_timeout": 1}"""
    rest = HybridCacheController.parse_storage_backend_extra_config(text)[0]
    assert StorageOptions.parse(rest) == StorageOptions(tiers=("memory://8GiB",), load_timeout=1.0)
    assert StorageOptions.parse(None) == StorageOptions.parse({}) == StorageOptions()
    assert StorageOptions.parse({"load_timeout": "500ms"}) == StorageOptions(load_timeout=0.5)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"tier": ["memory://1GiB"]}, "has 'tier'; kvkeep's options are tiers, revision, tenant"),
        ({"load_timout": 1}, "did you mean 'load_timeout'"),
        ({"tiers": "memory://1GiB"}, "a list of URLs, fastest first"),
        ({"tiers": []}, "a list of URLs, fastest first"),
        ({"tiers": [1]}, "a list of URLs, fastest first"),
        ({"revision": 3}, "revision is 3; text is needed"),
        ({"tenant": None}, "tenant is None; text is needed"),
        (
            {"load_timeout": "soon"},
            "load_timeout: 'soon' is no time; write seconds, as 30, or 500ms",
        ),
        ({"load_timeout": "-1"}, "load_timeout is -1.0; a number of seconds is needed"),
        ({"load_timeout": True}, "load_timeout is True"),
        ({"load_timeout": float("nan")}, "load_timeout is nan"),
        ({"load_timeout": 1e300}, "load_timeout is 1e.300"),
        ({"load_timeout": 10**400}, "load_timeout is a whole number of 1329 bits"),
    ],
)
def test_what_is_wrong_is_named(given: dict[str, object], said: str) -> None:
    with pytest.raises(InvalidValue, match=said):
        StorageOptions.parse(given)


def test_a_password_is_not_repeated() -> None:
    with pytest.raises(InvalidValue) as refused:
        StorageOptions.parse({"tiers": "valkey://:secret@there"})
    assert "secret" not in str(refused.value)
