"""Options of the storage backend, in ``--hicache-storage-backend-extra-config``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvkeep.integrations.options import EngineOptions

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["StorageOptions"]

# Keys of the same JSON object that SGLang reads.
_OF_SGLANG: Final = {
    "backend_name", "module_path", "class_name", "interface_v1", "allocator", "file_storage_path",
    "prefetch_threshold", "prefetch_timeout_base", "prefetch_timeout_per_ki_token",
    "hicache_storage_pass_prefix_keys", "tp_lcm_size",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class StorageOptions(EngineOptions):
    """Options of `KVKeepStorage`. Each rank opens the tiers for itself.

    ``load_timeout`` is for one call of SGLang, of up to 128 pages; later pages are misses.
    """

    @classmethod
    def parse(cls, given: Mapping[str, object] | None) -> StorageOptions:
        """See `EngineOptions.from_json`; options of SGLang itself are ignored."""
        own = {name: value for name, value in (given or {}).items() if name not in _OF_SGLANG}
        return cls.from_json(own, "--hicache-storage-backend-extra-config")
