"""kvkeep inside vLLM: a KV connector, so that no prompt is prefilled twice.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "KVKeepConnector",
      "kv_connector_module_path": "kvkeep.integrations.vllm", "kv_role": "kv_both",
      "kv_connector_extra_config": {"tiers": ["memory://8GiB", "file:///var/lib/kvkeep?size=500GiB"]}}'

    connector.py   KVKeepConnector: vLLM's interface, which forwards to one of two sides
    scheduler.py   the scheduler's side: which blocks are stored, loaded and saved
    lookups.py     lookups that the scheduler's side waits for, how long, and what is loaded
    worker.py      the worker's side: has the pages, loads and saves them
    messages.py    messages between the two sides, with every step
    groups.py      groups of layers, keys of blocks, which kinds of KV are stored, and how far
    pages.py       the engine's memory, page by page; copies on a GPU
    naming.py      the namespace, with the settings that decide numbers
    versions.py    what differs between versions of vLLM
    content.py     which requests are kept, and their LoRA weights
    options.py     options of the connector, the tier and a request, and wrong ones of requests
    transfer.py    those, and the tiers', in vLLM's configuration
    kept.py        the open store, its line in vLLM's log at the start, and how a scheduler in the
                   same process finds it
    outer.py       options that vLLM reads from an outer connector, such as MultiConnector
    stats.py       counts for vLLM's log and its Prometheus page
    public.py      prefixes that all cache salts share
    tier.py        KVKeepTier, a tier below vLLM's own offloading: offload/ has its parts

The connector is imported when it is asked for; options.py and transfer.py need no vLLM. The worker
opens the store.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvkeep.core.errors import require_engine

if TYPE_CHECKING:
    from kvkeep.integrations.vllm.connector import KVKeepConnector

__all__ = ["KVKeepConnector"]


def __getattr__(name: str) -> object:
    """Import the connector when it is asked for."""
    if name == "KVKeepConnector":
        require_engine("vllm", "vLLM")
        from kvkeep.integrations.vllm.connector import KVKeepConnector  # noqa: PLC0415

        return KVKeepConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
