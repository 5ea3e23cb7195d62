"""What can be chosen, in ``--hicache-storage-backend-extra-config``."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Final

from kvkeep.core.errors import InvalidValue
from kvkeep.integrations.given import count_of, refuse_unknown, seconds_of, tiers_of

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["StorageOptions"]


# In the same object, and meant for SGLang.
_OF_SGLANG: Final = {
    "backend_name",
    "module_path",
    "class_name",
    "interface_v1",
    "allocator",
    "file_storage_path",
    "prefetch_threshold",
    "prefetch_timeout_base",
    "prefetch_timeout_per_ki_token",
    "hicache_storage_pass_prefix_keys",
    "tp_lcm_size",
}


@dataclass(frozen=True, slots=True)
class StorageOptions:
    """What kvkeep is told; times in seconds.

    Attributes:
        tiers: URLs of the store, fastest first; each rank opens them for itself.
        revision: which weights these are, where no files say so.
        tenant: what keeps this server's KV from being found by servers of other tenants.
        load_timeout: for one call that loads, of up to 128 pages; later pages are misses.
        lookup_timeout: for one question to places that others write to.
        save_timeout: how long one call that saves waits for memory when all of it is waiting to
            be written; then the rest is dropped.
        flush_timeout: when SGLang detaches, for what still waits to be written.
        threads: copy the pages of one call.
    """

    tiers: tuple[str, ...] = ("memory://1GiB",)
    revision: str = ""
    tenant: str = ""
    load_timeout: float = 5.0
    lookup_timeout: float = 0.5
    save_timeout: float = 2.0
    flush_timeout: float = 10.0
    threads: int = 4

    @classmethod
    def parse(cls, given: Mapping[str, object] | None) -> StorageOptions:
        """Check what was given.

        Raises:
            InvalidValue: an option that there is not, or a value that it cannot have.
        """
        options = {name: value for name, value in (given or {}).items() if name not in _OF_SGLANG}
        known = [field.name for field in fields(cls)]
        refuse_unknown(
            options, known, "--hicache-storage-backend-extra-config has", "kvkeep's options are"
        )
        if "tiers" in options:
            options["tiers"] = tiers_of(options["tiers"])
        for name in ("revision", "tenant"):
            if not isinstance(options.get(name, ""), str):
                raise InvalidValue(f"{name} is {options[name]!r}; text is needed")
        for name in ("load_timeout", "lookup_timeout", "save_timeout", "flush_timeout"):
            if name in options:
                options[name] = seconds_of(name, options[name])
        if "threads" in options:
            options["threads"] = count_of("threads", options["threads"], 1, 64)
        return cls(**options)  # type: ignore[arg-type]
