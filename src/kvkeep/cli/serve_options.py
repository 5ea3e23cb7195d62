"""The options of ``kvkeep serve``, and those that ``kvkeep route`` has as well."""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING

from kvkeep.cli.arguments import (
    add_count,
    add_option,
    add_path,
    add_seconds,
    add_switch,
    count,
)
from kvkeep.cli.client import KEY_VARIABLE
from kvkeep.cli.model import add_dtype, add_model_arguments
from kvkeep.cli.tiers import add_store_arguments
from kvkeep.core.errors import InvalidValue
from kvkeep.core.eviction import POLICIES, policy
from kvkeep.core.eviction.shares import Shares, check_weights

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Sequence

    from kvkeep.core.eviction import EvictionPolicy

__all__ = [
    "add_address",
    "add_log_level",
    "add_options",
    "add_public_prefixes",
    "add_tenant_options",
    "allowed_hosts",
    "eviction_of",
    "weights_in",
    "weights_of",
]


def add_address(group: argparse._ArgumentGroup, *, port: int) -> None:
    """Add ``--host``, ``--port`` and ``--allow-host``; ``port`` is the default port."""
    group.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on (default: 127.0.0.1, this machine only)",
    )
    text = f"port to listen on; 0: any free port (default: {port})"
    group.add_argument("--port", metavar="N", type=count, default=port, help=text)
    group.add_argument(
        "--allow-host",
        metavar="NAME",
        action="append",
        default=[],
        help="accept requests with this Host header, besides localhost; may be repeated "
        "(default: any, unless --host is a loopback address)",
    )


def add_log_level(parser: argparse.ArgumentParser) -> None:
    """Add ``--log-level``."""
    parser.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default="info",
        help="least severe messages to log (default: info)",
    )


def allowed_hosts(host: str, names: Iterable[str], loopback: Iterable[str]) -> list[str] | None:
    """Return the Host headers to accept when listening on ``host``; None accepts all.

    ``names`` were given with ``--allow-host``. On a loopback address ``loopback`` is accepted
    too, and nothing else: a web page cannot reach the server under the page's own host name.
    """
    allowed = [name.lower() for name in names]
    return [*allowed, *loopback, host.lower()] if is_loopback(host) else allowed or None


def is_loopback(host: str) -> bool:
    """Whether no other machine reaches a server that listens on ``host``."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


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


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add all options."""
    add_model_arguments(parser, memory="4GiB")
    add_dtype(parser)
    add_store_arguments(
        parser,
        default="1 GiB of memory, and at most 20 GiB or a tenth of the free space in "
        "$XDG_CACHE_HOME/kvkeep/store",
    )
    add_path(
        parser,
        "--cost",
        "what prompts and tiers take: read at the start, if the "
        "file exists, and written as the server learns it (default: a file for each model, device "
        "and tiers in $XDG_CACHE_HOME/kvkeep/costs)",
    )
    add_switch(parser, "--no-store", "keep KV in the pool only, without tiers")
    add_switch(parser, "--no-reuse", "compute every prompt in full; neither reuse nor keep KV")
    parser.add_argument("--name", help="model name in the API (default: its directory's name)")
    _add_access(parser.add_argument_group("address and access"))
    _add_events(parser.add_argument_group("KV events for a router; they contain prompt tokens"))
    _add_capture(parser.add_argument_group("capture of requests, to replay them"))
    _add_limits(parser.add_argument_group("limits"))
    parser.add_argument(
        "--eviction",
        metavar="POLICY",
        choices=tuple(POLICIES),
        default="lru",
        help=f"eviction policy: {', '.join(POLICIES)} (default: lru)",
    )
    add_tenant_options(parser.add_argument_group("tenants, told apart by cache_salt"))
    add_switch(parser, "--no-text", "show no text and no tokens of prompts in answers of /kv")
    add_log_level(parser)
    parser.add_argument(
        "--log-format",
        choices=("text", "json"),
        default="text",
        help="log lines as text, or as one JSON object each (default: text)",
    )


def _add_access(access: argparse._ArgumentGroup) -> None:
    add_address(access, port=8000)
    add_option(
        access,
        "--api-key KEY",
        "key that every request except health checks must send; visible to other users of this "
        f"machine (default: ${KEY_VARIABLE}, which is not)",
    )
    add_path(access, "--api-key-file", "file that holds the key, in one line")


def _add_events(events: argparse._ArgumentGroup) -> None:
    add_option(
        events,
        "--events ADDRESS",
        "publish KV events at this address, such as tcp://127.0.0.1:5557, and resend missed ones "
        "at the next port",
    )


def _add_capture(capture: argparse._ArgumentGroup) -> None:
    add_path(
        capture,
        "--capture",
        "write a trace to this file: times, lengths and keyed hashes of each request, no text; "
        "compressed if the name ends in .gz or .zst",
    )


def _add_limits(limits: argparse._ArgumentGroup) -> None:
    add_count(limits, "--max-running", 32, "answers generated at once")
    add_count(limits, "--max-waiting", 256, "requests waiting; further ones get status 429")
    add_seconds(limits, "--request-timeout", 600.0, "time for a whole request")
    add_seconds(limits, "--drain-timeout", 30.0, "time for running requests to end on SIGTERM")
    add_seconds(limits, "--load-timeout", 2.0, "time that a request waits for the tiers")
