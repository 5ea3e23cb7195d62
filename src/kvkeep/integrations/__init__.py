"""kvkeep inside other engines. Import each module by its name; it needs only its own packages.

transformers.py   generate on a Transformers model, with KV from a store
vllm/             a KV connector · vllm_plugin.py: its name in vLLM
sglang/           a storage backend below HiCache

Shared by several of them: options.py, records.py, loaded.py. tested.py: beside which versions.
"""
