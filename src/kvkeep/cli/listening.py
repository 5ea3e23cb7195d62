"""Options of both ``kvkeep serve`` and ``kvkeep route``: address, log level."""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING

from kvkeep.cli.arguments import count

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable

__all__ = ["add_address", "add_log_level", "allowed_hosts"]


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
