"""Options about tenants: the prefixes that all of them share, and their shares of memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvkeep.cli.arguments import add_path
from kvkeep.core.errors import InvalidValue
from kvkeep.core.eviction import policy
from kvkeep.core.eviction.shares import Shares, check_weights

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from kvkeep.core.eviction import EvictionPolicy

__all__ = ["add_public_prefixes", "add_tenant_options", "eviction_of", "weights_in", "weights_of"]


def add_public_prefixes(parser: argparse._ActionsContainer) -> None:
    """Add ``--public-prefixes``."""
    add_path(
        parser,
        "--public-prefixes",
        "JSON lines, each a prefix that all tenants share: a text, a list of token ids, or an "
        "object with the first messages of a chat; nothing else is shared between tenants",
    )


def add_tenant_options(parser: argparse._ActionsContainer) -> None:
    """Add ``--public-prefixes`` and ``--share``."""
    add_public_prefixes(parser)
    parser.add_argument(
        "--share",
        action="append",
        default=[],
        metavar="TENANT=WEIGHT",
        help="share the pool and the tiers fairly, with this weight for a tenant (cache_salt); may "
        "be repeated, others have weight 1; '=1' shares with equal weights (default: no shares)",
    )


def eviction_of(args: argparse.Namespace) -> str | EvictionPolicy:
    """Return the policy of ``--eviction`` and ``--share``. Raises `InvalidValue`."""
    name: str = args.eviction
    weights = weights_of(args)
    return name if weights is None else Shares(lambda: policy(name), weights)


def weights_of(args: argparse.Namespace) -> dict[str, float] | None:
    """Return the weights that ``--share`` gives tenants; None without. Raises `InvalidValue`."""
    if not args.share:
        return None
    return weights_in(args.share)


def weights_in(texts: Sequence[str]) -> dict[str, float]:
    """Return the weights in ``--share`` options, each TENANT=WEIGHT. Raises `InvalidValue`."""
    weights: dict[str, float] = {}
    for text in texts:
        tenant, equals, weight = text.rpartition("=")
        try:
            weights[tenant] = float(weight)
        except ValueError:
            equals = ""
        if not equals:
            raise InvalidValue(f"--share is {text!r}; TENANT=WEIGHT is needed, as team-a=3")
    return check_weights(weights)
