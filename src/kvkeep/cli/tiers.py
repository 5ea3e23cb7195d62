"""What the commands with a store share: which tiers it has, and opening it."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from kvkeep.cli.numbers import count
from kvkeep.core.errors import InvalidValue, KVKeepError
from kvkeep.core.geometry.units import format_bytes

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from kvkeep.serve.engine import Runner
    from kvkeep.store import KVStore

__all__ = ["add_store_arguments", "cache_folder", "open_default_store", "open_store"]

_BLOCK_TOKENS = 256
_MEMORY_BYTES = 1 << 30
_DISK_BYTES = 20 << 30
_DISK_SHARE = 10  # a tenth of what is free
_LEAST_DISK_BYTES = 256 << 20


def add_store_arguments(parser: argparse.ArgumentParser, *, default: str) -> None:
    """The tiers; ``default`` says which there are when none is named."""
    store = parser.add_argument_group("store")
    store.add_argument(
        "--tier",
        metavar="URL",
        action="append",
        default=[],
        help="where KV is kept besides the pool: memory://4GiB, file:///path?size=200GiB, "
        f"valkey://host:6379, s3://bucket; fastest first, may be repeated (default: {default})",
    )
    store.add_argument(
        "--tiering",
        metavar="NAME",
        default="inclusive",
        help="what moves where: inclusive, exclusive, adaptive; inclusive:2 or exclusive:2 for "
        "blocks that were touched twice (default: inclusive)",
    )
    store.add_argument(
        "--block-tokens",
        metavar="N",
        type=count,
        help=f"tokens that are kept as one (default: {_BLOCK_TOKENS}, or the pages next to it)",
    )


def open_store(
    args: argparse.Namespace, runner: Runner, *, name: str, tiers: Sequence[str]
) -> KVStore:
    """The store of ``args``' model over ``tiers``. Raises `InvalidValue`: a URL is wrong."""
    from kvkeep.store import KVStore  # noqa: PLC0415 - torch
    from kvkeep.store.tiers import tiering  # noqa: PLC0415

    block = args.block_tokens
    if block is None:
        block = -(-_BLOCK_TOKENS // runner.page_size) * runner.page_size
    if block < 1 or block % runner.page_size:
        raise InvalidValue(
            f"--block-tokens is {block}; a multiple of the page size, {runner.page_size}, is needed"
        )
    return KVStore(
        runner.geometry,
        model=name,
        revision=runner.identity,
        tiers=list(tiers),
        policy=tiering(args.tiering),
        block_tokens=block,
    )


def open_default_store(args: argparse.Namespace, runner: Runner, *, name: str) -> KVStore | None:
    """The store of one who named no tiers: memory, and a capped folder in the user's cache.

    Where that cannot be had, less is kept, and said on stderr: it must not stop the service.
    """
    from kvkeep.store.tiers import tiering  # noqa: PLC0415

    tiering(args.tiering)  # which is wrong is not for want of a place
    memory = f"memory://{_MEMORY_BYTES}"
    try:
        return open_store(args, runner, name=name, tiers=[memory, _disk_tier()])
    except (KVKeepError, OSError) as error:
        if args.block_tokens is not None and isinstance(error, InvalidValue):
            raise
        _say(f"nothing is kept on disk: {error}")
    try:
        return open_store(args, runner, name=name, tiers=[memory])
    except KVKeepError as error:
        _say(f"nothing is kept beyond the pool: {error}")
        return None


def cache_folder() -> Path:
    """Where the disk tier of those who named none is: $XDG_CACHE_HOME/kvkeep/store."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    # A relative one is to be ignored, says the specification.
    return (Path(home) if Path(home).is_absolute() else Path.home() / ".cache") / "kvkeep/store"


def _disk_tier() -> str:
    folder = cache_folder()
    exists = next(place for place in (folder, *folder.parents) if place.exists())
    share = shutil.disk_usage(exists).free // _DISK_SHARE
    if share < _LEAST_DISK_BYTES:
        raise InvalidValue(
            f"a tenth of what is free at {exists} is {format_bytes(share)}, which is too little; "
            "name a place with --tier file:///path?size=…"
        )
    return f"file://{quote(str(folder))}?size={min(_DISK_BYTES, share)}"


def _say(what: str) -> None:
    print("kvkeep: " + " ".join(what.split()), file=sys.stderr)
