"""The core: the cache of an inference engine, in NumPy alone.

cache/       PagedCache and Sequence: open, append, fork, publish, close
prefix/      prefix indices: the longest cached prefix of a prompt
eviction/    policies: what goes first
pages/       the pool of pages, page tables, the tensors they name (torch)
slots/       SlotCache, for engines whose caches are contiguous
geometry/    bytes per token, from a model's configuration
miss_ratio/  sampled miss-ratio curves
keys.py · tokens.py · extras.py · events.py · errors.py   what all rooms use
"""
