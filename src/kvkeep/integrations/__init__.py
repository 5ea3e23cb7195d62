"""kvkeep inside other engines. Import each module by its name; it needs only its own packages.

transformers.py   generate on a Transformers model, with KV from a store; its parts are
                  transformers_*.py
vllm/             a KV connector, and a tier · vllm_plugin.py: their names in vLLM
sglang/           a storage backend below HiCache, and a prefix tree

Shared by several of them: options.py, records.py, loaded.py, load_choice.py. tested.py: beside
which versions.
"""
