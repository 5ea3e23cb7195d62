"""Arguments of the commands with a store, and opening the store."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from kvkeep.cli.arguments import add_option, count
from kvkeep.core.errors import InvalidValue, KVKeepError
from kvkeep.core.geometry.units import format_bytes

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

    from kvkeep.core.cost import CostModel
    from kvkeep.serve.engine import Runner
    from kvkeep.store import KVStore

__all__ = [
    "add_store_arguments",
    "block_tokens",
    "cache_folder",
    "default_tiers",
    "open_default_store",
    "open_store",
]

_BLOCK_TOKENS = 256
_MEMORY_BYTES = 1 << 30
_DISK_BYTES = 20 << 30
_DISK_SHARE = 10  # at most a tenth of the free space
_LEAST_DISK_BYTES = 256 << 20


def add_store_arguments(parser: argparse.ArgumentParser, *, default: str) -> None:
    """Add the options of a store; ``default`` describes its tiers without ``--tier``."""
    store = parser.add_argument_group("store")
    store.add_argument(
        "--tier",
        metavar="URL",
        action="append",
        default=[],
        help="tier to store KV in: memory://4GiB, file:///path?size=200GiB, valkey://host:6379, "
        f"s3://bucket; may be repeated, fastest first (default: {default})",
    )
    add_option(
        store,
        "--tiering NAME",
        "which blocks move between tiers: inclusive or exclusive; inclusive:2 or exclusive:2 "
        "move only blocks used twice",
        default="inclusive",
    )
    add_option(
        store,
        "--block-tokens N",
        "tokens per stored block, a multiple of the page size (default: "
        f"{_BLOCK_TOKENS}, rounded up to whole pages)",
        type=count,
    )


def open_store(
    args: argparse.Namespace,
    runner: Runner,
    *,
    name: str,
    tiers: Sequence[str],
    shares: Mapping[str, float] | None = None,
    cost: CostModel | None = None,
) -> KVStore:
    """Open the store of the model in ``args`` over ``tiers``. Raises `InvalidValue`.

    ``shares`` are weights of tenants, ``cost`` is what is known of costs; see `KVStore`.
    """
    from kvkeep.store import KVStore  # noqa: PLC0415 - torch
    from kvkeep.store.tiers import tiering  # noqa: PLC0415

    return KVStore(
        runner.geometry,
        model=name,
        revision=runner.identity,
        tiers=list(tiers),
        policy=tiering(args.tiering),
        block_tokens=block_tokens(args, runner),
        shares=shares,
        snapshots=runner.layout is not None,
        cost=cost,
    )


def block_tokens(args: argparse.Namespace, runner: Runner) -> int:
    """Return the tokens of a block, by ``--block-tokens``. Raises `InvalidValue`."""
    block: int | None = args.block_tokens
    if block is None:
        block = -(-_BLOCK_TOKENS // runner.page_size) * runner.page_size
    if block < 1 or block % runner.page_size:
        raise InvalidValue(
            f"--block-tokens is {block}; a multiple of the page size, {runner.page_size}, is needed"
        )
    return block


def open_default_store(
    args: argparse.Namespace,
    runner: Runner,
    *,
    name: str,
    shares: Mapping[str, float] | None = None,
    cost: CostModel | None = None,
) -> KVStore | None:
    """Open the store used without ``--tier``: memory, and a capped folder in the user's cache.

    If a tier cannot be opened, a warning is printed and the server starts without it.
    """
    from kvkeep.store.tiers import tiering  # noqa: PLC0415

    tiering(args.tiering)  # a wrong name is an error, not a missing tier
    memory, _ = default_tiers()
    try:
        return open_store(
            args, runner, name=name, tiers=[memory, _disk_tier()], shares=shares, cost=cost
        )
    except (KVKeepError, OSError) as error:
        if args.block_tokens is not None and isinstance(error, InvalidValue):
            raise
        _warn(f"KV is not stored on disk: {error}")
    try:
        return open_store(args, runner, name=name, tiers=[memory], shares=shares, cost=cost)
    except KVKeepError as error:
        _warn(f"KV is not stored outside the pool: {error}")
        return None


def default_tiers() -> tuple[str, str]:
    """Return the places of the tiers used without ``--tier``; their sizes differ by machine."""
    return f"memory://{_MEMORY_BYTES}", f"file://{quote(str(cache_folder()))}"


def cache_folder() -> Path:
    """Return the folder of the default disk tier: $XDG_CACHE_HOME/kvkeep/store."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    # A relative path is ignored, as the XDG specification demands.
    return (Path(home) if Path(home).is_absolute() else Path.home() / ".cache") / "kvkeep/store"


def _disk_tier() -> str:
    folder = cache_folder()
    exists = next(place for place in (folder, *folder.parents) if place.exists())
    share = shutil.disk_usage(exists).free // _DISK_SHARE
    if share < _LEAST_DISK_BYTES:
        raise InvalidValue(
            f"a tenth of the free space at {exists} is {format_bytes(share)}, which is too little; "
            "name another place with --tier file:///path?size=…"
        )
    return f"{default_tiers()[1]}?size={min(_DISK_BYTES, share)}"


def _warn(message: str) -> None:
    print("kvkeep: " + " ".join(message.split()), file=sys.stderr)
