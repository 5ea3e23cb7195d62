"""What `kvkeep translate` prints is what the connector takes."""

from __future__ import annotations

from kvkeep.integrations.lmcache import translate
from kvkeep.integrations.vllm.options import ConnectorOptions


def test_the_connector_takes_it():
    given = {
        "max_local_cpu_size": 20, "local_disk": "/mnt/a", "max_local_disk_size": 9,
        "min_retrieve_tokens": 300, "save_decode_cache": False, "blocking_timeout_secs": 7,
        "lookup_timeout_ms": 250, "remote_url": "valkey://h:6379",
    }  # fmt: skip
    options = ConnectorOptions.parse(translate(given).options)
    assert options.tiers == ("memory://20GiB", "file:///mnt/a?size=9GiB", "valkey://h:6379")
    assert (options.min_tokens, options.answers) == (300, False)
    assert (options.load_timeout, options.lookup_timeout) == (7, 0.25)
