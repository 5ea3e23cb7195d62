"""Offloading: moves KV between the pages of the engine and a store.

offload.py   the engine's interface: when to load, when to write; which prompts wait
             for a load: what pays, until when
load.py      the state of one load, and its report · loads.py: from the store, in the background
movers.py    chunks into pages; the same for models with windows and states
writes.py    from pages to the store; threads
forms.py     KV in page order, in the store's token order and in snapshots; reusable host memory
"""
