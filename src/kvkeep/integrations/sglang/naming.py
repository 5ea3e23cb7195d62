"""What pages are called: the namespace of a rank, and in it the keys of each pool.

SGLang hands over bare hashes of tokens: SHA-256, chained from the first token of the prompt, with
salts and adapters in them. All else that makes a page's bytes other bytes is in what stands here.

    namespace   weights, tenant; of the pool of KV: dtype, layout and page size, geometry; the rank
    key         SHA-256( the pool's digest + the hash )
    digest      the pool's name, dtype, layout, page size, geometry; its rank; a draft's weights
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import secrets
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import snapshot_download

from kvkeep.errors import InvalidValue
from kvkeep.keys import Namespace
from kvkeep.store.weights import weights_digest

if TYPE_CHECKING:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

    from kvkeep.integrations.sglang.options import Options

__all__ = ["is_replicated", "namespace_of", "page_keys", "pool_digest"]

_LOG = logging.getLogger("kvkeep.sglang")
_FORMAT = 1  # of our records: a page in its pool's own layout
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHAPE = ("start_layer", "end_layer", "layer_num", "target_layer_num", "head_num", "head_dim",
          "v_head_dim", "kv_lora_rank", "qk_rope_head_dim", "kv_cache_dim", "head_group_num",
          "storage_format_tag")  # fmt: skip
# What of the server's settings is in the bytes of KV, besides the weights.
_SETTINGS = ("dtype", "kv_cache_dtype", "quantization", "quantization_param_path",
             "json_model_override_args")  # fmt: skip


def namespace_of(
    config: HiCacheStorageConfig, options: Options, pool: Any, page_bytes: int
) -> Namespace:
    """What must never be mixed with what this rank keeps; ``pool`` is that of its KV."""
    path = str(_server("model_path") or config.model_name or "model")
    commit = str(_server("revision") or "")
    directory = _directory(path, commit)
    return Namespace(
        tenant=options.tenant,
        model=Path(path).name,
        revision=options.revision or _revision(config, path, commit, directory),
        dtype=_dtype(pool),
        layout=_layout(pool),
        geometry=f"{_geometry(pool, page_bytes)}/{_settings(directory)}",
        rank=_rank(config, replicated=is_replicated(config, "kv", pool)),
    )


def pool_digest(config: HiCacheStorageConfig, name: str, pool: Any, page_bytes: int) -> bytes:
    """What parts the keys of one pool from those of every other; 32 bytes."""
    parts = [name, _dtype(pool), _layout(pool), _geometry(pool, page_bytes)]
    parts.append(_rank(config, replicated=is_replicated(config, name, pool)))
    drafted = getattr(pool, "layer_num", 0) > getattr(pool, "target_layer_num", 1 << 30)
    if name.startswith("draft") or drafted:
        parts.append(_draft())
    return hashlib.sha256("\n".join(map(repr, parts)).encode()).digest()


def page_keys(digest: bytes, hashes: list[str]) -> list[bytes]:
    """The store's keys of pages. Cost: 0.6 µs each."""
    sha256 = hashlib.sha256
    return [sha256(digest + name.encode()).digest() for name in hashes]


def is_replicated(config: HiCacheStorageConfig, name: str, pool: Any) -> bool:
    """Whether all tensor-parallel ranks hold the same: latent KV, but no state and no heads."""
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
    # SGLang stores every fp8 as uint8; which one it is, only the server knows.
    return f"{name}:{_server('kv_cache_dtype')}" if name == "uint8" else name


def _layout(pool: Any) -> str:
    return f"sglang {version('sglang')} {_FORMAT} {pool.layout}/{pool.page_size}"


def _geometry(pool: Any, page_bytes: int) -> str:
    shape = [f"{name}={getattr(pool, name)}" for name in _SHAPE if hasattr(pool, name)]
    return f"{type(pool).__name__}({','.join(shape)})/{page_bytes}"


def _settings(directory: str | None) -> str:
    """A digest of what the server was told, and of the model's configuration."""
    told = "\n".join(f"{name}={_server(name)}" for name in _SETTINGS)
    digest = hashlib.blake2b(told.encode(), digest_size=8)
    if directory is not None and (file := Path(directory, "config.json")).is_file():
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _revision(config: HiCacheStorageConfig, path: str, commit: str, directory: str | None) -> str:
    """Which weights these are; what nobody else has where that cannot be known."""
    if _server("load_format") == "dummy":
        why = "its weights are dummies"
    elif directory is None:
        why = "its weights are in no directory of this machine"
    else:
        try:
            return weights_digest(directory)
        except InvalidValue as error:
            why = str(error)
    if _COMMIT.fullmatch(commit):
        return commit
    _LOG.warning(
        "What is kept of %s cannot be told from what another revision of it would leave (%s), so "
        "no other start of this server will find it. Name the revision: "
        '"revision" in --hicache-storage-backend-extra-config',
        path,
        why,
    )
    return _this_start(config)


def _directory(path: str, revision: str) -> str | None:
    """Where weights lie on this machine: a directory, or what the hub downloaded."""
    if Path(path).is_dir():
        return path
    try:
        snapshot: str = snapshot_download(path, revision=revision or None, local_files_only=True)
    except (OSError, ValueError):  # no such name, or nothing of it is here
        return None
    return snapshot


def _this_start(config: HiCacheStorageConfig) -> str:
    """A name for this start of the server; ranks that share their KV share it."""
    if config.is_mla_model and config.tp_size > 1:
        stat = Path(f"/proc/{os.getppid()}/stat")  # the ranks of one machine have one parent
        if stat.exists():
            started = stat.read_text().rpartition(")")[2].split()[19]
            return f"start {os.getppid()} {started}"
    return f"start {secrets.token_hex(16)}"


def _draft() -> str:
    """Which weights the draft model has, where there is one beside the target's own."""
    path = str(_server("speculative_draft_model_path", "spec") or "")
    revision = str(_server("speculative_draft_model_revision", "spec") or "")
    directory = _directory(path, revision) if path else None
    return f"{path} {revision}" if directory is None else weights_digest(directory)


def _server(name: str, bag: str = "model") -> object:
    """A setting of the server that this process is a part of; None where it is of none."""
    from sglang.srt import runtime_context  # noqa: PLC0415 - imports much of SGLang

    try:
        return getattr(getattr(runtime_context, f"get_{bag}")(), name, None)
    except ValueError:  # nothing was published: no server runs here
        return None
