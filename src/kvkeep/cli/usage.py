"""``kvkeep usage``: what each tenant of a running server read, computed and kept."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from kvkeep.cli.arguments import add_json
from kvkeep.cli.drawing import amount, visible
from kvkeep.cli.replies import entries, whole
from kvkeep.cli.server import add_server_arguments, add_server_url, connect
from kvkeep.cli.tables import print_table

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

    from kvkeep.cli.arguments import Commands

__all__ = ["add_parser", "run"]

_HEAD = (
    "tenant", "requests", "prompts", "read", "computed", "written", "pool", "tiers",
)  # fmt: skip
_TOKENS = (
    "prompt_tokens", "read_tokens", "computed_tokens", "written_tokens", "pool_tokens",
    "tier_tokens",
)  # fmt: skip
_LONGEST = 16


def add_parser(commands: Commands) -> None:
    """Add the command and its options."""
    parser = commands.add_parser(
        "usage",
        help="show what each tenant of a running server read, computed and kept",
        description="Show for each tenant (cache_salt) of a running kvkeep server the tokens that "
        "it read from the cache, computed and wrote since the server started, and those it keeps "
        "now in pool and tiers. --json has more figures, and whole names.",
    )
    add_server_url(parser)
    add_json(parser, "print the server's answer as one JSON object instead of a table")
    add_server_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Ask the server, and print its answer."""
    with connect(args.url, args) as client:
        answer = client.get("/kv/usage")
    rows = entries(answer, "tenants")
    if args.json:
        print(json.dumps(answer))
    else:
        print_table(_HEAD, [_cells(row) for row in rows if _counts(row)])
    return 0


def _counts(row: Mapping[str, Any]) -> bool:
    """Whether a row has anything; that of all others is often empty."""
    return row.get("cache_salt") is not None or any(whole(row, name) for name in _TOKENS)


def _cells(row: Mapping[str, Any]) -> list[str]:
    salt = row.get("cache_salt")
    name = "(others)" if salt is None else visible(str(salt)) or "(none)"
    if len(name) > _LONGEST:
        name = f"{name[: _LONGEST - 1]}…"
    tokens = [amount(whole(row, field)) for field in _TOKENS]
    return [name, amount(whole(row, "requests")), *tokens]
