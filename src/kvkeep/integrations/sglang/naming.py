"""The namespace of a rank, and the keys of the pages of each pool.

SGLang passes bare hashes of tokens: SHA-256, chained from the first token of the prompt, over salts
and adapter names too. Everything else on which the bytes of a page depend is named here.

    namespace   weights, adapters, the model's configuration, settings (settings.py), tenant; dtype,
                layout, page size and geometry of the pool of KV; the rank
    key         SHA-256( the pool's digest + the hash )
    digest      the pool's name, dtype, layout, page size, geometry; its rank; a draft's weights

Where pages are stored by heads (pages.py), the namespace has the number of all heads and no
tensor-parallel rank, and there is a digest for each of the rank's parts, with its heads.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvkeep.core.errors import InvalidValue
from kvkeep.core.keys import Namespace
from kvkeep.integrations.loaded import SAFETENSORS_FORMATS, loaded_identity
from kvkeep.integrations.sglang.settings import server_setting, settings_digest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

    from kvkeep.integrations.sglang.options import StorageOptions
    from kvkeep.integrations.sglang.pages import HeadParts

__all__ = ["is_replicated", "namespace_of", "page_keys", "pool_digests"]

_LOG = logging.getLogger("kvkeep.sglang")
_FORMAT = 1  # version of our records: a page in its pool's own layout
_SHAPE = ("start_layer", "end_layer", "layer_num", "target_layer_num", "head_num", "head_dim",
          "v_head_dim", "kv_lora_rank", "qk_rope_head_dim", "kv_cache_dim", "head_group_num",
          "storage_format_tag")  # fmt: skip
_SAFETENSORS = SAFETENSORS_FORMATS | {"layered", "bitsandbytes"}


def namespace_of(
    config: HiCacheStorageConfig,
    options: StorageOptions,
    pool: Any,
    record_bytes: int,
    heads: HeadParts | None = None,
) -> Namespace:
    """Return the namespace of this rank's pages; ``pool`` is the pool of KV.

    With ``heads``, all ranks of any number of them have the same one.
    """
    path = str(server_setting("model_path") or config.model_name or "model")
    replicated = is_replicated(config, "kv", pool)
    shared = config.tp_size > 1 and (config.is_mla_model or heads is not None)
    geometry = _geometry(pool, record_bytes, heads.heads if heads else None)
    return Namespace(
        tenant=options.tenant,
        model=Path(path).name,
        revision=options.revision or _revision(path, shared=shared),
        lora=_adapters(shared=shared),
        dtype=_dtype(pool),
        layout=_layout(pool),
        geometry=f"{geometry}/{settings_digest()}/{_configuration(path)}",
        rank=_rank(config, replicated=replicated or heads is not None),
    )


def pool_digests(
    config: HiCacheStorageConfig,
    name: str,
    pool: Any,
    record_bytes: int,
    heads: HeadParts | None = None,
) -> list[bytes]:
    """Return a digest (32 bytes) for each record of a page: it separates the keys from all others.

    A page is one record, or with ``heads`` one for each of its parts.
    """
    replicated = is_replicated(config, name, pool) or heads is not None
    parts = [name, _dtype(pool), _layout(pool)]
    parts.append(_geometry(pool, record_bytes, heads.width if heads else None))
    parts.append(_rank(config, replicated=replicated))
    drafted = getattr(pool, "layer_num", 0) > getattr(pool, "target_layer_num", 1 << 30)
    if name.startswith("draft") or drafted:
        parts.append(_draft())
    records = [[*parts, part] for part in heads.names] if heads else [parts]
    return [hashlib.sha256("\n".join(map(repr, record)).encode()).digest() for record in records]


def page_keys(digests: Sequence[bytes], hashes: list[str]) -> list[bytes]:
    """Return the store's keys of pages, one for each digest, page after page.

    Cost: 0.6 µs each.
    """
    sha256 = hashlib.sha256
    return [sha256(digest + name.encode()).digest() for name in hashes for digest in digests]


def is_replicated(config: HiCacheStorageConfig, name: str, pool: Any) -> bool:
    """Whether all tensor-parallel ranks hold the same pages: latent KV, without states or heads."""
    return config.is_mla_model and name != "mamba" and not hasattr(pool, "head_num")


def _rank(config: HiCacheStorageConfig, *, replicated: bool) -> str:
    parts = [] if replicated else [f"tp{config.tp_rank}/{config.tp_size}"]
    if config.pp_size > 1:
        parts.append(f"pp{config.pp_rank}/{config.pp_size}")
    if config.attn_cp_size > 1:
        parts.append(f"cp{config.attn_cp_rank}/{config.attn_cp_size}")
    if config.dcp_size > 1:
        parts.append(f"dcp{config.dcp_rank}/{config.dcp_size}")
    return " ".join(parts)


def _dtype(pool: Any) -> str:
    name = str(getattr(pool, "dtype", "")).removeprefix("torch.")
    # SGLang stores every fp8 dtype as uint8; the server's setting says which one it is.
    return f"{name}:{server_setting('kv_cache_dtype')}" if name == "uint8" else name


def _layout(pool: Any) -> str:
    return f"sglang {version('sglang')} {_FORMAT} {pool.layout}/{pool.page_size}"


def _geometry(pool: Any, record_bytes: int, heads: int | None = None) -> str:
    """Return the shape of a pool, with this number of heads in place of its own."""
    found = {name: getattr(pool, name) for name in _SHAPE if hasattr(pool, name)}
    if heads is not None:
        found["head_num"] = heads
    shape = ",".join(f"{name}={value}" for name, value in found.items())
    return f"{type(pool).__name__}({shape})/{record_bytes}"


def _revision(path: str, *, shared: bool) -> str:
    """Return the identity of the weights; if unknown, a name that only this start has."""
    load_format = str(server_setting("load_format") or "auto")
    if load_format == "dummy":
        why = "its weights are dummies"
    elif load_format not in _SAFETENSORS or server_setting("custom_weight_loader"):
        why = f"--load-format {load_format} may read files that kvkeep does not check"
    else:
        try:
            return _loaded(path, str(server_setting("revision") or ""))
        except InvalidValue as error:
            why = str(error)
    _LOG.warning(
        "The weights of %s cannot be identified (%s), so no other start of this server will find "
        "their KV. Name the revision: "
        '"revision" in --hicache-storage-backend-extra-config',
        path,
        why,
    )
    return _this_start(shared=shared)


def _loaded(path: str, revision: str) -> str:
    """Return the identity of loaded weights in a directory, or of a hub model.

    Raises:
        InvalidValue: the weights cannot be identified.
    """
    cache = server_setting("download_dir")
    return loaded_identity(path, revision or None, None if cache is None else str(cache))


def _configuration(path: str) -> str:
    """Return a digest of ``config.json``, which counts even if the user names the revision."""
    file = Path(path, "config.json")
    if not file.is_file():
        return ""
    return hashlib.blake2b(file.read_bytes(), digest_size=8).hexdigest()


def _adapters(*, shared: bool) -> str:
    """Return a digest of the adapters that the server starts with; empty without any.

    SGLang names such an adapter by its name and path, equally in every start, and passes only
    hashes to a storage. An adapter that a request loads later has a name that no other start has.
    """
    given = server_setting("lora_paths", "lora")
    if not isinstance(given, list | tuple) or not given:
        return ""
    digest = hashlib.sha256()
    for name, path in sorted((str(one.lora_name), str(one.lora_path)) for one in given):
        try:
            identity = _loaded(path, "")
        except InvalidValue as error:
            _LOG.warning(
                "The weights of LoRA %s cannot be identified (%s), so no other start of this "
                "server will find their KV", name, error,
            )  # fmt: skip
            identity = _this_start(shared=shared)
        digest.update(repr((name, path, identity)).encode())
    return digest.hexdigest()[:32]


def _this_start(*, shared: bool) -> str:
    """Return a name for this start of the server; ``shared``: ranks have it in common."""
    if shared:
        stat = Path(f"/proc/{os.getppid()}/stat")  # the ranks of one machine have one parent
        if stat.exists():
            started = stat.read_text().rpartition(")")[2].split()[19]
            return f"start {os.getppid()} {started}"
    return f"start {secrets.token_hex(16)}"


def _draft() -> str:
    """Return the identity of a draft model with separate weights; empty without one."""
    path = str(server_setting("speculative_draft_model_path", "spec") or "")
    revision = str(server_setting("speculative_draft_model_revision", "spec") or "")
    if not path:
        return ""
    try:
        return _loaded(path, revision)
    except InvalidValue as error:
        _LOG.warning("The weights of the draft model cannot be identified: %s", error)
        return f"start {secrets.token_hex(16)}"
