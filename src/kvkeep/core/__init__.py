"""The core: the cache of an inference engine, in NumPy alone.

cache/         PagedCache and Sequence: open, append, fork, publish, close
prefix/        the tree: the longest cached prefix of a prompt, and what may be evicted
eviction/      policies: the order of eviction
groups/        windows and states of hybrid models, beside the pages
pages/         the pool of pages, page tables, and their tensors (torch)
slots.py       SlotCache, for engines whose caches are contiguous
geometry/      bytes per token, from a model's configuration
miss_ratio.py  sampled miss-ratio curves
returns.py     when conversations come back
cost.py        seconds to compute, and to move bytes
keys.py · public.py · tokens.py · extras.py · events.py · errors.py   used by all rooms
"""
