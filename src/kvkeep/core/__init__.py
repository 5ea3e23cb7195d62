"""The core: the cache of an inference engine, in NumPy alone.

cache/       PagedCache and Sequence: open, append, fork, publish, close
prefix/      prefix indices: the longest cached prefix of a prompt
eviction/    policies: the order of eviction
pages/       the pool of pages, page tables, and their tensors (torch)
slots/       SlotCache, for engines whose caches are contiguous
geometry/    bytes per token, from a model's configuration
miss_ratio/  sampled miss-ratio curves
keys.py · public.py · tokens.py · extras.py · events.py · errors.py   used by all rooms
config_file.py · prefix_file.py   files that users write
"""
