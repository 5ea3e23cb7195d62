"""The line that says, once for each engine, what kvkeep keeps and where."""

from __future__ import annotations

import logging
import shutil
from importlib.metadata import version
from typing import TYPE_CHECKING, Final

from kvkeep.core.geometry.units import format_bytes
from kvkeep.core.keys import root_key

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvkeep.store import BlockStore
    from kvkeep.store.tiers import TierStats

__all__ = ["join_logs", "log_start", "start_line"]

_LOG = logging.getLogger("kvkeep.vllm")
_DISK: Final = "file://"
_DIGITS: Final = 12  # of a namespace


def join_logs() -> None:
    """Make kvkeep's loggers children of vLLM's, so that they have its handlers and its level.

    Does nothing where ``kvkeep`` has handlers of its own, as by ``VLLM_LOGGING_CONFIG_PATH``, and
    at a second call. Thread safety: as `logging`.
    """
    ours, theirs = logging.getLogger("kvkeep"), logging.getLogger("vllm")
    if ours.handlers or not ours.propagate or ours.parent is theirs:
        return
    ours.parent = theirs
    ours.setLevel(ours.level)  # forgets which levels were found to be enabled by the former parent


def log_start(store: BlockStore, records: str, *, below: bool = False) -> None:
    """Log what `start_line` says of an open store; ``below``: without the memory in front."""
    tiers = store.stats()
    namespace = root_key(store.namespace).hex()
    shown = tiers[1:] if below else tiers
    _LOG.info("%s", start_line(shown, store.own_bytes(), records, namespace))


def start_line(
    tiers: Sequence[TierStats],
    own_bytes: Mapping[str, int],
    records: str,
    namespace: str,
) -> str:
    """Return the line: version, tiers, records, namespace.

    Arguments:
        tiers: fastest first.
        own_bytes: by tier, the bytes of this engine's namespace, where they are counted.
        records: describes what is stored.
        namespace: in hexadecimal; its first digits are shown, as by ``kvkeep store ls``.
    """
    places = "; ".join(_tier(tier, own_bytes.get(tier.name)) for tier in tiers)
    ours = f"kvkeep {version('kvkeep')}"
    return f"{ours} keeps {records} in {places}; namespace {namespace[:_DIGITS]}"


def _tier(tier: TierStats, own: int | None) -> str:
    """Return a tier's place, budget, free space, and what was found in it."""
    if tier.capacity is None or tier.used_bytes is None:
        return f"{tier.place} (no budget of kvkeep's)"
    free = max(0, tier.capacity - tier.used_bytes)
    words = [f"{format_bytes(tier.capacity)}, {format_bytes(free)} free"]
    if tier.place.startswith(_DISK):
        try:
            there = shutil.disk_usage(tier.place.removeprefix(_DISK)).free
        except OSError:
            there = free  # gone by now: the tier will say so
        if there < free:
            words.append(f"but {format_bytes(there)} on its disk")
    found = f"{tier.blocks or 0:,} blocks found"
    if tier.blocks and own is not None:
        found += f", {format_bytes(own)} of this namespace"
    return f"{tier.place} ({', '.join([*words, found])})"
