"""`register`: makes SGLang know ``--radix-cache-backend kvkeep``.

SGLang calls it in each of its processes, as an entry point in the group ``sglang.srt.plugins``.
"""

from __future__ import annotations

from functools import partial

from kvkeep.integrations.sglang.building import backend_names, build_tree

__all__ = ["register"]


def register() -> None:
    """Register kvkeep's tree under all its names; names that are registered stay as they are."""
    from sglang.srt.mem_cache.registry import (  # noqa: PLC0415 - imports torch
        register_radix_cache_backend,
        registered_radix_cache_backends,
    )

    there = set(registered_radix_cache_backends())
    for name, policy in backend_names().items():
        if name not in there:
            register_radix_cache_backend(name, partial(build_tree, policy=policy))
