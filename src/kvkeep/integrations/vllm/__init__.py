"""kvkeep inside vLLM: a KV connector, so that no prompt is prefilled twice.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "KVKeepConnector",
      "kv_connector_module_path": "kvkeep.integrations.vllm", "kv_role": "kv_both",
      "kv_connector_extra_config": {"tiers": ["memory://8GiB", "file:///var/lib/kvkeep?size=500GiB"]}}'

    connector.py   what vLLM calls; hands it to one of the two sides
    scheduler.py   the side that decides: which blocks are there, which are to be saved
    worker.py      the side that has the pages: loads and saves them
    messages.py    what they tell each other, step by step
    shared.py      the store of a worker, and how a scheduler in the same process finds it
    groups.py      what of a model's KV can be kept: its groups of layers
    pages.py       the memory of the engine, page by page
    naming.py      the namespace · keys.py: the keys of blocks
    weights.py     which weights were loaded · numbers.py: what of the configuration decides numbers
    adapters.py    which LoRA weights a request is computed with
    options.py     what can be chosen at start, and for each request
    outer.py       what vLLM reads elsewhere when the connector is inside another one
    stats.py       what vLLM's log and its Prometheus page show

Import it where vLLM is installed; opening a store is left to the worker.
"""

from __future__ import annotations

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from kvkeep.integrations.vllm.connector import KVKeepConnector

__all__ = ["KVKeepConnector"]

# MultiConnector finds the class of counts that crossed a process by name, and in vLLM's registry
# alone: without an entry there the first ones end the server's output handler.
if KVKeepConnector.__name__ not in KVConnectorFactory._registry:
    KVConnectorFactory.register_connector(KVKeepConnector.__name__, __name__, "KVKeepConnector")
