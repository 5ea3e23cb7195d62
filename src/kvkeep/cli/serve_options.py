"""The options of ``kvkeep serve``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvkeep.cli.arguments import (
    add_count,
    add_option,
    add_path,
    add_seconds,
    add_switch,
)
from kvkeep.cli.listening import add_address, add_log_level
from kvkeep.cli.model import add_dtype, add_model_arguments
from kvkeep.cli.server import KEY_VARIABLE
from kvkeep.cli.tenants import add_tenant_options
from kvkeep.cli.tiers import add_store_arguments
from kvkeep.core.eviction import POLICIES

if TYPE_CHECKING:
    import argparse

__all__ = ["add_options"]


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
