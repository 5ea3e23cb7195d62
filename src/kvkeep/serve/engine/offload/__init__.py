"""Offloading: KV on its way between the pages of the engine and a store.

offload.py    what the engine tells of its requests, and when KV moves
loads.py     from the store into pages, while others compute
writes.py    from pages to the store, behind computing
forms.py     KV in the order of pages and in the order of tokens, and the memory between
evidence.py  what is noted of a load, and the report that comes of it
"""
