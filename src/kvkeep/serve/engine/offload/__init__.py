"""Offloading: moves KV between the pages of the engine and a store.

offload.py   the engine's interface: when to load, when to write
load.py      the state of one load · loads.py: from the store into pages, in the background
writes.py    from pages to the store, in the background
forms.py     KV in page order and in the store's token order; reusable host memory
evidence.py  notes on one load, and the report for an observer made of them
threads.py   daemon threads for calls into a store
"""
